"""ctl.distributed.cluster: where the workers are found, and who is missing."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import threading
import time

import pytest
from absl import logging

from ctl import launch
from ctl.distributed.cluster import (
    Cluster,
    Tasks,
    elastic,
    meet,
    rendezvous,
    resolve,
    resolve_tasks,
    strategy_for,
)
from ctl.errors import PeerError, UsageError

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
    for index in (1, "1"):
        assert resolve(None, None, tf_config({"worker": TWO}, index=index)).index == 1


def test_one_host_may_have_several_ports():
    workers = ("localhost:1", "127.0.0.1:2", "host0:2", "host1:2", "10.0.0.1:2", "[fd00::1]:2")
    assert resolve(workers, 4, {}).workers == workers


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
        (("a:1", "a:٣"), 0, {}, "'a:٣' is not HOST:PORT"),
        (("a b:1", "b:2"), 0, {}, "'a b:1' is not HOST:PORT"),
        (("a..b:1", "b:2"), 0, {}, "'a..b:1' is not HOST:PORT"),
        (("grpc://a:1", "b:2"), 0, {}, "'grpc://a:1' is not HOST:PORT"),
        (("fe80::1:2", "b:2"), 0, {}, "'fe80::1:2' has an IPv6 address without brackets"),
        (("[fe80::1%eth0]:1", "b:2"), 0, {}, "'[fe80::1%eth0]:1' is not HOST:PORT"),
        (("[::g]:1", "b:2"), 0, {}, "'[::g]:1' is not HOST:PORT"),
        (("[::1]:1", "[0:0::1]:1"), 0, {}, "twice: [::1]:1 and [0:0::1]:1"),
        (("127.0.0.1:1", "[::1]:1"), 0, {}, "twice: 127.0.0.1:1 and [::1]:1"),
        (("10.0.0.1:1", "[::ffff:10.0.0.1]:1"), 0, {}, "twice: 10.0.0.1:1 and [::ffff:10.0.0.1]:1"),
        (("localhost:1", "127.0.0.1:1"), 0, {}, "twice: localhost:1 and 127.0.0.1:1"),
        (("127.0.0.2:1", "0.0.0.0:1"), 0, {}, "twice: 127.0.0.2:1 and 0.0.0.0:1"),
        (("10.0.1:01", "10.0.0.1:1"), 0, {}, "twice: 10.0.1:01 and 10.0.0.1:1"),
        (("Host0.net:1", "host0.net.:1"), 0, {}, "twice: Host0.net:1 and host0.net.:1"),
        (None, None, {"TF_CONFIG": "[" * 100_000}, "TF_CONFIG is malformed"),
        (None, None, tf_config({"worker": TWO}, index=float("inf")), "index inf is not a whole"),
        (None, None, tf_config({"worker": TWO}, index=1.7), "index 1.7 is not a whole number"),
        (None, None, tf_config({"worker": TWO}, index=True), "index True is not a whole number"),
        (None, None, tf_config({"worker": TWO}, index="1.7"), "invalid literal"),
        (None, None, tf_config({"worker": None}), "TypeError"),
        (None, None, tf_config({"worker": TWO}, ["worker"]), "this task is a \"['worker']\""),
        (None, None, tf_config({"chief": ["c:1"], "worker": TWO}, "chief", 1), "no chief 1"),
        (None, None, tf_config({"chief": ["c:1"], "worker": TWO}, index=-1), "no worker -1"),
        (None, None, {"TF_CONFIG": "{"}, "TF_CONFIG is malformed"),
        (None, None, {"TF_CONFIG": "[]"}, "TF_CONFIG is malformed"),
        (None, None, {"TF_CONFIG": '{"cluster": {}}'}, "'task'"),
        (None, None, tf_config({"worker": ["a:1"]}, index=1), "there is no worker 1"),
        (None, None, tf_config({"ps": ["a:1"]}, "ps"), "this task is a 'ps'"),
        (None, None, tf_config({"worker": [7]}), "'7' is not HOST:PORT"),
    ],
    ids=lambda value: str(value)[:100],
)
def test_what_is_wrong_is_one_line(workers, index, environ, words):
    with pytest.raises(UsageError) as error:
        resolve(workers, index, environ)
    assert words in str(error.value) and "\n" not in str(error.value)


def two_workers() -> tuple[str, str]:
    return tuple(launch.cluster(2)["worker"])


def test_a_port_in_use():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(PeerError, match=f"worker 0 cannot listen on 127.0.0.1:{port}: Addr"):
            meet(Cluster((f"127.0.0.1:{port}",), 0, "test"), 1.0)
    meet(Cluster((f"127.0.0.1:{port}",), 0, "test"), 1.0)


def meet_all(clusters, timeout=20.0, late=0.3) -> list:
    """What each worker's `meet` raises, or None; the workers come one after the other."""
    outcomes = [None] * len(clusters)

    def come(number):
        time.sleep(late * number)
        try:
            meet(clusters[number], timeout)
        except Exception as error:
            outcomes[number] = error

    threads = [threading.Thread(target=come, args=(n,)) for n in range(len(clusters))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    return outcomes


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2, 5])
def test_workers_that_come_one_by_one_meet(workers):
    addresses = tuple(launch.cluster(workers)["worker"])
    for _ in range(3):  # on the same ports again: as TensorFlow will take them
        clusters = [Cluster(addresses, index, "test") for index in range(workers)]
        assert meet_all(clusters) == [None] * workers


