"""ctl.distributed.watch.hang: verdicts on made-up records, and on files that nobody should
trust."""

from __future__ import annotations

import dataclasses
import json
import os
import re

import pytest

from ctl.distributed.watch import hang
from ctl.distributed.watch.beats import Peer
from ctl.distributed.watch.record import Record, path_of, phase_of, read, write
from ctl.errors import UsageError
from ctl.inspect.commands import hang as hang_command


def peer(step=411, doing="training", phase="pack0", waits=True, since=97.0, **changes) -> Peer:
    return Peer(step, doing, phase, waits, since, **{"gave_up": "", "silent": 0.5} | changes)


def record(worker: int, workers: int = 4, **changes) -> Record:
    """Waits in pack 0 of step 412 since 97 s."""
    values = {
        "worker": worker,
        "workers": workers,
        "time": 1000.0 + worker / 10,
        "why": "timed out",
        "step": 411,
        "doing": "training",
        "phase": "pack0",
        "waits": True,
        "since": 97.0,
        "silent_after": 4.0,
        "fired": {"input": 97.2, "forward": 97.1},
        "not_fired": ("done0", "apply"),
        "peers": {},
        "gone": {},
        "packs": (1024,),
        "stacks": {"MainThread": ("train.py:1 main", "loop.py:2 _call")},
        "versions": {"python": "3"},
    }
    return Record(**values | changes)


WAITING = "step 412: workers 0, 2, 3 have waited 97 s in pack0 of training for "


def others(**changes) -> list[Record]:
    return [record(worker, **changes) for worker in (0, 2, 3)]


def test_a_worker_that_is_late_by_its_own_record():
    late = record(1, phase="input", fired={})
    assert hang.summary([late, *others()]) == (
        WAITING + "worker 1 (in input of training after step 411 for 97 s)"
    )


def test_a_worker_that_does_something_else():
    busy = record(1, doing="the action Save", phase="", waits=False, step=410)
    line = "worker 1 (in the action Save after step 410 for 97 s, loop.py:2 _call)"
    assert hang.summary([*others(), busy]) == WAITING + line


def test_a_frozen_worker_is_known_by_the_beats_of_it():
    frozen = {1: peer(phase="input", since=0.2, silent=96.0)}
    line = (
        "worker 1 (frozen or dead: silent for 96 s, last seen in input of training after step 411)"
    )
    assert hang.summary(others(peers=frozen)) == WAITING + line


def test_who_heard_it_last_is_believed():
    records = [
        record(0, peers={1: peer(step=400, silent=80.0)}),
        record(2, peers={1: peer(step=405, silent=60.0)}),
        record(3),
    ]
    assert "silent for 60 s, last seen in pack0 of training after step 405" in hang.summary(records)


def test_a_frozen_worker_that_went_on_afterwards():
    """Its own record is of later, and looks harmless."""
    thawed = record(1, time=1030.0, since=0.1, phase="", why="broke off")
    records = others(peers={1: peer(silent=50.0, since=0.1)})
    assert "worker 1 (frozen or dead: silent for 50 s" in hang.summary([*records, thawed])


def test_a_worker_that_has_given_up_before_is_not_blamed():
    """Silence after its own record is of its exit; the last record is by who stayed longest."""
    gone = record(0, time=990.0)
    records = [record(2, time=1000.0, peers={0: peer(silent=9.9, gave_up="broke off")}), record(3)]
    late = record(1, phase="input")
    assert [p.worker for p in hang.suspects([gone, *records, late])] == [1]
    unheard = [record(2, time=1000.0, peers={0: peer(silent=9.5)}), record(3)]
    assert [p.worker for p in hang.suspects([gone, *unheard, late])] == [1]


def test_a_worker_that_hangs_until_its_own_limit_is_to_blame():
    """It was in the collective's section, so it times out with those that wait for it."""
    hung = peer(step=5, phase="forward", since=10.0, gave_up="timed out")
    waits = record(
        0, step=5, phase="pack0", since=10.0, why="timed out", workers=2, peers={1: hung}
    )
    assert [p.worker for p in hang.suspects([waits])] == [1]
    assert "worker 1 (in forward of training after step 5" in hang.summary([waits])


