"""Shows training on a terminal: a progress bar, or plain lines for a pipe."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TextIO

from absl import logging
from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.text import Text

from ctl.base.actions import Status, scalars_of
from ctl.base.console import INDENT, filled
from ctl.base.interactive import is_notebook, is_watched
from ctl.errors import UsageError

_REFRESH_SECONDS = 0.5
_NARROWEST_BAR, _WIDEST_BAR = 8, 40
_CELL_COLUMNS = 100  # of the output of a notebook
# A step that counts something else, see `ctl.phases.base_step.BaseStep.counts`, has another rate,
# too.
_UNITS = ("steps_per_second", "examples_per_second")
_NOT_SHOWN = ("goodput",)  # of the whole run, which the end of a command says
_SHORT_UNITS = {"examples": "ex", "tokens": "tok"}


class Lines:
    """A sink that prints each record as one line, for output that is not a terminal."""

    def __init__(self, file: TextIO | None = None):
        self._file = file or sys.stdout
        self._time_left = _TimeLeft()

    def write(self, record: Mapping[str, Any]) -> None:
        left = None
        if record["phase"] == "train":
            left = self._time_left.seconds(record, record["time"], record)
        print(format_record(record, left), file=self._file, flush=True)

    def close(self) -> None:
        """Does nothing: the file stays open."""


class Progress:
    """A progress bar at the foot of the terminal, or in a notebook: a context manager, an action,
    and a sink.

    As an action, it updates the bar between two calls. As a sink of `ctl.actions.Log`, it prints
    each record above the bar. Other output appears above the bar, too::

        with Progress() as progress:
            loop = ctl.Loop(..., actions=[Every(Log(progress), steps=100), progress])
            loop.train_and_evaluate(..., on_progress=progress.evaluating)

    Args:
        peek: whether to read the scalars twice a second, without ending their window. Must be
            False with more than one worker, where a read is a collective; the bar then shows the
            scalars of the last record.
        console: by default standard output.
        clock: returns seconds.
    """

    shown = 0  # in this process

    def __init__(
        self,
        *,
        peek: bool = True,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._peek = peek
        self._clock = clock
        self._began = clock()
        self._read_at = -math.inf
        self._steps_per_epoch: float | None = None
        self._time_left = _TimeLeft()
        self._bar = _Bar()
        self._live: Live | _Cell
        if is_notebook() and console is None:
            self._live = _Cell(self._render)
        else:
            # Only redirected where it would overwrite the bar: standard error may go elsewhere.
            self._live = Live(
                console=console or Console(),
                get_renderable=self._render,
                refresh_per_second=1 / _REFRESH_SECONDS,
                redirect_stderr=sys.stderr.isatty(),
                vertical_overflow="crop",
            )
        self._is_open = False
        self._log_stream: TextIO | None = None

    def __enter__(self) -> Progress:
        self._began = self._clock()
        before = sys.stderr
        self._live.start()
        self._is_open = True
        Progress.shown += 1
        # absl keeps its first stream: set the one that prints above the bar.
        handler = logging.get_absl_handler().python_handler
        if handler.stream is before and sys.stderr is not before:
            self._log_stream = before
            handler.setStream(sys.stderr)
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def __call__(self, status: Status) -> None:
        now, self._steps_per_epoch = self._clock(), status.steps_per_epoch
        scalars = self._bar.scalars
        if self._peek and (status.final or now - self._read_at >= _REFRESH_SECONDS):
            scalars, self._read_at = dict(status.scalars()), now
        self._show(vars(status), scalars, now)

    def evaluated(
        self, step: int, results: Mapping[str, float], steps_per_epoch: float | None = None
    ) -> None:
        """Prints the results of an evaluation above the bar. ``steps_per_epoch`` is by default that
        of the training so far."""
        length = steps_per_epoch or self._steps_per_epoch
        epoch = step / length if length else None
        self.write({"phase": "eval", "step": step, "epoch": epoch, **results})

    def evaluating(self, done: int, batches: int | None) -> None:
        """Shows evaluation progress, ``done`` of ``batches`` (None: unknown), instead of training.

        For ``Loop.evaluate(progress.evaluating)``.
        """
        self._bar = dataclasses.replace(self._bar, evaluated=(done, batches))
        if isinstance(self._live, _Cell):
            self._live.refresh()

    def write(self, record: Mapping[str, Any]) -> None:
        left = None
        if record["phase"] == "train":
            self._show(record, scalars_of(record), self._clock())
            left = self._bar.left
        else:
            self._bar = dataclasses.replace(self._bar, evaluated=None)
        # Text, so that a metric called "[red]" is not read as markup.
        self._live.console.print(Text(format_record(record, left)), soft_wrap=True)
        self._live.refresh()  # or the bar would lag behind the record

    def say(self, text: str) -> None:
        """Prints a line above the bar."""
        self._live.console.print(Text(text), soft_wrap=True)

    def close(self) -> None:
        """Leaves the bar on the screen and releases the terminal. A second call has no effect."""
        if self._log_stream:
            logging.get_absl_handler().python_handler.setStream(self._log_stream)
            self._log_stream = None
        if self._is_open:
            self._is_open = False
            Progress.shown -= 1
            self._live.stop()
            if isinstance(self._live, Live) and not self._live.console.is_terminal:
                self._live.console.line()  # as `Live` does on a terminal

    def _show(self, place: Mapping[str, Any], scalars: Mapping[str, float], now: float) -> None:
        left = self._time_left.seconds(place, now, scalars)
        # A new object, because another thread renders.
        self._bar = _Bar(place["step"], place["until"], scalars, left)
        if isinstance(self._live, _Cell) and self._is_open:
            self._live.refresh()

    def _render(self) -> _Bar:
        return dataclasses.replace(self._bar, elapsed=self._clock() - self._began)


@contextlib.contextmanager
def showing(
    asked: bool | None, watchers: list[Any], *, peek: bool
) -> Iterator[Callable[[int, int | None], None] | None]:
    """Inside, a bar is the first of the ``watchers`` of a loop. Gives what shows an evaluation.

    Args:
        asked: whether to show one; None if somebody looks, see `is_watched`. While one is shown,
            there is no other.
        peek: see `Progress`.

    Raises:
        UsageError: ``asked`` is something else.
    """
    if asked is not None and not isinstance(asked, bool):
        raise UsageError(f"progress must be True, False or None, not {asked!r}")
    if Progress.shown or not (is_watched() if asked is None else asked):
        yield None
        return
    with Progress(peek=peek) as bar:
        watchers.insert(0, bar)
        try:
            yield bar.evaluating
        finally:
            watchers.remove(bar)


class _Cell:
    """Shows a bar in the output of a notebook's cell, in one place; has what is used of `Live`."""

    def __init__(self, render: Callable[[], _Bar]):
        self._render = render
        self._handle: Any = None
        self._at = -math.inf
        self.console = self

    def start(self) -> None:
        """Shows it."""
        from IPython.display import display

        self._handle = display(self._content(), raw=True, display_id=True)

    def refresh(self) -> None:
        """Shows it as it is now, twice a second at most."""
        if self._handle and time.monotonic() - self._at >= _REFRESH_SECONDS:
            self.stop()

    def stop(self) -> None:
        """Shows it as it is now."""
        self._at = time.monotonic()
        self._handle.update(self._content(), raw=True)

    def print(self, text: Text, **_: Any) -> None:
        """Prints below it."""
        print(text.plain)

    def _content(self) -> dict[str, str]:
        text = io.StringIO()
        width = _CELL_COLUMNS
        Console(file=text, width=width, color_system=None, force_jupyter=False).print(
            self._render()
        )
        return {"text/plain": text.getvalue().rstrip("\n")}


