"""ctl.cluster: where the workers are found, and who is missing."""

from __future__ import annotations

import json
import socket
import subprocess
import sys

import pytest

from ctl.cluster import Cluster, check_port, resolve
from ctl.errors import UsageError

TWO = ("a:1", "b:2")


def tf_config(cluster, kind="worker", index=0) -> dict[str, str]:
    return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": kind, "index": index}})}


def test_flags_come_first():
    found = resolve(TWO, 1, tf_config({"worker": ["c:3"]}))
    assert found == Cluster(TWO, 1, "--workers")
    assert not found.is_chief
    assert json.loads(found.tf_config()) == {
        "cluster": {"worker": ["a:1", "b:2"]},
        "task": {"type": "worker", "index": 1},
    }


def test_tf_config():
    assert resolve(None, None, tf_config({"worker": list(TWO)}, index=1)).index == 1


@pytest.mark.parametrize("chief", ["chief", "master"])
def test_a_chief_is_the_first_worker(chief):
    jobs = {chief: ["c:9"], "worker": list(TWO)}
    assert resolve(None, None, tf_config(jobs, chief)) == Cluster(("c:9", *TWO), 0, "TF_CONFIG")
    assert resolve(None, None, tf_config(jobs, "worker", 1)).index == 2


@pytest.mark.parametrize(
    ("workers", "index", "environ", "words"),
    [
        (None, None, {}, "finds no cluster"),
        (TWO, None, {}, "--workers needs --worker_index"),
        (None, 0, {}, "--worker_index needs --workers"),
        (TWO, 2, {}, "there is no worker 2; it names 2"),
        (("a:1", "a:1"), 0, {}, "occurs twice"),
        (("a", "b:2"), 0, {}, "'a' is not HOST:PORT"),
        (("a:1", "b:99999"), 0, {}, "'b:99999' is not HOST:PORT"),
        (None, None, {"TF_CONFIG": "{"}, "TF_CONFIG is not as TensorFlow wants it"),
        (None, None, {"TF_CONFIG": "[]"}, "TF_CONFIG is not as TensorFlow wants it"),
        (None, None, {"TF_CONFIG": '{"cluster": {}}'}, "'task'"),
        (None, None, tf_config({"worker": ["a:1"]}, index=1), "there is no worker 1"),
        (None, None, tf_config({"ps": ["a:1"]}, "ps"), "this task is a 'ps'"),
        (None, None, tf_config({"worker": [7]}), "7 is not HOST:PORT"),
    ],
    ids=str,
)
def test_what_is_wrong_is_one_line(workers, index, environ, words):
    with pytest.raises(UsageError) as error:
        resolve(workers, index, environ)
    assert words in str(error.value) and "\n" not in str(error.value)


def test_a_port_in_use():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(UsageError, match=f"worker 0 cannot listen on 127.0.0.1:{port}: Addr"):
            check_port(Cluster((f"127.0.0.1:{port}",), 0, "test"))
    check_port(Cluster((f"127.0.0.1:{port}",), 0, "test"))


def test_a_missing_peer_is_named_and_waiting_ends():
    """In a process of its own, because giving up ends the process."""
    code = """
import time
from ctl import cluster, console
cluster._QUIET_SECONDS = 0.5
console.log_to_terminal()
with cluster.waiting_for_peers(cluster.Cluster(("127.0.0.1:2", "127.0.0.1:1"), 0, "test"), 2.0):
    time.sleep(60)
"""
    process = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=40
    )
    assert process.returncode == 5
    _, *waiting, last = process.stderr.splitlines()  # the first is absl's, about flags
    assert waiting and all("worker 0 waits for worker 1 at 127.0.0.1:1" in w for w in waiting)
    assert "gave up after 2 s" in last and "worker 1 at 127.0.0.1:1" in last