def test_a_worker_that_died():
    records = others(why="broke off", since=0.1, phase="", gone={1: "h:1: Connection refused"})
    verdict = hang.summary(records)
    assert verdict.endswith(" for worker 1 (gone: h:1: Connection refused)")
    known = [dataclasses.replace(r, peers={1: peer(step=410)}) for r in records]
    assert "refused, last seen in pack0 of training after step 410)" in hang.summary(known)


def test_where_peers_are_means_nothing_while_all_move():
    """A connection broke, and a second ago worker 1 was a step behind."""
    records = others(why="broke off", since=0.1, phase="", peers={1: peer(step=410, since=0.1)})
    assert hang.suspects(records) == []


def test_a_worker_that_nobody_knows():
    assert hang.summary(others()) == (
        WAITING + "worker 1 (it left no record, and no worker heard from it)"
    )


def test_who_was_never_heard_is_named_where_others_were():
    """Where nobody was heard, the datagrams may be what is lost."""
    heard = record(0, workers=3, peers={2: peer()})
    assert [p.worker for p in hang.suspects([heard])] == [1]
    assert hang.suspects([record(0, workers=3)]) == []


def test_who_waits_at_the_end_of_the_step_waits_with_the_others():
    """Worker 3 was frozen after it had reduced the loss of a call, whose sum worker 1 had not read
    yet, and which the others had: those are in the next step. Its own step is not counted later."""
    frozen = {3: peer(since=0.1, silent=96.0)}
    at_the_end = record(1, phase="", not_fired=(), peers=frozen)
    records = [record(0, peers=frozen), at_the_end, record(2, peers=frozen)]
    assert hang.summary(records).startswith("step 412: workers 0, 1, 2 have waited 97 s in pack0")
    assert [p.worker for p in hang.suspects(records)] == [3]
    seen = record(0, peers={1: peer(phase=""), 2: peer(), **frozen})
    assert [p.worker for p in hang.suspects([seen])] == [3]


def test_a_ring_that_ended_on_some_workers_only():
    """Worker 1 froze in the action; worker 2 still waits for the last part of the sum before."""
    frozen = peer(step=408, doing="the action Save", phase="", since=0.2, silent=96.0)
    own = [record(worker, step=412, peers={1: frozen, 2: peer()}) for worker in (0, 3)]
    assert [p.worker for p in hang.suspects(own)] == [1]
    behind = [record(worker, step=412, peers={2: peer()}) for worker in (0, 3)]
    assert [p.worker for p in hang.suspects(behind)] == [2]


def test_of_two_workers_the_other_one_is_named_even_if_nobody_heard_it():
    (place,) = hang.suspects([record(0, workers=2, peers={})])
    assert place.worker == 1 and str(place).endswith("no worker heard from it)")
    assert hang.suspects([record(0, workers=3, peers={})]) == []


def test_who_has_given_up_has_waited():
    gone = {3: peer(since=0.1, silent=96.0)}
    first = record(1, step=410, phase="input", why="broke off", peers=gone)
    records = [record(0, peers=gone), first, record(2, peers=gone)]
    assert hang.summary(records).startswith("step 412: workers 0, 1, 2 have waited 97 s in pack0")


def test_who_was_caught_in_an_action_that_waits():
    """An action may have collectives of its own, of which the watchdog does not know."""
    action = {"doing": "the action Sum", "phase": "", "waits": False, "why": "broke off"}
    records = [record(i, 3, gone={1: "refused"}, since=0.2, **action) for i in (0, 2)]
    assert hang.summary(records) == (
        "step 412: workers 0, 2 have waited 0 s in the action Sum for worker 1 (gone: refused)"
    )
    heard = {2: peer(doing="the action Sum", phase="", waits=False)}  # it has not given up yet
    alone = record(0, 3, gone={1: "refused"}, peers=heard, **action)
    assert hang.summary([alone]).startswith("step 412: workers 0, 2 have waited 97 s in the action")
    assert [p.worker for p in hang.suspects([alone])] == [1]


