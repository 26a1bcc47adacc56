"""The doctor of one machine, with a fault that is really there."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from networks import two_namespaces
from paths import SUPPORT
from waiting import wait_until

from ctl.base import stores
from ctl.doctor import machine, program, storage
from ctl.doctor.report import FINE, NOT_FINE, SKIPPED

pytestmark = pytest.mark.slow  # starts processes

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to mount and to limit")


@pytest.fixture
def examine(zygote_without_tensorflow, tmp_path):
    """Runs a doctor; returns the rows that are not fine, by check."""

    def run(*options: str, **more: Any) -> dict[str, dict[str, Any]]:
        quick = [tmp_path, "--all_reduce_seconds=0", "--json", *options]
        command = zygote_without_tensorflow.start("doctor_worker", *quick, path=[SUPPORT], **more)
        code = command.wait(60)
        assert command.stdout, command.stderr
        table = json.loads(command.stdout)
        assert code == (0 if table["fine"] else 2)
        return {row["check"]: row for row in table["checks"] if row["state"] == "not fine"}

    return run


def test_a_machine_without_a_fault(examine, tmp_path):
    assert examine(f"--model_dir={tmp_path / 'new' / 'run'}") == {}
    assert not (tmp_path / "new").exists()


@needs_root
@pytest.mark.parametrize(
    ("options", "reason"),
    [("ro", "Read-only file system"), ("size=4k", "No space left on device")],
)
def test_a_file_system_that_takes_no_file(examine, tmp_path, options, reason):
    (tmp_path / "run").mkdir()
    found = examine(f"--model_dir={tmp_path / 'run'}", f"tmpfs={tmp_path / 'run'}:{options}")
    assert found.keys() == {"model_dir"}
    assert found["model_dir"]["seen"] == f"{tmp_path / 'run'}: {reason}"


@needs_root
def test_a_file_system_that_does_not_answer(tmp_path, monkeypatch):
    """As an NFS whose server is away: the kernel lets who writes wait."""
    image, place = tmp_path / "image", tmp_path / "run"
    image.write_bytes(bytes(16 << 20))
    place.mkdir()
    for command in (["mkfs.ext4", "-q", image], ["mount", "-o", "loop", image, place]):
        try:
            made = subprocess.run(command, capture_output=True, text=True)
        except FileNotFoundError as error:
            pytest.skip(f"there is no program {error.filename}")
        if made.returncode:
            pytest.skip(f"may not mount a file: {made.stderr}")
    monkeypatch.setattr(storage, "_MOST_SECONDS", 1.0)
    try:
        subprocess.run(["fsfreeze", "--freeze", place], check=True)
        found = storage.check_model_dir(str(place))
        subprocess.run(["fsfreeze", "--unfreeze", place], check=True)
        wait_until(
            lambda: not {"ctl_within", "replacing"} & {t.name for t in threading.enumerate()}
        )
    finally:
        subprocess.run(["umount", place], check=True)
    assert found.seen == f"{place}: no answer after 1 s" and found.state == NOT_FINE


def test_a_file_where_the_directory_should_be(tmp_path):
    (tmp_path / "run").write_text("")
    found = storage.check_model_dir(str(tmp_path / "run"))
    assert found.state == NOT_FINE and found.remedy.startswith("A file is in the way")


def test_an_object_store(tmp_path, monkeypatch):
    pytest.importorskip("fsspec")
    url = f"memory://{tmp_path}/run"
    found = storage.check_model_dir(url)
    assert found.state == FINE and found.seen.startswith(f"{url}: can be written")
    assert not stores.open_store(url).list()
    write = stores.Store.write
    monkeypatch.setattr(
        stores.Store, "write", lambda self, name, data, only_new: write(self, name, data)
    )
    found = storage.check_model_dir(url)
    assert found.state == NOT_FINE and "two writers can take one name" in found.seen
    assert "needs a package" in storage.check_model_dir("az://bucket/run").seen


def test_a_file_that_is_not_replaced_by_a_rename_is_met_in_part(tmp_path):
    """As on a file system whose renames copy."""
    target = tmp_path / "target"
    target.write_text(storage.lines(0))
    writer = "\n".join(
        [
            "import itertools, sys, time",
            "for number in itertools.count():",
            "    with open(sys.argv[1], 'w') as file:",
            "        file.write(f'{number}\\n' * 2000); file.flush()",
            "        time.sleep(0.01)",
            "        file.write(f'{number}\\n' * 2000)",
            "    time.sleep(0.01)",
        ]
    )
    process = subprocess.Popen([sys.executable, "-c", writer, target])
    try:
        deadline = time.monotonic() + 30
        while target.read_text() == storage.lines(0) and time.monotonic() < deadline:
            time.sleep(0.01)
        reads, torn = storage.replacing(tmp_path / "mine", [target])
    finally:
        process.kill()
        process.wait()
    assert reads > torn > 0
    target.write_text(storage.lines(0)[:1000])
    reads, torn = storage.replacing(None, [target])
    assert reads == torn > 0
    assert storage.replacing(tmp_path / "mine", [tmp_path / "mine"])[1] == 0


def test_loopback_that_is_down(examine):
    with two_namespaces() as (first, _):
        subprocess.run(["ip", "-n", first, "link", "set", "lo", "down"], check=True)
        found = examine(namespace=first)
    assert found["loopback"]["command"] == "ip link set lo up"


@needs_root
def test_a_host_name_without_an_address(examine):
    found = examine("hostname=no-such-machine.invalid")
    assert found.keys() == {"names"}
    assert found["names"]["command"] == "echo '127.0.0.1 no-such-machine.invalid' >>/etc/hosts"


def test_a_port_that_is_taken(examine):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        workers = f"--workers=127.0.0.1:{port},127.0.0.1:1"
        found = examine(workers, "--worker_index=0")
    assert {"port", "workers"} <= found.keys()
    assert "Address already in use" in found["port"]["seen"]
    assert found["port"]["command"] == f"ss -tulpn | grep :{port}"


def test_a_udp_port_that_is_taken(examine):
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        found = examine(f"--workers=127.0.0.1:{port},127.0.0.1:1", "--worker_index=0")
    assert found["port"]["seen"] == f"UDP port {port} cannot be used: Address already in use"


@contextlib.contextmanager
def limited_to(cores: float):
    """Inside, this process has so many cores, by a control group."""
    folder = Path("/sys/fs/cgroup/cpu" if Path("/sys/fs/cgroup/cpu").exists() else "/sys/fs/cgroup")
    group = folder / f"ctl-doctor-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"may not make a control group: {error}")
    try:
        try:
            if (group / "cpu.cfs_quota_us").exists():
                (group / "cpu.cfs_quota_us").write_text(str(int(cores * 100_000)))
            else:
                (group / "cpu.max").write_text(f"{int(cores * 100_000)} 100000")
        except OSError as error:
            pytest.skip(f"may not limit a control group: {error}")
        yield group
    finally:
        group.rmdir()


@needs_root
def test_a_container_with_fewer_cores_than_the_machine():
    program = "from ctl.doctor.machine import check_cores; print(check_cores().seen)"
    with limited_to(0.5) as group:
        enter = f'echo $$ >{group}/cgroup.procs && exec "$@"'
        command = ["sh", "-c", enter, "sh", sys.executable, "-c", program]
        seen = subprocess.run(command, capture_output=True, text=True).stdout
    cores = len(os.sched_getaffinity(0))
    assert seen == (
        f"the limit of the container is 0.5 cores, TensorFlow starts threads for {cores}\n"
    )


@pytest.fixture
def nvidia_smi(tmp_path, monkeypatch):
    """A program that says that the driver has a GPU. TensorFlow here sees none."""
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho 'GPU 0: NVIDIA H100 (UUID: GPU-0)'\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")


def test_a_gpu_that_tensorflow_does_not_see(nvidia_smi, monkeypatch):
    probe = machine.Probe({"tensorflow": "2.21"}, gpus=(), cuda=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    found = machine.check_devices(probe)
    assert found.state == NOT_FINE and found.command == "unset CUDA_VISIBLE_DEVICES"
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    found = machine.check_devices(probe)
    assert found.seen == (
        "the driver has 1 GPU, TensorFlow sees none, since it was built without CUDA"
    )
    assert found.command == "pip install 'tensorflow[and-cuda]'"
    assert machine.check_devices(machine.Probe({"tensorflow": "2.21"}, ("H100",))).state == FINE


@pytest.fixture
def another_tensorflow(tmp_path, monkeypatch):
    """``another_tensorflow(code)``: programs that are started from now on import this one."""

    def install(code: str) -> None:
        (tmp_path / "tensorflow").mkdir()
        (tmp_path / "tensorflow/__init__.py").write_text(code)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    return install


def test_a_tensorflow_that_cannot_be_loaded(another_tensorflow):
    another_tensorflow("raise ImportError('libcuda.so: wrong ELF class')")
    found, probe = machine.check_tensorflow()
    assert found.state == NOT_FINE and "libcuda.so: wrong ELF class" in found.seen
    assert found.command.endswith('-c "import tensorflow"')
    assert machine.check_devices(probe).state == SKIPPED


def test_a_tensorflow_that_kills_the_process(another_tensorflow):
    """As one for another processor does."""
    another_tensorflow("import os, signal; os.kill(os.getpid(), signal.SIGILL)")
    assert machine.check_tensorflow()[0].seen == "cannot be used: died of SIGILL"


def test_a_tensorflow_that_hangs(another_tensorflow, monkeypatch, capsys):
    """It is ended after a time, and shown to be waited for until then."""
    another_tensorflow("import time; time.sleep(3600)")
    monkeypatch.setattr(machine, "_PROBE_SECONDS", 1.5)
    monkeypatch.setattr(program, "_QUIET_SECONDS", 0.5)
    assert machine.check_tensorflow()[0].seen == "cannot be used: no answer after 2 s"
    assert "doctor: loading TensorFlow has taken" in capsys.readouterr().err
