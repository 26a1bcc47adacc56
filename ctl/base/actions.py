"""Actions that run during training, and the form of a log record.

An action is a callable that takes a `Status`. An evaluation action is called with ``(step,
results)`` after each evaluation. `Every` calls an action every so many steps or seconds::

    def report(status):
        print(status.step, status.scalars()["loss"])

    loop = ctl.Loop(..., actions=[Every(report, steps=100)])

`ctl.logs.sinks` writes records to files; `ctl.logs.progress` shows them on the terminal. Imports no
TensorFlow, because flags are checked before TensorFlow is loaded.
"""

from __future__ import annotations

import contextlib
import dataclasses
import numbers
import os
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from ctl.errors import UsageError


@dataclasses.dataclass
class Status:
    """The state of training between two calls of the loop, when Python runs and actions are called.

    Attributes:
        step: global batches trained on so far.
        until: the step at which training ends.
        steps_per_epoch: may be fractional, because batches span the ends of epochs; None when the
            size of the dataset is unknown.
        seconds_per_step: mean of the last call.
        final: whether training ends here. After `stop`, actions may be called twice at one step.
        scalars: returns loss, metrics, learning rate and examples/s since an action called
            ``reset``. Where none does: of the epoch so far, if the training has epochs (see
            `ctl.logs.history.History.epochs`), else since the training began. Reads the metrics
            from the devices when an action asks first.
        reset: starts a new window for ``scalars``. It does not cut the epoch's, which the history
            and callbacks of Keras get.
        stops: whether `stop` was called.
        stopped_by: the name of the action that did.
    """

    step: int
    until: int
    steps_per_epoch: float | None
    seconds_per_step: float
    final: bool
    scalars: Callable[[], dict[str, float]]
    reset: Callable[[], None]
    stops: bool = False
    stopped_by: str = ""

    def stop(self) -> None:
        """Asks the training to end at this step: it calls the actions once more, evaluates and
        saves. With several workers, one may ask; the others learn of it at the end of the next
        call, and all end there."""
        self.stops = True


Action = Callable[[Status], None]

EvalAction = Callable[[int, dict[str, float]], Any]

STOP = object()  #: An evaluation action on any worker that returns it ends the training there.


def name_of(action: Any) -> str:
    """The class or the function that the user knows an action by. One that calls others has an
    attribute ``ended_by``: which of them has asked to end the training."""
    if by := getattr(getattr(action, "__self__", action), "ended_by", ""):
        return by
    inner = getattr(action, "action", None) or getattr(action, "func", None)  # `Every`, `partial`
    if inner:
        return name_of(inner)
    name = getattr(action, "__qualname__", type(action).__name__).rpartition("<locals>.")[2]
    if name != "<lambda>":
        return name
    code = action.__code__
    return f"a lambda ({os.path.basename(code.co_filename)}, line {code.co_firstlineno})"


def resets(action: Any) -> bool:
    """Whether ``action`` is a `Log`, also inside an `Every`."""
    return isinstance(action, Log) or (hasattr(action, "action") and resets(action.action))


NEVER = sys.maxsize  #: `Every.steps_until_due` returns it when no step is due.

#: The keys of a record that are not scalars.
CONTEXT = ("phase", "step", "until", "epoch", "time")

_WINDOW = re.compile(r"\s*([0-9]+)\s*:\s*([0-9]+)\s*")


