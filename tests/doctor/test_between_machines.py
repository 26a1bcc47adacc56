"""The doctors of two machines, which are network namespaces, with a fault that is really there.

Needs root and Linux's ``ip``. TensorFlow is not loaded, see `doctor_worker`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from networks import HOSTS, WORKERS, bad_link, connect, run, two_namespaces
from paths import SUPPORT
from worker_jobs import said, start_job

from ctl.distributed.cluster.members import Cluster

pytestmark = pytest.mark.slow  # starts processes

QUICK = ["--all_reduce_seconds=0", "--json"]


@pytest.fixture
def machines() -> Iterator[list[str]]:
    """Two namespaces that a cable connects."""
    with two_namespaces() as names:
        connect(names)
        yield names


@pytest.fixture
def examine(zygote_without_tensorflow, tmp_path):
    """Runs a doctor on each of two machines. Returns the rows that are not fine, by check, of each
    worker; `doctor_worker` has the faults."""

    def run_job(machines: list[str], *options: str, addresses=WORKERS, workers: int = 2):
        with start_job(
            zygote_without_tensorflow,
            tmp_path,
            *QUICK,
            *options,
            workers=workers,
            addresses=addresses,
            namespaces=machines,
            program=SUPPORT / "doctor_worker.py",
        ) as processes:
            codes = [process.wait(100) for process in processes]
        return [rows_of(tmp_path, i, code) for i, code in enumerate(codes)]

    return run_job


def rows_of(out: Path, worker: int, code: int) -> dict[str, dict[str, Any]]:
    text = (out / f"process-{worker}" / "stdout").read_text()
    assert text, said(out, worker)
    table = json.loads(text)
    assert code == (0 if table["fine"] else 2), said(out, worker)
    skipped = {row["check"] for row in table["checks"] if row["state"] == "skipped"}
    assert {"all_reduce", "nccl"} <= skipped
    found: dict[str, dict[str, Any]] = {}
    for row in table["checks"]:
        if row["state"] == "not fine":
            first = found.setdefault(row["check"], {**row, "seen": ""})
            first["seen"] += f"{row['seen']}\n"
    return found


def drop(machine: str, protocol: str) -> None:
    """What comes in for the port of the job is dropped in silence, as by a firewall."""
    rules = (
        ["add", "pref", "100", "lookup", "local"],
        ["del", "pref", "0"],
        ["add", "pref", "5", "iif", "wire", "ipproto", protocol, "dport", "2222", "blackhole"],
    )
    for rule in rules:
        made = run("ip", "-n", machine, "rule", *rule)
        if made.returncode:
            pytest.skip(f"this kernel cannot drop packets by port: {made.stderr}")


def test_two_machines_without_a_fault(examine, machines, tmp_path):
    (tmp_path / "run").mkdir()
    assert examine(machines, f"--model_dir={tmp_path / 'run'}") == [{}, {}]
    assert os.listdir(tmp_path / "run") == []


@pytest.mark.parametrize("protocol", ["tcp", "udp"])
def test_a_firewall(examine, machines, protocol):
    """Both say which way is closed, and give the line that opens it."""
    drop(machines[1], protocol)
    for found in examine(machines):
        assert found.keys() == {protocol}
        row = found[protocol]
        assert row["seen"].startswith("worker 0 to worker 1 (10.77.0.2:2222): "), row
        assert row["remedy"] == "Open the port on worker 1, as root:"
        assert row["command"] == f"ufw allow from {HOSTS[0]} to any port 2222 proto {protocol}"


def test_a_firewall_that_closes_both_ways(examine, machines):
    for machine in machines:
        drop(machine, "tcp")
    for me, found in enumerate(examine(machines, "--startup_timeout=3")):
        assert found.keys() == {"workers", "tcp"}
        assert found["workers"]["seen"] == f"nothing was heard of worker {1 - me}\n"
        assert found["tcp"]["remedy"].startswith(f"Start the doctor on worker {1 - me}, too")
        line = f"ufw allow from {HOSTS[me]} to any port 2222 proto tcp"
        assert found["tcp"]["command"] == line


def test_a_link_that_delays_and_loses(examine, machines):
    run("ip", "-n", machines[0], "link", "del", "wire")
    with bad_link("wire", machines, delay_ms=8, loss_percent=10):
        for found in examine(machines):
            assert {"latency", "udp"} <= found.keys() <= {"latency", "udp", "bandwidth"}
            assert "of 100 datagrams were lost" in found["udp"]["seen"]
            assert "and back takes" in found["latency"]["seen"]


def test_a_slow_link(examine, machines):
    rate = ["rate", "80mbit", "burst", "32kbit", "latency", "50ms"]
    made = run("tc", "-n", machines[0], "qdisc", "add", "dev", "wire", "root", "tbf", *rate)
    if made.returncode:
        pytest.skip(f"this kernel has no tbf: {made.stderr}")
    for found in examine(machines):
        assert "bandwidth" in found and found.keys() <= {"bandwidth", "latency"}
        assert found["bandwidth"]["seen"].startswith("worker 0 to worker 1: ")


def test_devices_with_different_mtus(examine, machines):
    run("ip", "-n", machines[0], "link", "set", "wire", "mtu", "9000")
    for found in examine(machines):
        assert found.keys() == {"mtu"}
        assert found["mtu"]["seen"] == (
            "worker 0 sends packets of 9000 bytes, which do not arrive at worker 1\n"
        )
        assert found["mtu"]["command"] == "ip link set dev wire mtu 1500"


def test_a_name_without_an_address(examine, machines):
    addresses = [WORKERS[0], "no-such-machine.invalid:2222"]
    for found in examine(machines, addresses=addresses):
        assert found.keys() == {"hosts"}
        assert "worker 0 finds no address of no-such-machine.invalid" in found["hosts"]["seen"]


def test_a_name_that_leads_back_to_the_machine_itself(examine, machines):
    """As Debian's installer writes it to /etc/hosts."""
    hosts = "hosts=127.0.1.1 first.example"
    for found in examine(machines, hosts, addresses=["first.example:2222", WORKERS[1]]):
        seen = {name: row["seen"] for name, row in found.items()}
        assert "worker 1 takes first.example, worker 0, for itself (127.0.1.1)" in seen["hosts"]


