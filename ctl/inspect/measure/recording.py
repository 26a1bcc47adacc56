"""Switches the marks of a step on and off, and gathers their stamps and clocks from all workers."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from ctl.distributed.watch import watchdog
from ctl.distributed.workers import all_gather, cluster_of, is_multi_worker, naming_lost_peers
from ctl.errors import UsageError
from ctl.inspect.measure.profile import with_collectives
from ctl.inspect.measure.window import Pack, Window
from ctl.loop import Loop
from ctl.phases.marks import Marks, Ring, stamp
from ctl.phases.observer import Observer

# The tightest of so many meetings bounds the offset of a clock. They take 0.2 to 0.4 s on loopback.
BARRIERS = 200

_DOING = "comparing clocks"


class Recording:
    """Marks that can be switched on and off repeatedly, with one trace of the step.

    With several workers, all must switch at the same steps, and all must call `take`.

    Args:
        loop: whose step is marked.
        steps: the length of a window: it holds the last so many steps that ran.

    Raises:
        UsageError: ``steps`` is below 1, or the step cannot be stamped (see
        `ctl.phases.marks.Marks`).
    """

    def __init__(self, loop: Loop, steps: int):
        if steps < 1:
            raise UsageError(f"a window must have at least 1 step, not {steps}")
        self._loop = loop
        self.step = step = loop.step
        self.steps = steps
        self._ring = Ring(step, steps + 1)  # a step begins when the one before was applied
        if type(step.observer) not in (Observer, Marks):
            raise UsageError(
                "an inspection would replace step.observer: set it to "
                "ctl.phases.observer.NO_OBSERVER first"
            )
        self._before = step.observer
        others = step.observer.stores if isinstance(step.observer, Marks) else ()
        self._marks = Marks(step, *others, self._ring)
        self._barriers: np.ndarray | None = None
        self._plan: dict[str, Any] | None = None

    @property
    def worker(self) -> int:
        """The index of this worker."""
        strategy = self.step.strategy
        return cluster_of(strategy).index if is_multi_worker(strategy) else 0

    def start(self) -> None:
        """Stamps steps from the next call of the loop on; forgets earlier ones."""
        self._ring.clear()
        self._before, self.step.observer = self.step.observer, self._marks

    def stop(self, *, failed: bool = False) -> None:
        """Stamps no more steps. ``failed``: an error ended them, so `take` is not called."""
        if not failed and self._plan is None and len(self._ring.read()[0]):
            self._plan = self._loop.plan().to_json()  # of the trace that has run
        self.step.observer = self._before

    def take(self, traces: Sequence[Any] = (), *, align: bool = True) -> list[Window]:
        """The windows of all workers, in order, on every worker.

        Args:
            traces: profiles of the same steps, see `ctl.inspect.measure.profile`.
            align: compare clocks with the other workers, which takes 0.2 to 0.4 s. Otherwise use
                the last comparison, if there is one.

        Raises:
            PeerError: a worker was lost.
        """
        strategy = self.step.strategy
        if align or self._barriers is None:
            self._barriers = barriers(strategy)
        steps, stamps = self._ring.read()
        cluster = cluster_of(strategy) if is_multi_worker(strategy) else None
        mine = Window(
            worker=self.worker,
            workers=len(cluster.workers) if cluster else 1,
            steps=steps,
            names=self._ring.names,
            stamps=stamps,
            packs=tuple(
                Pack(f"pack{number}", size) for number, size in enumerate(self._marks.pack_bytes)
            ),
            in_order=self._marks.in_order,
            barriers=self._barriers,
            description=_describe(self.step),
            plan=self._plan,
        )
        mine = with_collectives(mine, traces)
        if not cluster:
            return [mine]
        texts = all_gather(strategy, json.dumps(mine.to_json()).encode(), "an inspection")
        run = hashlib.sha256(b"".join(texts)).hexdigest()[:16]
        windows = [Window.from_json(json.loads(text)) for text in texts]
        return [dataclasses.replace(window, run=run) for window in windows]


def _describe(step: Any) -> str:
    strategy = step.strategy
    assert strategy is not None  # the step is built
    kind = type(strategy).__name__
    replicas = strategy.num_replicas_in_sync
    return (
        f"{step.model.name}, {step.model.count_params():,} parameters, {replicas} "
        f"replica{'s' if replicas > 1 else ''} under {kind}, TensorFlow {tf.__version__}"
    )


def barriers(strategy: tf.distribute.Strategy, count: int = BARRIERS) -> np.ndarray:
    """Meets all workers ``count`` times, by which `ctl.inspect.measure.timeline` compares their
    clocks; every worker must call it. Returns seconds since the epoch on this worker's clock before
    and after each meeting, float64 [count, 2]; with one worker, [0, 2].

    Raises:
        PeerError: a worker was lost.
    """
    if not is_multi_worker(strategy):
        return np.zeros([0, 2])

    def meet(token: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        arrived = stamp([token])
        with tf.control_dependencies([arrived]):  # the stamp precedes the meeting
            token = tf.identity(token)
        total = tf.distribute.get_replica_context().all_reduce("SUM", token)
        return total, tf.stack([arrived, stamp([total])])

    @tf.function
    def meet_all() -> tf.Tensor:
        stamps = tf.TensorArray(tf.float64, count, element_shape=[2])
        token = strategy.run(lambda: tf.zeros([]))
        for number in tf.range(count):
            token, times = strategy.run(meet, args=(token,))
            stamps = stamps.write(number, strategy.experimental_local_results(times)[0])
        return stamps.stack()

    with naming_lost_peers(strategy, _DOING), watchdog.collective(_DOING, first=True):
        return meet_all().numpy()
