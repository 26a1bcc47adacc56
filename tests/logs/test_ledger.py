"""Accounts of time add up, are read whatever became of their file, and tell what was lost."""

from __future__ import annotations

import json
import os
import threading
import time

import pytest

from ctl.base import ledger as accounts
from ctl.base.ledger import LEDGER, Ledger, process_age
from ctl.errors import Preempted, UsageError
from ctl.logs.ledger import LedgerFile, path_of, read, spans, spent


@pytest.fixture
def clock(monkeypatch):
    """Moves the clock of the accounts by hand: ``clock(seconds)``."""
    now = [0.0]
    monkeypatch.setattr(accounts.time, "perf_counter", lambda: now[0])

    def move(seconds: float) -> None:
        now[0] += seconds

    return move


def test_a_second_is_on_one_account(clock):
    ledger = Ledger()
    clock(1)
    with ledger.spend("evaluation"):
        clock(2)
        with ledger.spend("saving"):
            clock(4)
        clock(8)
    clock(16)
    assert ledger.read().seconds == {"start": 17, "evaluation": 10, "saving": 4}
    ledger.move("evaluation", "input", 3)
    assert ledger.read().seconds == {"start": 17, "evaluation": 7, "saving": 4, "input": 3}


def test_an_error_ends_what_was_spent(clock):
    ledger = Ledger()
    with pytest.raises(ValueError), ledger.spend("steps"):
        clock(1)
        raise ValueError
    clock(2)
    assert ledger.read().seconds == {"start": 2, "steps": 1}


def test_once_a_step_was_run_the_start_is_over(clock):
    ledger = Ledger()
    ledger.reach(5)
    clock(1)
    with ledger.spend("compile"):
        clock(2)
    ledger.reach(6)
    clock(4)
    now = ledger.read()
    assert now.seconds == {"start": 1, "compile": 2, "other": 4}
    assert (now.first, now.step) == (5, 6)
    ledger.reach(2)  # restored
    assert (ledger.read().first, ledger.read().step) == (2, 2)


def test_other_threads_spend_nothing(clock):
    """The thread of the watchdog may wait for a checkpoint while the main thread hangs."""
    ledger = Ledger()

    def spend():
        with ledger.spend("saving"):
            clock(1)

    thread = threading.Thread(target=spend)
    thread.start()
    thread.join()
    assert ledger.read().seconds == {"start": 1}


def test_a_process_knows_its_age():
    assert 0 <= process_age() < 86400


# What is read --------------------------------------------------------------------------------


def line(began: float, time: float, first=None, step=None, end: str = "", **seconds: float) -> str:
    record = {"schema": 1, "began": began, "time": time, "workers": 1, "first": first, "step": step}
    return json.dumps(record | {"seconds": seconds} | ({"end": end} if end else {}))


def write(directory, *lines: str, worker: int = 0) -> None:
    path_of(directory, worker).write_text("".join(f"{text}\n" for text in lines))


def shares(directory) -> dict[str, float]:
    seconds = spent(read(directory)[0]).seconds
    return {name: value for name, value in seconds.items() if abs(value) > 1e-9}


def test_steps_that_are_done_again_are_lost(tmp_path):
    write(
        tmp_path,
        line(100, 104, start=4),
        line(100, 110, 0, 10, start=4, steps=5, input=1),
        line(100, 120, 0, 20, start=4, steps=13, input=3),  # 1 s a step, a fifth of it input
        line(100, 122, 0, 20, start=4, steps=15, input=3),  # in the next step
        line(130, 132, 16, 16, start=2),
        line(130, 140, 16, 30, "done", start=2, steps=8),
    )
    # Of steps 10 to 20, the last 4 of 10; and the 2 s after them.
    lost = 0.4 * (8 + 2) + 2
    expected = {"start": 6, "steps": 13 + 8 - 3.2, "input": 3 - 0.8, "lost": lost, "down": 8}
    assert shares(tmp_path) == pytest.approx(expected)
    total = spent(read(tmp_path)[0])
    assert total.wall == 40 and total.goodput == pytest.approx(17.8 / 40)


def test_a_run_that_begins_anew_has_lost_all(tmp_path):
    write(
        tmp_path,
        line(100, 110, 0, 30, steps=10),
        line(110, 120, 0, 20, steps=10),
        line(120, 130, 20, 40, "done", steps=10),
    )
    assert shares(tmp_path) == pytest.approx({"steps": 20, "lost": 10})


def test_steps_before_a_restore_in_one_process_are_lost(tmp_path):
    write(
        tmp_path,
        line(100, 110, 0, 30, steps=10),
        line(100, 120, 20, 40, "done", steps=20),
    )
    assert shares(tmp_path)["lost"] == pytest.approx(10 / 3)


def test_a_pause_after_the_end_of_a_run_is_none_of_it(tmp_path):
    write(
        tmp_path,
        line(100, 110, 0, 10, "done", steps=10),
        line(900, 910, 10, 20, "done", steps=10),
    )
    assert shares(tmp_path) == {"steps": 20} and spent(read(tmp_path)[0]).goodput == 1


def test_who_reads_why_a_start_was_refused_is_not_waited_for(tmp_path):
    write(
        tmp_path,
        line(100, 105, None, None, "UsageError", start=5),
        line(200, 210, 0, 10, steps=10),  # killed
        line(220, 225, 10, 10, "UsageError", start=5),
        line(400, 410, 10, 20, steps=10),
        line(420, 430, 20, 25, "UsageError", steps=10),  # by a step: it did something
        line(440, 450, 25, 30, "done", steps=10),
    )
    assert shares(tmp_path) == {"start": 10, "steps": 40, "down": 10 + 10 + 10}
    assert spent(read(tmp_path)[0]).wall == 80