def test_directories_that_are_not_shared(examine, machines, tmp_path):
    """Both have a directory of this name. What one writes, the other does not see. A file that
    doctors left who were killed is no file of this time."""
    job = Cluster(tuple(WORKERS), 0, "").fingerprint
    left = tmp_path / "run" / f"tmp-doctor-0-{job[:8]}"
    left.mkdir(parents=True)
    (left / "token-1").write_text("0123456789abcdef")
    options = f"--model_dir={tmp_path / 'run'}", f"tmpfs={tmp_path / 'run'}:size=1M"
    for found in examine(machines, *options):
        assert found.keys() == {"shared"}
        assert found["shared"]["seen"].splitlines() == [
            f"worker {i} does not see what worker {1 - i} wrote to --model_dir" for i in range(2)
        ]
    assert os.listdir(tmp_path / "run") == []


def test_a_directory_that_one_worker_cannot_write(examine, machines, tmp_path):
    (tmp_path / "run").mkdir()
    options = f"--model_dir={tmp_path / 'run'}", f"tmpfs={tmp_path / 'run'}:ro"
    for found in examine(machines, *options):
        assert found.keys() == {"model_dir"}
        assert found["model_dir"]["workers"] == [1]
        assert "Read-only file system" in found["model_dir"]["seen"]


def test_a_clock_that_is_off(examine, machines):
    for found in examine(machines, "clock=90"):
        assert found.keys() == {"clock"}
        seen = found["clock"]["seen"]
        assert seen.startswith(("that of worker 1 is 90.0 s ahead", "that of worker 1 is 89.9 s a"))


def test_versions_that_differ(examine, machines):
    for found in examine(machines, "keras=3.10"):
        assert found.keys() == {"versions"}
        assert found["versions"]["seen"] == "keras is 3.15 on worker 0, 3.10 on worker 1\n"
        assert found["versions"]["command"] == "pip install 'keras==3.15'"


def test_another_secret(examine, machines):
    for found in examine(machines, "secret=wrong", "--startup_timeout=3"):
        assert found.keys() == {"workers", "tcp"}
        assert "CTL_JOB_SECRET" in found["tcp"]["seen"]


def test_a_worker_that_does_not_come(examine, machines):
    (found,) = examine(machines[:1], "--startup_timeout=2", workers=1)
    assert found.keys() == {"workers", "tcp"}
    assert found["workers"]["seen"] == "nothing was heard of worker 1\n"
