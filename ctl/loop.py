"""The explicit training loop: batches in, one step on every replica, losses combined.

Read `Loop._train_steps` first: it is what the project is named for. It runs `ctl.step.TrainStep` on
every replica; the all-reduce is the one line marked ``<- here`` in `ctl.reduce.all_reduce`.
"""

from __future__ import annotations

import contextlib
import math
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf
from absl import logging

import ctl
from ctl import noinline, share, workers
from ctl.actions import Action, Status
from ctl.checkpoint.manager import CheckpointManager, Saved
from ctl.data.feed import Feed, batch_of, next_block
from ctl.data.global_batches import as_dataset
from ctl.errors import CheckpointError, DivergedError, Preempted, UsageError
from ctl.evaluator import Evaluator
from ctl.pace import Pace, StopRequested
from ctl.step import TrainStep
from ctl.watch import watchdog

if TYPE_CHECKING:
    from ctl.watch.flight import Flight

SUM = tf.distribute.ReduceOp.SUM

# Updates in a row that were skipped because gradients were not finite. A loss scale needs at most
# 15 halvings to get from its first value to 1, so after so many the run is lost.
_MOST_SKIPPED = 100


class Loop:
    """Trains, evaluates, saves and resumes.

    Args:
        step: what one replica does. The loop builds it.
        dataset: see `ctl.data`; or an endless `tf.data.Dataset` of global batches.
        strategy: by default the current one.
        schedule: learning rate as a function of the step, see `ctl.schedule`; by default the
            optimizer's own.
        evaluator: what `evaluate` runs.
        checkpoints: where `save` and `restore` go.
        actions: called with a `Status` whenever Python wakes. One with a method
            ``steps_until_due(step) -> int`` (see `ctl.actions.Every`) is sure to be called at that
            step.
        eval_actions: called with ``(step, results)`` after each evaluation.
        steps_per_loop: steps in one call, at most; by default as many as fit in half a second.
    """

    def __init__(
        self,
        step: TrainStep,
        dataset: Any,
        *,
        strategy: tf.distribute.Strategy | None = None,
        schedule=None,
        evaluator: Evaluator | None = None,
        checkpoints: CheckpointManager | None = None,
        actions: Sequence[Action] = (),
        eval_actions: Sequence[Callable[[int, dict[str, float]], None]] = (),
        steps_per_loop: int | None = None,
    ):
        self.step = step
        self.dataset = as_dataset(dataset)
        self.strategy = strategy or tf.distribute.get_strategy()
        self.evaluator = evaluator
        self.checkpoints = checkpoints
        self.actions = list(actions)
        self.eval_actions = list(eval_actions)
        size, replicas = self.dataset.global_batch_size, self.strategy.num_replicas_in_sync
        if size and size % replicas:
            raise UsageError(
                f"the global batch size {size} is not divisible by {replicas} replicas"
            )
        if size and step.accumulate_steps > size // replicas:
            raise UsageError(
                f"accumulate_steps={step.accumulate_steps}, but a replica has {size // replicas} "
                f"examples: use {size // replicas} or less"
            )
        workers.watch(self.strategy)
        with workers.watching_variables(self.strategy):
            step.build(self.strategy, schedule)
        step.loop = weakref.ref(self)
        self._flight = self._watch()
        self._pace = Pace(steps_per_loop)
        self._marks = step.marks  # of the last call
        self._feed: Feed | None = None
        self._feed_step = -1
        self._resident = None
        self._is_chief = workers.is_chief(self.strategy)
        self._signal: int | None = None
        self._evaluated: dict[str, float] | None = None  # results at the current step
        self._skipped_in_a_row = 0
        self._reset_window()

    # The hot path -------------------------------------------------------------------------------

    @tf.function
    def _train_steps(
        self,
        iterator: Iterator,
        position: tuple,
        resident: Any,
        steps: tf.Tensor,
        report: tf.Tensor,
        marks: Any = None,
        bytes_per_pack: int = 0,
        jit_compile: bool = False,
    ):
        # The last three are those of `self.step`: here, each has a trace of its own, which is kept.
        strategy = self.strategy
        losses = strategy.run(lambda: (tf.zeros([]), tf.zeros([], tf.int32)))
        while steps > 0:
            block, first, count, position = next_block(iterator, position, steps)
            if jit_compile and marks is None and self.step.single_replica:
                every = losses, block, first, count, resident
                losses = strategy.run(self._compiled_steps, args=every)
            else:
                one_step = self._run_step_noinline if self.step.noinline else self._run_step
                static = marks, bytes_per_pack, jit_compile
                for number in tf.range(first, first + count):
                    losses = one_step(losses, block, number, resident, *static)
            steps -= count
        # Each replica has summed its own losses, which are scaled by the global batch size: one
        # reduction for each Python call gives the sum of the mean losses of the global batches.
        # What workers have to tell each other goes with it.
        totals = strategy.run(lambda loss: tf.concat([[loss], report], 0), args=(losses[0],))
        return strategy.reduce(SUM, totals, axis=None), losses[1], position

    def _run_step(self, losses: Any, block: Any, number: tf.Tensor, resident: Any, *static):
        """One step. ``static``: for what it is traced, as `_train_steps` is."""
        return self.strategy.run(self._one_step, args=(losses, block, number, resident))

    _run_step_noinline = noinline.noinline(_run_step)

    def _one_step(
        self, losses: tuple[tf.Tensor, tf.Tensor], block: Any, number: tf.Tensor, resident: Any
    ):
        batch = batch_of(block, number, self._feed.in_blocks)
        # The call that finds the data at their end must change nothing, Dropout's seeds included.
        with tf.control_dependencies(tf.nest.flatten(batch, expand_composites=True)):
            loss = losses[0] + self.step(self.dataset.on_replica(batch, resident))
        # NaN and Inf stay in the sum, so this counts the steps before the first of them.
        return loss, losses[1] + tf.cast(tf.math.is_finite(loss), tf.int32)

    @tf.function(jit_compile=True)
    def _compiled_steps(self, losses, block, first, count, resident):
        """Steps of one replica, which has nothing to reduce, as one program of XLA."""
        number = first  # over a `tf.range`, XLA would compile each count by itself
        while number < first + count:
            losses = self._one_step(losses, block, number, resident)
            number += 1
        return losses

    # Training -----------------------------------------------------------------------------------

    @property
    def global_step(self) -> int:
        """Global batches trained on so far."""
        return int(self.step.global_step.numpy())

    def train(self, until: int) -> dict[str, float]:
        """Trains until the global step is ``until``.

        Returns:
            The scalars of the last window, see `Status`.

        Raises:
            DivergedError: the loss is not finite, or updates are skipped without end.
            Preempted: a signal arrived (see `stop_on_signals`); the state was saved.
            CheckpointError: a save in the background failed.
        """
        with self._ending_well("training"):
            return self._train(until, until)

    def _train(self, stop: int, until: int) -> dict[str, float]:
        """Trains to step ``stop``, on the way to ``until``."""
        step = self.global_step
        scalars: dict[str, float] = {}
        if step < stop and self._feed_step != step:
            self._start(step)
        while step < stop:
            steps = self._steps_until_due(step, stop)
            try:
                seconds, asked = self._call(step, steps)
            except tf.errors.OutOfRangeError:
                if self.global_step > step:
                    self._evaluated = None
                step = self._feed_step = self.global_step
                workers.check_all_ended(self.strategy, step)
                logging.warning("the dataset ended after step %d, before step %d", step, until)
                return self._wake(step, step, 0.0)
            step = self._feed_step = step + steps
            self._evaluated = None
            scalars = self._wake(step, until, seconds / steps)
            if asked or (self._signal is not None and not workers.is_multi_worker(self.strategy)):
                raise StopRequested
        return scalars

    def _steps_until_due(self, step: int, stop: int) -> int:
        """How many steps to run in one call: to the next action that is due, at most."""
        due = (a.steps_until_due(step) for a in self.actions if hasattr(a, "steps_until_due"))
        return min(self._pace.steps(), stop - step, *due)

    def _call(self, step: int, steps: int) -> tuple[float, bool]:
        """Runs ``steps`` steps from ``step`` and takes their losses into the window.

        Returns:
            The seconds it took; whether a worker was asked to stop.
        """
        if self.step.marks is not self._marks:
            self._marks = self.step.marks
            self._pace.traces_again()
        skipped = self._skipped()
        report = self._pace.report(self._signal is not None)
        start = time.perf_counter()
        with (
            self._watched(step, steps),
            tf.profiler.experimental.Trace("ctl_step", step_num=step, _r=1),
        ):
            totals, finite = self.run_steps(self._feed, steps, report)
            loss, asked, pace = (float(total) for total in totals.numpy())
        seconds = time.perf_counter() - start
        if self.global_step != step + steps:
            raise UsageError(
                f"{steps} steps were run from step {step}, but the global step is "
                f"{self.global_step}: does {type(self.step).__name__} call self.apply()?"
            )
        if not math.isfinite(loss):
            counts = self.strategy.experimental_local_results(finite)
            first = step + 1 + min(int(c) for c in counts)
            self._diverged(workers.earliest(self.strategy, first), loss)
        skipped = self._skipped() - skipped
        self._skipped_in_a_row = self._skipped_in_a_row + skipped if skipped == steps else 0
        if self._skipped_in_a_row >= _MOST_SKIPPED:
            self._diverged(step + steps, math.nan)
        self._window_loss += loss
        self._window_steps += steps - skipped
        self._window_skipped += skipped
        if self._pace.took(seconds, steps, workers.mean(self.strategy, pace)):
            self._window_timed_steps += steps
            self._window_seconds += seconds
        return seconds, asked > 0

    def run_steps(self, feed: Feed, steps: int, report: tf.Tensor) -> tuple[tf.Tensor, Any]:
        """``steps`` steps on the batches of ``feed``, and nothing around them."""
        totals, finite, feed.position = self._train_steps(
            *(feed.iterator, feed.position, self._resident, tf.constant(steps), report),
            *self._traced_for(),
        )
        return totals, finite

    def _traced_for(self) -> tuple:
        """What may change between calls: each has a trace of its own."""
        return self.step.marks, self.step.bytes_per_pack, self.step.jit_compile

    def set_step_option(self, name: str, value: Any) -> None:
        """``step.bytes_per_pack`` or ``step.jit_compile`` is ``value`` from the next step on;
        workers must agree on it."""
        setattr(self.step, name, value)
        self._flight = self._watch()  # its marks are those of the packs
        self._feed_step = -1

    def _watch(self) -> Flight | None:
        """With several workers: what ends a call that does not come back, and says where it is."""
        if not workers.watch(self.strategy):
            return None
        from ctl.watch.flight import attach_progress_marks

        if self.checkpoints:
            watchdog.finish_first(self.checkpoints.wait)
        return attach_progress_marks(self.step)

    def _watched(self, step: int, steps: int) -> contextlib.AbstractContextManager[None]:
        flight = self._flight
        return watchdog.collective(
            "training",
            first=not self._pace.traced,
            step=step,
            progress=lambda: self.global_step,
            marks=flight and (lambda: flight.read(step + steps)),
            packs=flight.packs if flight else (),
        )

    def traced(self) -> tf.types.experimental.ConcreteFunction:
        """The graph that `train` runs, traced now if it was not before. No step is run."""
        if self._feed is None:
            self._open(self.global_step)
            self._feed_step = -1  # nothing has begun: peers are still to be met
        feed, report = self._feed, self._pace.report(False)
        return self._train_steps.get_concrete_function(
            *(feed.iterator, feed.position, self._resident, tf.constant(1), report),
            *self._traced_for(),
        )

    def traced_step(self) -> tf.types.experimental.ConcreteFunction:
        """The graph of one step alone, without marks, on a given batch: what could be compiled."""
        self.traced()
        none = tf.zeros([]), tf.zeros([], tf.int32)
        step = tf.function(
            lambda block: self.strategy.run(self._one_step, args=(none, block, 0, self._resident))
        )
        marks, self.step.marks = self.step.marks, None
        try:
            return step.get_concrete_function(self._feed.iterator.element_spec)
        finally:
            self.step.marks = marks

    def _start(self, step: int) -> None:
        self._open(step)
        if workers.is_multi_worker(self.strategy):
            self._meet_peers(step)

    def _open(self, step: int) -> None:
        if self._resident is None:
            self._resident = self.dataset.resident(self.strategy)
        self._feed = Feed(self.dataset, self.strategy, step)
        self._feed_step = step

    def _meet_peers(self, step: int) -> None:
        """Before the first step: all are about to do the same, and have traced it."""
        workers.check_agreement(
            self.strategy,
            {
                "the step": step,
                "the code of ctl": ctl.__version__,
                "bytes_per_pack": self.step.bytes_per_pack,
                "the optimizer": self.step.optimizer.get_config(),
                **{f"data: {key}": value for key, value in self.dataset.fingerprint().items()},
                **{
                    f"variable {number}": f"{v.path} {v.dtype} {list(v.shape)}"
                    for number, v in enumerate(self.step.model.trainable_variables)
                },
            },
        )
        self.traced()
        workers.barrier(self.strategy, watchdog.FIRST_CALL_SECONDS)
        workers.check_agreement(self.strategy, self._plan_facts())

    def _plan_facts(self) -> dict[str, str]:
        try:
            return self.step.plan().facts()
        except Exception as error:  # a graph that we cannot read trains all the same
            logging.warning("the plan of the all-reduces is not compared: %r", error)
            return {}

    def _wake(self, step: int, until: int, seconds_per_step: float) -> dict[str, float]:
        cache: dict[str, float] = {}

        def scalars() -> dict[str, float]:
            if not cache:
                cache.update(self._scalars())
            return dict(cache)

        def reset() -> None:
            scalars()  # for who reads after
            self._reset_window()

        examples, batch = self.dataset.num_examples, self.dataset.global_batch_size
        status = Status(
            step=step,
            until=until,
            steps_per_epoch=examples / batch if examples and batch else None,
            seconds_per_step=seconds_per_step,
            final=step >= until,
            scalars=scalars,
            reset=reset,
        )
        if self.checkpoints and self._is_chief:
            self.checkpoints.check()
        for action in self.actions:
            name = type(getattr(action, "action", action)).__name__  # what an `Every` calls
            with watchdog.host(f"the action {name}", step):
                action(status)
        return scalars() if status.final else {}

    def _skipped(self) -> int:
        updater = self.step.updater
        return int(updater.skipped.numpy()) if updater.judges_finiteness else 0

    def _reset_window(self) -> None:
        self._window_loss = self._window_seconds = 0.0
        self._window_steps = self._window_timed_steps = self._window_skipped = 0
        self.step.reset_metrics()

    def _scalars(self) -> dict[str, float]:
        scalars = {"loss": self._window_loss / max(1, self._window_steps)}
        with watchdog.collective("reading the metrics"):
            scalars |= self.step.results()
        updater = self.step.updater
        scalars["learning_rate"] = float(updater.learning_rate(updater.global_step - 1))
        if self._window_seconds:
            rate = self._window_timed_steps / self._window_seconds
            scalars["steps_per_second"] = rate
            if self.dataset.global_batch_size:
                scalars["examples_per_second"] = rate * self.dataset.global_batch_size
        if updater.judges_finiteness:
            scalars["skipped_steps"] = float(self._window_skipped)
        if updater.loss_scale:
            scalars["loss_scale"] = float(updater.loss_scale.scale.numpy())
        return scalars

    def _diverged(self, step: int, loss: float) -> None:
        good = None
        if self.checkpoints:
            try:
                self.checkpoints.wait()  # the write in flight may be the last good one
            except CheckpointError as error:
                logging.error("%s", error)
            good = self.checkpoints.latest()
        raise DivergedError(
            (
                f"the last {self._skipped_in_a_row} updates were skipped, their gradients were not "
                f"finite (step {step})"
                if self._skipped_in_a_row >= _MOST_SKIPPED
                else f"the loss is {loss} at step {step}"
            )
            + f"; last good checkpoint: {good.path if good else 'none'}; try a lower learning "
            "rate, clipping (--clip_norm) or --on_nan=skip"
        )

    # Evaluation and state -----------------------------------------------------------------------

    def evaluate(
        self, on_wake: Callable[[int, int | None], None] | None = None
    ) -> dict[str, float]:
        """Evaluates with the averaged weights where there are any (``ema_decay``).

        Raises:
            Preempted: as `train`.
        """
        if self.evaluator is None:
            raise UsageError("this loop has no evaluator: give Loop(evaluator=Evaluator(...))")

        with (
            self._ending_well("the evaluation"),
            watchdog.host("preparing the evaluation", self.global_step),
            self.step.updater.averaged(),
        ):
            results = self.evaluator.run(on_wake, lambda: self._signal is not None)
        for action in self.eval_actions:
            with watchdog.host("an action after the evaluation", self.global_step):
                action(self.global_step, results)
        return results

    def save(self, metrics: dict[str, float] | None = None, *, wait: bool = False) -> None:
        """Saves the state in the background; with ``wait``, returns when it is on the disk. Of
        several workers, the chief does."""
        if self.checkpoints is None:
            raise UsageError("this loop has no checkpoints: give Loop(checkpoints=...)")
        if not self._is_chief:
            return
        with watchdog.host("saving", self.global_step):
            self.checkpoints.save(self.global_step, self.step.state(), metrics, wait=wait)

    def restore(self) -> Saved | None:
        """Goes on from the newest intact checkpoint, bit for bit; None when there is none."""
        if self.checkpoints is None:
            raise UsageError("this loop has no checkpoints: give Loop(checkpoints=...)")
        saved = self.checkpoints.restore(self.step.state())
        if saved:
            self.step.offset_dropout_seeds()
            self._evaluated = dict(saved.metrics) or None
            self._reset_window()
        return saved

    def train_and_evaluate(
        self, until: int, *, evaluate_every: int, on_wake=None
    ) -> dict[str, float]:
        """Trains until step ``until``; every ``evaluate_every`` steps and at the end, saves and
        evaluates. Resumes where `restore` left it, an evaluation that is due included.

        Returns:
            The results of the last evaluation.
        """
        step = self.global_step
        while True:
            due = step and (step % evaluate_every == 0 or step >= until)
            if due and self._evaluated is None:
                if self.checkpoints:
                    self.save()
                self._evaluated = self.evaluate(on_wake)
                if self.checkpoints and self._is_chief:
                    self.checkpoints.annotate(step, self._evaluated)
            if step >= until:
                return self._evaluated or {}
            stop = min(until, step - step % evaluate_every + evaluate_every)
            with self._ending_well("training"):
                self._train(stop, until)
            step = self.global_step
            if step < stop:  # the data ended
                until = step

    # Signals ------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def stop_on_signals(self) -> Iterator[None]:
        """While inside, SIGTERM and SIGINT let the current call end, save the state and raise
        `Preempted`. A second SIGINT raises `KeyboardInterrupt` at once. Main thread only."""
        if threading.current_thread() is not threading.main_thread():
            raise UsageError("signals can be handled in the main thread only")
        self._signal = None

        def note(number: int, frame: Any) -> None:
            if self._signal == number == signal.SIGINT:
                raise KeyboardInterrupt
            self._signal = number

        before = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @contextlib.contextmanager
    def _ending_well(self, doing: str) -> Iterator[None]:
        """Saves when a signal asked to stop; names the peers that were lost."""
        try:
            with (
                workers.naming_lost_peers(self.strategy, doing, lambda: self.global_step),
                share.refusals(),
            ):
                yield
        except StopRequested:
            step = self.global_step
            name = "another worker's signal"
            if self._signal is not None:
                name = signal.Signals(self._signal).name
            if self.checkpoints is None:
                raise Preempted(f"{name} at step {step}; nothing saved, no checkpoints") from None
            self.save(wait=True)
            where = self.checkpoints.directory
            if self._is_chief:
                where = self.checkpoints.latest().path
            raise Preempted(
                f"{name}: saved step {step} in {where}; the same command resumes"
            ) from None
