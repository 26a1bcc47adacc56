"""The scalars of a log record: loss, metrics, learning rate and speed since the last record; and
the actions between two calls of a loop, which read them from a `Status`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ctl.base.actions import NEVER, Action, Status, name_of
from ctl.data.dataset import Dataset
from ctl.data.epochs import steps_per_epoch
from ctl.distributed.watch import watchdog
from ctl.phases.loss_accumulator import CallTotals
from ctl.step import TrainStep


class Scalars:
    """Collects the scalars of a window of steps.

    Args:
        step: a built step.
        global_batch_size: None if unknown; then `read` gives no ``examples_per_second``.

    Attributes:
        extras: functions that return more scalars from the scalars, see `ctl.logs.machine`.
        latest: what `read` returned since the last `add`; else an empty dict.
        rates: learning rates that the last step applied. By the time of `read`, a schedule that
            depends on more than the step may give other rates.
    """

    def __init__(self, step: TrainStep, global_batch_size: int | None):
        self._step = step
        self._global_batch_size = global_batch_size
        self.extras: list[Callable[[Mapping[str, float]], Mapping[str, float]]] = []
        self.rates: Sequence[Any] = ()
        self.latest: dict[str, float] = {}
        self.reset()

    def reset(self) -> None:
        """Starts a new window."""
        self._loss = self._examples = self._seconds = self._timed_examples = self._latest = 0.0
        self._timed_steps = self._skipped = 0
        self._step.reset_metrics()

    def add(self, totals: CallTotals, skipped: int) -> None:
        """Adds the ``totals`` of a call, and its number of ``skipped`` updates, which do not count
        in the loss."""
        self.latest = {}
        self._loss += totals.loss * totals.examples
        self._examples += totals.examples
        self._latest = totals.examples
        self._skipped += skipped
        self._step.logged.collect(totals.logged, self._step.strategy.num_replicas_in_sync)

    def add_time(self, seconds: float, steps: int) -> None:
        """Adds the duration of the ``steps`` steps of the last `add`."""
        self._seconds += seconds
        self._timed_examples += self._latest
        self._timed_steps += steps

    def read(self) -> dict[str, float]:
        """Returns the scalars by name; without ``loss`` if the window has no losses. With several
        workers, all must read at the same steps."""
        scalars = {"loss": self._loss / self._examples} if self._examples else {}
        scalars |= self._step.results()
        updater = self._step.updater
        for number, rate in enumerate(self.rates, start=1):
            scalars["learning_rate" + (f"_{number}" if number > 1 else "")] = float(rate)
        if self._seconds:
            rate = self._timed_steps / self._seconds
            scalars["steps_per_second"] = rate
            if self._global_batch_size:
                scalars["examples_per_second"] = rate * self._global_batch_size
            if self._step.counts != "examples":
                scalars[f"{self._step.counts}_per_second"] = self._timed_examples / self._seconds
        if updater.judges_finiteness:
            scalars["skipped_steps"] = float(self._skipped)
        if updater.loss_scale:
            scalars["loss_scale"] = float(updater.loss_scale.scale.numpy())
        for extra in self.extras:
            scalars |= extra(scalars)
        self.latest = scalars
        return scalars


def steps_until_due(actions: Sequence[Action], step: int) -> int:
    """Number of steps until the next of ``actions`` is due; `NEVER` if none is."""
    due = [a.steps_until_due(step) for a in actions if hasattr(a, "steps_until_due")]
    return min(due, default=NEVER)


def status_of(
    step: int, until: int, seconds_per_step: float, dataset: Dataset, window: Scalars
) -> Status:
    """Returns the status at ``step``. Its scalars are read once, when an action asks for them."""
    read: dict[str, float] = {}

    def scalars() -> dict[str, float]:
        if not read:
            read.update(window.read())
        return dict(read)

    def reset() -> None:
        scalars()  # keeps them for actions that read them later
        window.reset()

    return Status(
        step=step,
        until=until,
        steps_per_epoch=steps_per_epoch(dataset),
        seconds_per_step=seconds_per_step,
        final=step >= until,
        scalars=scalars,
        reset=reset,
    )


def run_actions(actions: Sequence[Action], status: Status) -> None:
    """Calls each of ``actions``. With several workers, the watchdog names an action that hangs."""
    for action in actions:
        name = type(getattr(action, "action", action)).__name__  # an `Every` holds the action
        with watchdog.host(f"the action {name}", status.step):
            action(status)
        if status.stops and not status.stopped_by:
            status.stopped_by = name_of(action)
