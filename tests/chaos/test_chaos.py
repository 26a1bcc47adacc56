"""The chaos runner: what it draws, how it judges, three schedules of it, and two elastic jobs."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from paths import ROOT

from .attempt import Attempt, Hit, ports
from .draw import KINDS, MARKS, PLACES, Fault, Schedule, draw, loads
from .judge import deadline, judge
from .run import table


def test_a_seed_draws_the_same_schedule_again():
    for seed in range(300):
        schedule = draw(seed)
        assert draw(seed) == schedule == loads(schedule.dumps())
        *disturbed, last = schedule.attempts
        assert 1 <= len(disturbed) <= 2 and last == ()
        assert all(1 <= len(faults) <= 2 for faults in disturbed)


def test_seeds_draw_all_there_is():
    drawn = [draw(seed) for seed in range(2000)]
    faults = [fault for schedule in drawn for faults in schedule.attempts for fault in faults]
    assert {fault.kind for fault in faults} == set(KINDS)
    assert {schedule.workers for schedule in drawn} == {1, 2, 3, 4}
    assert {fault.place for fault in faults if fault.kind == "raise"} == set(PLACES)
    assert {fault.place for fault in faults if fault.kind == "kill"} > set(MARKS)


@pytest.mark.parametrize("text", ["{", "[]", '{"seed": 1}', '{"attempts": [[{"kind": "flood"}]]}'])
def test_what_is_no_schedule(text):
    with pytest.raises(ValueError):
        loads(text)


def killed(at_mark: str = "step 20", kind: str = "kill", **fault) -> Attempt:
    """Three workers of which the second is hit, and all that follows as documented."""
    names = ["worker 0", "worker 1", "worker 2"]
    attempt = Attempt(names, began=100.0)
    marks = dict.fromkeys(names, at_mark)
    attempt.hits = [Hit(Fault(0, kind, 1, at_mark, **fault), 110.0, ("worker 1",), marks)]
    attempt.ends = {name: [(5, 111.0)] for name in names}
    attempt.ends["worker 1"] = [(-9, 110.0)]
    attempt.marks = {name: [(101.0, "resumed 0"), (109.0, at_mark)] for name in names}
    attempt.said = dict.fromkeys(
        names, "worker 0 of 3: a collective broke off: reset; waiting for worker 1 (gone: refused)"
    )
    return attempt


def checks(attempt: Attempt, tmp_path, before: int = 0) -> list[str]:
    return [failure.check for failure in judge(attempt, tmp_path, before)]


def test_what_is_documented_is_right(tmp_path):
    assert checks(killed(), tmp_path) == []


def test_a_task_that_does_not_end_and_one_that_is_left(tmp_path):
    attempt = killed()
    attempt.stuck, attempt.ends["worker 2"], attempt.left = ["worker 2"], [], [1]
    assert checks(attempt, tmp_path) == ["time", "time"]


@pytest.mark.parametrize("code", [0, 1, 42, -6])
def test_a_wrong_code(tmp_path, code):
    attempt = killed()
    attempt.ends["worker 2"] = [(code, 111.0)]
    assert checks(attempt, tmp_path) == ["code"]


@pytest.mark.parametrize(("times", "wrong"), [(1, ["code"]), (2, [])])
def test_the_second_ctrl_c_ends_a_task_at_once(tmp_path, times, wrong):
    attempt = killed(kind="int", times=times)
    attempt.ends["worker 1"] = [(130, 111.0)]
    attempt.ends["worker 0"] = attempt.ends["worker 2"] = [(42, 111.0)]
    assert checks(attempt, tmp_path) == wrong


@pytest.mark.parametrize(
    "last",
    [
        "worker 2 of 3: broke off; waiting for other workers, which all still listen",
        "worker 2 of 3: broke off; waiting for worker 0 (gone: refused)",
        "worker 2 of 3: broke off; waiting for worker 1 (gone: x), worker 0 (in forward for 9 s)",
    ],
)
def test_a_wrong_blame(tmp_path, last):
    attempt = killed()
    attempt.said["worker 2"] = last
    assert checks(attempt, tmp_path) == ["blame"]


def test_what_tensorflow_logs_afterwards_is_no_blame(tmp_path):
    attempt = killed()
    attempt.said["worker 2"] += (
        "\nE0000 00:00:1 executor.cc:252] Socket closed\n:UNKNOWN:Error {}\n"
    )
    assert checks(attempt, tmp_path) == []


def test_a_lost_checkpoint(tmp_path):
    """Two workers resume from the begin although step 5 was saved, and it is gone."""
    attempt = killed()
    attempt.marks["worker 0"][0] = (101.0, "resumed 5")
    assert checks(attempt, tmp_path, before=5) == ["state"] * 3


def test_a_pause_must_change_nothing(tmp_path):
    attempt = killed(kind="pause", seconds=2.0)
    assert set(checks(attempt, tmp_path)) == {"code"}
    attempt.ends = {name: [(0, 120.0)] for name in attempt.names}
    assert checks(attempt, tmp_path) == []


@pytest.mark.parametrize(
    ("attempt", "seconds"),
    [
        (killed(), 15),
        (killed("built"), 25),
        (killed("leaving"), 25),
        (killed(kind="freeze"), 25),
        (killed("start"), 55),  # the others wait for it, and then for TensorFlow
        (killed(kind="hang"), 35),  # maybe in a call that compiles
        (killed(kind="pause", seconds=3.0), 3 + 5 * 4 - 10),
    ],
)
def test_bounds(attempt, seconds):
    """Of an attempt in which the fault came after 10 s; undisturbed it takes 4 s."""
    assert deadline(attempt, 4.0, factor=1.0) == 110 + seconds


def test_garbage_goes_to_every_port_of_a_process():
    script = """
