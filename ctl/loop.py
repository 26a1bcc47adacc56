"""The explicit training loop: batches in, one step on every replica, losses combined.

Read `Steps.run` first: it is the custom training loop. From a batch to an update, each call inside
the one above it:

    Loop.train                           how many steps to run; what follows from them
      Steps.call                         calls `run`; TensorFlow looks for its trace once
        Steps.run                        one graph: iterator, strategy.run, strategy.reduce(SUM)
          next_block                     `ctl.data.feed`: some batches of the iterator
          Steps._one_step                on each replica: its part of one batch
            TrainStep.__call__           forward, backward, reduce, clip, apply
              TrainStep.forward_backward   loss and gradients of the replica
              TrainStep.reduce           gradients, and what must be summed with them
                TrainStep.sum_gradients  to override for another collective
                  ctl.reduce.all_reduce  in packs: context.all_reduce(SUM, ...)  # <- here
                Tables.sum_rows          of embedding tables: rows are gathered, then summed
              TrainStep.clip             what all replicas have together
              TrainStep.apply            all replicas call it together, once
                Updater.__call__         `ctl.phases.apply`: updates or skips; counts the step
                  Updater._update        on each device of the strategy; by XLA, or not
                    Updater._update_rows   of tables, those rows that have a gradient
                    Updater._update_device   the update of each variable, by the optimizer

`Steps._strategy_run` chooses what every replica runs. With ``jit_compile`` (`ctl.control.jit`), XLA
compiles the whole step on one replica, and forward and backward on several. With several workers,
the observer of the step is `ctl.phases.marks.Marks`: its ``all_reduce`` calls
`ctl.reduce.all_reduce` and stamps each pack.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf
from absl import logging

from ctl.base.actions import STOP, Action, EvalAction, Status, name_of
from ctl.base.autograph import graph_function
from ctl.base.bounds import checked
from ctl.base.foreign_names import missing_attribute, refuses_foreign
from ctl.base.interactive import is_shell
from ctl.base.ledger import LEDGER
from ctl.base.signals import Signals, StopRequested
from ctl.base.tf_internals import QuietMethod
from ctl.base.tracebacks import hides_frames
from ctl.checkpoint.manager import CheckpointManager, Saved
from ctl.control import jit, source_hash
from ctl.control.agreement import agree
from ctl.control.copies import check_copies
from ctl.control.divergence import Divergence
from ctl.control.eager import check_eager, without_graphs
from ctl.control.evaluator import Evaluator, OnProgress
from ctl.control.flight import attach_progress_marks, watched_call
from ctl.control.input_wait import InputWait
from ctl.control.kept import Kept
from ctl.control.keras_callbacks import counting_epochs
from ctl.control.own_saves import OwnSaves
from ctl.control.pace import Pace
from ctl.control.scalars import Scalars, run_actions, status_of, steps_until_due
from ctl.control.state import TrainState
from ctl.data.adapters import as_dataset
from ctl.data.dataset import Dataset, on_replica
from ctl.data.epochs import (
    completed,
    end_of,
    end_of_training,
    evaluation_interval,
    steps_per_epoch,
)
from ctl.data.errors import translate_data_errors
from ctl.data.feed import Block, Feed, batch_of, next_block, open_feed, waiting_for
from ctl.data.global_batches import comparable
from ctl.distributed import gathers, local_batch, workers
from ctl.distributed.cluster import elastic
from ctl.distributed.watch import watchdog
from ctl.errors import PeerError, Preempted, UsageError
from ctl.logs.history import History
from ctl.logs.progress import showing
from ctl.phases import freezing, labels, noinline
from ctl.phases.base_step import build_model
from ctl.phases.checks import (
    check_arguments,
    check_evaluator,
    check_step_kind,
    naming_eval_step,
    translate_trace_errors,
)
from ctl.phases.loss_accumulator import CallResult, LossAccumulator, no_losses
from ctl.phases.observer import NO_OBSERVER
from ctl.phases.plan.collectives import plan_of_step
from ctl.phases.plan.plan import Plan
from ctl.phases.table_plan import plan_tables
from ctl.phases.trace_guards import TraceKey
from ctl.reduce import SUM
from ctl.schedule.patience import check_watched, remembered, usual_best
from ctl.step import TrainStep

_SAVE_SECONDS = 60.0  # between two saves into a directory


class Steps:
    """Runs steps on every replica.

    Args:
        step: the step, already built.
        dataset: source of the global batches.
        strategy: the strategy that ``step`` was built for.
    """

    def __init__(self, step: TrainStep, dataset: Dataset, strategy: tf.distribute.Strategy):
        self.step = step
        self.dataset = dataset
        self.strategy = strategy
        self._resident: Any = None
        self._batches_per_block = 1
        self._traces: dict[TraceKey, tf.types.experimental.ConcreteFunction] = {}  # of a feed

    def open(self, start_step: int) -> Feed:
        """Opens a feed of the global batches from ``start_step`` on."""
        if self._resident is None:
            self._resident = self.dataset.resident(self.strategy)
        elif hasattr(self.dataset, "rewind"):
            self.dataset.rewind()
        self._traces = {}
        feed = open_feed(self.dataset, self.strategy, start_step, self._resident)
        self._batches_per_block = feed.batches_per_block
        return feed

    def reserve(self, most: int) -> int:
        """Returns how many steps, ``most`` at most, the next call of `run` may run. Call it before
        each call."""
        return self.step.tables.reserve(1 if gathers.one_step_per_call(self.strategy) else most)

    def call(
        self, feed: Feed, steps: tf.Tensor, report: tf.Tensor, trace_key: TraceKey
    ) -> CallResult:
        """Calls `run`, by the trace that an earlier call with this ``trace_key`` has found."""
        arguments = feed, steps, report, trace_key
        if tf.config.functions_run_eagerly():
            return self.run(*arguments)
        if trace := self._traces.get(trace_key):
            return trace(*arguments)
        result = self.run(*arguments)
        self._traces[trace_key] = self.run.get_concrete_function(*arguments)
        return result

    @QuietMethod
    def run(
        self, feed: Feed, steps: tf.Tensor, report: tf.Tensor, trace_key: TraceKey
    ) -> CallResult:
        """Runs ``steps`` (int32 scalar) steps on the batches of ``feed``.

        ``report`` (float32 [3], see `Pace.worker_report`) is summed over replicas. TensorFlow keeps
        one trace per ``trace_key``.
        """
        strategy, position = self.strategy, feed.position
        strategy_run, most = self._strategy_run()
        losses = strategy.run(no_losses)
        while steps > 0:
            block, position = next_block(feed, position, tf.minimum(steps, most))
            losses = strategy_run(args=(losses, block, feed.resident))
            steps -= block.end - block.first
        # Each replica divides its losses by the number of examples of all replicas, so their sum is
        # the mean loss. The reports of the workers share this reduction.
        replicas = strategy.num_replicas_in_sync
        totals = strategy.run(
            lambda losses: losses.totals(report, replicas, self.step.logged.terms()), (losses,)
        )
        sums, ended = strategy.reduce(SUM, totals, axis=None), tf.identity(self.step.global_step)
        rates = self.step.updater.learning_rates(ended - 1)
        return CallResult(sums, losses.finite, position, ended, rates)

    def graph_of_one(self, feed: Any) -> Callable[[], tf.types.experimental.ConcreteFunction]:
        """Returns a function that traces one step on one element of ``feed``, for XLA. The trace
        has no observer."""

        def one_step(element: Any, resident: Any) -> tf.Tensor:
            batch = batch_of(Block(element, 0, 1), 0, self._batches_per_block)
            return self.step.__call__(on_replica(self.dataset, batch, resident))

        def traced() -> tf.types.experimental.ConcreteFunction:
            function = tf.function(lambda e: self.strategy.run(one_step, args=(e, feed.resident)))
            observer, self.step.observer = self.step.observer, NO_OBSERVER
            try:
                return function.get_concrete_function(feed.iterator.element_spec)
            finally:
                self.step.observer = observer

        return traced

    def _one_step(
        self, step: Callable, losses: LossAccumulator, block: Block, resident: Any
    ) -> LossAccumulator:
        """Runs one step on one replica, with the first batch of ``block``."""
        batch = batch_of(block, block.first, self._batches_per_block)
        with waiting_for(batch):
            batch = self.step.observer.begin(on_replica(self.dataset, batch, resident))
            loss, count = step(batch)
            self.step.observer.end()
        return losses.add(loss, count)

    def _strategy_run(self) -> tuple[Callable[..., LossAccumulator], int]:
        """Returns what runs the step on every replica, and the most batches that it takes at once.

        * XLA, one replica, no time stamps: XLA compiles a loop over the batches of a block.
        * XLA, one replica, time stamps: XLA compiles the step, and the stamps stay outside.
        * Otherwise: the step as it is. With XLA on several replicas, `TrainStep._gradient_fn` has
          forward and backward compiled.
        """
        step: Any = self.step
        # A single replica has nothing to reduce.
        whole = step.jit_compile and step.single_replica
        if whole and not step.observer.stamps:
            steps = graph_function(self._steps_of_block, jit_compile=True)
            return functools.partial(self.strategy.run, steps), self._batches_per_block
        call = graph_function(step.__call__, jit_compile=True) if whole else step.__call__
        run = functools.partial(self.strategy.run, functools.partial(self._one_step, call))
        return (noinline.noinline(run) if step.noinline else run), 1

    def _steps_of_block(
        self, losses: LossAccumulator, block: Block, resident: Any
    ) -> LossAccumulator:
        def body(first: tf.Tensor, losses: LossAccumulator) -> tuple[tf.Tensor, LossAccumulator]:
            left = block._replace(first=first)
            return first + 1, self._one_step(self.step.__call__, losses, left, resident)

        # With `tf.range`, XLA would compile once per length.
        return tf.while_loop(lambda first, _: first < block.end, body, (block.first, losses))[1]


def _manager(directory: str | os.PathLike[str], evaluator: Evaluator | None) -> CheckpointManager:
    return CheckpointManager(
        directory,
        save_every_seconds=_SAVE_SECONDS,
        best_metric=usual_best(evaluator),
        lock_timeout=elastic.lock_timeout(),
    )


class Loop:
    """Trains, evaluates, saves and resumes.

    Args:
        step: the step to train with. The loop builds it.
        dataset: a dataset of `ctl.data`; arrays ``(x, y)``, with ``global_batch_size``; a
            `keras.utils.PyDataset`; or a `tf.data.Dataset` of global batches (repeated).
        global_batch_size: examples of a batch, of all replicas. For data that do not tell it.
        strategy: by default the current strategy.
        schedule: learning rate as a function of the step; by default the optimizer's.
        evaluator: used by `evaluate`.
        checkpoints: a directory, or a `CheckpointManager`; used by `save` and `restore`. Into a
            directory, `train` saves once a minute, at its end and at Ctrl-C; for a manager, see its
            ``save_every_seconds``. `train_and_evaluate` saves at each evaluation, into either.
        actions: called with a `Status` after each call of `Steps.run`. If an action has a method
            ``steps_until_due(step) -> int`` (see `ctl.actions.Every`), calls end where it is due.
        eval_actions: called with ``(step, results)`` after each evaluation; may return `STOP`. They
            run after `train_and_evaluate` has saved ``step``; if they or callbacks change the
            state of the step, it is saved again.
        steps_per_loop: maximum steps per call; by default, as many as fit in half a second.

    Attributes:
        history: what was trained and evaluated, see `ctl.logs.history.History`.
        stopped: whether an action has ended the training. If so, `train` runs no step.
            `train_and_evaluate` records it in the checkpoint, and `restore` sets it. Set it to
            False to train on.

    Raises:
        UsageError: see `ctl.data.as_dataset`, `ctl.local_batch.check_sizes` and
            `TrainStep.build`.
    """

    @refuses_foreign
    def __init__(
        self,
        step: TrainStep,
        dataset: Any,
        *,
        global_batch_size: int | None = None,
        strategy: tf.distribute.Strategy | None = None,
        schedule: Callable[[Any], Any] | None = None,
        evaluator: Evaluator | None = None,
        checkpoints: CheckpointManager | str | os.PathLike[str] | None = None,
        actions: Sequence[Action] = (),
        eval_actions: Sequence[EvalAction] = (),
        steps_per_loop: int | None = None,
    ):
        check_step_kind(step, TrainStep, "ctl.Loop")
        check_arguments(
            evaluator, checkpoints, schedule, actions=actions, eval_actions=eval_actions
        )
        self.step = step
        self.dataset = as_dataset(dataset, global_batch_size=global_batch_size)
        self.strategy = strategy or tf.distribute.get_strategy()
        # The first call is traced. Only then is it known whether `gathers.one_step_per_call`.
        alone = gathers.by_collectives(self.strategy)
        self._pace = Pace(checked("steps_per_loop", steps_per_loop), first_alone=alone)
        self.evaluator = evaluator
        if isinstance(checkpoints, str | os.PathLike):
            checkpoints = _manager(checkpoints, evaluator)
        self.checkpoints = checkpoints
        self.actions = list(actions)
        self.eval_actions = [*remembered(schedule), *eval_actions]
        size, replicas = self.dataset.global_batch_size, self.strategy.num_replicas_in_sync
        local_batch.check_sizes(size, replicas, step.accumulate_steps)
        self._several_workers = workers.watch(self.strategy)
        with workers.watching_variables(self.strategy):
            build_model(step, self.strategy, self.dataset)
        step.check_labels(self.dataset)
        plan_tables(step, self.strategy, self.dataset)
        with workers.watching_variables(self.strategy):
            step.build(self.strategy, schedule)
        self.state = TrainState(step, self.dataset, self.eval_actions)
        if evaluator:
            check_evaluator(step, self.dataset, evaluator)
        check_watched(self.eval_actions, evaluator, getattr(checkpoints, "selects_by", None))
        if checkpoints:
            watchdog.finish_first(self._finish_saving)
            fingerprint = comparable(self.dataset)
            checkpoints.begin_run(self.state.variables(), source_hash.identity(step), fingerprint)
        self.signals = Signals()
        self.steps = Steps(step, self.dataset, self.strategy)
        self._flight = attach_progress_marks(step) if self._several_workers else None
        self._flights: dict[Any, Any] = {}  # those of other settings
        scalars = self.scalars = Scalars(step, size)
        self.history = History(lambda: scalars.latest, reads=not self._several_workers)
        self.watchers: list[Any] = [self.history]  # called after all actions; epochs before it
        self._bars: list[Any] = []  # of progress: one, while it is shown
        self._kept = Kept(step, self.state, checkpoints)
        self._own_saves = OwnSaves(checkpoints, self._pace)
        self._divergence = Divergence(step, self.dataset, checkpoints)
        self._input_wait = InputWait(self.dataset)
        self._is_chief = workers.is_chief(self.strategy)
        self.feed: Any = None  # opened by `begin`
        self._feed_step = -1
        self._doing = ""  # what `translate_failures` is for, at present
        self._agreed: Any = None  # settings of the step
        self._evaluated: dict[str, float] | None = None  # results at the current step
        self.stopped, self._ended_by = False, ""  # by any action, and which
        self._asked_by = ""  # an action of this worker has asked to end the training
        jit.decide(self.step, self.dataset)
        step.attach(self)
        step.trace_guards.snapshot(step)

    if not TYPE_CHECKING:  # which would take any name then

        def __getattr__(self, name: str) -> Any:
            raise missing_attribute(self, name)

    # Training -----------------------------------------------------------------------------------

    @property
    def global_step(self) -> int:
        """Number of global batches trained on so far."""
        return int(self.step.global_step.numpy())

    @hides_frames
    @refuses_foreign
    def train(
        self,
        until: int | None = None,
        *,
        epochs: float | None = None,
        total: int | None = None,
        progress: bool | None = None,
        eager: bool = False,
        callbacks: Sequence[keras.callbacks.Callback] | None = None,
    ) -> dict[str, float]:
        """Trains until the global step is ``until``, or an action calls `Status.stop`.

        A loop that saves by itself (see ``checkpoints`` of the class) has saved when it returns,
        unless ``total`` says that the training goes on.

        Args:
            until: global step at the end of this call.
            epochs: instead of ``until``, epochs at the end of this call. Like steps, they count
                from the start of the training: after a resume, ``epochs=3`` trains what is left.
            total: global step at the end of the whole training, of which this call is a part; by
                default ``until``. Actions see ``Status.final`` there.
            progress: whether to show a progress bar; by default, if standard output is a terminal
                or the cell of a notebook, no other bar is shown, and not ``eager``.
            eager: runs the same steps without graphs, one per call and without XLA, so that
                ``print``, ``breakpoint()`` and NumPy work in the step, and an error names what
                made a NaN. The numbers are the same up to rounding. Slow; not with several workers,
                parameter servers or TPUs.
            callbacks: of Keras, see `ctl.control.keras_callbacks.Epochs`; the same on all workers.

        Returns:
            Scalars of the last epoch, with ``epochs`` or ``callbacks``; else since the training
            began, or an action called `Status.reset`. An empty dict if ``total`` was not reached,
            unless an action ended the training or the data ended.

        Raises:
            DivergedError: the loss is not finite, or too many updates in a row were skipped.
            Preempted: a signal arrived (see `stop_on_signals`); the state was saved, if there are
                checkpoints. In a notebook or a shell, the stop button or Ctrl-C does the same, with
                `KeyboardInterrupt`; the next call goes on. So does Ctrl-C in a script, if the loop
                saves by itself.
            CheckpointError: a save failed.
            PeerError: another worker was lost.
            UsageError: the workers do not agree, the step does not fit the batches, a label is not
                a class, or a change would have no effect (`_check`,
                `ctl.phases.trace_guards.TraceGuards`).
        """
        until = end_of_training(until, epochs, self.dataset)
        total = until if total is None else checked("total", total)
        scalars: dict[str, float] = {}
        run = without_graphs(self.steps.run, self._divergence.origins) if eager else self.steps.call
        step = self.global_step
        runs = self._runs(step, until)
        with (
            self._showing(progress, runs, eager),
            counting_epochs(callbacks, self, total, None, epochs, self._say),
            self.translate_failures("training"),
            self._saving(until, total),
        ):
            if runs:
                if eager:
                    check_eager(self.step)
                self.begin(step)
            while step < until and not self.stopped:
                steps = min(1 if eager else self._pace.steps(), until - step)
                due = steps_until_due([*self.actions, *self.watchers], step)
                steps = self.steps.reserve(min(steps, due))
                report = self._pace.worker_report(self.signals.arrived, bool(self._asked_by))
                if (key := self.step.trace_key)[1:] != self._agreed:  # an action changed a setting
                    self.begin(step)
                    key = self.step.trace_key
                skipped_before = self.step.updater.skipped_so_far()
                first = self._pace.will_trace((key, eager))
                call = watched_call(self.step, step, steps, self._flight, first)
                self._feed_step = -1  # a call that fails has taken an unknown number of batches
                start = time.perf_counter()
                try:
                    with call:
                        outcome = run(self.feed, tf.constant(steps), report, key)
                        totals = outcome.totals()
                except tf.errors.OutOfRangeError:
                    return self._ended(step, total)
                seconds = time.perf_counter() - start
                self.step.trace_guards.snapshot(self.step, ran=True)
                self.feed = self.feed._replace(position=outcome.position)
                step = self._feed_step = step + steps
                skipped = self.step.updater.skipped_so_far() - skipped_before
                self._divergence.check(step, steps, totals.loss, outcome, skipped)
                self._evaluated, self.scalars.rates = None, outcome.rates
                self.scalars.add(totals, skipped)
                self.history.add(totals.loss, totals.examples)
                mean = workers.mean(self.strategy, totals.pace)
                self._input_wait.add(outcome.position, seconds, first)
                if self._pace.record_duration(seconds, steps, mean):
                    self.scalars.add_time(seconds, steps)
                if totals.end:
                    self._stop(step)
                scalars = self._between_calls(
                    step, step if self.stopped else total, seconds / steps
                )
                if totals.stop or (self.signals.arrived and not self._several_workers):
                    raise StopRequested
        return scalars

    def _runs(self, step: int, until: int, warns: bool = True) -> bool:
        """Whether there is a step to run from ``step`` on. ``warns`` if not."""
        if step < until and not self.stopped:
            return True
        if warns and step >= until:
            logging.warning(
                "no step is run: the loop is at step %d, not before %d; both count from the start "
                "of the training, so give more epochs or a later step",
                *(step, until),
            )
        elif warns:
            logging.warning(
                "no step is run: %s ended the training at step %d; to go on, set loop.stopped = "
                "False (--extend)",
                *(self._ended_by or "an action or a callback", step),
            )
        return False

    def _ended(self, before: int, total: int) -> dict[str, float]:
        """Handles the end of the data in a call that began at step ``before``."""
        step = self._feed_step = self.global_step
        self._evaluated = self._evaluated if step == before else None
        self.scalars.rates = self.step.updater.learning_rates(step - 1)
        workers.check_all_ended(self.strategy, step)
        if step == 0:
            raise UsageError("the training data have no examples: look at what filters them")
        with watchdog.collective("the end of the data", first=True):
            self.scalars.add_left()
        lost = f"; the losses of its last {step - before} are not logged" if step > before else ""
        logging.warning("the dataset ended after step %d of %d%s", step, total, lost)
        return self._between_calls(step, step, 0.0)

    def traced(self) -> tf.types.experimental.ConcreteFunction:
        """Returns the graph that `train` runs, and traces it if necessary. Runs no step."""
        if self.feed is None:
            self.feed = self.steps.open(self.global_step)  # the workers have not agreed on it yet
        report = self._pace.worker_report(False, False)
        with LEDGER.spend("compile"), translate_trace_errors(self.step):
            graph = self.steps.run.get_concrete_function(
                self.feed, tf.constant(1), report, self.step.trace_key
            )
        self.step.trace_guards.snapshot(self.step, ran=True)
        return graph

    def plan(self, *, xla: bool = False) -> Plan:
        """Reads from the graph what one step moves between replicas. Runs no step.

        With ``xla``, the plan includes XLA's program of the whole step, or a note why XLA cannot
        compile it.
        """
        graph = self.traced()
        return plan_of_step(self.step, graph, self.steps.graph_of_one(self.feed) if xla else None)

    def begin(self, step: int) -> None:
        """Opens the batches from ``step`` on.

        Several workers check that they agree (`agree`), at first and after each change of settings.
        All workers must make the same changes.
        """
        key = self.step.trace_key  # before `decide`, which may trace the model
        jit.decide(self.step, self.dataset)
        settings = key._replace(jit_compile=self.step.jit_compile)[1:]
        self._check()
        self.step.updater.renew_copies()
        if (self._feed_step, self._agreed) == (step, settings):
            return
        if self._feed_step != step:
            self.feed, self._feed_step = self.steps.open(step), step
        if self._several_workers:
            if self._agreed not in (None, settings):  # each trace keeps its marks
                self._flights[self._agreed] = self._flight
                self._flight = attach_progress_marks(self.step, self._flights.get(settings))
            agree(self.step, self.dataset, self.traced, self.plan)
        self._agreed = settings
        LEDGER.reach(step)

    def _check(self) -> None:
        """Refuses changes since the loop was made that would have no effect, and a run that was not
        restored.

        Raises:
            UsageError: layers were frozen or unfrozen; the step, the dataset, the strategy or the
                schedule was replaced; the learning rate of an optimizer with a schedule was set;
                ``jit_compile`` was set, and the model does not allow it; or the directory of the
                checkpoints has a run that was not restored.
        """
        step = self.step
        for name in ("step", "dataset", "strategy"):
            if getattr(self, name) is not getattr(self.steps, name):
                raise UsageError(f"the {name} of the loop has changed: make a new loop")
        for name in {"schedule", "steps_per_loop"} & vars(self).keys():
            raise UsageError(f"loop.{name} was set, which has no effect: make a new loop")
        if self.checkpoints:
            self.checkpoints.require_restored()
        step.trace_guards.check_rate(step)
        step.check_model()

    def train_only(self, parts: Sequence[Any] | None = None) -> None:
        """From the next call on, trains only the variables of ``parts``; None trains all. See
        `freezing.select_trainable`. Other variables keep their values and slots. All workers must
        call it at the same step."""
        self.step.trainable_mask = freezing.select_trainable(self.step, parts)

    def _between_calls(self, step: int, until: int, seconds_per_step: float) -> dict[str, float]:
        LEDGER.reach(step)
        if self.checkpoints and self._is_chief:
            self.checkpoints.check()
        status = status_of(step, until, seconds_per_step, self.dataset, self.scalars)
        if status.final:
            self._divergence.check_weights(step)
        self._run_actions(status)
        self._asked_by = self._asked_by or status.stopped_by
        if self._asked_by and not self._several_workers:  # several learn of it in the next call
            self._stop(step)
            if not status.final:
                status = dataclasses.replace(status, until=step, final=True)
                self._run_actions(status)
        if self._own_saves.are_due and not status.final:
            self._save_itself(step)
        self._kept.keep(step)
        self.scalars.ended = status.final
        return self.scalars.read_epoch() if status.final else {}

    def _run_actions(self, status: Status) -> None:
        """A bar shows the epoch, and comes before the history, which takes what it has read."""
        *epochs, history = self.watchers
        run_actions([*self.actions, *epochs], status)
        run_actions(self._bars, dataclasses.replace(status, scalars=self.scalars.read_epoch))
        run_actions([history], status)

    def _stop(self, step: int) -> None:
        self.stopped, self._ended_by = True, self._asked_by or "an action of another worker"
        self._asked_by = ""
        self._say(f"{self._ended_by} ended the training at step {step}")

    def _say(self, text: str) -> None:
        """To the log, and to who looks at a progress bar."""
        logging.info("%s", text)
        for bar in self._bars:
            bar.say(text)

    # Evaluation and state -----------------------------------------------------------------------

    @hides_frames
    def evaluate(
        self, on_progress: OnProgress | None = None, *, eager: bool = False
    ) -> dict[str, float]:
        """Evaluates, with the averaged weights if there are any; see `Evaluator.run`. Raises
        `Preempted` and `PeerError` as `train` does, `UsageError` if the loop has no evaluator."""
        evaluator = self._evaluator()
        # An evaluator of the user's need not take `eager`.
        run = functools.partial(evaluator.run, eager=True) if eager else evaluator.run
        check_copies(self.step)
        if self.feed:  # there was a step
            self._divergence.check_weights(self.global_step)
        with (
            LEDGER.spend("evaluation"),
            self.translate_failures("the evaluation"),
            watchdog.host("preparing the evaluation", self.global_step),
            self.step.updater.averaged(),
        ):
            results = run(on_progress, lambda: self.signals.arrived)
        step = self.global_step
        for action in [*self.eval_actions, *(watcher.evaluated for watcher in self.watchers)]:
            with watchdog.host("an action after the evaluation", step):
                if action(step, results) is STOP:
                    self._asked_by = self._asked_by or name_of(action)
        for bar in self._bars:
            bar.evaluated(step, results, steps_per_epoch(self.dataset))
        if workers.any_of(self.strategy, bool(self._asked_by)):
            self._stop(self.global_step)
        return results

    def _save_itself(self, step: int) -> None:
        self.save()
        self._own_saves.last_own = step

    @contextlib.contextmanager
    def _saving_changes(self, step: int) -> Iterator[None]:
        """Inside, ``step`` is evaluated. Saves it again if that has changed it: actions, callbacks,
        and layers that draw random numbers in an evaluation, too, as an LSTM with dropout."""
        chief_saves = bool(self.checkpoints) and self._is_chief
        unchanged = self.state.now() if chief_saves else None
        yield
        changed = bool(unchanged and not unchanged())
        if self.checkpoints and workers.any_of(self.strategy, changed):
            self._own_saves.last_own = step  # so that `save` replaces it
            self.save()

    @contextlib.contextmanager
    def _saving(self, until: int, total: int) -> Iterator[None]:
        """Inside, the loop trains to ``until``. Saves at the end of the whole training, and returns
        when the last save is on disk."""
        saves = self._own_saves
        saves.warn_if_closed()
        began = self.global_step if saves.are_on else 0
        yield
        if not saves.are_on or (step := self.global_step) == began:
            return
        data_ended = step < until
        if step >= total or self.stopped or data_ended:
            if saves.last != step:
                self._save_itself(step)
            self._annotate(step, wait=True)

    def save(self, metrics: dict[str, float] | None = None, *, wait: bool = False) -> None:
        """Saves the state and ``metrics`` in the background; with ``wait``, returns when they are
        on disk. Call it on all workers; the chief writes. Raises `CheckpointError` if a save
        failed, `UsageError` if the loop has no checkpoints; also as `check_copies` does."""
        checkpoints = self._checkpoints()
        step = self.global_step
        self._own_saves.note(step)
        with LEDGER.spend("saving"):
            self.state.collect()
            if not self._is_chief:
                return
            with watchdog.host("saving", step):
                check_copies(self.step, this_worker=True)
                state, changed = self.state.variables(), self.step.trace_guards.changed(self.step)
                anew = step == self._own_saves.last_own
                checkpoints.save(step, state, metrics, changed=changed, wait=wait, replace=anew)

    def restore(self, *, changed: bool = True, grow: bool = False) -> Saved | None:
        """Restores the last checkpoint (see `manifest.newest_first`) and returns it; None if there
        is none. Call it on all workers, which restore that of the chief. Training resumes bit for
        bit. With ``changed`` False, Python values stay as the program has set them (see
        `Saved.changed`). With ``grow``, embedding tables may have more rows than the checkpoint;
        those keep the values that the model gave them. Raises `CheckpointError` if none is intact,
        or if it does not fit or has another class of step; `UsageError` if the loop has no
        checkpoints, or an action calls it."""
        if self._doing == "training":
            raise UsageError(
                "an action cannot call restore(): end the training with status.stop(), and "
                "call it then"
            )
        saved, results = self.state.restore(self._checkpoints(), changed, grow)
        if saved:
            self._evaluated = results or None
            self.stopped, self._ended_by, self._asked_by = saved.stopped, "", ""
            self._own_saves.note(saved.step)
            self._own_saves.last_own = -1
            self.scalars.reset()
            self._kept.forget()
            self.history.rewind(saved.step)
            if results:
                self.history.evaluated(saved.step, results)
        return saved

    def restore_best_weights(self) -> Saved | None:
        """Gives the model the weights of the best checkpoint (see `CheckpointManager.best`), for a
        test or an export, and returns it; None if there is no checkpoint. Averages, layers of the
        step and the step count are those of the best, too; the optimizer's state is not, so to
        train again, call `restore` first. Call it on all workers. Raises `CheckpointError` if none
        was evaluated or is intact, `UsageError` if the loop has no checkpoints."""
        checkpoints = self._checkpoints()
        checkpoints.wait()
        if self._several_workers:
            workers.barrier(self.strategy)  # the chief has written it
        saved = self.state.read_best(checkpoints)
        checkpoints.unrestored = checkpoints.latest()
        metric, mode = checkpoints.ranks_by
        best = self.history.best(metric, mode)
        if saved and best and saved.metrics.get(metric, best[1]) != best[1]:
            logging.warning(
                "the weights are those of step %d, the best that is kept: the best %s was %g, at "
                "step %d; to keep it, give CheckpointManager(DIRECTORY, keep_best=1, "
                "best_metric=%r)",
                *(saved.step, metric, best[1], best[0], metric),
            )
        return saved

    @hides_frames
    @refuses_foreign
    def train_and_evaluate(
        self,
        until: int | None = None,
        *,
        epochs: float | None = None,
        evaluate_every: int | str | None = None,
        on_progress: OnProgress | None = None,
        progress: bool | None = None,
        eager: bool = False,
        callbacks: Sequence[keras.callbacks.Callback] | None = None,
    ) -> dict[str, float]:
        """Trains until step ``until`` or the end of ``epochs`` (see `train`), or until an action
        ends the training. Saves and evaluates every ``evaluate_every`` steps, or epochs
        (``"0.5ep"``), by default at the end of each epoch, and at the end. If the current step is
        due but not evaluated, as after a restore, evaluates first. Returns the results of the last
        evaluation; if a callback has given the model the weights of an earlier step, those of that
        step. Traces the evaluation first, so that its mistakes are known before the first step. For
        ``progress``, ``callbacks`` and ``eager``, which traces nothing, see `train`. Raises
        `UsageError` if ``evaluate_every`` is not a whole number of at least 1 or a number of
        epochs, or epochs have no known length; also as `train` and `evaluate` do."""
        until = end_of_training(until, epochs, self.dataset)
        every = evaluation_interval(evaluate_every, self.dataset)
        evaluator = self._evaluator()
        check_watched(self.eval_actions, evaluator)
        # A finished run that is begun again as it was has its results, as it should.
        as_it_was = not self.history.steps and self.global_step == until and not self.stopped
        runs = self._runs(self.global_step, until, warns=not as_it_was)
        with (
            self._showing(progress, runs, eager) as bar,
            counting_epochs(callbacks, self, until, every, epochs, self._say) as counted,
            self._own_saves.paused(),
        ):
            if runs and not eager:
                self._trace_evaluation(evaluator)
            results = self._train_and_evaluate(until, every, on_progress or bar, eager)
        if counted and counted.results:  # of the weights that the model has
            self._evaluated = results = counted.results
        return results

    def _train_and_evaluate(
        self, until: int, every: float, on_progress: OnProgress | None, eager: bool
    ) -> dict[str, float]:
        step = self.global_step
        while True:
            ends = step >= until or self.stopped
            due = step and (completed(step, every) > completed(step - 1, every) or ends)
            if due and self._evaluated is None:
                if self.checkpoints:
                    self.save()
                with self._saving_changes(step):
                    self._evaluated = self.evaluate(on_progress, eager=eager)
                self._annotate(step, wait=ends or self.stopped)
            if ends or self.stopped:
                return self._evaluated or {}
            stop = min(until, end_of(completed(step, every) + 1, every))
            self.train(stop, total=until, progress=False, eager=eager)
            step = self.global_step
            if step < stop:  # the data ended
                until = step

    def _showing(
        self, progress: bool | None, runs: bool, eager: bool
    ) -> contextlib.AbstractContextManager[OnProgress | None]:
        """Shows a progress bar inside, if it is wanted, the loop ``runs`` steps and this worker is
        the first. Gives what shows an evaluation."""
        in_the_way = eager and progress is None  # of a debugger
        wanted = progress if runs and self._is_chief and not in_the_way else False
        return showing(wanted, self._bars, peek=not self._several_workers)

    def _trace_evaluation(self, evaluator: Evaluator) -> None:
        with (
            LEDGER.spend("compile"),
            self.translate_failures("tracing the evaluation"),
            watchdog.host("tracing the evaluation", self.global_step),
            naming_eval_step(self.step, evaluator),
        ):
            evaluator.trace()

    def _annotate(self, step: int, wait: bool) -> None:
        """Adds the results of the evaluation to the checkpoint of ``step``, if the loop saves."""
        if self.checkpoints and self._is_chief:
            if self._evaluated or self.stopped:
                self.checkpoints.annotate(step, self._evaluated or {}, stopped=self.stopped)
            if wait:
                self.checkpoints.wait()

    def _evaluator(self) -> Evaluator:
        if self.evaluator is None:
            raise UsageError("this loop has no evaluator: give Loop(evaluator=Evaluator(...))")
        return self.evaluator

    def _checkpoints(self) -> CheckpointManager:
        if self.checkpoints is None:
            raise UsageError("this loop has no checkpoints: give Loop(checkpoints=...)")
        return self.checkpoints

    # Ends ---------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def translate_failures(self, doing: str) -> Iterator[None]:
        """Turns exceptions of the code inside into errors for the user. ``doing`` names the code.

        Raises:
            Preempted: a signal asked to stop; the state was saved, if there are checkpoints.
            KeyboardInterrupt: so did Ctrl-C or the stop button of a notebook, see `Signals.button`.
            PeerError: a worker was lost.
            UsageError: a check in the graph failed, see `local_batch.translate_graph_checks`; or
                the data cannot be read, see `translate_data_errors`.
        """
        datasets = [self.dataset, *(self.evaluator.datasets if self.evaluator else ())]
        before, self._doing = self._doing, doing
        try:
            with (
                self.signals.button(in_scripts=self._own_saves.seconds is not None),
                workers.naming_lost_peers(self.strategy, doing, lambda: self.global_step),
                translate_data_errors(*datasets),
                local_batch.translate_graph_checks(self._place_of),
                translate_trace_errors(self.step),
            ):
                yield
        except StopRequested:
            raise self._saved_at_stop() from None
        except PeerError:
            self._kept.save()
            raise
        finally:
            self._doing = before

    def _place_of(self, index: int) -> str:
        """Says where ``index`` is in the data of the step that failed."""
        failed = self.global_step + 1
        return labels.place_of(self.dataset, failed, failed, index)

    def _finish_saving(self) -> None:
        """What the watchdog does before it ends this process. A store may not answer until then,
        so what is kept is saved first."""
        self._kept.save()
        self._checkpoints().flush()

    def _saved_at_stop(self) -> Preempted | KeyboardInterrupt:
        step, name = self.global_step, self.signals.name
        if self.signals.is_button:
            if self.checkpoints:
                self.save(wait=True)
            if not is_shell():
                return KeyboardInterrupt(f"step {step} is saved: after restore(), train goes on")
            saved_too = " and is saved" if self.checkpoints else ""
            return KeyboardInterrupt(
                f"the loop stopped after step {step}, keeps its state{saved_too}; the same call "
                "goes on"
            )
        if self.checkpoints is None:
            return Preempted(
                f"{name} at step {step}: nothing saved, because the loop has no checkpoints"
            )
        self.save(wait=True)
        saved = self.checkpoints.latest() if self._is_chief else None
        path = self.checkpoints.shown(saved.path if saved else self.checkpoints.directory)
        return Preempted(f"{name}: saved step {step} in {path}; the same command resumes")

    def stop_on_signals(self) -> contextlib.AbstractContextManager[None]:
        """While inside, the loop answers SIGTERM and SIGINT: it finishes the current call,
        with several workers also the next one, saves the state and raises `Preempted`, which ends a
        program with 42. For a second SIGINT, see `Signals.noted`. Main thread only."""
        return self.signals.noted()
