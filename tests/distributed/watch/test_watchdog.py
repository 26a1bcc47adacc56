"""ctl.distributed.watch.watchdog and ctl.distributed.watch.beats, in real processes without
TensorFlow: who ends, how, with which words; who does not."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import time

import answering
import pytest
from paths import ROOT
from waiting import wait_until

from ctl import launch
from ctl.distributed.cluster import Cluster, elastic, secret
from ctl.distributed.watch import beats, record, watchdog
from ctl.inspect.commands import hang as hang_command

pytestmark = pytest.mark.slow  # starts processes

# A worker: starts a watchdog over two workers, says so, then does what it is told.
PRELUDE = """
import contextlib, os, sys, threading, time
from pathlib import Path
from ctl.distributed.watch import watchdog
from ctl.distributed.cluster import Cluster
from ctl.errors import UsageError
index, addresses = int(sys.argv[1]), sys.argv[2].split(",")
cluster, folder = Cluster(tuple(addresses), index, "test"), Path(sys.argv[3])
watchdog.start(cluster, 1.5, folder, 1.5, (folder / "aborted").write_text)
print("started", flush=True)
"""

WAITS = "with watchdog.collective('training', step=7): time.sleep(60)"
BUSY = "with watchdog.host('the action Sleep', 6): time.sleep(60)"


@pytest.fixture
def start(tmp_path):
    """Starts worker ``index`` of a pair, whose workers know each other, or one that is ``alone``;
    ends what is left of them."""
    first, second, *others = launch.cluster(4)["worker"]
    pairs = [[first, second], others]
    processes = []

    def start(index: int, program: str, alone: bool = False, pair: int = 0) -> subprocess.Popen:
        addresses = ",".join(launch.cluster(2)["worker"] if alone else pairs[pair])
        process = subprocess.Popen(
            [sys.executable, "-c", PRELUDE + program, str(index), addresses, tmp_path],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        processes.append(process)
        assert process.stdout.readline() == "started\n"
        return process

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def test_it_ends_a_process_whose_collective_does_not_come_back(start, tmp_path):
    """And the one that keeps it waiting is told so, and writes down where it is."""
    busy, waits = start(1, BUSY), start(0, WAITS)
    assert waits.wait(30) == 5
    assert busy.poll() is None
    (line,) = waits.stderr.read().splitlines()
    assert line.startswith(
        "worker 0 of 2: a collective in training after step 7 timed out: no progress for "
    )
    records, notes = hang_command.load(tmp_path)
    assert [r.worker for r in records] == [0, 1] and not notes
    assert "<string>:11 <module>" in records[1].stacks["MainThread"][-1]
    assert records[1].why == "worker 0 gave up"
    # The limit of this test is below what makes a place steady.
    steady = [record.read(record.path_of(tmp_path, i)) for i in range(2)]
    assert [(r.step, r.doing, r.waits) for r in steady] == [
        (7, "training", True),
        (6, "the action Sleep", False),
    ]


def test_it_says_for_whom_it_waits(start):
    """Once, and again when twice the time is over; nothing where all wait in the same place."""
    quiet = "from ctl.base import console\nconsole.log_to_terminal()\n"
    quiet += "watchdog._QUIET_SECONDS = 4.0\nwatchdog._watchdog.timeout = 9.0\n"
    start(1, BUSY)
    waits = start(0, quiet + WAITS)
    together = [start(index, quiet + WAITS, pair=1) for index in range(2)]
    assert waits.wait(30) == 5
    *said, last = waits.stderr.read().splitlines()
    said = [line for line in said if line.startswith("warning: ")]
    assert len(said) == 2 and "timed out" in last
    for line in said:
        assert re.search(
            r"worker 0 has waited \d+ s in training for worker 1 \(in the action Sl", line
        )
    assert [process.wait(30) for process in together] == [5, 5]
    for process in together:
        (line,) = process.stderr.read().splitlines()
        assert "timed out" in line


def test_nobody_waits_for_itself(start):
    """Two workers in two places: each blames the other, whichever is right."""
    quiet = "watchdog._watchdog.timeout = 5.0\n"
    pair = [start(i, quiet + WAITS.replace("training", f"place {i}")) for i in range(2)]
    assert [process.wait(30) for process in pair] == [5, 5]
    for index, process in enumerate(pair):
        assert f"waiting for worker {index} " not in process.stderr.read()


def test_building_has_the_limit_of_the_start(start):
    building = (
        "watchdog._watchdog.{} = 60\nwith watchdog.building('making variables'): time.sleep({})"
    )
    waits = start(0, building.format("timeout", 60), alone=True)
    goes_on = start(0, building.format("startup_timeout", 4), alone=True)
    assert waits.wait(30) == 5
    assert "no progress for 2 s (--startup_timeout); waiting for" in waits.stderr.read()
    assert goes_on.wait(30) == 0


def test_it_lets_live_what_goes_on(start):
    """For longer than the limit: steps that move in one long call, what waits for nobody, a first
    call that compiles."""
    programs = [
        "def step(): return int(10 * time.monotonic())\n"
        "with watchdog.collective('training', progress=step): time.sleep(4)",
        "with watchdog.host('saving'): time.sleep(4)",
        "with watchdog.collective('training', first=True): time.sleep(4)",
    ]
    processes = [start(0, program, alone=True) for program in programs]
    assert [process.wait(30) for process in processes] == [0, 0, 0]


def test_a_process_that_was_stopped_has_not_waited(start, tmp_path):
    """Stopped for longer than the limit: it goes on, and its peer had seen it frozen."""
    program = """