@dataclasses.dataclass(frozen=True)
class _Bar:
    """The content of the bar, rendered as one line of the width of the terminal."""

    step: int = 0
    until: int = 0
    scalars: Mapping[str, float] = dataclasses.field(default_factory=dict)
    left: float | None = None
    evaluated: tuple[int, int | None] | None = None
    elapsed: float = 0.0

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if not self.until and not self.evaluated:
            yield Text(f"tracing the first step  {_duration(self.elapsed)} elapsed", no_wrap=True)
            return
        of: int | None
        done, of, head = self.step, self.until, _place(self.step, self.until)
        if self.evaluated:
            done, of = self.evaluated
            head = f"eval {done}/{of}" if of else f"eval {done}"
        room = options.max_width - len(head) - _NARROWEST_BAR - 2
        tail = "".join(f"  {piece}" for piece in self._fitting(room))
        width = min(_WIDEST_BAR, max(0, options.max_width - len(head) - len(tail) - 2))
        filled = width * done // of if of else 0
        full, empty = ("#", "-") if options.ascii_only else ("━", "─")
        yield Text.assemble(
            head + "  ",
            (full * filled, "cyan"),
            (empty * (width - filled), "bright_black"),
            tail,
            no_wrap=True,
            overflow="crop",
        )

    def _fitting(self, room: int) -> list[str]:
        """The pieces that fit. Dropped first: details such as the learning rate, elapsed time,
        rate, then metrics from the last."""
        pieces, details = _metrics(self.scalars), _details(self.scalars)
        optional = [*_rate(self.scalars), f"{_duration(self.elapsed)} elapsed"]
        left = [] if self.left is None else [f"{_duration(self.left)} left"]
        while pieces or optional:
            shown = [*pieces, *optional, *left, *details]
            if sum(Text(piece).cell_len + 2 for piece in shown) <= room:
                return shown
            (details or optional or pieces).pop()
        return left


