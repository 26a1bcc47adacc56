"""Each second that a job loses is found where it was put."""

from __future__ import annotations

import json
import math
import signal
import time

import pytest
from paths import SUPPORT
from runs import records
from worker_jobs import assert_codes, run_job

from ctl.logs.ledger import Start, read, spans, spent

PROGRAM = SUPPORT / "ledger_job.py"
PAUSE = 4.0
OFTEN = 0.25  # seconds between two records, unless the machine is busy


def planted(out, name: str) -> list[tuple[float, float]]:
    lines = map(json.loads, (out / "planted.jsonl").read_text().splitlines())
    return [(begin, end) for what, begin, end in lines if what == name]


def assert_found(starts, account: str, begin: float, end: float) -> None:
    """The records that ``begin`` to ``end`` touches have this time on ``account``."""
    touched = [s for s in spans(starts) if s.end > begin and s.begin < end]
    seconds = sum(span.seconds.get(account, 0.0) for span in touched)
    beside = sum(span.end - span.begin for span in touched) - (end - begin)
    assert 0.95 * (end - begin) <= seconds <= 1.05 * (end - begin) + beside, account


def nearly(seconds: float, start: Start):
    """Within 5 %, and what a record of ``start`` came late on a busy machine."""
    moments = [start.began, *(moment for moment, _ in start.records)]
    longest = max(b - a for a, b in zip(moments, moments[1:], strict=False))
    return pytest.approx(seconds, rel=0, abs=0.05 * seconds + max(0.0, longest - OFTEN))


def test_planted_losses_are_found_where_they_were_put(job, tmp_path):
    began = time.time()
    with job(tmp_path, "kill=yes", workers=1, program=PROGRAM) as processes:
        assert_codes(tmp_path, processes, [-signal.SIGKILL])
    time.sleep(PAUSE)
    again = time.time()
    with job(tmp_path, workers=1, program=PROGRAM) as processes:
        assert_codes(tmp_path, processes, [0])
    starts = read(tmp_path)[0]
    assert [start.end for start in starts] == ["", "done"]
    assert began < starts[0].began < again < starts[1].began and starts[1].ended < time.time()
    for account in ("input", "steps", "evaluation", "saving"):
        ((begin, end), *_) = planted(tmp_path, account)
        assert_found(starts, account, begin, end)
    total = spent(starts)
    done_again = sum(end - begin for begin, end in planted(tmp_path, "lost"))
    assert done_again > 7 and total.seconds["lost"] == nearly(done_again, starts[0])
    down = starts[1].began - float((tmp_path / "killed").read_text())
    assert down > PAUSE and total.seconds["down"] == nearly(down, starts[0])
    wall = starts[1].ended - starts[0].began
    assert sum(total.seconds.values()) == pytest.approx(wall, rel=0.01)


def test_a_late_worker_is_waited_for(job, tmp_path):
    run_job(job, tmp_path, "late=yes", program=PROGRAM)
    chief, late = read(tmp_path).values()
    assert [start.workers for start in (*chief, *late)] == [2, 2]
    for name in ("before the start", "before a barrier"):
        ((begin, end),) = planted(tmp_path, name)
        assert_found(late, "start", begin, end)  # without a loop, all else is the start
        assert_found(chief, "waiting", begin, end)


def test_the_command_logs_goodput_and_says_at_the_end_where_the_time_went(zygote, tmp_path):
    flags = ["--model=dense", "--log_every=10", "--notensorboard", "--noexport"]
    long, short = tmp_path / "long", tmp_path / "short"
    endless = ["--train_steps=1000000", "--evaluate_every=1000000"]
    stopped = zygote.start("ctl.train", f"--model_dir={long}", *flags, *endless)
    stopped.until("loss", "stdout")
    stopped.signal(signal.SIGTERM)
    assert stopped.wait() == 42
    done = zygote.start("ctl.train", f"--model_dir={short}", *flags, "--train_steps=20")
    assert done.wait() == 0, done.stderr
    assert "  time         " in done.stdout and " % of " not in done.stdout  # it is short
    logged = [record["goodput"] for record in records(short, "train")]
    assert all(0 < value < 1 for value in logged) and len(logged) == 2
    ((start,), (other,)) = read(short)[0], read(long)[0]
    assert (start.end, other.end) == ("done", "stopped")
    total = spent([start])
    assert math.isclose(sum(total.seconds.values()), total.wall, rel_tol=0.01)
    shown = zygote.start("ctl.inspect.commands.time_spent", str(short))
    assert shown.wait() == 0 and "goodput" in shown.stdout and "wall time" in shown.stdout
    assert (short / "inspect/time.html").is_file()