for step in range(40):
    with watchdog.collective("training", step=step):
        time.sleep(0.1)
"""
    frozen = start(1, program)
    waits = start(0, WAITS)
    time.sleep(0.5)
    frozen.send_signal(signal.SIGSTOP)
    time.sleep(3)
    frozen.send_signal(signal.SIGCONT)
    assert frozen.wait(30) == 0, frozen.stderr.read()
    assert waits.wait(30) == 5


ANSWERS = answering.PROGRAM + "answer(addresses[index]); "
ELASTIC = """
watchdog._SILENT_SECONDS, watchdog._ANSWER_SECONDS = 1.5, 1.0
watchdog._watchdog.timeout = 60.0
while not watchdog._watchdog._beats.peers: time.sleep(0.1)
print("heard", flush=True)
"""


def test_an_elastic_job_does_not_wait_for_a_worker_that_is_frozen(start, tmp_path, monkeypatch):
    """One that sends no beats, since Python computes, and answers as TensorFlow does is not."""
    monkeypatch.setenv(elastic.VARIABLE, "-1")
    silent = start(1, ANSWERS + "time.sleep(2); watchdog._watchdog._stopped.set(); time.sleep(60)")
    waits, aborted = start(0, ELASTIC + WAITS), tmp_path / "aborted"
    assert waits.stdout.readline() == "heard\n"
    time.sleep(6)
    assert not aborted.exists()
    silent.send_signal(signal.SIGSTOP)
    says = "worker 1 does not answer"
    wait_until(lambda: aborted.exists() and aborted.read_text() == says, 30)


@pytest.mark.parametrize("elastic_job", [True, False])
def test_an_elastic_job_does_not_wait_for_a_worker_that_gave_up(
    start, tmp_path, monkeypatch, elastic_job
):
    if elastic_job:
        monkeypatch.setenv(elastic.VARIABLE, "-1")
    start(1, ANSWERS + "watchdog.broke_off(None, 6); time.sleep(60)")
    waits, aborted = start(0, ELASTIC + WAITS), tmp_path / "aborted"
    assert waits.stdout.readline() == "heard\n"
    if elastic_job:
        wait_until(lambda: aborted.exists() and aborted.read_text() == "worker 1 gave up", 30)
    else:
        time.sleep(4)
        assert not aborted.exists()


def test_another_error_may_be_the_reason(start, tmp_path):
    program = """
wrong = UsageError("its data ended")
with watchdog.collective("a barrier", timeout=1, otherwise=wrong): time.sleep(60)
"""
    process = start(0, program)
    assert process.wait(30) == 2
    assert process.stderr.read() == "its data ended\n"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("left", [False, True])
def test_who_gives_up_where_it_heard_of_another_had_waited_there(start, tmp_path, left):
    """In a collective of an action; where it had ``left`` the action, that was the cause."""
    give_up = """
def fail():
    while not Path(sys.argv[3], "flight-worker-0.json").exists():
        time.sleep(0.1)
    {leave}
    raise ValueError("Socket closed")
with contextlib.suppress(ValueError), contextlib.ExitStack() as stack:
    stack.enter_context(watchdog.host("the action Sum", 6))
    fail()
watchdog.broke_off(None, 6)
"""
    leave = "stack.close(); stack.enter_context(watchdog.collective('training', step=6))"
    busy = start(0, give_up.format(leave=leave if left else ""))
    waits = start(1, WAITS)
    assert waits.wait(30) == 5
    assert busy.wait(30) == 0
    found = record.read(record.path_of(tmp_path, 0))
    assert found.doing == "the action Sum"
    assert found.why == ("worker 1 gave up" if left else "broke off")


def test_nothing_keeps_it_from_ending(start, tmp_path):
    """A directory that cannot be written, a save that fails and never ends."""
    (tmp_path / "flight-worker-0.json").mkdir()
    fails = "def save(): raise OSError('full')\n"
    hangs = "watchdog._LAST_WORDS_SECONDS = 3.0\ndef save(): time.sleep(100)\n"
    processes = [
        start(index, f"{program}watchdog.finish_first(save)\n{WAITS}", alone=True)
        for index, program in enumerate((fails, hangs))
    ]
    assert [process.wait(30) for process in processes] == [5, 5]


@pytest.mark.parametrize("fault", ["time.sleep(100)", "raise OSError('stale file handle')"])
def test_a_file_system_that_hangs_or_fails_turns_no_limit_off(start, fault):
    """Where it says for whom it waits, and in its last words."""
    program = f"""
