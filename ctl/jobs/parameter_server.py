"""Asynchronous training: workers that do not wait for each other.

The coordinator runs the program. It sends the next global batches, 8 at most, to a free worker,
which calls the same `ctl.step.TrainStep` on one after the other. For each, the worker reads the
variables from the parameter servers and adds its own update to them. There is no all-reduce, and
gradients are some updates old when they are applied. The coordinator waits for all calls before the
actions run, so that actions, evaluation and checkpoints see a state that does not change, after an
exact number of steps.
"""

from __future__ import annotations

import functools
import itertools
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from ctl.control.evaluator import Evaluator
from ctl.data.dataset import Dataset, on_replica
from ctl.data.feed import Feed, element_of
from ctl.distributed.cluster.members import Tasks
from ctl.distributed.heartbeats import Heartbeats, attend
from ctl.errors import CtlError, PeerError
from ctl.loop import Loop, Steps
from ctl.phases.base_step import EvalStep
from ctl.phases.loss_accumulator import CallResult
from ctl.phases.trace_guards import TraceKey
from ctl.step import TrainStep

# Between two questions: have all calls ended, is a task lost, are there new steps.
_POLL_SECONDS = 0.001
_CHECK_SECONDS = 0.05
_LOOK_SECONDS = 1.0

# Batches to prepare ahead of the calls.
_PREFETCH = 16

# The most batches that a worker is sent at once, as one tensor: a call takes about 1 ms.
_MOST = 8


def serve(tasks: Tasks, startup_timeout: float = 300.0) -> None:
    """Runs a worker or a parameter server; ends the process when the coordinator ends or is lost.

    Args:
        tasks: the job, and which of its tasks this process is.
        startup_timeout: seconds to wait for the coordinator.

    Raises:
        PeerError: the port is taken.
    """
    jobs = {"worker": tasks.workers, "ps": tasks.ps}
    address = jobs[tasks.kind][tasks.index]
    try:
        server = tf.distribute.Server(jobs, tasks.kind, tasks.index, protocol="grpc")
    except tf.errors.OpError as error:
        raise PeerError(
            f"{tasks.name} cannot listen on {address}: {error.message.splitlines()[0]}; choose "
            "another port, or free it"
        ) from error
    try:
        code = attend(tasks, startup_timeout)
    except CtlError as error:
        print(error, file=sys.stderr)
        code = error.exit_code
    sys.stderr.flush()
    del server
    os._exit(code)  # TensorFlow's servers cannot be stopped in another way


class _RemoteSteps(Steps):
    """Runs the next steps on a free worker."""

    def __init__(
        self,
        step: TrainStep,
        dataset: Dataset,
        strategy: tf.distribute.ParameterServerStrategy,
        heartbeats: Heartbeats,
        timeout: float,
    ):
        super().__init__(step, dataset, strategy)
        self._heartbeats = heartbeats
        self._timeout = timeout
        self._coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
        # Functions for each version of the settings of the step, see `TraceKey`.
        self._train_step = functools.cache(lambda version: tf.function(self._on_worker))
        self._train_steps = functools.cache(
            lambda version: tf.function(functools.partial(_of_each, self._train_step(version)))
        )

    def open(self, start_step: int) -> Feed:
        """Opens the same batches, in the same order, as the synchronous loop; the coordinator reads
        them."""
        resident = self.dataset.resident(tf.distribute.get_strategy())
        batches = self.dataset.batches(start_step)
        examples = batches.map(
            lambda *arguments: on_replica(self.dataset, element_of(arguments), resident)
        )
        return Feed(iter(examples.prefetch(_PREFETCH)), ())

    def _on_worker(self, batch: Any) -> tuple[tf.Tensor, tf.Tensor]:
        return self.strategy.run(self.step, args=(batch,))

    def call(
        self, feed: Feed, steps: tf.Tensor, report: tf.Tensor, trace_key: TraceKey
    ) -> CallResult:
        """See `Steps.run`."""
        del report
        train_step = self._train_step(trace_key.version)
        train_steps = self._train_steps(trace_key.version)
        begin, count, sent, remote = self._step_number(), int(steps), 0, []
        most = _MOST if _can_be_stacked(feed.iterator.element_spec) else 1
        while sent < count:
            share = _share(count - sent, len(self._heartbeats.workers), most)
            batches = [*itertools.islice(feed.iterator, share)]
            if len(batches) > 1:
                stacked = tf.nest.map_structure(lambda *parts: tf.stack(parts), *batches)
                remote.append(self._coordinator.schedule(train_steps, args=(stacked,)))
            elif batches:
                remote.append(self._coordinator.schedule(train_step, args=(batches[0],)))
            sent += len(batches)
            if len(batches) < share:
                break
        self._wait()
        if self._step_number() > begin + sent:
            # If a worker is lost after it has counted a batch, another worker counts it again.
            self.step.global_step.assign(begin + sent)
        if sent < count:
            raise tf.errors.OutOfRangeError(None, None, "the dataset has ended")
        pairs = [np.reshape(np.array(of.fetch(), np.float64), [-1, 2]) for of in remote]
        losses, examples = np.concatenate(pairs).T
        finite = count if np.isfinite(losses).all() else int(np.isfinite(losses).argmin())
        mean = (losses * examples).sum() / max(examples.sum(), np.finfo(np.float64).tiny)
        stop = float(self._heartbeats.asked_to_stop)
        totals = tf.constant([mean, examples.sum(), stop, 0.0, 0.0])
        ended = tf.constant(self._step_number(), tf.int64)
        rates = self.step.updater.learning_rates(ended - 1)
        return CallResult(totals, tf.constant(finite), (), ended, rates)

    def _step_number(self) -> int:
        return int(self.step.global_step.numpy())

    def _wait(self) -> None:
        """Returns when all calls have ended.

        Raises PeerError after ``timeout`` seconds without a step, even if a worker is there: while
        one worker comes back, TensorFlow also waits for all others that are missing.
        """
        counted, changed = self._step_number(), time.monotonic()
        looked = checked = changed
        while not self._coordinator.done():
            time.sleep(_POLL_SECONDS)
            now = time.monotonic()
            if now - checked > _CHECK_SECONDS:
                checked = now
                self._heartbeats.check()
            if now - looked > _LOOK_SECONDS:
                looked, step = now, self._step_number()
                if step != counted:
                    counted, changed = step, now
                if now - changed > self._timeout:
                    quiet = self._heartbeats.quiet()
                    raise PeerError(
                        f"no step was made for {now - changed:.0f} s (--collective_timeout) after "
                        f"step {step}" + (quiet and f"; waiting for {quiet}")
                    )


