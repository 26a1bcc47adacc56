"""Asynchronous training: workers that do not wait for each other.

The coordinator runs the program. It hands each global batch to a worker that is free, as one call
of the same `ctl.step.TrainStep`: the worker reads the variables from the parameter servers, and
adds its own update to them. There is no all-reduce; an update is made of gradients that are some
updates old. The coordinator waits for all calls where the loop wakes, so that actions, evaluation
and checkpoints see a state that stands still after an exact number of steps.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from ctl.asynchronous.roll_call import RollCall, attend
from ctl.cluster.members import Tasks
from ctl.data.dataset import Dataset
from ctl.data.feed import Feed, element_of
from ctl.errors import CtlError, PeerError, UsageError
from ctl.evaluator import Evaluator
from ctl.loop import Loop, Outcome, Steps
from ctl.step import EvalStep, TraceKey, TrainStep

_POLL_SECONDS = 0.001
_LOOK_SECONDS = 1.0

# Batches kept ready ahead of the calls.
_PREFETCH = 4


def serve(tasks: Tasks, startup_timeout: float) -> None:
    """Runs a worker or a parameter server; ends the process when the coordinator ends or is lost.

    Raises:
        UsageError: the port is taken.
    """
    jobs = {"worker": tasks.workers, "ps": tasks.ps}
    address = jobs[tasks.kind][tasks.index]
    try:
        server = tf.distribute.Server(jobs, tasks.kind, tasks.index, protocol="grpc")
    except tf.errors.OpError as error:
        raise UsageError(
            f"{tasks.name} cannot listen on {address}: {error.message.splitlines()[0]}; choose "
            "another port"
        ) from error
    try:
        code = attend(tasks, startup_timeout)
    except CtlError as error:
        print(error, file=sys.stderr)
        code = error.exit_code
    sys.stderr.flush()
    del server
    os._exit(code)  # TensorFlow's servers know no other end


class _RemoteSteps(Steps):
    """Each step on a worker that is free."""

    def __init__(
        self,
        step: TrainStep,
        dataset: Dataset,
        strategy: tf.distribute.ParameterServerStrategy,
        roll_call: RollCall,
        timeout: float,
    ):
        super().__init__(step, dataset, strategy)
        self._roll_call = roll_call
        self._timeout = timeout
        self._coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)

    def open(self, start_step: int) -> Feed:
        """The batches of the synchronous loop, in the same order, read by the coordinator."""
        resident = self.dataset.resident(tf.distribute.get_strategy())
        batches = self.dataset.batches(start_step)
        examples = batches.map(
            lambda *arguments: self.dataset.on_replica(element_of(arguments), resident)
        )
        return Feed(iter(examples.prefetch(_PREFETCH)), ())

    @tf.function
    def _train_step(self, batch: Any) -> tf.Tensor:
        return self.strategy.run(self.step, args=(batch,))

    def run(self, feed: Feed, steps: tf.Tensor, report: tf.Tensor, trace_key: TraceKey) -> Outcome:
        """See `Steps.run`."""
        del report, trace_key
        begin, count, remote = self._step_number(), int(steps), []
        for batch in feed.iterator:
            remote.append(self._coordinator.schedule(self._train_step, args=(batch,)))
            if len(remote) == count:
                break
        self._wait()
        if self._step_number() > begin + len(remote):
            # A batch whose worker was lost has gone to another one, and was counted by both.
            self.step.global_step.assign(begin + len(remote))
        if len(remote) < count:
            raise tf.errors.OutOfRangeError(None, None, "the dataset has ended")
        losses = np.array([loss.fetch() for loss in remote], np.float64)
        finite = count if np.isfinite(losses).all() else int(np.isfinite(losses).argmin())
        totals = tf.constant([losses.sum(), float(self._roll_call.asked_to_stop), 0.0])
        return Outcome(totals, tf.constant(finite), ())

    def _step_number(self) -> int:
        return int(self.step.global_step.numpy())

    def _wait(self) -> None:
        """Returns when all calls have ended. While a worker comes back, TensorFlow waits for every
        other that is missing, too: there may be a worker, and yet no step."""
        counted, changed = self._step_number(), time.monotonic()
        looked = changed
        while not self._coordinator.done():
            self._roll_call.check()
            now = time.monotonic()
            if now - looked > _LOOK_SECONDS:
                looked, step = now, self._step_number()
                if step != counted:
                    counted, changed = step, now
                if now - changed > self._timeout:
                    raise PeerError(
                        f"no step was made for {now - changed:.0f} s (--collective_timeout) after "
                        f"step {step}"
                    )
            time.sleep(_POLL_SECONDS)


class ParameterServerLoop(Loop):
    """A `ctl.Loop` whose steps run on the workers, at the same time.

    Args:
        roll_call: who is there.
        timeout: seconds without a single step after which the job has failed.
        others: as for `ctl.Loop`; the strategy must be that of `connect`, and the evaluator a
            `CopyEvaluator`.
    """

    def __init__(
        self,
        step: TrainStep,
        dataset: Any,
        *,
        strategy: tf.distribute.ParameterServerStrategy,
        roll_call: RollCall,
        timeout: float = 300.0,
        **others: Any,
    ):
        super().__init__(step, dataset, strategy=strategy, **others)
        self.steps = _RemoteSteps(step, self.dataset, strategy, roll_call, timeout)
        roll_call.keep(self)


class CopyEvaluator(Evaluator):
    """Evaluates on the coordinator: every example once, whatever becomes of the workers.

    Args:
        model: what is trained.
        step: evaluates a model like it, which was not made in the strategy's scope.
        dataset: see `ctl.data`.
    """

    def __init__(self, model: keras.Model, step: EvalStep, dataset: Any):
        super().__init__(step, dataset)
        self._model = model

    def copy(self) -> keras.Model:
        """The evaluator's model, with the weights that are trained."""
        for mine, trained in zip(self.step.model.variables, self._model.variables, strict=True):
            mine.value.assign(trained.value.read_value())
        return self.step.model

    def run(self, *args, **kwargs) -> dict[str, float]:
        """See `Evaluator.run`."""
        self.copy()
        return super().run(*args, **kwargs)