@pytest.mark.parametrize("words", [bytes(range(256)), b"1 x", b""])
def test_strangers_are_ignored(words):
    """Also 150 that are silent, more than wait at a port."""
    addresses = two_workers()
    host, _, port = addresses[0].rpartition(":")
    with contextlib.ExitStack() as open_connections:

        def disturb():
            for _ in range(150):
                with contextlib.suppress(OSError):
                    stranger = socket.create_connection((host, int(port)), 1)
                    open_connections.enter_context(stranger).sendall(words)

        def worker_1_comes_after_them():
            time.sleep(0.3)  # until worker 0 listens
            disturb()
            meet(Cluster(addresses, 1, "test"), 20.0)

        peer = threading.Thread(target=worker_1_comes_after_them)
        peer.start()
        meet(Cluster(addresses, 0, "test"), 20.0)
        peer.join()


@pytest.mark.slow
def test_another_list_of_workers():
    first, second = two_workers()
    clusters = [Cluster((first, second), 0, "test"), Cluster((first, second, "c:3"), 1, "test")]
    for index, refused in enumerate(meet_all(clusters)):
        assert isinstance(refused, UsageError)
        assert f"worker {1 - index} at {(second, first)[index]} has another list" in str(refused)


def test_a_missing_peer_is_named(monkeypatch):
    monkeypatch.setattr("ctl.distributed.cluster.rendezvous._QUIET_SECONDS", 0.5)
    addresses = two_workers()
    monkeypatch.setattr(logging, "warning", lambda text, *values: said.append(text % values))
    said = []
    with pytest.raises(PeerError) as error:
        meet(Cluster(addresses, 0, "test"), 1.4)
    absent = f"worker 1 at {addresses[1]} (Connection refused)"
    assert len(said) == 2 and all(
        re.search(rf"worker 0 has waited \d+ s for {re.escape(absent)}", line) for line in said
    )
    assert f"gave up after 1 s (--startup_timeout) waiting for {absent}" in str(error.value)


JOBS = {"chief": ["c:1"], "worker": list(TWO), "ps": ["p:1"]}


def test_a_frozen_peer_ends_the_wait_of_an_elastic_job(monkeypatch):
    """It listens, and does not answer."""
    clock = [0.0]
    monkeypatch.setattr(rendezvous.time, "monotonic", lambda: clock[0])

    def asked(error: Exception | None) -> str:
        """How it ended to ask a peer, for 6 s."""
        try:
            with frozen.patient_with("worker 1 at host:1"):
                clock[0] += 6.0
                if error:
                    raise error
        except Exception as raised:
            return f"{type(raised).__name__}: {raised}"
        return "answered"

    silent, refused = TimeoutError("timed out"), ConnectionRefusedError("refused")
    frozen = rendezvous.Frozen("worker 0")
    assert [asked(silent) for _ in range(9)] == ["TimeoutError: timed out"] * 9
    monkeypatch.setenv(elastic.VARIABLE, "-1")
    frozen = rendezvous.Frozen("worker 0")
    for error in (silent, refused, silent, None, silent):
        assert not asked(error).startswith("PeerError")
    gave_up = "worker 0: gave up after 12 s: worker 1 at host:1 does not answer"
    assert asked(silent) == f"PeerError: {gave_up}"


def test_tasks_with_parameter_servers():
    found = resolve_tasks(tf_config(JOBS, "ps"))
    assert found == Tasks("c:1", TWO, ("p:1",), "ps", 0)
    assert found.name == "ps 0" and not found.is_coordinator
    assert found.servers == {"ps 0": "p:1", "worker 0": "a:1", "worker 1": "b:2"}
    assert resolve_tasks(tf_config(JOBS, "worker", 1)).name == "worker 1"
    coordinator = resolve_tasks(tf_config(JOBS, "chief"))
    assert coordinator.is_coordinator and coordinator.name == "the coordinator"


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({}, "needs a TF_CONFIG with a chief"),
        ({"TF_CONFIG": "{"}, "needs a TF_CONFIG with a chief"),
        ({"TF_CONFIG": '{"cluster": 3}'}, "needs a TF_CONFIG with a chief"),
        (tf_config({"worker": list(TWO)}), "KeyError: 'chief'"),
        (tf_config(JOBS, "evaluator"), "this task is a 'evaluator'"),
        (tf_config(JOBS, "worker", 2), "there is no worker 2; it names 2"),
        (tf_config({**JOBS, "ps": []}, "worker"), "not 1 chief, 2 worker, 0 ps"),
        (tf_config({**JOBS, "ps": ["a:1"]}, "worker"), "an address occurs twice"),
        (tf_config({**JOBS, "ps": ["p"]}, "worker"), "'p' is not HOST:PORT"),
        (tf_config(JOBS, "worker", 0.5), "index 0.5 is not a whole number"),
        (tf_config(JOBS, "worker", float("inf")), "index inf is not a whole number"),
        ({"TF_CONFIG": "[" * 100_000}, "RecursionError"),
    ],
)
def test_tasks_that_cannot_be(environ, words):
    with pytest.raises(UsageError) as error:
        resolve_tasks(environ)
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("environ", "strategy"),
    [
        (tf_config(JOBS), "parameter_server"),
        (tf_config({"worker": list(TWO)}), "multi_worker"),
        *((e, "") for e in (tf_config({"worker": ["a:1"]}), tf_config({}), {})),
        *(({"TF_CONFIG": text}, "") for text in ("", "{}")),
    ],
)
def test_the_strategy_for_a_tf_config(environ, strategy):
    assert strategy_for(environ) == strategy


@pytest.mark.parametrize("text", ["{", "3", '{"cluster": 3}', "[" * 100_000])
def test_a_tf_config_that_cannot_be_read_is_not_passed_over(text):
    with pytest.raises(UsageError, match="TF_CONFIG is malformed"):
        strategy_for({"TF_CONFIG": text})