from ctl.distributed.watch import record
def make(*arguments): {fault}
record.make = make
watchdog._QUIET_SECONDS, watchdog._LAST_WORDS_SECONDS = 0.5, 3.0
"""
    assert start(0, program + WAITS, alone=True).wait(30) == 5


def test_an_error_of_a_turn_turns_no_limit_off(start):
    program = """
exchange, turns = watchdog._watchdog._beats.exchange, []
def fails_once(*arguments):
    turns.append(1)
    if len(turns) == 1:
        raise RuntimeError("once")
    exchange(*arguments)
watchdog._watchdog._beats.exchange = fails_once
"""
    process = start(0, program + WAITS, alone=True)
    assert process.wait(30) == 5
    assert "the watchdog continues after RuntimeError('once')" in process.stderr.read()


def test_a_reader_that_is_stuck_keeps_nobody(start):
    """Nobody reads standard error, which is full: neither who waits for whom, nor the last line,
    nor what was printed before keeps the process from its exit code."""
    full = """
from ctl.base import console
console.log_to_terminal()
watchdog._QUIET_SECONDS, watchdog._LAST_WORDS_SECONDS = 1.0, 1.5
watchdog._watchdog.timeout = 2.5
os.set_blocking(2, False)
with contextlib.suppress(BlockingIOError):
    while True:
        os.write(2, bytes(4096))
os.set_blocking(2, True)
"""
    ends = [full + WAITS, full + WAITS.replace("step=7", "otherwise=UsageError('its data ended')")]
    for pair in range(2):
        start(1, BUSY, pair=pair)
    processes = [start(0, program, pair=pair) for pair, program in enumerate(ends)]
    assert [process.wait(40) for process in processes] == [5, 2]


def test_without_it_sections_do_nothing():
    assert watchdog._watchdog is None
    with watchdog.collective("training"), watchdog.host("saving"):
        pass


# Beats -------------------------------------------------------------------------------------------

GOOD = {
    **{"ctl": 2, "job": "j", "worker": 1, "step": 3, "doing": "training", "phase": "pack0"},
    **{"waits": True, "since": 0.5, "gave_up": ""},
}


def datagram(beat: dict) -> bytes:
    return secret.sign(json.dumps(beat))


def test_a_beat_is_read():
    worker, beat = beats.parse(datagram(GOOD), "j")
    assert (worker, beat) == (1, beats.Beat(3, "training", "pack0", True, 0.5, ""))


@pytest.mark.parametrize(
    "text",
    [
        *(b"", b"\xff", json.dumps(GOOD).encode(), datagram(GOOD)[1:], b"0" + datagram(GOOD)[1:]),
        *map(secret.sign, ["", "[]", "3", "null", "[" * 900, "{}"]),
        *(
            datagram(GOOD | change)
            for change in (
                {"ctl": 1},
                {"job": "another"},
                {"worker": "1"},
                {"worker": True},
                {"step": -1},
                {"step": 1.5},
                {"since": float("nan")},
                {"since": -1},
                {"since": "1"},
                {"waits": 1},
                {"gave_up": None},
                {"doing": 5},
                {"doing": "x" * 1000},
            )
        ),
        *(datagram({k: v for k, v in GOOD.items() if k != name}) for name in GOOD),
    ],
)
def test_what_is_no_beat_is_ignored(text):
    assert beats.parse(text, "j") is None


def test_beats_hold_no_control_characters():
    _, beat = beats.parse(datagram(GOOD | {"doing": "a\x1b[2J\nb"}), "j")
    assert beat.doing == "a[2Jb"


def test_only_who_knows_the_secret_can_send_a_beat(monkeypatch):
    """A stranger knows the rest: the addresses, and the program."""
    monkeypatch.setenv(secret.VARIABLE, "open sesame")
    addresses = tuple(launch.cluster(2)["worker"])
    with contextlib.ExitStack() as stack:
        mine, peer, forger = (beats.Beats(Cluster(addresses, i, "test")) for i in (0, 1, 1))
        for opened in (mine, peer, forger):
            stack.callback(opened._socket.close)
        _, beat = beats.parse(datagram(GOOD), "j")
        with monkeypatch.context() as without_it:
            without_it.setenv(secret.VARIABLE, "")
            forger.send(dataclasses.replace(beat, step=9, gave_up="broke off"))
        mine.exchange(beat, 0.5)
        assert mine.peers == {}
        peer.send(beat)
        wait_until(lambda: mine.exchange(beat, 0.05) or mine.peers)
        assert mine.peers[1].step == 3 and 0 <= mine.peers[1].silent < 60


def test_the_number_of_datagrams_is_bounded():
    assert beats.interval(2) == 1.0
    for workers in (100, 1000, 10_000):
        assert workers / beats.interval(workers) <= 100
