"""ctl.launch --workers=LEAST..MOST with processes that only say what a worker would say."""

from __future__ import annotations

import math
import subprocess
import sys
from types import SimpleNamespace

import answering
import pytest

from ctl import launch as module
from ctl.errors import PeerError, Preempted, UsageError
from ctl.launch import launch

# A worker that tells what the text `does` makes of its `rank` and the `attempt`, from 0. Rank 0
# writes the attempts to a file.
WORKER = """
import json, os, signal, sys, time
config = json.loads(os.environ["TF_CONFIG"])
rank, peers, file = config["task"]["index"], config["cluster"]["worker"], sys.argv[1]
tell = lambda what: os.write(int(os.environ["CTL_ELASTIC"]), what)
me = f"{len(peers)} {peers[0]}\\n"
if rank == 0:
    with open(file, "a") as opened:
        opened.write(me)
while not os.path.exists(file) or me not in (lines := open(file).readlines()):
    time.sleep(0.05)
attempt = lines.index(me)
saves = lambda *_: os._exit(42)
signal.signal(signal.SIGTERM, saves)
def survive():
    tell(b"l")
    time.sleep(0.3)
    os._exit(5)
"""


def run(tmp_path, does: str, *options: str, workers: str = "2..4") -> tuple[int, list[int], str]:
    """Returns the exit code, the number of workers of each attempt, and what the launcher said."""
    file = tmp_path / "attempts"
    command = [sys.executable, "-c", WORKER + does, str(file)]
    options = (f"--workers={workers}", "--backoff=0.1", "--grace=5", *options)
    done = subprocess.run(
        [sys.executable, "-m", "ctl.launch", *options, "--", *command],
        capture_output=True,
        text=True,
        timeout=120,
    )
    counts = [int(line.split()[0]) for line in file.read_text().splitlines()]
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, counts, done.stderr


DIES = "os.kill(os.getpid(), 9) if rank == {} else survive()"


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 2])
def test_a_worker_that_dies_is_done_without(tmp_path, rank):
    code, counts, said = run(tmp_path, f"if attempt == 0: {DIES.format(rank)}")
    assert (code, counts) == (0, [4, 3])
    assert "; the others save and end" in said
    goes_on = f"goes on with 3 workers without slots {rank}, for 300 s"
    assert f"worker {rank} died of SIGKILL: {goes_on}" in said


# Worker 1 stops. The others do what they do when it is killed.
STOPS = """
if attempt == 0 and rank == 1:
    open(file + ".pid", "w").write(str(os.getpid()))
    os.kill(os.getpid(), signal.SIGSTOP)
def wait_until_killed():
    while not os.path.exists(file + ".pid"):
        time.sleep(0.1)
    {meanwhile}
    while os.path.exists("/proc/" + open(file + ".pid").read()):
        time.sleep(0.1)
if attempt == 0:
    {then}
"""
ANSWERS = """
if attempt == 0 and rank == 1:
    answer(peers[1])
    time.sleep(3.0)  # so the launcher knows that it answers
"""
FREEZES = answering.PROGRAM + ANSWERS + STOPS
HOLDS = {"meanwhile": "tell(b'l')", "then": "wait_until_killed(); os._exit(5)"}


@pytest.mark.slow
def test_a_worker_that_hangs_is_killed_while_the_others_wait_for_what_it_holds(tmp_path):
    """The others wait for its end, as for the lock of the chief: nobody has ended before."""
    code, counts, said = run(tmp_path, STOPS.format(**HOLDS), "--grace=30")
    assert (code, counts) == (0, [4, 3])
    assert "has lost another; the others save and end" in said
    assert "worker 1 has not ended: killed" in said and said.count("killed") == 1
    assert "worker 1 hangs: goes on with 3 workers without slots 1" in said


@pytest.mark.slow
@pytest.mark.parametrize(
    ("others", "left"),
    [
        (HOLDS, 3),
        ({**HOLDS, "meanwhile": "os.kill(os.getpid(), 9) if rank == 2 else tell(b'l')"}, 2),
        ({"meanwhile": "pass", "then": "sys.exit(0)"}, 3),
    ],
    ids=["the others lose it", "another dies", "the others have ended"],
)
def test_a_frozen_worker_is_killed_at_once(tmp_path, others, left):
    """TensorFlow does not answer its launcher any more. It does not depend on the others."""
    code, counts, said = run(tmp_path, FREEZES.format(**others), "--grace=100")
    assert (code, counts) == (0, [4, left])
    assert "worker 1 is frozen: killed" in said and said.count("killed") == 1
    assert f": goes on with {left} workers without slots 1" in said