def test_all_in_the_same_place():
    verdict = hang.summary([record(i) for i in range(4)])
    assert verdict == (
        "step 412: workers 0, 1, 2, 3 have waited 97 s in pack0 of training; all are in the same "
        "place: suspect the network between them, or TensorFlow"
    )


def test_two_halves_that_wait_for_each_other():
    """Who is behind is blamed."""
    records = [record(0), record(1, step=410), record(2), record(3, step=410)]
    assert [p.worker for p in hang.suspects(records)] == [1, 3]
    assert hang.summary(records).startswith("step 412: workers 0, 2 have waited")


def test_workers_in_different_parts_of_the_code():
    records = [*others(), record(1, doing="the evaluation", phase="")]
    assert " for worker 1 (in the evaluation after step 411 for 97 s)" in hang.summary(records)


def test_several_suspects_the_surest_first():
    records = [
        record(0, peers={2: peer(silent=90.0), 3: peer(phase="input")}),
        record(1),
    ]
    assert [p.worker for p in hang.suspects(records)] == [2, 3]


def test_one_record_is_enough_to_blame():
    found = hang.suspects([record(0, workers=3, peers={1: peer(phase="input"), 2: peer()})])
    assert [str(place) for place in found] == [
        "worker 1 (in input of training after step 411 for 97 s)"
    ]


def test_before_the_first_step():
    records = [record(i, 2, step=None, doing="a barrier", phase="") for i in range(2)]
    assert hang.summary(records).startswith(
        "before step 1: workers 0, 1 have waited 97 s in a barrier"
    )


def test_nobody_waits():
    records = [record(0, 1, waits=False, doing="the action Log", phase="")]
    assert hang.summary(records).startswith(
        "step 412: no worker waits for others; worker 0 (in the"
    )


@pytest.mark.parametrize("workers", [2, 64, 1000])
@pytest.mark.parametrize("late", [0, 1])
def test_any_number_of_workers(workers, late):
    records = [record(i, workers, peers={late: peer(silent=50)}) for i in range(workers)]
    del records[late]
    assert [p.worker for p in hang.suspects(records)] == [late]


# Marks -------------------------------------------------------------------------------------------

NAMES = ("input", "forward", "backward", "ready0", "done0", "ready1", "done1", "apply")


@pytest.mark.parametrize(
    ("fired", "phase"),
    [
        ([], "input"),
        (["input"], "forward"),
        (["input", "forward"], "backward"),
        (["input", "forward", "ready0"], "backward"),  # a pack on its way does not matter yet
        (["input", "forward", "backward", "ready0"], "pack0"),
        (["input", "backward", "ready0"], "pack0"),  # XLA: no mark within
        (["input", "forward", "backward", "ready0", "done0"], "backward"),
        (["input", "forward", "backward", "ready0", "done0", "ready1"], "pack1"),
        (list(NAMES[:-1]), "apply"),
        (list(NAMES), ""),
    ],
)
def test_the_phase_of_a_step(fired, phase):
    assert phase_of(fired, tuple(name for name in NAMES if name not in fired)) == phase


# Files -------------------------------------------------------------------------------------------


def test_a_record_comes_back(tmp_path):
    whole = record(1, peers={0: peer()}, gone={2: "refused"})
    assert read(write(tmp_path / "inspect", whole)) == whole
    assert [path.name for path in (tmp_path / "inspect").iterdir()] == ["flight-worker-1.json"]


def test_the_report(tmp_path, capsys):
    for one in others(peers={1: peer(silent=50.0)}):
        write(tmp_path / "inspect", one)
    path_of(tmp_path / "inspect", 1).write_text("{")
    write(tmp_path / "inspect", record(1, time=100.0))
    write(tmp_path / "inspect", record(3))
    path_of(tmp_path / "inspect", 7).write_text('{"schema": 9}')
    hang_command.main([str(tmp_path)])
    first, *rest = capsys.readouterr().out.splitlines()
    assert first.startswith(WAITING + "worker 1 (frozen or dead: silent for 50 s")
    assert "flight-worker-1.json is not used: it is 900 s older than the last" in rest
    assert "flight-worker-7.json is not used: it has schema 9; this ctl reads 2" in rest
    assert any("worker 0: in pack0 of training after step 411" in line for line in rest)


