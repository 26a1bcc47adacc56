"""A worker that all-reduces with `ctl.reduce.all_reduce` on request of `all_reduce.py`.

Every replica reads the clock in the graph, before and after the all-reduce. By hand::

    echo '{"size": 1024, "iterations": 3}' |
        python benchmarks/peers/all_reduce_worker.py --replicas=2
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Sequence
from typing import Any

from absl import flags
from lines import serve

from ctl.distributed import cluster
from ctl.errors import UsageError
from ctl.flags.parsing import group, run_command

with group("What is measured"):
    _STRATEGY = flags.DEFINE_enum("strategy", "mirrored", ["mirrored", "multi_worker"], "which")
    _OPERATION = flags.DEFINE_string("operation", "auto", "as --cross_device_ops of ctl.train")
    _REPLICAS = flags.DEFINE_integer("replicas", None, "replicas of mirrored", lower_bound=2)
    _DTYPE = flags.DEFINE_string("dtype", "float32", "of what is reduced")
    _CHECK = flags.DEFINE_boolean("check", True, "every element of every result")


def place() -> Any:
    """The `Placement` of --strategy. ``TF_CONFIG`` lists the workers of multi_worker.

    Raises:
        UsageError: this device or strategy does not have --operation.
    """
    from ctl.distributed.strategy import make_multi_worker, make_strategy

    if _STRATEGY.value == "multi_worker":
        if _OPERATION.value not in ("auto", "ring", "nccl"):
            raise UsageError(f"multi_worker has no {_OPERATION.value}")
        return make_multi_worker(
            cluster.resolve(None, None), communication=_OPERATION.value, startup_timeout=60.0
        )
    return make_strategy("mirrored", replicas=_REPLICAS.value, cross_device_ops=_OPERATION.value)


class Measured:
    """Runs all-reduces of given sizes and measures when they begin and end."""

    def __init__(self, placement: Any):
        import tensorflow as tf

        self.tf, self.strategy, self.options = tf, placement.strategy, placement.options
        self.dtype = tf.as_dtype(_DTYPE.value)

    def run(
        self, size: int, iterations: int, tensors: int = 1, bytes_per_pack: int = 0
    ) -> dict[str, Any]:
        """All-reduces ``size`` bytes, cut into ``tensors`` tensors, ``iterations`` times.

        Returns:
            Over the replicas of this worker, a list with one value for each iteration: ``ready``
            and ``done``, when the last replica was (seconds since 1970); ``call``, the seconds that
            the call from Python took beyond the graph. ``wrong``: the number of wrong elements.
        """
        count = max(1, size // self.dtype.size // tensors)
        call = self._function(count, tensors, bytes_per_pack)
        pattern = self._on_replicas(lambda _: self.tf.cast(self.tf.range(count) % 7, self.dtype))
        patterns = [pattern] * tensors
        times: dict[str, Any] = {"ready": [], "done": [], "call": [], "wrong": 0}
        for iteration in range(iterations):
            turn = self.tf.cast(iteration % 5, self.dtype)
            start = time.perf_counter()
            stamps, wrong = call(patterns, turn)
            rows = [row.numpy() for row in self.strategy.experimental_local_results(stamps)]
            seconds = time.perf_counter() - start
            entered, ready, done, left = zip(*rows, strict=True)
            times["ready"].append(max(ready))
            times["done"].append(max(done))
            times["call"].append(seconds - (max(left) - min(entered)))
            times["wrong"] += sum(int(w) for w in self.strategy.experimental_local_results(wrong))
        return times

    def _on_replicas(self, value: Any) -> Any:
        return self.strategy.experimental_distribute_values_from_function(value)

    @functools.lru_cache(maxsize=1)  # noqa: B019 - one object in the process
    def _function(self, count: int, tensors: int, bytes_per_pack: int) -> Any:
        """A function that is traced for these static shapes, as a training step is."""
        body = functools.partial(self._on_replica, bytes_per_pack=bytes_per_pack)
        return self.tf.function(
            lambda patterns, turn: self.strategy.run(body, args=(patterns, turn))
        )

    def _on_replica(self, patterns: Sequence[Any], turn: Any, *, bytes_per_pack: int) -> Any:
        """Stamps, float64 [4]: entered, ready, done, left. Wrong elements, int64 scalar."""
        from ctl.reduce import all_reduce

        tf, replicas = self.tf, self.strategy.num_replicas_in_sync
        entered = self._stamp()
        with tf.control_dependencies([entered]):
            me = tf.cast(tf.distribute.get_replica_context().replica_id_in_sync_group, self.dtype)
            # The values differ by replica and turn; their sums are small whole numbers, so exact.
            mine = [pattern + turn + me for pattern in patterns]
        ready = self._stamp(*mine)
        with tf.control_dependencies([ready]):
            mine = [tf.identity(tensor) for tensor in mine]
        sums = all_reduce(mine, bytes_per_pack=bytes_per_pack, options=self.options)
        done = self._stamp(*sums)
        wrong = tf.zeros([], tf.int64)
        if _CHECK.value:
            with tf.control_dependencies([done]):
                everybody = tf.cast(sum(range(replicas)), self.dtype)
                many = tf.cast(replicas, self.dtype)
                for pattern, total in zip(patterns, sums, strict=True):
                    right = (pattern + turn) * many + everybody
                    wrong += tf.math.count_nonzero(tf.not_equal(total, right))
        return tf.stack([entered, ready, done, self._stamp(done, wrong)]), wrong

    def _stamp(self, *after: Any) -> Any:
        """The time when ``after`` are computed, float64 scalar."""
        with self.tf.control_dependencies(after):
            now = self.tf.timestamp()
        # Automatic control dependencies would run the stamps of all replicas one after the other.
        now.graph.experimental_acd_manager.run_independently(now.op)
        return now


def build() -> tuple[dict[str, Any], Any]:
    try:
        placement = place()
    except UsageError as error:  # the operation does not work on this device
        return {"unavailable": str(error)}, None
    replicas = placement.strategy.num_replicas_in_sync
    return {"replicas": replicas, "device": placement.description}, Measured(placement).run


if __name__ == "__main__":
    run_command(lambda: serve(build), sys.modules["__main__"].__doc__)