@pytest.mark.slow
def test_a_worker_that_waits_for_a_core_is_not_frozen(tmp_path):
    """It does not answer for longer than a frozen one may."""
    computes = """
end = time.monotonic() + 12.0
if rank == 1:
    answer(peers[1], 3.0)
    while time.monotonic() < end:
        pass
time.sleep(max(0.0, end - time.monotonic()))
"""
    code, counts, said = run(tmp_path, answering.PROGRAM + computes)
    assert (code, counts) == (0, [4])
    assert "killed" not in said


@pytest.mark.slow
@pytest.mark.parametrize("wakes", [True, False])
def test_all_workers_of_a_launcher_are_frozen(tmp_path, wakes):
    """As by a disk that hangs: they may go on. They are killed after the grace."""
    stops = """
import subprocess
answer(peers[rank])
def wait_for(what):
    while not os.path.exists(file + what):
        time.sleep(0.1)
if rank == 1:
    open(file + ".pid", "w").write(str(os.getpid()))
    wait_for(".end")
else:
    wait_for(".pid")
    time.sleep(3.0)
    both = open(file + ".pid").read() + f" {os.getpid()}"
    does = f"kill -STOP {both}; sleep 9; " + ("kill -CONT " + both) * WAKES
    subprocess.Popen(["sh", "-c", does], start_new_session=True).wait()
    open(file + ".end", "w").close()
"""
    does = f"{answering.PROGRAM}WAKES = {wakes}{stops}"
    options = "--max_restarts=0", f"--grace={100 if wakes else 2}"
    code, counts, said = run(tmp_path, does, *options, workers="2..2")
    assert (code, counts) == (0 if wakes else 137, [2])
    assert said.count("is frozen: killed") == (0 if wakes else 2)


def test_workers_that_stall_are_judged_together():
    """Also if one missed its questions before the other, and the grace is over between them."""
    job = object.__new__(module._ElasticJob)
    job._missed, job._stalled = {"a": 2, "b": 1}, math.inf
    both = [module._Task(name, "") for name in "ab"]
    assert job._frozen(both, 0.0) == []
    job._missed["b"] = 2
    assert job._frozen(both, 0.0) == both
    assert job._frozen(both, 100.0) == []
    job._missed["b"] = 0  # it goes on
    assert job._frozen(both, 0.0) == [] and job._missed == {}
    job._missed = {"a": 2, "b": 0}
    assert job._frozen(both, 100.0) == both[:1]


LOCKS = """
import fcntl, subprocess
lock, null = open(file + ".lock", "w"), subprocess.DEVNULL
if attempt == 0 and rank == 1:
    fcntl.flock(lock, fcntl.LOCK_EX)
    subprocess.Popen(["sleep", "1000"], stdout=null, stderr=null, pass_fds=[lock.fileno()])
    open(file + ".held", "w").close()
    os.kill(os.getpid(), 9)
if attempt == 0:
    while not os.path.exists(file + ".held"):
        time.sleep(0.05)
    fcntl.flock(lock, fcntl.LOCK_EX)
    fcntl.flock(lock, fcntl.LOCK_UN)
    open(f"{file}.saved {rank}", "w").close()
    survive()
"""


@pytest.mark.slow
def test_a_child_of_a_dead_worker_does_not_keep_its_lock(tmp_path):
    assert run(tmp_path, LOCKS, workers="2..3")[:2] == (0, [3, 2])
    assert len([*tmp_path.glob("*.saved *")]) == 2


def test_who_saves_after_a_stop_has_the_whole_grace():
    """Also if the signal came to another worker, which has ended; not beside one that hangs."""
    job = object.__new__(module._ElasticJob)
    job._killed = {}
    for code, seconds in ((Preempted.exit_code, 60.0), (PeerError.exit_code, 10.0)):
        job._tasks = [
            module._Task("worker", "", SimpleNamespace(poll=lambda code=code: code))
            for code in (None, code)
        ]
        assert job._patience(job._tasks[0], 60.0, asked=False) == seconds