def test_the_report_is_dated_and_says_that_the_run_has_gone_on(tmp_path, capsys):
    write(tmp_path / "inspect", record(0, 2))
    hang_command.main([str(tmp_path)])
    lines = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"recorded at 1970-01-01 00:16:40 UTC, [\d]+ days ago", lines[1])
    assert lines[2] == ""
    (tmp_path / "config.json").write_text('{"schema": 1, "flags": {}}')
    log = tmp_path / "metrics.jsonl"
    for step, gone_on in ((400, False), (420, True)):
        log.write_text(f'{{"phase": "train", "step": {step}, "loss": 1.0}}\n')
        os.utime(log, (1060, 1060))
        hang_command.main([str(tmp_path)])
        said = capsys.readouterr().out.splitlines()[2]
        line = "the run has gone on since: its log has step 420 at 1970-01-01 00:17:40 UTC"
        assert said == (line if gone_on else "")
    os.utime(log, (900, 900))  # its last step is of before
    hang_command.main([str(tmp_path)])
    assert "gone on" not in capsys.readouterr().out
    write(tmp_path / "inspect", record(0, 2, time=1e12))
    hang_command.main([str(tmp_path)])
    assert "UTC, 0 s ago" in capsys.readouterr().out


def test_no_records(tmp_path):
    with pytest.raises(UsageError, match="no flight record in .*give the --model_dir"):
        hang_command.main([str(tmp_path)])
    path_of(tmp_path, 0).write_bytes(b"\xff\xfe")
    with pytest.raises(UsageError, match=r"flight-worker-0.json is not used"):
        hang_command.main([str(tmp_path)])
    with pytest.raises(UsageError, match="one directory"):
        hang_command.main([])


BAD = {
    "worker": [4, -1, "0", None, 1.5, True],
    "workers": [0, 10**9, None],
    "time": ["now", None, float("inf"), float("nan")],
    "why": [None, 3, ["x"]],
    "step": [-1, "x", 1.5],
    "waits": [1, None],
    "since": [-1, "x"],
    "fired": [[], {"input": "x"}, None],
    "not_fired": [{}, [1], None],
    "peers": [[], {"9": {}}, {"0": {}}, {"0": 3}, {"x": {}}, {"٣": {}}],
    "gone": [{"0": 3}, 5],
    "packs": [[-1], {}, ["x"]],
    "stacks": [{"MainThread": [1]}, {"MainThread": "x"}, []],
    "versions": [{"python": 3}, None],
}


@pytest.mark.parametrize("field", BAD)
def test_what_is_no_record_is_refused(tmp_path, field):
    path = write(tmp_path, record(0))
    good = json.loads(path.read_text())
    for value in BAD[field]:
        path.write_text(json.dumps(good | {field: value}))
        with pytest.raises(ValueError):
            read(path)
    path.write_text(json.dumps({name: v for name, v in good.items() if name != field}))
    if field != "step":
        with pytest.raises(ValueError):
            read(path)


@pytest.mark.parametrize(
    "text",
    ["", "[]", "null", "[" * 100_000, '{"schema": 1}', "1" * 5 * 2**20],
    ids=lambda text: text[:20],
)
def test_what_is_not_even_an_object_is_refused(tmp_path, text):
    path = tmp_path / "flight-worker-0.json"
    path.write_text(text)
    with pytest.raises(ValueError):
        read(path)


def test_nothing_from_a_file_moves_the_cursor(tmp_path, capsys):
    evil = "\x1b[2Jpwned\nsecond line"
    one = record(
        0, 2, doing=evil, stacks={"MainThread": (evil,)}, why=evil, waits=False, gone={1: evil}
    )
    write(tmp_path, one)
    hang_command.main([str(tmp_path)])
    out = capsys.readouterr().out
    assert "\x1b" not in out and "[2Jpwnedsecond line" in out
    assert not re.search(r"^second", out, re.MULTILINE)
