"""Evaluation on every replica of a strategy."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf

from ctl.base.names import check_name
from ctl.base.signals import StopRequested
from ctl.base.tf_internals import QuietMethod
from ctl.base.tracebacks import hides_frames
from ctl.control.eager import without_graphs
from ctl.control.pace import Pace
from ctl.data.adapters import as_dataset
from ctl.data.dataset import on_replica
from ctl.data.feed import open_batches, waiting_for
from ctl.distributed import gathers, local_batch, workers
from ctl.distributed.watch import watchdog
from ctl.errors import UsageError
from ctl.phases import labels
from ctl.phases.base_step import EvalStep, build_model
from ctl.phases.checks import check_step_kind, warn_of_outputs
from ctl.phases.metrics import makes_variables_late
from ctl.phases.trace_guards import TraceGuards

# Takes the number of finished batches and the number of all batches (None if unknown).
OnProgress = Callable[[int, int | None], None]


class Evaluator:
    """Evaluates a model on every example of a dataset exactly once, on any number of replicas.

    Args:
        step: the step to evaluate with. Create its model and metrics in ``strategy.scope()``.
        dataset: what `ctl.data.as_dataset` takes: a dataset of `ctl.data`, arrays ``(x, y)``, a
            `keras.utils.PyDataset`, or a finite `tf.data.Dataset` of global batches.
        strategy: by default the current strategy.
        others: more datasets by name. They are evaluated after ``dataset``; their results are
            called ``name/loss``, ``name/accuracy``.

    Raises:
        UsageError: ``dataset`` is not a dataset, or a variable was created outside the scope.
    """

    def __init__(
        self,
        step: EvalStep,
        dataset: Any,
        *,
        strategy: tf.distribute.Strategy | None = None,
        others: Mapping[str, Any] | None = None,
    ):
        check_step_kind(step, EvalStep, "ctl.Evaluator")
        self.step = step
        self.dataset = as_dataset(dataset, training=False)
        self.strategy = strategy or tf.distribute.get_strategy()
        step.check_scope(self.strategy)
        with workers.watching_variables(self.strategy):
            build_model(step, self.strategy, self.dataset)
            step.logged.create(self.strategy)
        step.check_labels(self.dataset)
        examples, batch_size = self.dataset.num_examples, self.dataset.global_batch_size
        self._batches: int | None = None
        if examples is not None and batch_size is not None:
            self._batches = math.ceil(examples / batch_size)
        self._iterator: Any = None
        self._resident: Any = None
        self._pace = Pace()
        self.others = {name: self.on(dataset) for name, dataset in (others or {}).items()}

    @functools.cached_property
    def _guards(self) -> TraceGuards:
        """Made for the first trace: until then, a loop may change how tables are looked up, or
        refuse what `warn_of_outputs` says."""
        warn_of_outputs(self.step)
        return TraceGuards(self.step)

    @property
    def datasets(self) -> list[Any]:
        """``dataset``, and the datasets of ``others``."""
        return [self.dataset, *(other.dataset for other in self.others.values())]

    def on(self, dataset: Any) -> Evaluator:
        """Returns an evaluator of the same model on another ``dataset``."""
        return Evaluator(self.step, dataset, strategy=self.strategy)

    def check_result(self, what: str, name: str) -> None:
        """Raises `UsageError`, before an evaluation, unless ``name`` will be one of its results.
        ``what`` describes the name. All workers must call it."""
        check_name(what, name, self.known_results(name))

    def known_results(self, name: str) -> list[str]:
        """The names that results of an evaluation will have. A step of one's own may log more than
        its metrics, so it is traced where these have no ``name``; all workers must call it."""
        known = ["loss", *self.step.results()]
        known += [f"{which}/{each}" for which in self.others for each in known]
        if name not in known and type(self.step) is not EvalStep:
            with local_batch.translate_graph_checks():
                self.trace()
            logged = self.step.logged.names
            known += [*logged, *(f"{which}/{each}" for which in self.others for each in logged)]
        return known

    @hides_frames
    def trace(self) -> None:
        """Traces the graph that `run` then uses: a mistake is known before the training. Runs
        nothing, but for a batch if a metric makes variables in its first update. With several
        workers, all of them must call it."""
        self._iterator = self._iterator or self._start()
        report, version = self._pace.worker_report(False), self._guards.version_for(self.step)
        arguments = (self._iterator, self._resident, tf.constant(1), report, version)
        if any(makes_variables_late(metric) for metric in self.step.all_metrics()):
            self._eval_steps(*arguments)  # TensorFlow makes variables in a loop only as it runs it
            self._iterator = None
        else:
            self._eval_steps.get_concrete_function(*arguments)
        self._guards.snapshot(self.step, ran=True)
        for other in self.others.values():
            other.trace()

    @hides_frames
    def run(
        self,
        on_progress: OnProgress | None = None,
        asked_to_stop: Callable[[], bool] = lambda: False,
        *,
        eager: bool = False,
    ) -> dict[str, float]:
        """Evaluates once. With several workers, all of them must call it.

        Args:
            on_progress: called after each group of batches, see `OnProgress`.
            asked_to_stop: if it returns True on any worker, the evaluation stops on all workers.
            eager: evaluates without graphs, see `ctl.Loop.train`.

        Returns:
            ``loss`` (the mean over valid examples) and each metric, by name; then the results of
            ``others``.

        Raises:
            UsageError: a dataset has no valid examples.
            StopRequested: a worker was asked to stop.
        """
        results = self._run(on_progress, asked_to_stop, eager)
        for dataset_name, other in self.others.items():
            other_results = other.run(on_progress, asked_to_stop, eager=eager)
            results |= {f"{dataset_name}/{name}": value for name, value in other_results.items()}
        return results

    def _run(
        self, on_progress: OnProgress | None, asked_to_stop: Callable[[], bool], eager: bool
    ) -> dict[str, float]:
        eval_steps = without_graphs(self._eval_steps) if eager else self._eval_steps
        self.step.reset_metrics()
        # If the length of the dataset is known, the dataset repeats and one iterator serves every
        # evaluation. A new iterator each time would cost start-up time and, in TensorFlow, memory.
        iterator, self._iterator = self._iterator or self._start(), None
        totals, done = [0.0, 0.0], 0
        while self._batches is None or done < self._batches:
            steps = 1
            alone = eager or gathers.one_step_per_call(self.strategy)
            if self._batches is not None and not alone:
                steps = min(self._pace.steps(), self._batches - done)
            start = time.perf_counter()
            report = self._pace.worker_report(asked_to_stop())
            version = self._guards.version_for(self.step)
            place_of = functools.partial(labels.place_of, self.dataset, done + 1, done + steps)
            try:
                first = self._pace.will_trace((version, eager))
                with (
                    watchdog.collective("the evaluation", first=first),
                    local_batch.translate_graph_checks(place_of),
                ):
                    sums = eval_steps(iterator, self._resident, tf.constant(steps), report, version)
                    loss, examples, asked, pace, *logged = sums.numpy().tolist()
            except tf.errors.OutOfRangeError:
                if self._batches is not None:
                    raise
                iterator = None
                break
            self._guards.snapshot(self.step, ran=True)
            self._pace.record_duration(
                time.perf_counter() - start, steps, workers.mean(self.strategy, pace)
            )
            if asked or (not workers.is_multi_worker(self.strategy) and asked_to_stop()):
                raise StopRequested
            done += steps
            totals = [totals[0] + loss, totals[1] + examples]
            self.step.logged.collect(logged, self.strategy.num_replicas_in_sync)
            if on_progress:
                on_progress(done, self._batches)
        self._iterator = iterator
        if not totals[1]:
            raise UsageError("the evaluation dataset holds no valid examples")
        return {"loss": totals[0] / totals[1], **self.step.results()}

    def _start(self) -> Any:
        if self._resident is None:
            self._resident = self.dataset.resident(self.strategy)
        return open_batches(self.dataset, self.strategy, again=self._batches is not None)

    @QuietMethod
    def _eval_steps(
        self, iterator: Any, resident: Any, steps: tf.Tensor, report: tf.Tensor, version: int
    ) -> tf.Tensor:
        sums = self.strategy.run(lambda: tf.zeros([2]))
        for _ in tf.range(steps):
            sums = self.strategy.run(self._one_step, args=(sums, iterator.get_next(), resident))
        sums = self.strategy.run(
            lambda sums: tf.concat([sums, report, self.step.logged.terms()], 0), args=(sums,)
        )
        return self.strategy.reduce(tf.distribute.ReduceOp.SUM, sums, axis=None)

    def _one_step(self, sums: tf.Tensor, element: Any, resident: Any) -> tf.Tensor:
        with waiting_for(element):
            return sums + self.step.__call__(on_replica(self.dataset, element, resident))
