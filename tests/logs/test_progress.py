"""What a terminal shows, wide, narrow and piped."""

from __future__ import annotations

import io
import sys

import pytest
from absl import logging
from helpers import make_loop
from records import Clock
from rich.console import Console

from ctl.base.actions import Status
from ctl.base.interactive import is_notebook, is_watched
from ctl.errors import UsageError
from ctl.logs import progress as progress_module
from ctl.logs.progress import Lines, Progress, _count, _duration, _number, format_record, showing

SCALARS = {
    "loss": 0.43121,
    "accuracy": 0.8521,
    "learning_rate": 1e-3,
    "steps_per_second": 640.0,
    "examples_per_second": 41234.0,
}


def record(step, time=0.0, until=9380, **scalars):
    scalars = scalars or SCALARS
    return {"phase": "train", "step": step, "until": until, "epoch": 1.28, "time": time, **scalars}


def status(step, scalars=lambda: SCALARS, until=9380):
    return Status(step, until, 938.0, 0.1, step >= until, scalars, lambda: None)


@pytest.fixture
def shown():
    """``shown(progress) -> str``: the bar as it is now, at a width."""

    def render(progress, width=120):
        console = Console(file=io.StringIO(), width=width, color_system=None)
        console.print(progress._render())
        return console.file.getvalue().rstrip("\n")

    return render


@pytest.fixture
def quiet():
    """A console that takes whatever is printed above a bar."""
    return Console(file=io.StringIO(), force_terminal=True, width=120, color_system=None)


def test_lines_of_training_and_evaluation():
    assert format_record(record(1200), 43.2) == (
        "step 1200/9380  loss 0.4312  accuracy 0.8521  41.2k ex/s  0:43 left  lr 1.00e-3"
    )
    evaluation = {"phase": "eval", "step": 1560, "epoch": 1.7, "time": 0.0, "loss": 0.4, "auc": 0.9}
    assert format_record(evaluation) == "eval at step 1560 (epoch 1.70): loss 0.4000  auc 0.9000"
    tested = format_record({**evaluation, "phase": "test"})
    assert tested == "test at step 1560 (epoch 1.70): loss 0.4000  auc 0.9000"


def test_lines_are_aligned():
    early = format_record(record(20, examples_per_second=999.0, loss=1.0))
    late = format_record(record(9000, examples_per_second=99123.0, loss=0.5))
    assert len(early) == len(late)


def test_lines_leave_out_what_there_is_not():
    line = format_record({**record(5, loss=1.0, skipped_steps=0.0), "epoch": None})
    assert line == "step    5/9380  loss 1.0000"
    assert "skipped 3" in format_record(record(5, skipped_steps=3.0))
    assert format_record(record(5, steps_per_second=12.34)).endswith(" 12.3 steps/s")


def test_time_left_in_lines_is_at_the_pace_of_this_run():
    file = io.StringIO()
    lines = Lines(file)
    lines.write(record(5000, until=6000, time=50.0, loss=1.0))  # resumed: nothing known
    lines.write(record(5100, until=6000, time=60.0, loss=1.0))
    lines.write(record(6000, until=6000, time=150.0, loss=1.0))
    ends = [line.split("  ")[-1] for line in file.getvalue().splitlines()]
    assert ends == ["loss 1.0000", "1:30 left", "loss 1.0000"]


def test_lines_to_a_closed_pipe():
    class Closed(io.StringIO):
        def write(self, text):
            raise BrokenPipeError(32, "Broken pipe")

    with pytest.raises(BrokenPipeError):  # exit code 141
        Lines(Closed()).write(record(1))


def test_bar_fits_every_width_and_keeps_what_matters(quiet, shown):
    progress = Progress(console=quiet, clock=Clock())
    progress(status(1876))
    wide = shown(progress, 140)
    for piece in ("step 1876/9380", "loss 0.4312", "lr 1.00e-3", "41.2k ex/s", "0:12 left"):
        assert piece in wide
    assert "0:00 elapsed" in wide
    assert wide.count("━") == 8 and wide.count("─") == 32  # a fifth of it
    assert "loss" in shown(progress, 60) and "ex/s" not in shown(progress, 60)
    for width in range(30, 140):
        line = shown(progress, width)
        assert len(line) <= width and "\n" not in line
        assert "step 1876/9380" in line
        if width >= 40:
            assert "0:12 left" in line
    assert "\n" not in shown(progress, 10)


def test_bar_before_the_first_step_and_during_an_evaluation(quiet, shown):
    clock = Clock()
    progress = Progress(console=quiet, clock=clock)
    clock.now += 65
    assert shown(progress) == "tracing the first step  1:05 elapsed"
    progress.evaluating(3, 12)
    assert shown(progress).startswith("eval 3/12  ━")
    progress.evaluating(4, None)
    assert shown(progress).startswith("eval 4  ─")
    progress(status(10))
    assert shown(progress).startswith("step   10/9380")
    progress.evaluated(469, {"loss": 0.5})
    progress.evaluated(469, {"loss": 0.5}, 100.0)
    output = quiet.file.getvalue()
    assert "eval at step 469 (epoch 0.50): loss 0.5000\n" in output
    assert "eval at step 469 (epoch 4.69): loss 0.5000\n" in output