def test_a_process_that_was_frozen_was_down(tmp_path):
    write(tmp_path, line(100, 110, 0, 10, steps=10), line(100, 150, 0, 10, steps=11))
    assert shares(tmp_path) == {"steps": 11, "down": 39}


def test_a_second_command_on_a_run_that_goes_on_is_left_out(tmp_path):
    write(
        tmp_path,
        line(100, 110, 0, 10, steps=10),
        line(105, 107, None, None, "CheckpointError", start=2),
        line(100, 120, 0, 20, "done", steps=20),
    )
    assert shares(tmp_path) == {"steps": 20}


def test_what_an_inspection_has_measured_is_told_apart(tmp_path):
    one = json.loads(line(100, 110, 0, 10, steps=10)) | {"inspected": [4.0, 1.0]}
    write(tmp_path, json.dumps(one), line(110, 120, 10, 20, "done", steps=10))
    assert shares(tmp_path) == {"steps": 17.5, "exposed": 2.5}
    total = spent(read(tmp_path)[0])
    assert total.names()["steps"] == "compute" and total.goodput == 1


def test_damaged_lines_are_left_out(tmp_path):
    good = line(100, 110, 0, 10, steps=10)
    bad = ["", "{", "[1]", "7", good[:-9], "[" * 5000, good.replace("110", "1e999")]
    bad += [good.replace("10}", '"x"}'), good.replace('"step": 10', '"step": null')]
    bad += [good.replace('"workers": 1', '"workers": -1'), good.replace('"began": 100', '"x": 1')]
    bad += [good[:-1] + ', "inspected": [1]}', good.replace('"steps": 10', '"steps": NaN')]
    write(tmp_path, *bad, good, *bad)
    (start,) = read(tmp_path)[0]
    assert len(start.records) == 1
    with pytest.raises(UsageError, match="time-worker-0.jsonl"):
        read(tmp_path / "nothing")


# What is written -----------------------------------------------------------------------------


def test_each_start_appends_its_accounts(tmp_path):
    for error in (Preempted(""), ValueError(), None):
        try:
            with LedgerFile(tmp_path) as file, LEDGER.spend("saving"):
                time.sleep(0.05)
                if error:
                    raise error
        except (Preempted, ValueError):
            pass
        with open(file.path, "a") as torn:
            torn.write('{"schema": 1, "beg')  # as a kill may leave it
    starts = read(tmp_path)[0]
    assert [start.end for start in starts] == ["stopped", "ValueError", "done"]
    for start in starts:
        assert start.last.seconds["saving"] >= 0.05
        assert sum(start.last.seconds.values()) == pytest.approx(
            start.ended - start.began, abs=0.001
        )


def test_the_time_before_the_file_is_start(tmp_path):
    with LedgerFile(tmp_path, age=100.0):
        pass
    (start,) = read(tmp_path)[0]
    assert 100 <= start.last.seconds["start"] == pytest.approx(start.ended - start.began, rel=0.01)


def test_a_process_that_is_killed_has_told_nearly_all(tmp_path):
    with LedgerFile(tmp_path) as file, LEDGER.spend("evaluation"):
        lines = len(file.path.read_text().splitlines())
        while len(file.path.read_text().splitlines()) < lines + 3:
            time.sleep(0.01)
        assert read(tmp_path)[0][0].last.seconds["evaluation"] > 0


def test_goodput_while_it_runs_is_that_of_the_file(tmp_path):
    now = time.time()
    write(
        tmp_path,
        line(now - 100, now - 70, 0, 30, steps=30),
        line(now - 60, now - 30, 15, 45, "stopped", steps=30),
    )
    with LedgerFile(tmp_path) as file:
        LEDGER.reach(15)
        live = file.goodput({})["goodput"]
    assert live == pytest.approx(15 / 100, rel=0.1)
    assert spent(read(tmp_path)[0]).goodput == pytest.approx(live, rel=0.1)
    assert spent(read(tmp_path)[0]).pieces()[0].startswith("15 % of 1:")


def test_a_run_shorter_than_a_minute_has_no_share(tmp_path):
    """Most of it is the start of TensorFlow, which is no fault of the run."""
    write(tmp_path, line(time.time() - 30, time.time(), 0, 30, steps=1))
    assert spent(read(tmp_path)[0]).pieces()[0] == "30.0 s in all"


@pytest.mark.parametrize("kind", ["pipe", "link", "directory"])
def test_a_file_that_cannot_be_written_is_a_warning(tmp_path, kind, warnings_of):
    path = path_of(tmp_path, 0)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "link":
        path.symlink_to(tmp_path / "elsewhere")
    else:
        path.mkdir()
    with LedgerFile(tmp_path) as file:
        assert file.pieces() == [] and 0 <= file.goodput({})["goodput"] <= 1
    (warning,) = warnings_of()
    assert str(path) in warning and not (tmp_path / "elsewhere").exists()


def test_spans_follow_each_other(tmp_path):
    write(tmp_path, line(100, 110, 0, 9, steps=9), line(120, 130, 9, 20, "done", steps=9))
    found = list(spans(read(tmp_path)[0]))
    assert [(span.begin, span.end) for span in found] == [(100, 110), (110, 120), (120, 130)]
    for span in found:
        assert sum(span.seconds.values()) == pytest.approx(span.end - span.begin)
