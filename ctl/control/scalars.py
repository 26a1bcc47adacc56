"""The scalars of windows of steps: loss, metrics, learning rate and speed, for log records and for
epochs; and the actions between two calls of a loop, which read them from a `Status`."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from ctl.base.actions import NEVER, Action, Status, name_of
from ctl.data.dataset import Dataset
from ctl.data.epochs import steps_per_epoch
from ctl.distributed.watch import watchdog
from ctl.phases.logged import Rows
from ctl.phases.loss_accumulator import CallTotals
from ctl.step import TrainStep


@dataclasses.dataclass
class _Sums:
    """Sums over the calls of a window."""

    loss: float = 0.0  # of all examples
    examples: float = 0.0
    seconds: float = 0.0  # of the calls that were timed, as are those below
    timed_examples: float = 0.0
    timed_steps: int = 0
    skipped: int = 0
    calls: int = 0


@dataclasses.dataclass
class _Epoch:
    """The window of an epoch that did not begin where that of the actions did."""

    sums: _Sums
    rows: Rows
    offset: list[np.ndarray]  # what to add to `BaseStep.metric_totals`, float64


class Scalars:
    """Collects the scalars of two windows of steps.

    The window of the actions ends when one of them calls `Status.reset`, as a `ctl.actions.Log`
    does. That of the epoch ends with the epoch, if the training counts epochs. If nothing but the
    epoch ends a window, or nothing but the actions, there is one window.

    The metrics on the devices are of the actions' window. A second window is a difference of sums:
    what the metrics hold in addition, or what they held when the epoch began. So a metric whose
    variables are not sums (a maximum) means nothing there.

    Args:
        step: a built step.
        global_batch_size: None if unknown; then `read` gives no ``examples_per_second``.

    Attributes:
        extras: functions that return more scalars from the scalars, see `ctl.logs.machine`.
        latest: what `read` returned since the last `add`; else an empty dict.
        rates: learning rates that the last step applied. By the time of `read`, a schedule that
            depends on more than the step may give other rates.
        counts_epochs: whether something calls `end_epoch`.
        has_log: whether an action ends windows. Known at the first one that it ends, or set before.
        ended: whether the training has ended, so that `begin` starts new windows.
    """

    def __init__(self, step: TrainStep, global_batch_size: int | None):
        self._step = step
        self._global_batch_size = global_batch_size
        self.extras: list[Callable[[Mapping[str, float]], Mapping[str, float]]] = []
        self.rates: Sequence[Any] = ()
        self.counts_epochs = self.has_log = self.ended = self._failed = False
        self.latest: dict[str, float] = {}
        self._latest_of_epoch: dict[str, float] = {}
        self._totals: list[tf.Tensor] | None = None  # of the metrics, if they were read
        self._examples = 0.0  # of the last call
        self._sums = _Sums()
        self._epoch: _Epoch | None = None  # if it is not the window of the actions
        self.reset()

    def begin(self, of_epochs: bool) -> None:
        """Begins a training, or goes on with one that has not ended. After an error, such as the
        stop button of a notebook, the epoch goes on in one ``of_epochs`` alone."""
        if self.ended or (self._failed and not of_epochs):
            self.reset()
        self._failed = False

    @contextlib.contextmanager
    def noting_errors(self) -> Iterator[None]:
        """Inside is a training, see `begin`."""
        try:
            yield
        except BaseException:
            self._failed = True
            raise

    def reset(self) -> None:
        """Starts new windows."""
        self.has_log = self.ended = False
        self._forget()
        self._restart(None)

    def _restart(self, epoch: _Epoch | None) -> None:
        """Starts a window of the actions, and one of the epoch unless that goes on as ``epoch``."""
        self._epoch, self._sums, self._totals = epoch, _Sums(), None
        self._step.reset_metrics()

    def _forget(self) -> None:
        """What was read."""
        self.latest, self._latest_of_epoch, self._totals = {}, {}, None

    def end_window(self) -> None:
        """Starts a new window of the actions. `latest` stays until the next `add`, for actions that
        read it later."""
        if not self.latest:
            self.read()
        self.has_log = True
        if (epoch := self._epoch) is None and self.counts_epochs:
            self._latest_of_epoch = self.latest
            epoch = _Epoch(self._sums, self._step.logged.rows, self._held())
        elif epoch:
            pairs = zip(epoch.offset, self._held(), strict=True)
            epoch.offset = [offset + held for offset, held in pairs]
        self._restart(epoch)

    def end_epoch(self) -> None:
        """Starts a new window of the epoch, and of the actions if none of them does."""
        if self.has_log and self._sums.calls:
            self._epoch = _Epoch(_Sums(), {}, [-held for held in self._held()])
        else:
            self._restart(None)

    def add(self, totals: CallTotals, skipped: int) -> None:
        """Adds the ``totals`` of a call, and its number of ``skipped`` updates, which do not count
        in the loss."""
        self._forget()
        for sums in self._all_sums:
            sums.loss += totals.loss * totals.examples
            sums.examples += totals.examples
            sums.skipped += skipped
            sums.calls += 1
        self._examples = totals.examples
        replicas = self._step.strategy.num_replicas_in_sync
        self._step.logged.collect(totals.logged, replicas, *self._other_rows)

    def add_left(self) -> None:
        """Adds what the steps of a call have logged that found the end of the data."""
        self._forget()
        self._step.logged.collect_left(self._step.strategy, *self._other_rows)

    def add_time(self, seconds: float, steps: int) -> None:
        """Adds the duration of the ``steps`` steps of the last `add`."""
        for sums in self._all_sums:
            sums.seconds += seconds
            sums.timed_examples += self._examples
            sums.timed_steps += steps

    @property
    def _all_sums(self) -> list[_Sums]:
        return [self._sums, self._epoch.sums] if self._epoch else [self._sums]

    @property
    def _other_rows(self) -> list[Rows]:
        return [self._epoch.rows] if self._epoch else []

    def read(self) -> dict[str, float]:
        """Returns the scalars of the actions' window by name; without ``loss`` if it has no losses.
        With several workers, all must read at the same steps."""
        self.latest = self._of(self._sums, self._read_totals(), self._step.logged.rows)
        return self.latest

    def read_epoch(self) -> dict[str, float]:
        """As `read`, of the epoch so far. At its end, until the next `add`, of that epoch."""
        if not self._latest_of_epoch:
            if (epoch := self._epoch) is None:
                self._latest_of_epoch = self.latest or self.read()
            else:
                pairs = zip(self._read_totals(), self._held(), epoch.offset, strict=True)
                totals = [tf.cast(held + offset, t.dtype) for t, held, offset in pairs]
                self._latest_of_epoch = self._of(epoch.sums, totals, epoch.rows)
        return dict(self._latest_of_epoch)

    def _read_totals(self) -> list[tf.Tensor]:
        """Those of the metrics on the devices; read once between two calls."""
        if self._totals is None:
            self._totals = self._step.metric_totals()
        return self._totals

    def _held(self) -> list[np.ndarray]:
        return [np.asarray(total, np.float64) for total in self._read_totals()]

    def _of(self, sums: _Sums, totals: Sequence[tf.Tensor], rows: Rows) -> dict[str, float]:
        scalars = {"loss": sums.loss / sums.examples} if sums.examples else {}
        with self._step.window(totals, rows):
            scalars |= self._step.results()
        updater = self._step.updater
        for number, rate in enumerate(self.rates, start=1):
            scalars["learning_rate" + (f"_{number}" if number > 1 else "")] = float(rate)
        if sums.seconds:
            rate = sums.timed_steps / sums.seconds
            scalars["steps_per_second"] = rate
            if self._global_batch_size:
                scalars["examples_per_second"] = rate * self._global_batch_size
            if self._step.counts != "examples":
                scalars[f"{self._step.counts}_per_second"] = sums.timed_examples / sums.seconds
        if updater.judges_finiteness:
            scalars["skipped_steps"] = float(sums.skipped)
        if updater.loss_scale:
            scalars["loss_scale"] = float(updater.loss_scale.scale.numpy())
        for extra in self.extras:
            scalars |= extra(scalars)
        return scalars


def steps_until_due(actions: Sequence[Action], step: int) -> int:
    """Number of steps until the next of ``actions`` is due; `NEVER` if none is."""
    due = [a.steps_until_due(step) for a in actions if hasattr(a, "steps_until_due")]
    return min(due, default=NEVER)


def status_of(
    step: int, until: int, seconds_per_step: float, dataset: Dataset, scalars: Scalars
) -> Status:
    """Returns the status at ``step``. Its scalars are read once, when an action asks for them."""
    return Status(
        step=step,
        until=until,
        steps_per_epoch=steps_per_epoch(dataset),
        seconds_per_step=seconds_per_step,
        final=step >= until,
        scalars=lambda: dict(scalars.latest or scalars.read()),
        reset=scalars.end_window,
    )


def run_actions(actions: Sequence[Action], status: Status) -> None:
    """Calls each of ``actions``. With several workers, the watchdog names an action that hangs."""
    for action in actions:
        name = type(getattr(action, "action", action)).__name__  # an `Every` holds the action
        with watchdog.host(f"the action {name}", status.step):
            action(status)
        if status.stops and not status.stopped_by:
            status.stopped_by = name_of(action)
