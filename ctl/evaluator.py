"""Evaluation over a strategy."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from ctl import share, workers
from ctl.control.pace import Pace
from ctl.control.signals import StopRequested
from ctl.data.feed import distribute
from ctl.data.global_batches import as_dataset
from ctl.errors import UsageError
from ctl.step import EvalStep
from ctl.watch import watchdog

SUM = tf.distribute.ReduceOp.SUM


class Evaluator:
    """Evaluates a model on every example of a dataset exactly once, on any number of replicas.

    Args:
        step: what one replica does; made in the strategy's scope, as its model and metrics.
        dataset: see `ctl.data`; or a `tf.data.Dataset` of global batches.
        strategy: by default the current one.
    """

    def __init__(
        self,
        step: EvalStep,
        dataset: Any,
        *,
        strategy: tf.distribute.Strategy | None = None,
    ):
        self.step = step
        self.dataset = as_dataset(dataset, training=False)
        self.strategy = strategy or tf.distribute.get_strategy()
        step.check_scope(self.strategy)
        examples = self.dataset.num_examples
        self._batches = None
        if examples is not None:
            self._batches = math.ceil(examples / self.dataset.global_batch_size)
        self._iterator = None
        self._resident = None
        self._pace = Pace()

    def run(
        self,
        on_wake: Callable[[int, int | None], None] | None = None,
        asked_to_stop: Callable[[], bool] = lambda: False,
    ) -> dict[str, float]:
        """Evaluates once; with several workers every one must.

        Args:
            on_wake: called between calls with the batches done and in all (None when unknown).
            asked_to_stop: when it returns True on any worker, evaluation ends on all.

        Returns:
            ``loss`` (the mean over examples) and each metric, by name.
        """
        self.step.reset_metrics()
        # One iterator serves every evaluation: it goes round a dataset whose length is known. A new
        # one each time would cost start-up and, in TensorFlow, memory.
        iterator, self._iterator = self._iterator or self._start(), None
        totals, done = [0.0, 0.0], 0
        while self._batches is None or done < self._batches:
            steps = 1 if self._batches is None else min(self._pace.steps(), self._batches - done)
            start = time.perf_counter()
            report = self._pace.report(asked_to_stop())
            try:
                with (
                    watchdog.collective("the evaluation", first=self._pace.traces()),
                    share.refusals(),
                ):
                    sums = self._eval_steps(iterator, self._resident, tf.constant(steps), report)
                    *sums, asked, pace = sums.numpy()
            except tf.errors.OutOfRangeError:
                if self._batches is not None:
                    raise
                iterator = None
                break
            self._pace.took(time.perf_counter() - start, steps, workers.mean(self.strategy, pace))
            if asked or (not workers.is_multi_worker(self.strategy) and asked_to_stop()):
                raise StopRequested
            done += steps
            totals = [a + float(b) for a, b in zip(totals, sums, strict=True)]
            if on_wake:
                on_wake(done, self._batches)
        self._iterator = iterator
        if not totals[1]:
            raise UsageError("the evaluation dataset holds no valid examples")
        with watchdog.collective("reading the metrics"):
            return {"loss": totals[0] / totals[1], **self.step.results()}

    def _start(self) -> Iterator:
        if self._resident is None:
            self._resident = self.dataset.resident(self.strategy)
        batches = self.dataset.batches()
        if self._batches is not None:
            batches = batches.repeat()
        return distribute(self.strategy, batches)

    @tf.function
    def _eval_steps(
        self, iterator: Iterator, resident: Any, steps: tf.Tensor, report: tf.Tensor
    ) -> tf.Tensor:
        sums = self.strategy.run(lambda: tf.zeros([2]))
        for _ in tf.range(steps):
            sums = self.strategy.run(self._one_step, args=(sums, next(iterator), resident))
        sums = self.strategy.run(lambda sums: tf.concat([sums, report], 0), args=(sums,))
        return self.strategy.reduce(SUM, sums, axis=None)

    def _one_step(self, sums: tf.Tensor, element: Any, resident: Any) -> tf.Tensor:
        return sums + self.step(self.dataset.on_replica(element, resident))
