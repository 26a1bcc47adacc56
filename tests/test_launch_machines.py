"""ctl.launch --rendezvous."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from launchers import Launcher, fake_worker, launchers, until

from ctl import launch
from ctl.distributed.cluster import board as boards
from ctl.distributed.cluster import machines as machines_module
from ctl.distributed.cluster.board import (
    AWAY,
    LEFT,
    RUNS,
    WAITS,
    DirectoryBoard,
    Machine,
    Plan,
    ServedBoard,
)
from ctl.distributed.cluster.machines import Machines, View, next_plan, verdict
from ctl.distributed.cluster.secret import sign
from ctl.errors import PeerError


def command(directory: Path, rendezvous: str, *options: str) -> list[str]:
    launch = [sys.executable, "-m", "ctl.launch", "--workers=2..3", "--grace=5", "--last_call=2"]
    where = [f"--rendezvous={rendezvous}", "--address=127.0.0.1"]
    return [*launch, *where, *options, "--", *fake_worker(directory)]


def end(directory: Path, left: list[Launcher]) -> None:
    (directory / "end").touch()
    assert [one.code() for one in left] == [0] * len(left)


def at_a_port() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{free.getsockname()[1]}"


@pytest.mark.slow
def test_a_machine_that_is_lost_is_done_without_and_one_that_comes_joins(tmp_path):
    """The first, since the board is a directory."""
    board = f"{tmp_path}/board"
    with launchers([command(tmp_path, board, "--join_every=1")] * 3) as three:
        gone = three.pop(0)
        gone.process.kill()
        until(lambda: all(one.sizes() == [3, 2] for one in three))
        assert [one.attempts()[1][0] for one in three] == [0, 1]  # in the order of before
        came = Launcher(command(tmp_path, board))
        three.append(came)
        last = [(0, 3), (1, 3), (2, 3)]
        until(lambda: [seen[:2] for one in three for seen in one.attempts()[-1:]] == last)
        assert "can join: the workers are asked to save and end" in three[0].said
        end(tmp_path, three)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "says"), [(signal.SIGKILL, "died of SIGKILL"), (signal.SIGSTOP, "is frozen")]
)
def test_a_worker_that_is_lost_leaves_its_machine_away_for_a_while(tmp_path, how, says):
    """The launcher of one that is frozen notices it."""
    options = "--join_every=3", "--grace=60"
    with launchers([command(tmp_path, at_a_port(), *options)] * 3) as three:
        if how == signal.SIGSTOP:
            time.sleep(3.0)  # so the launcher knows that it answers
        os.kill(three[1].attempts()[0][2], how)
        until(lambda: three[1].sizes() == [3, 3])
        until(lambda: three[0].sizes() == three[2].sizes() == [3, 2, 3])
        assert f"worker 1 {says}: this machine is away for 3 s" in three[1].said
        killed = "worker 1 is frozen: killed" in three[1].said
        assert killed == (how == signal.SIGSTOP)
        end(tmp_path, three)


@pytest.mark.slow
def test_a_machine_that_is_stopped_leaves_and_the_others_go_on(tmp_path):
    with launchers([command(tmp_path, f"{tmp_path}/board")] * 3) as three:
        three[2].process.send_signal(signal.SIGTERM)
        assert three[2].code() == 42
        until(lambda: three[0].sizes() == three[1].sizes() == [3, 2])
        # Whoever stops a worker, not its launcher, stops the job.
        os.kill(three[1].attempts()[-1][2], signal.SIGTERM)
        assert [one.code() for one in three[:2]] == [42, 42]


@pytest.mark.slow
def test_a_machine_that_is_lost_while_its_worker_starts(tmp_path, monkeypatch):
    """The others wait for it in vain, and are not blamed. It says that it is there until there is a
    plan with it."""
    monkeypatch.setenv("CTL_JOB_SECRET", "of this test")
    board = DirectoryBoard(tmp_path / "board")
    two = [Launcher(command(tmp_path, f"{tmp_path}/board")) for _ in range(2)]
    try:
        ghost, plan = Machine("z-ghost", "127.0.0.1:1"), Plan()
        for _ in range(200):
            if "z-ghost" in plan.members:
                break
            ghost = dataclasses.replace(ghost, beat=ghost.beat + 1)
            plan = board.exchange(ghost)[1]
            time.sleep(0.3)
        until(lambda: all(one.sizes() == [2] for one in two))
        says = "z-ghost is lost before the first call"
        assert any(says in one.said for one in two)
        # The second may see first that the first has ended.
        assert all(says in one.said or "has lost a worker" in one.said for one in two)
        assert not any("is away" in one.said for one in two)
        end(tmp_path, two)
    finally:
        for one in two:
            one.process.kill()
            one.process.wait()


@pytest.mark.slow
def test_too_few_wait_for_others_and_give_up(tmp_path):
    with launchers([command(tmp_path, f"{tmp_path}/board", "--join_timeout=3")] * 2) as two:
        two[0].process.kill()
        assert two[1].code() == 5
        assert re.search(r"1 of at least 2 machines came: \S+; start the launchers", two[1].said)


@pytest.mark.slow
def test_a_board_that_another_job_has_used(tmp_path):
    """Its plans and machines are not taken for those of this job."""
    board = f"{tmp_path}/board"
    with launchers([command(tmp_path, board)] * 2) as two:
        end(tmp_path, two)
    (tmp_path / "end").unlink()
    with launchers([command(tmp_path, board)] * 3) as three:
        end(tmp_path, three)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (
            ["--rendezvous=host"],
            "--rendezvous: 'host' is not HOST:PORT; or give a directory, with a /",
        ),
        (["--rendezvous="], "--rendezvous: '' is not HOST:PORT"),
        (["--rendezvous=localhost:99999"], "--rendezvous: 'localhost:99999' is not HOST:PORT"),
        (["--rendezvous=./r", "--address=fd00::1"], "--address: 'fd00::1' is not HOST:PORT"),
        (["--rendezvous=s3://bucket/run"], "--rendezvous=s3://bucket/run is a URL: give a dir"),
        (
            ["--rendezvous=[::1]:2222", "--address=localhost:2222"],
            "--rendezvous and --address: an address occurs twice: [::1]:2222 and localhost:2222",
        ),
        (["--rendezvous=no.such.invalid:2222"], "no.such.invalid is not found"),
        (["--rendezvous=/proc/no"], "cannot make /proc/no"),
        (["--address=host0"], "--address has no effect without --rendezvous"),
        (["--workers=2", "--rendezvous=./r"], "--rendezvous needs --workers=LEAST..MOST"),
    ],
)
def test_what_cannot_work_is_one_line(options, says, tmp_path):
    command = [sys.executable, "-m", "ctl.launch", "--workers=1..2", *options, "--", "true"]
    environ = {**os.environ, "CTL_JOB_SECRET": "x", "PYTHONPATH": os.getcwd()}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60, env=environ, cwd=tmp_path
    )
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1), done.stderr
    assert says in done.stderr


def test_a_rendezvous_needs_a_secret(tmp_path):
    command = [sys.executable, "-m", "ctl.launch", "--workers=1..2", f"--rendezvous={tmp_path}"]
    environ = {name: value for name, value in os.environ.items() if name != "CTL_JOB_SECRET"}
    done = subprocess.run(
        [*command, "--", "true"], capture_output=True, text=True, timeout=60, env=environ
    )
    assert done.returncode == 2 and "--rendezvous needs CTL_JOB_SECRET" in done.stderr


def view(*machines: Machine, plan: Plan, lost: str = "", silent: float = math.inf) -> View:
    there = frozenset(m.name for m in machines if m.state != LEFT and m.name not in lost.split())
    return View(plan, {machine.name: machine for machine in machines}, there, silent)


def machine(name: str, state: str = WAITS, code: int = 5, plan: int = 1, **more) -> Machine:
    return Machine(name, f"{name}:1", state, plan, code, **more)


PLAN = Plan(1, ("b", "a"), ("b:1", "a:1"))


def planned(seen: View, **more):
    bounds = {"waited": 0.0, "last_call": 5.0, "lasted": False, **more}
    plan = next_plan(seen, 2, 3, **bounds)
    return plan and (plan.members, plan.failures)


def test_plans():
    """The rules, one by one."""
    a, b, c = (machine(name, trained=True) for name in "abc")
    new = dataclasses.replace(c, plan=0, code=-1)
    assert planned(view(a, b, c, plan=Plan())) == (("a", "b", "c"), 0)
    first = view(a, b, plan=Plan())
    assert planned(first) is None and planned(first, waited=5.0) == (("a", "b"), 0)
    # All are there and have lost each other; nobody has trained, so it counts.
    assert planned(view(a, b, plan=PLAN)) == (("b", "a"), 0)
    fresh = [dataclasses.replace(one, trained=False) for one in (a, b)]
    assert planned(view(*fresh, plan=PLAN)) == (("b", "a"), 1)
    tried = dataclasses.replace(PLAN, failures=2)
    assert planned(view(*fresh, plan=tried)) == (("b", "a"), 3)
    assert planned(view(*fresh, plan=tried), lasted=True) == (("b", "a"), 1)
    # One is lost: a newcomer takes its place, or those that are away are tried again.
    assert planned(view(a, b, new, plan=PLAN, lost="b")) == (("a", "c"), 0)
    assert planned(view(a, b, plan=PLAN, lost="b")) is None
    away = dataclasses.replace(b, state=AWAY, code=1)
    assert planned(view(a, away, plan=PLAN)) == (("b", "a"), 1)
    assert planned(view(a, away, new, plan=PLAN)) == (("a", "c"), 0)


def test_others_do_not_begin_beside_a_job_that_may_train():
    """The board has lost all its members for a while, or was started anew."""
    a, b = (machine(name, RUNS, code=-1) for name in "ab")
    spares = [machine(name, plan=0, code=-1) for name in "cd"]
    for silent, plan in ((30.0, None), (61.0, (("c", "d"), 0))):
        seen = view(a, b, *spares, plan=PLAN, lost="a b", silent=silent)
        assert planned(seen, waited=1000.0) == plan
    ended = [dataclasses.replace(one, state=WAITS, code=5) for one in (a, b)]
    seen = view(*ended, *spares, plan=PLAN, lost="a b", silent=30.0)
    assert planned(seen, waited=1000.0) == (("c", "d"), 0)
    anew = view(a, *spares, plan=Plan())
    assert planned(anew, waited=1000.0) is None and anew.strangers() == ["a"]


def test_verdicts():
    a, b = machine("a"), machine("b")
    assert verdict(view(a, b, plan=PLAN)) is None
    runs = dataclasses.replace(b, state=RUNS, code=-1)
    for code, wanted in ((2, 2), (3, 3), (0, None), (42, None)):
        assert verdict(view(dataclasses.replace(a, code=code), runs, plan=PLAN)) == wanted
    # The chief, "b", writes.
    assert verdict(view(a, dataclasses.replace(b, code=0), plan=PLAN)) == 0
    assert verdict(view(dataclasses.replace(a, code=0), b, plan=PLAN)) is None
    stopped = [dataclasses.replace(one, code=42) for one in (a, b)]
    assert verdict(view(*stopped, plan=PLAN)) == 42
    left = dataclasses.replace(stopped[0], state=LEFT)
    joins = dataclasses.replace(stopped[1], joins=True)
    assert verdict(view(left, stopped[1], plan=PLAN)) is None
    assert verdict(view(stopped[0], joins, plan=PLAN)) is None


def test_strangers_change_nothing(monkeypatch):
    monkeypatch.setenv("CTL_JOB_SECRET", "ours")
    place = at_a_port()
    served = ServedBoard(place)
    try:
        mine = machine("a", code=-1)
        assert served.exchange(mine) == ({"a": mine}, Plan())
        plan = Plan(1, ("a",), ("a:1",))
        assert served.exchange(mine, plan)[1] == plan
        other = Plan(1, ("b",), ("b:1",))
        assert served.exchange(mine, other)[1] == plan  # the first of a number counts
        monkeypatch.setenv("CTL_JOB_SECRET", "theirs")
        forged = sign(json.dumps([json.dumps(dataclasses.asdict(machine("b"))), ""])) + b"\n"
        monkeypatch.setenv("CTL_JOB_SECRET", "ours")
        host, _, port = place.partition(":")
        for line in (b"\n", forged, b"\xff\n", sign("[1]") + b"\n", b"0" * 32 + b" [1]\n"):
            with socket.create_connection((host, int(port)), 5) as stranger:
                stranger.sendall(line)
                assert stranger.recv(100) == b""
        odd = dataclasses.replace(mine, name="b", address="no address")
        assert served.exchange(odd) == ({"a": mine}, plan)
    finally:
        served.close()


def test_a_late_record_and_a_thousand_machines(monkeypatch):
    """The board keeps what a launcher has said last, and forgets those that it heard of longest
    ago, not those that come."""
    monkeypatch.setenv("CTL_JOB_SECRET", "ours")
    monkeypatch.setattr(boards, "_MOST_MACHINES", 2)
    served = ServedBoard(at_a_port())
    try:
        new = machine("a", code=-1, beat=5)
        served.exchange(new)
        late = dataclasses.replace(new, state=RUNS, beat=4)
        assert served.exchange(late)[0] == {"a": new}
        served.exchange(machine("b"))
        served.exchange(dataclasses.replace(new, beat=6))
        assert {*served.exchange(machine("c"))[0]} == {"a", "c"}
    finally:
        served.close()


def test_the_first_plan_of_a_number_in_a_directory(tmp_path, monkeypatch):
    """Also if launchers have the same process id, as in containers, and write at the same time."""
    one, other = DirectoryBoard(tmp_path), DirectoryBoard(tmp_path)
    plans = [Plan(1, (name,), (f"{name}:1",)) for name in "ab"]
    link = os.link

    def link_and_meet(*names):
        link(*names)
        monkeypatch.setattr(os, "link", link)
        other.exchange(machine("b"), plans[1])

    monkeypatch.setattr(os, "link", link_and_meet)
    assert one.exchange(machine("a"), plans[0])[1] == plans[0]
    assert other.exchange(machine("b"))[1] == plans[0]


def test_plans_in_a_directory_that_cannot_be_read(tmp_path, monkeypatch):
    """They keep no job from the next plan: neither those of another secret, nor one that was cut
    short. What is old goes."""
    monkeypatch.setenv("CTL_JOB_SECRET", "of yesterday")
    DirectoryBoard(tmp_path).exchange(machine("a"), Plan(1, ("a",), ("a:1",)))
    monkeypatch.setenv("CTL_JOB_SECRET", "of today")
    board = DirectoryBoard(tmp_path)
    assert board.exchange(machine("b")) == ({"b": machine("b")}, Plan())
    for number in (1, 2):
        plan = Plan(number, ("b",), ("b:1",))
        assert board.exchange(machine("b"), plan)[1] == plan
    (folder,) = {file.parent for file in tmp_path.rglob("plan-2")}
    (folder / "plan-3").touch()
    assert board.exchange(machine("b"))[1] == Plan(3)
    plan = Plan(4, ("b",), ("b:1",))
    assert board.exchange(machine("b"), plan)[1] == plan
    for file in folder.iterdir():
        os.utime(file, (0, 0))
    board.exchange(machine("b"))
    assert sorted(file.name for file in folder.iterdir()) == ["machine-b", "plan-4"]


def test_nobody_is_lost_with_the_board(monkeypatch):
    """While it does not answer, or this launcher is frozen, no record can change. Else a spare
    would take over from those that train."""
    now = [0.0]
    monkeypatch.setattr(machines_module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    seen = Machines(SimpleNamespace(), machine("spare"))

    def look(beat: int, after: float) -> frozenset[str]:
        now[0] += after
        seen._see({"a": machine("a", RUNS, beat=beat)}, Plan(1, ("a",), ("a:1",)))
        return seen.view.there

    assert look(0, 1) == frozenset()  # perhaps of yesterday
    assert look(1, 1) == {"a"}
    assert look(1, 60) == {"a"}
    assert [bool(look(1, 1)) for _ in range(10)] == [True] * 7 + [False] * 3


def test_a_machine_that_comes_while_this_one_is_frozen_is_there(monkeypatch):
    """Else this one begins beside a job that has begun meanwhile."""
    now, seen = [0.0], Machines(SimpleNamespace(), machine("a"))
    monkeypatch.setattr(machines_module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    old = machine("a"), machine("b")
    seen._see({one.name: one for one in old}, PLAN)
    now[0] = 100.0
    new = [machine(name, RUNS, plan=2) for name in "cd"]
    seen._see({one.name: one for one in (*old, *new)}, Plan(2, ("c", "d"), ("c:1", "d:1")))
    assert not seen.view.is_over() and seen.view.silent == 0.0


def test_a_machine_of_a_job_that_has_lost_a_worker_is_lost_sooner(monkeypatch):
    """Until its launcher is heard of again."""
    now, seen = [0.0], Machines(SimpleNamespace(), machine("a", RUNS))
    monkeypatch.setattr(machines_module, "time", SimpleNamespace(monotonic=lambda: now[0]))

    def look(beat: int, broken: bool = True) -> bool:
        now[0] += 1
        records = {
            "a": machine("a", RUNS, broken=broken, beat=now[0]),
            "b": machine("b", beat=beat),
        }
        seen._see(records, Plan(1, ("a", "b"), ("a:1", "b:1")))
        return "b" in seen.view.there

    assert [look(beat) for beat in (0, 1)] == [False, True]
    assert [look(1, broken=False) for _ in range(8)] == [True] * 8
    assert not look(1)
    assert [look(2) for _ in range(5)] == [True] * 4 + [False]


@pytest.fixture
def waiting(tmp_path, monkeypatch):
    """Gives a launcher, with its record, that waits for a plan beyond 1."""
    monkeypatch.setenv("CTL_JOB_SECRET", "ours")
    monkeypatch.setattr(launch, "_QUIET_SECONDS", 0.0)
    monkeypatch.setattr(launch, "SILENT_SECONDS", 0.0)
    DirectoryBoard(tmp_path).exchange(machine("b"), Plan(1, ("b",), ("b:1",)))

    def wait(mine: Machine, received: list[int], board=None) -> launch.board.Plan | int:
        bounds = launch._Bounds(2, 3, 0, 0.0, 0.0, 0.0, 0.0, join_timeout=0.5)
        with Machines(board or DirectoryBoard(tmp_path), mine) as machines:
            return launch._Waiting(machines, bounds, "PLACE").for_plan(received)

    return wait


def test_a_rendezvous_that_was_started_anew(waiting):
    """Nobody starts a training again that is done."""
    with pytest.raises(PeerError, match="PLACE was started anew"):
        waiting(machine("a", plan=2), [])
    assert waiting(machine("a", plan=2, code=0), []) == 0


def test_the_code_after_a_signal(waiting, capsys):
    """Of a worker that was stopped it is the worker's. While a launcher waits, the worker had lost
    another, and was saved."""
    received: list[int] = []
    threading.Timer(0.2, received.append, [signal.SIGTERM]).start()
    assert waiting(machine("a", plan=0), received) == 42
    assert "SIGTERM: stopped while it waited" in capsys.readouterr().err
    for code, ends_with in ((5, 5), (0, 0), (42, 42), (-1, 42)):
        assert waiting(machine("a", code=code), [signal.SIGTERM]) == ends_with


def test_says_why_the_board_does_not_answer(waiting, tmp_path, capsys):
    """And says that it leaves, so that no plan is made with it."""
    board = DirectoryBoard(tmp_path)

    def exchange(mine, proposed):
        board.exchange(mine)
        raise OSError(111, "Connection refused")

    with pytest.raises(PeerError, match="PLACE has not answered for 0.5 s .* refused"):
        waiting(machine("a", plan=0), [], SimpleNamespace(exchange=exchange, close=board.close))
    assert (
        "no answer from --rendezvous=PLACE for 0 s: Connection refused" in capsys.readouterr().err
    )
    assert board.exchange(machine("b"))[0]["a"].state == LEFT


def test_nothing_is_stopped_for_others_while_the_board_is_silent():
    """There could be no plan with them."""
    job = job_on_machine(trained=True)
    seen = view(machine("c", plan=0, code=-1), plan=PLAN)
    for silence, why in ((11.0, ""), (1.0, "c can join")):
        job._machines = SimpleNamespace(silence=silence, view=seen)
        assert job._who_joins() == why


def job_on_machine(trained: bool, lost: bool = False) -> launch._JobOnMachine:
    job = object.__new__(launch._JobOnMachine)
    job._plan, job._may_join, job.join_at, job._is_over = PLAN, True, 0.0, False
    job._tasks = [launch._Task("worker 0", "", told=b"t" * trained + b"l" * lost)]
    return job


def test_a_worker_that_trains_is_asked_to_save_when_others_have_gone_on():
    """As after the board has lost its machine. One that has lost the others is killed."""
    later = view(plan=dataclasses.replace(PLAN, number=2))
    for trained, lost, saves in ((True, False, True), (True, True, False), (False, False, False)):
        job = job_on_machine(trained, lost)
        job._machines = SimpleNamespace(silence=0.0, view=later)
        assert bool(job._who_joins()) == saves
        job._loss()
        assert job._is_over != saves  # it is killed at once


def test_who_is_asked_to_stop_says_so_first(monkeypatch):
    """The others go on, also if the machine is gone before its worker has saved."""
    done: list[object] = []
    monkeypatch.setattr(os, "killpg", lambda *what: done.append(what))
    job = job_on_machine(trained=True)
    job._tasks[0].process = SimpleNamespace(pid=7, poll=lambda: None)
    job._machines = SimpleNamespace(say=lambda **said: done.append(said))
    job._signal(signal.SIGTERM)
    assert done == [{"joins": True}, (7, signal.SIGTERM)]


def test_a_directory_that_hangs_does_not_keep_a_launcher(monkeypatch):
    monkeypatch.setattr(machines_module, "_END_SECONDS", 0.1)
    hangs = threading.Event()
    board = SimpleNamespace(exchange=lambda *_: hangs.wait(60.0), close=lambda: None)
    began = time.monotonic()
    with Machines(board, machine("a")):
        pass
    assert time.monotonic() - began < 30.0
    hangs.set()