def _share(left: int, workers: int, most: int) -> int:
    """How many of the ``left`` batches the next free worker gets: fewer at the end, so that all
    ``workers`` end together. Powers of 2, since each number is traced."""
    share = max(1, left // (2 * workers))
    return min(most, left, 1 << share.bit_length() - 1)


def _can_be_stacked(spec: Any) -> bool:
    parts = tf.nest.flatten(spec)
    return all(isinstance(p, tf.TensorSpec) and p.shape.is_fully_defined() for p in parts)


def _of_each(train_step: Callable, stacked: Any) -> list[Any]:
    """Runs ``train_step`` on each of the batches that were stacked."""
    count = tf.nest.flatten(stacked)[0].shape[0]
    batches = [tf.nest.map_structure(lambda part, n=n: part[n], stacked) for n in range(count)]
    return [train_step(batch) for batch in batches]


class ParameterServerLoop(Loop):
    """A `ctl.Loop` whose steps run on all workers at the same time.

    Args:
        step, dataset, others: as for `ctl.Loop`; an evaluator must be a `CopyEvaluator`.
        strategy: see `ctl.strategy.make_parameter_server`.
        heartbeats: tells which tasks are there.
        timeout: seconds without a finished step after which the job has failed.
    """

    def __init__(
        self,
        step: TrainStep,
        dataset: Any,
        *,
        strategy: tf.distribute.ParameterServerStrategy,
        heartbeats: Heartbeats,
        timeout: float = 300.0,
        **others: Any,
    ):
        super().__init__(step, dataset, strategy=strategy, **others)
        self.steps = _RemoteSteps(step, self.dataset, strategy, heartbeats, timeout)
        heartbeats.keep(self)


class CopyEvaluator(Evaluator):
    """Evaluates a copy of the model on the coordinator, so that it does not depend on workers.

    Args:
        model: the model that is trained.
        step: evaluates another model of the same architecture, made outside the strategy's scope.
        dataset, others: see `Evaluator`.
    """

    def __init__(self, model: keras.Model, step: EvalStep, dataset: Any, **others: Any):
        self._model = model
        super().__init__(step, dataset, **others)

    def on(self, dataset: Any) -> CopyEvaluator:
        """See `Evaluator.on`."""
        return CopyEvaluator(self._model, self.step, dataset)

    def copy(self) -> keras.Model:
        """Copies the trained weights to the model of the evaluator, and returns that."""
        for mine, trained in zip(self.step.model.variables, self._model.variables, strict=True):
            mine.value.assign(tf.convert_to_tensor(trained))  # also of a table that is split
        return self.step.model

    def run(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """See `Evaluator.run`."""
        self.copy()
        return super().run(*args, **kwargs)