class _TimeLeft:
    """Seconds to the end, at the pace since the first call of the loop; evaluations count."""

    def __init__(self) -> None:
        self._first: tuple[int, float] | None = None

    def seconds(
        self, place: Mapping[str, Any], now: float, scalars: Mapping[str, float]
    ) -> float | None:
        """From ``step`` and ``until`` in ``place``; None if unknown or at the end."""
        step, todo = place["step"], place["until"] - place["step"]
        if todo <= 0:
            return None
        if self._first is None:  # after the first call, which is mostly tracing
            self._first = step, now
        first, began = self._first
        if step > first:
            return todo * (now - began) / (step - first)
        rate = scalars.get("steps_per_second")
        return todo / rate if rate else None


def format_record(record: Mapping[str, Any], seconds_left: float | None = None) -> str:
    """Formats a record as ``step 1200/9380  loss 0.4312  ...  0:43 left  lr 1.00e-3``, in lines of
    at most 80 columns, or those of a narrower terminal. The epoch is in the lines
    of evaluations only, where it has room."""
    scalars = scalars_of(record)
    if record["phase"] == "train":
        pieces = [_place(record["step"], record["until"]), *_metrics(scalars), *_rate(scalars)]
        if seconds_left is not None:
            pieces.append(f"{_duration(seconds_left)} left")
        return filled([*pieces, *_details(scalars)])
    epoch = "" if record["epoch"] is None else f" (epoch {record['epoch']:.2f})"
    heads = {"": f"{record['phase']} at step {record['step']}{epoch}: "}
    of_sets: dict[str, list[str]] = {"": []}
    for name, value in scalars.items():
        which, slash, metric = name.rpartition("/")
        heads.setdefault(which, f"{INDENT}{which}: ")
        of_sets.setdefault(which, []).extend(_metrics({metric: value}))
    return "\n".join(filled(pieces, heads[which]) for which, pieces in of_sets.items())


def _place(step: int, until: int) -> str:
    return f"step {step:>{len(str(until))}}/{until}"


def _metrics(scalars: Mapping[str, float]) -> list[str]:
    """The loss, the metrics and what a step logs."""
    return [
        f"{name} {_number(value)}"
        for name, value in scalars.items()
        if not (name in _DETAILS or name in _NOT_SHOWN or _is_of_group(name))
        and not name.endswith("_per_second")
    ]


def _is_of_group(name: str) -> bool:
    """Whether it is the learning rate of a parameter group, such as ``learning_rate_2``."""
    return name.startswith("learning_rate") and name[13:].strip("_").isdecimal()


def _details(scalars: Mapping[str, float]) -> list[str]:
    """What is shown last, and left out first."""
    shown = [name for name in _DETAILS if scalars.get(name, 0.0) or name == "learning_rate"]
    pieces = [_DETAILS[name](scalars[name]) for name in shown if name in scalars]
    rates = [f"lr{n[13:]} {_short(value)}" for n, value in scalars.items() if _is_of_group(n)]
    return pieces[:1] + rates + pieces[1:] if rates else pieces


def _short(value: float) -> str:
    """Three digits, such as 1.00e-3."""
    digits, _, exponent = f"{value:.2e}".partition("e")
    return f"{digits}e{int(exponent)}" if exponent else digits


# How the scalars are shown that ctl adds to loss and metrics.
_DETAILS: dict[str, Callable[[float], str]] = {
    "learning_rate": lambda value: f"lr {_short(value)}",
    "skipped_steps": lambda value: f"skipped {value:.0f}",
    "loss_scale": lambda value: f"scale {value:g}",
    "gradient_norm": lambda value: f"grad norm {_number(value)}",
    "weight_norm": lambda value: f"weight norm {_number(value)}",
    "update_ratio": lambda value: f"update {_short(value)}",
    "mfu": lambda value: f"mfu {100 * value:.1f} %",
    "peak_memory_mib": lambda value: f"peak {value:,.0f} MiB",
}


def _rate(scalars: Mapping[str, float]) -> list[str]:
    """The speed: in tokens, else in examples, else in steps per second."""
    rates = [name for name in scalars if name.endswith("_per_second")]
    if not rates:
        return []
    name = max(rates, key=lambda name: _UNITS.index(name) if name in _UNITS else len(_UNITS))
    unit = name.removesuffix("_per_second")
    return [f"{_count(scalars[name]):>5} {_SHORT_UNITS.get(unit, unit)}/s"]


def _number(value: float) -> str:
    small = value and abs(value) < 1e-3
    return f"{value:.2e}" if small or abs(value) >= 1e5 else f"{value:.4f}"


def _count(value: float) -> str:
    """Three digits and a unit, such as 41.2k."""
    power = 0
    while value >= 999.5 and power < 3:
        value, power = value / 1000, power + 1
    digits = 2 if value < 9.995 else 1 if value < 99.95 else 0
    return f"{value:.{digits}f}" + ("", "k", "M", "G")[power]


def _duration(seconds: float) -> str:
    """Minutes and seconds, ``0:43``; from an hour on, hours and minutes, ``1h05``."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02}" if hours else f"{minutes}:{seconds:02}"
