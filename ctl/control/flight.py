"""The marks of the running step, for `ctl.distributed.watch.watchdog`; on by default with several
workers.

Marks are recorded in every step, because a hang cannot be repeated.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import tensorflow as tf
from absl import logging

from ctl.base import tf_internals
from ctl.base.ledger import LEDGER
from ctl.distributed import workers
from ctl.distributed.watch import watchdog
from ctl.phases.marks import Latest, Marks
from ctl.phases.observer import Observer

if TYPE_CHECKING:
    from ctl.step import TrainStep


class FlightRecorder:
    """Adds marks to ``step``, which the loop then traces again. Another thread can read their
    latest stamps."""

    def __init__(self, step: TrainStep):
        self._step = step
        self._latest = Latest(step)
        self._marks = Marks(step, self._latest)
        self.attach()

    def attach(self) -> None:
        """Makes the marks those of the step, again if they were exchanged."""
        self._step.observer = self._marks

    def read(self, until: int) -> tuple[dict[str, float], tuple[str, ...]]:
        """Reads how far this process is in a call that ends at the global step ``until``. Call it
        from any thread.

        Returns the seconds since each mark that has fired on all replicas of this process; and the
        names of the other marks, in the order of the step.
        """
        running = int(self._step.global_step.numpy())
        # After the last step of a call, only the reduction of the losses is left.
        number = running if running < until else until - 1
        return fired(self._latest.names, self._latest.read(number), time.time())

    @property
    def packs(self) -> tuple[int, ...]:
        """Bytes of each pack; empty until the step is traced."""
        return tuple(getattr(self._step.observer, "pack_bytes", ()))


def fired(
    names: Sequence[str], stamps: np.ndarray, now: float
) -> tuple[dict[str, float], tuple[str, ...]]:
    """Returns the same as `FlightRecorder.read`, from stamps.

    Args:
        names: the marks, in the order of the step.
        stamps: float64 [replicas, marks], seconds since the epoch or NaN, see `Latest.read`.
        now: seconds since the epoch.
    """
    latest = stamps.max(axis=0)  # NaN where one replica has none
    ages = {
        name: max(0.0, now - stamp)
        for name, stamp in zip(names, latest, strict=True)
        if not np.isnan(stamp)
    }
    return ages, tuple(name for name in names if name not in ages)


def attach_progress_marks(
    step: TrainStep, again: FlightRecorder | None = None
) -> FlightRecorder | None:
    """Returns a `FlightRecorder` for ``step``: ``again``, or a new one; None, with a warning, if
    this TensorFlow cannot stamp."""
    reason = tf_internals.why_no_timestamps()
    if type(step.observer) not in (Observer, Marks):
        reason = "the step has an observer of its own, which is not a ctl.phases.marks.Marks"
    if reason:
        logging.warning("flight records will not say where in a step a worker is: %s", reason)
        return None
    if again:
        again.attach()
        return again
    with workers.watching_variables(step.strategy):
        return FlightRecorder(step)


@contextlib.contextmanager
def watched_call(
    step: TrainStep, begin: int, steps: int, flight: FlightRecorder | None, first: bool
) -> Iterator[None]:
    """Wraps a call of ``steps`` steps from ``begin`` on in the watchdog, the ledger and a marker
    for profiles.

    ``first``: the call traces the step, so its time limit is longer.
    """
    with (
        watchdog.collective(
            "training",
            first=first,
            step=begin,
            progress=lambda: int(step.global_step.numpy()),
            marks=(lambda: flight.read(begin + steps)) if flight else None,
            packs=flight.packs if flight else (),
        ),
        LEDGER.spend("compile" if first else "steps"),
        tf.profiler.experimental.Trace("ctl_step", step_num=begin, _r=1),
    ):
        yield
