"""Detects a diverged training: the loss or a weight is not finite, or all updates are skipped."""

from __future__ import annotations

import math
import time
from typing import Any, NoReturn

import tensorflow as tf
from absl import logging

from ctl.checkpoint.manager import CheckpointManager
from ctl.control.copies import check_copies
from ctl.control.eager import Origins, can_be_eager
from ctl.data.dataset import Dataset, NotResident
from ctl.distributed import workers
from ctl.distributed.watch import watchdog
from ctl.errors import CheckpointError, DivergedError, UsageError
from ctl.phases import labels
from ctl.phases.loss_accumulator import CallResult
from ctl.step import TrainStep

# Skipped updates in a row after which a run is lost. The loss scale needs at most 15 halvings from
# its initial value to 1, so more skips than that are not its search for a scale.
_MOST_SKIPPED = 100

_SEARCH_SECONDS = 3.0  # for an example that is not finite

_REMEDY = "try a lower learning rate, clipping (--clip_norm) or --on_nan=skip"
_REMEDY_OF_SKIPPED = "try a lower learning rate or clipping (--clip_norm)"


class Divergence:
    """Checks the steps of each call of a built ``step`` on ``dataset``. The message names the last
    good one of the ``checkpoints``, if any."""

    def __init__(self, step: TrainStep, dataset: Dataset, checkpoints: CheckpointManager | None):
        self._step, self._dataset = step, dataset
        self._checkpoints = checkpoints
        self._skipped_in_a_row = 0
        self._first = True
        self._finite_until = -1  # the last step at which the weights were found finite
        self.origins = Origins()  # of NaN and Inf in steps without graphs

    def check(self, step: int, steps: int, loss: float, outcome: CallResult, skipped: int) -> None:
        """Checks one call of the loop. All workers must call it.

        Args:
            step: global step that the call should have ended at.
            steps: number of steps of the call.
            loss: mean loss of these steps.
            outcome: of the call.
            skipped: number of these steps whose update was skipped.

        Raises:
            DivergedError: ``loss`` is not finite, 100 or more updates in a row were skipped, or the
                replicas differ after the first call (see `check_copies`).
            UsageError: the steps were not counted, the replicas differ after the first call (see
                `check_copies`), or a label is not a class.
        """
        counted = int(outcome.step)
        if counted != step:
            raise UsageError(
                f"{steps} steps were run to step {step}, but the global step is {counted}: does "
                f"{type(self._step).__name__} call self.apply()?"
            )
        if self._first:
            check_copies(self._step)
            self._first, self._finite_until = False, step - steps
        if not math.isfinite(loss):
            bad = self._first_bad(step - steps, outcome.finite)
            self._end(f"the loss is {loss} at step {bad}", self._remedy(self._finite_until, bad))
        self._skipped_in_a_row = self._skipped_in_a_row + skipped if skipped == steps else 0
        if self._skipped_in_a_row >= _MOST_SKIPPED:
            self._end(
                f"the last {self._skipped_in_a_row} updates, up to step {step}, were skipped "
                "because their gradients were not finite",
                _REMEDY_OF_SKIPPED,
            )

    def check_weights(self, step: int) -> None:
        """Checks the weights of ``step``, but for embedding tables that are trained by rows. All
        workers must call it. Losses need not tell: on a CPU, relu makes 0 of a NaN; and a call that
        reached the end of the data has none.

        Raises:
            DivergedError: a weight is not finite.
        """
        if step == self._finite_until:
            return
        for variable in self._step.trainable_variables:
            if variable in self._step.tables or tf.reduce_all(tf.math.is_finite(variable)):
                continue
            self._end(
                f"{variable.name.removesuffix(':0')} is not finite at step {step}",
                self._remedy(self._finite_until, step),
            )
        self._finite_until = step

    def _remedy(self, begin: int, end: int) -> str:
        """What to do; it names an example that has a NaN, if one of the steps before ``end``, or
        this one, and after ``begin`` had it, and a search for some seconds finds it."""
        deadline = time.monotonic() + _SEARCH_SECONDS
        steps = range(end, max(begin, 0), -1)
        if not isinstance(self._dataset, NotResident):
            steps = steps[:1]  # one look is at all examples
        with watchdog.host("the data of a batch"):
            for step in steps:
                if examples := labels.not_finite(self._dataset, step):
                    return f"{examples}: mend the data, or leave them out"
                if time.monotonic() > deadline:
                    break
        return _REMEDY_OF_SKIPPED if self._step.on_nan == "skip" else _REMEDY

    def _first_bad(self, begin: int, finite: Any) -> int:
        """The first step after ``begin`` whose loss is not finite."""
        step, strategy = self._step, self._step.strategy
        counts = strategy.experimental_local_results(finite)
        bad = workers.earliest(strategy, begin + 1 + min(int(c) for c in counts))
        device = step.model.trainable_variables[0].value.device.upper()
        if step.jit_compile or "CPU" not in device:  # there, a wrong label becomes NaN
            with watchdog.host("the labels of a batch"):
                step.check_labels(self._dataset, bad)
        return bad

    def _end(self, what: str, remedy: str = _REMEDY) -> NoReturn:
        good = None
        if self._checkpoints:
            try:
                self._checkpoints.wait()  # the pending save may be the last good checkpoint
            except CheckpointError as error:
                logging.error("%s", error)
            good = self._checkpoints.latest()
        if found := str(self.origins):
            what += f"; {found}"
        elif remedy in (_REMEDY, _REMEDY_OF_SKIPPED) and can_be_eager(self._step.strategy):
            again = "from there" if good else "again"
            remedy += f"; train {again} with --eager (eager=True) to see which operation makes it"
        workers.raise_together(
            self._step.strategy,
            DivergedError(
                f"{what}; last good checkpoint: {good.path if good else 'none'}; {remedy}"
            ),
        )
