"""The example for Slurm under a real Slurm: two nodes, which are network namespaces of this
machine, with a daemon each. Needs root and Debian's ``slurm-wlm``."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from paths import ROOT

from ctl import launch
from ctl.checkpoint import Reader

pytestmark = pytest.mark.slow  # starts processes

EXAMPLE = ROOT / "ctl/distributed/cluster/examples/slurm.sh"
NODES = ["ctl-n0", "ctl-n1"]
DAEMONS = ["munged", "slurmctld", "slurmd"]
TRAINING = ["--model=dense", "--train_steps=2000", "--log_every=100", "--noexport"]

CONFIGURATION = """
ClusterName=ctl
SlurmctldHost={host}({subnet}.254)
SlurmctldPort={port}
SlurmdPort={port_of_nodes}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
SlurmUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/pgid
TaskPlugin=task/none
MpiDefault=none
SelectType=select/linear
SlurmdParameters=config_overrides
ReturnToService=2
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
NodeName={nodes[0]} NodeAddr={subnet}.1 CPUs=8
NodeName={nodes[1]} NodeAddr={subnet}.2 CPUs=8
PartitionName=low Nodes=ALL Default=YES State=UP PriorityTier=1 GraceTime=60
PartitionName=high Nodes=ALL State=UP PriorityTier=2 PreemptMode=OFF
"""


def call(*words: object, **options) -> str:
    done = subprocess.run([*map(str, words)], capture_output=True, text=True, **options)
    assert done.returncode == 0, (words, done.stdout, done.stderr)
    return done.stdout


def until(condition: Callable[[], bool], seconds: float, why: Callable[[], str]) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, why()
        time.sleep(0.2)


@contextlib.contextmanager
def nodes(subnet: str) -> Iterator[None]:
    """The namespaces, with a card each on a bridge that has an address of this machine."""
    hosts = "".join(f"{subnet}.{i + 1} {name}\n" for i, name in enumerate(NODES))
    bridge = f"ctlb{os.getpid() % 10**6}"
    with contextlib.ExitStack() as stack:

        def made(undo: list[str], *command: str) -> None:
            call("ip", *command)
            stack.callback(subprocess.run, ["ip", *undo], capture_output=True)

        made(["link", "delete", bridge], "link", "add", bridge, "type", "bridge")
        call("ip", "address", "add", f"{subnet}.254/24", "dev", bridge)
        call("ip", "link", "set", bridge, "up")
        for index, name in enumerate(NODES):
            folder = Path("/etc/netns", name)
            folder.mkdir(parents=True)
            stack.callback(shutil.rmtree, folder)
            (folder / "hosts").write_text(f"127.0.0.1 localhost\n{hosts}")
            made(["netns", "delete", name], "netns", "add", name)
            outside = f"{bridge}-{index}"
            peer = ["peer", "name", "card", "netns", name]
            call("ip", "link", "add", outside, "type", "veth", *peer)
            call("ip", "link", "set", outside, "master", bridge, "up")
            call("ip", "-n", name, "link", "set", "lo", "up")
            call("ip", "-n", name, "address", "add", f"{subnet}.{index + 1}/24", "dev", "card")
            call("ip", "-n", name, "link", "set", "card", "up")
        yield


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    """A Slurm of two nodes; its commands find it."""
    missing = [name for name in [*DAEMONS, "sbatch", "ip"] if not shutil.which(name)]
    if missing or os.geteuid():
        pytest.skip(f"needs root, and {', '.join(missing) or 'nothing else'}")
    subnet = f"10.{150 + os.getpid() % 50}.{os.getpid() // 50 % 250}"
    folder = tmp_path / "slurm"
    folder.mkdir(mode=0o755)
    values = {"host": socket.gethostname(), "subnet": subnet, "folder": folder, "nodes": NODES}
    ports = [address.rpartition(":")[2] for address in launch.cluster(2)["worker"]]
    values |= dict(zip(("port", "port_of_nodes"), ports, strict=True))
    file = folder / "slurm.conf"
    file.write_text(CONFIGURATION.format(**values))
    monkeypatch.setenv("SLURM_CONF", str(file))
    (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
    (folder / "munge.key").write_bytes(os.urandom(128))
    (folder / "munge.key").chmod(0o400)
    munge = ["munged", "--foreground", "--force", f"--socket={folder}/munge.socket"]
    munge += [f"--{part}-file={folder}/munge.{part}" for part in ("key", "pid", "log", "seed")]
    commands = [munge, ["slurmctld", "-D", "-f", file]]
    commands += [["ip", "netns", "exec", n, "slurmd", "-D", "-N", n, "-f", file] for n in NODES]
    with nodes(subnet), contextlib.ExitStack() as stack:
        for command in commands:
            with (folder / f"{command[0]}.out").open("a") as out:
                daemon = subprocess.Popen([*map(str, command)], stdout=out, stderr=out)
            stack.callback(daemon.wait, 20)
            stack.callback(daemon.terminate)
            time.sleep(0.5)

        def logs() -> str:
            return "\n".join(p.read_text()[-1500:] for p in folder.glob("*.log"))

        def idle() -> bool:
            done = subprocess.run(["sinfo", "-h", "-o", "%t %D"], capture_output=True, text=True)
            return set(done.stdout.splitlines()) == {"idle 2"}

        until(idle, 30, logs)
        yield
        subprocess.run(["scancel", "--user=root", "--signal=KILL"], capture_output=True)
        until(lambda: not call("squeue", "-h"), 60, logs)


def steps(run: Path) -> list[int]:
    file = run / "metrics.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    return [json.loads(line)["step"] for line in lines]


def state(job: str) -> str:
    return call("squeue", "-h", "-o", "%T", "-j", job).strip()


def test_a_preempted_job_resumes(slurm, tmp_path):
    """A job of a higher priority takes the nodes; the training saves, and goes on after it."""
    run, whole, log = tmp_path / "run", tmp_path / "whole", tmp_path / "log"
    environment = {**os.environ, "PYTHON": sys.executable, "PYTHONPATH": str(ROOT)}
    submit = ["sbatch", "--parsable", f"--output={log}"]
    job = call(
        *submit, EXAMPLE, f"--model_dir={run}", *TRAINING, env=environment, cwd=tmp_path
    ).strip()

    def why() -> str:
        return log.read_text()[-3000:] if log.exists() else call("scontrol", "show", "job", job)

    until(lambda: max(steps(run), default=0) >= 500, 120, why)
    urgent = ["--partition=high", "--nodes=2", "--output=/dev/null", "--wrap=sleep 1"]
    other = call("sbatch", "--parsable", *urgent)
    until(lambda: state(job) == "PENDING", 120, why)
    until(lambda: other.strip() not in call("squeue", "-h", "-o", "%i"), 60, why)
    call("scontrol", "update", f"JobId={job}", "StartTime=now")  # Slurm waits two minutes otherwise
    until(lambda: max(steps(run)) == 2000, 120, why)
    until(lambda: job not in call("squeue", "-h", "-o", "%i"), 60, why)
    text = log.read_text()
    assert "worker 1 of 2 (from Slurm), 2 replicas in all" in text
    (saved,) = set(re.findall(r"SIGTERM: saved step (\d+) in", text))
    assert 500 <= int(saved) < 2000
    assert text.count(f"resuming at step {saved} from") == 2, text

    command = [sys.executable, "-m", "ctl.launch", "--workers=2", "--", sys.executable]
    command += ["-m", "ctl.train", "--strategy=multi_worker", f"--model_dir={whole}", *TRAINING]
    call(*command, env=environment, timeout=240)
    resumed, uninterrupted = Reader(run), Reader(whole)
    assert resumed.saved.step == uninterrupted.saved.step == 2000
    assert list(resumed) == list(uninterrupted)
    for name in resumed:
        assert resumed[name].tobytes() == uninterrupted[name].tobytes(), name