class Every:
    """Calls an action every so many steps or seconds, and at the end of the training.

    With more than one worker, an action that reads metrics must fire by steps: a read is a
    collective, and the clocks of workers differ.

    Args:
        action: also called at the end, unless it was called at that step already.
        steps: calls the action when the global step reaches a multiple of ``steps``, also in a
            resumed run. The loop ends a call at that step (see `steps_until_due`).
        seconds: calls the action as soon as so much time has passed since it was called last, or
            since the training began. With ``steps`` too, whichever comes first.
        clock: returns seconds.

    Raises:
        UsageError: ``action`` is not callable, ``steps`` and ``seconds`` are both None, ``steps``
            is not a whole number from 1, or ``seconds`` is not a number above 0.
    """

    def __init__(
        self,
        action: Action,
        *,
        steps: int | None = None,
        seconds: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        if not callable(action):
            raise UsageError(f"Every needs a callable that takes a Status, not {action!r}")
        if steps is None and seconds is None:
            raise UsageError("Every needs steps, seconds or both")
        if steps is not None and not (isinstance(steps, numbers.Integral) and steps >= 1):
            raise UsageError(f"Every(steps={steps!r}): steps must be a whole number above 0")
        if seconds is not None and not (isinstance(seconds, numbers.Real) and seconds > 0):
            raise UsageError(f"Every(seconds={seconds!r}): seconds must be a number above 0")
        self.action = action
        self.steps = int(steps) if steps else None
        self.seconds = seconds
        self._clock = clock
        self._step: int | None = None  # when it was asked last
        self._fired_at: int | None = None
        self._timer: float | None = None

    def steps_until_due(self, step: int) -> int:
        """Steps from ``step`` until the action is due; `NEVER` if only time decides."""
        return self.steps - step % self.steps if self.steps else NEVER

    def __call__(self, status: Status) -> None:
        now = self._clock()
        due = status.final and status.step != self._fired_at
        due = due or self._crossed(status.step) or self._elapsed(now)
        self._step = status.step
        if due:
            # An older state may be restored after the final call, and trained to the same step.
            self._fired_at, self._timer = None if status.final else status.step, now
            self.action(status)

    def _crossed(self, step: int) -> bool:
        if not self.steps:
            return False
        if self._step is None or step < self._step:  # asked first, or an older state restored
            return step % self.steps == 0
        return step // self.steps > self._step // self.steps

    def _elapsed(self, now: float) -> bool:
        if self._timer is None:
            self._timer = now
        return self.seconds is not None and now - self._timer >= self.seconds


class Turns:
    """Lets parts of a step train in turns. Make it in `TrainStep.attach`, and put it before actions
    that save, so that a checkpoint says what trains next::

        loop.actions.insert(0, Turns(loop, [("critic", 5), ("generator", 1)]))

    Args:
        loop: that it is an action of.
        turns: what trains, as `Loop.train_only` takes it, and for how many steps; again and again
            from step 0.

    Raises:
        UsageError: a number of steps is no whole number from 0, or all are 0; or as
            `Loop.train_only`.
    """

    def __init__(self, loop: Any, turns: Sequence[tuple[Any, int]]):
        if not all(isinstance(s, numbers.Integral) and s >= 0 for _, s in turns):
            raise UsageError(f"Turns: numbers of steps must be whole numbers, not {turns!r}")
        self._loop, self._turns = loop, [(parts, steps) for parts, steps in turns if steps]
        if not self._turns:
            raise UsageError("Turns needs (parts, steps), with steps above 0")
        for parts, _ in self._turns:  # finds what cannot train now, not at its turn
            loop.train_only(parts)
        self._choose(loop.global_step)

    def steps_until_due(self, step: int) -> int:
        """Steps from ``step`` to the end of a turn: a call of the loop ends there."""
        return self._turn(step)[1]

    def __call__(self, status: Status) -> None:
        self._choose(status.step)

    def _choose(self, step: int) -> None:
        self._loop.train_only(self._turn(step)[0])

    def _turn(self, step: int) -> tuple[Any, int]:
        """What trains after ``step`` steps, and for how many."""
        left = step % sum(steps for _, steps in self._turns)
        at = 0
        while left >= self._turns[at][1]:
            left -= self._turns[at][1]
            at += 1
        parts, steps = self._turns[at]
        return parts, steps - left


class Sink(Protocol):
    """Receives log records."""

    def write(self, record: Mapping[str, Any]) -> None:
        """Writes and flushes one record, see `Log`."""

    def close(self) -> None:
        """Called after the last record."""


class Log:
    """Reads the scalars of a window, writes them to every sink and starts the next window.

    It is an action, usually under `Every`; `evaluated` is an evaluation action. A record is a flat
    dict:

    * ``phase``: "train", "eval" or "test"
    * ``step``: global batches trained on so far
    * ``until``: the step at which training ends ("train" only)
    * ``epoch``: ``step / steps_per_epoch``, or None when the length of an epoch is unknown
    * ``time``: Unix time in seconds
    * the scalars by name: ``loss``, the metrics, ``learning_rate``, ``examples_per_second``, ...

    With more than one worker, every worker needs a `Log`, because reading metrics is a collective.
    Give sinks to one worker only.

    Raises:
        UsageError: when called, if a metric has the name of another key of the record.
    """

    def __init__(
        self,
        *sinks: Sink,
        steps_per_epoch: float | None = None,
        clock: Callable[[], float] = time.time,
    ):
        """``steps_per_epoch`` is used until the first training record."""
        self.sinks = sinks
        self.step = -1  # of the last training record
        self._clock = clock
        self._steps_per_epoch = steps_per_epoch

    def __call__(self, status: Status) -> None:
        self._steps_per_epoch, self.step = status.steps_per_epoch, status.step
        self._write("train", status.step, status.scalars(), until=status.until)
        status.reset()

    def evaluated(self, step: int, results: Mapping[str, float]) -> None:
        """Writes an "eval" record. For ``Loop(eval_actions=[log.evaluated])``."""
        self._write("eval", step, results)

    def tested(self, step: int, results: Mapping[str, float]) -> None:
        """Writes a "test" record, of an evaluation that selects no checkpoint."""
        self._write("test", step, results)

    def close(self) -> None:
        """Closes every sink, even if closing another one raises."""
        with contextlib.ExitStack() as stack:
            for sink in self.sinks:
                stack.callback(sink.close)

    def _write(
        self, phase: str, step: int, scalars: Mapping[str, float], **context: float | None
    ) -> None:
        taken = [name for name in scalars if name in CONTEXT]
        if taken:
            raise UsageError(
                f"the metric name {taken[0]!r} is reserved for log records: rename the metric"
            )
        epoch = step / self._steps_per_epoch if self._steps_per_epoch else None
        context |= {"epoch": epoch, "time": self._clock()}
        record = {"phase": phase, "step": step, **context, **scalars}
        for sink in self.sinks:
            sink.write(record)


def scalars_of(record: Mapping[str, Any]) -> dict[str, float]:
    """The entries of ``record`` that are not in `CONTEXT`."""
    return {name: value for name, value in record.items() if name not in CONTEXT}


def parse_window(text: str) -> tuple[int, int]:
    """Parses ``"20:30"`` as (20, 30): the steps 20 to 29, counted from 0.

    Raises:
        UsageError: the text has another form, the window is empty, or it begins at step 0. The
            first step is mostly tracing and is not profiled.
    """
    match = _WINDOW.fullmatch(text)
    start, stop = (int(match[1]), int(match[2])) if match else (0, 0)
    if not 1 <= start < stop:
        raise UsageError(
            f"{text!r} is not a window of steps: write START:STOP with 1 <= START < STOP, e.g. "
            "20:30 for the steps 20 to 29"
        )
    return start, stop