def test_bar_reads_scalars_at_most_twice_a_second(quiet):
    clock, reads = Clock(), []
    progress = Progress(console=quiet, clock=clock)
    for step in range(1, 101):
        progress(status(step, lambda: reads.append(1) or SCALARS))
        clock.now += 0.02
    assert len(reads) == 4
    progress(status(9380, lambda: reads.append(1) or SCALARS))
    assert len(reads) == 5  # the last in any case


def test_bar_without_peeking_shows_the_last_record(quiet, shown):
    def never():
        raise AssertionError("a read is a collective")

    progress = Progress(peek=False, console=quiet, clock=Clock())
    progress(status(10, never))
    assert "loss" not in shown(progress)
    progress.write(record(20, loss=0.75))
    progress(status(30, never))
    assert "step   30/9380" in shown(progress) and "loss 0.7500" in shown(progress)


def test_time_left_of_the_bar_leaves_out_tracing_and_earlier_runs(quiet, shown):
    clock = Clock()
    progress = Progress(console=quiet, clock=clock)
    clock.now += 60  # tracing
    progress(status(5001, lambda: {"loss": 1.0}, until=6001))
    assert "left" not in shown(progress)
    clock.now += 10
    progress(status(5101, lambda: {"loss": 1.0}, until=6001))
    assert "1:30 left" in shown(progress)


def test_log_lines_go_above_the_bar_and_names_are_no_markup(quiet, shown):
    with Progress(console=quiet, clock=Clock()) as progress:
        progress(status(10))
        progress.write(record(10, **{"[red]loss[/red]": 0.5, ":smile:": 2.0}))
        print("my own [bold] line")
    output = quiet.file.getvalue()
    assert "step   10/9380  [red]loss[/red] 0.5000  :smile: 2.0000" in output  # not the bar's
    assert "my own [bold] line" in output
    assert "[red]loss[/red] 0.5000" in shown(progress)


def test_the_terminal_is_given_back_after_an_error(quiet, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(sys, "__stderr__", sys.stderr)
    handler = logging.get_absl_handler().python_handler
    before = handler.stream
    handler.setStream(sys.stderr)
    stdout, stderr = sys.stdout, sys.stderr
    try:
        with pytest.raises(KeyboardInterrupt), Progress(console=quiet):
            assert sys.stdout is not stdout
            assert handler.stream is sys.stderr is not stderr
            raise KeyboardInterrupt
        assert (sys.stdout, sys.stderr, handler.stream) == (stdout, stderr, stderr)
    finally:
        handler.setStream(before)
    hidden, visible = "\x1b[?25l", "\x1b[?25h"
    output = quiet.file.getvalue()
    assert output.rindex(visible) > output.rindex(hidden)


def test_a_loop_shows_a_bar_where_somebody_looks(monkeypatch, capsys):
    """`tests/test_notebook.py` has a notebook."""
    loop = make_loop(evaluate=20)
    loop.train(2)
    assert capsys.readouterr().out == ""  # of a script whose output goes elsewhere
    loop.train(4, progress=True)
    output = capsys.readouterr().out
    assert output.startswith("step 4/4  ") and output.endswith(" elapsed\n")
    monkeypatch.setattr(progress_module, "is_watched", lambda: True)
    loop.train(4)
    loop.train(6, progress=False)
    assert capsys.readouterr().out == ""
    loop.train_and_evaluate(8, evaluate_every=4)
    output = capsys.readouterr().out
    assert output.count("eval at step 8 (epoch 1.28): loss ") == 1
    assert output.splitlines()[-1].startswith("step 8/8  ") and output.count("step 8/8") == 1
    loop.train_and_evaluate(9, evaluate_every=1, progress=False)
    assert capsys.readouterr().out == ""
    with Progress() as own:
        loop.actions.append(own)
        loop.train(10)
    assert capsys.readouterr().out.count("step 10/10") == 1
    loop.actions.clear()
    loop.actions.append(lambda status: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        loop.train(12)
    assert Progress.shown == 0 and not loop._bars
    with pytest.raises(UsageError, match="progress must be True, False or None, not 'bar'"):
        loop.train(20, progress="bar")


def test_a_bar_has_one_place(monkeypatch):
    watchers = []
    with showing(True, watchers, peek=True) as outer:
        assert outer and len(watchers) == 1
        with showing(True, watchers, peek=True) as inner:
            assert inner is None and len(watchers) == 1
    assert not watchers
    monkeypatch.setattr(sys, "stdout", None)
    assert not is_watched() and not is_notebook()


NUMBERS = {0.0: "0.0000", 0.43121: "0.4312", 1.2e-5: "1.20e-05", 3.2e7: "3.20e+07"}
NUMBERS |= {float("nan"): "nan", -12.5: "-12.5000"}
COUNTS = {0.0: "0.00", 9.994: "9.99", 9.996: "10.0", 99.94: "99.9", 99.96: "100", 999.4: "999"}
COUNTS |= {999.6: "1.00k", 41234: "41.2k", 412345: "412k", 2.5e6: "2.50M", 3e10: "30.0G"}
DURATIONS = {0: "0:00", 59.6: "1:00", 3599: "59:59", 3600: "1h00", 90061: "25h01"}


@pytest.mark.parametrize(
    ("shown", "texts"), [(_number, NUMBERS), (_count, COUNTS), (_duration, DURATIONS)]
)
def test_numbers(shown, texts):
    assert {value: shown(value) for value in texts} == texts