import socket, time
kinds = socket.SOCK_STREAM, socket.SOCK_DGRAM
both = [socket.socket(socket.AF_INET, kind) for kind in kinds]
for one in both:
    one.bind(("127.0.0.1", 0))
both[0].listen()
print(*(one.getsockname()[1] for one in both), flush=True)
time.sleep(1000)
"""
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    try:
        tcp, udp = map(int, process.stdout.readline().split())
        found = set(ports([process.pid]))
    finally:
        process.kill()
        process.communicate()
    assert {port for _, port in found} == {tcp, udp} and len(found) == 2


def test_table():
    results = [
        {"kinds": ["kill", "pause"], "failures": []},
        {"kinds": ["kill"], "failures": [{"check": "blame", "why": ""}] * 2},
    ]
    rows = {line.split()[0]: line.split()[1:] for line in table(results).splitlines()}
    assert rows["kill"] == ["2", "2", "2", "1", "2"]
    assert rows["pause"] == ["1", "1", "1", "1", "1"]
    assert rows["hang"] == ["0", "0", "0", "0", "0"]
    assert rows["all"] == ["2", "2", "2", "1", "2"]


def run_chaos(*arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "tests.chaos.run", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1800)
    if "cannot mount a disk" in done.stderr:
        pytest.skip(done.stderr.strip())
    return done


CHOSEN = Schedule(
    seed=0,
    workers=2,
    servers=0,
    attempts=(
        (
            Fault(0, "hang", 0, "saving", step=36),
            Fault(1, "pause", 1, "step 20", seconds=1.3),
        ),
        (),
    ),
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "seeds", "hit"),
    [
        pytest.param(
            ["--seed=580", "--schedules=2", "--workers=3", "--attempts=1"],
            [580, 581],
            {"slow"},  # an int and a pause may come after the end
            marks=pytest.mark.sample,
        ),
        ([f"--schedule={CHOSEN.dumps()}"], [0], {"hang", "pause"}),
    ],
    ids=["drawn", "chosen"],
)
def test_schedules(tmp_path, arguments, seeds, hit):
    """A machine may be slower than promised by a factor of 6; who is blamed does not depend on
    that."""
    out = tmp_path / "out.jsonl"
    done = run_chaos(*arguments, "--factor=6", f"--out={out}")
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    results = [json.loads(line) for line in out.read_text().splitlines()]
    assert [result["schedule"]["seed"] for result in results] == seeds
    assert hit <= {kind for result in results for kind in result["kinds"]}


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        # The number stays, so the weights have equal bits, with the masks of each replica.
        ("--workers=2..2", "--machines", "--kinds=machine"),
        ("--workers=2..3", "--kinds=freeze"),
    ],
)
def test_an_elastic_job(options):
    """It is ended with 1 if anything does not hold."""
    command = [sys.executable, "-m", "tests.chaos.elastic", "--losses=1", "--seconds=0.5"]
    command += ["--join_every=3", *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert "losses: 1" in done.stdout