@pytest.mark.slow
def test_a_job_that_is_stopped_while_a_worker_is_frozen(tmp_path):
    """The others save."""
    stops = "os.kill(os.getppid(), signal.SIGTERM) if rank == 0 else None"
    others = {"meanwhile": stops, "then": "wait_until_killed()"}
    code, counts, said = run(tmp_path, FREEZES.format(**others), "--grace=100")
    assert (code, counts) == (42, [4])
    assert "worker 1 is frozen: killed" in said


@pytest.mark.slow
def test_a_lost_slot_is_tried_again(tmp_path):
    """The workers are stopped for that, with SIGTERM, and go on with the one that came back."""
    does = f"if attempt == 0: {DIES.format(1)}\nif attempt == 1: time.sleep(100)"
    code, counts, said = run(tmp_path, does, "--join_every=2")
    assert (code, counts) == (0, [4, 3, 4])
    assert "a slot is tried again: the workers are asked to save and end" in said
    assert "goes on with 4 workers: slots 1 are tried again" in said


@pytest.mark.slow
def test_fewer_than_the_least_start_again_a_bounded_number_of_times(tmp_path):
    code, counts, said = run(tmp_path, DIES.format(1), "--max_restarts=2", workers="2..2")
    assert (code, counts) == (137, [2, 2, 2])
    few = "worker 1 died of SIGKILL: 1 remain, at least 2 are needed: restart 1 of 2 in 0.1 s"
    assert few in said


@pytest.mark.slow
def test_a_bug_of_all_workers_ends_the_job(tmp_path):
    """Also after they have trained."""
    code, counts, _ = run(tmp_path, "tell(b't'); sys.exit(7)", "--max_restarts=1")
    assert (code, counts) == (7, [4, 4])


@pytest.mark.slow
def test_a_full_disk_is_not_tried_again_without_end(tmp_path):
    """And nobody is away for it."""
    does = "tell(b't'); sys.exit(4) if rank == 0 else survive()"
    code, counts, said = run(tmp_path, does, "--max_restarts=1")
    assert (code, counts) == (4, [4, 4])
    assert "restart 1 of 1 in 0.1 s" in said and "without" not in said


@pytest.mark.slow
def test_workers_that_lost_each_other_are_all_there(tmp_path):
    """As after a cut of the network: none is blamed. It costs no restart if they have trained."""
    code, counts, said = run(tmp_path, "if attempt == 0: tell(b't'); survive()", "--max_restarts=0")
    assert (code, counts) == (0, [4, 4])
    assert "none is lost: goes on with 4 workers" in said
    (tmp_path / "attempts").unlink()
    assert run(tmp_path, "survive()", "--max_restarts=0")[:2] == (5, [4])


@pytest.mark.slow
@pytest.mark.parametrize("final", [2, 3, 42])
def test_final_codes_end_it(tmp_path, final):
    code, counts, _ = run(tmp_path, f"sys.exit({final}) if rank == 1 else survive()")
    assert (code, counts) == (final, [4])


@pytest.mark.parametrize("workers", ["0", "0..2", "4..2", "2..", "two", "2...4", "-1"])
def test_a_wrong_number_of_workers_is_one_line(workers):
    command = [sys.executable, "-m", "ctl.launch", f"--workers={workers}", "--", "true"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
    assert "is neither a number from 1 nor LEAST..MOST, as in 2..4" in done.stderr


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--workers=2", "--join_every=5"], "has no effect without --workers=LEAST..MOST"),
        (["--workers=1..2", "--join_every=0"], "--join_every=0"),  # would stop it at each step
    ],
)
def test_returns_that_cannot_be_are_refused(flags, says):
    command = [sys.executable, "-m", "ctl.launch", *flags, "--", "true"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and says in done.stderr


def test_parameter_servers_have_a_fixed_number_of_workers():
    with pytest.raises(UsageError, match="give --workers=N, not LEAST..MOST"):
        launch(["true"], workers=(1, 2), ps=1)
