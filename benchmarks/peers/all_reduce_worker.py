"""One worker that all-reduces with `ctl.reduce.all_reduce` when `all_reduce.py` tells it to.

The clock is read in the graph, before and after the all-reduce, on every replica. By hand::

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
from lines import answerer, serve

from ctl import cluster
from ctl.errors import UsageError
from ctl.flags.parsing import group, run_command

with group("What is measured"):
    _STRATEGY = flags.DEFINE_enum("strategy", "mirrored", ["mirrored", "multi_worker"], "which")
    _OPERATION = flags.DEFINE_string("operation", "auto", "as --cross_device_ops of ctl.train")
    _REPLICAS = flags.DEFINE_integer("replicas", None, "replicas of mirrored", lower_bound=2)
    _DTYPE = flags.DEFINE_string("dtype", "float32", "of what is reduced")
    _CHECK = flags.DEFINE_boolean("check", True, "every element of every result")


def place() -> Any:
    """The strategy; of several workers, which they are is in ``TF_CONFIG``."""
    from ctl.strategy import make_multi_worker, make_strategy

    if _STRATEGY.value == "multi_worker":
        if _OPERATION.value not in ("auto", "ring", "nccl"):
            raise UsageError(f"multi_worker has no {_OPERATION.value}")
        return make_multi_worker(
            cluster.resolve(None, None), communication=_OPERATION.value, startup_timeout=60.0
        )
    return make_strategy("mirrored", replicas=_REPLICAS.value, cross_device_ops=_OPERATION.value)


class Measured:
    """All-reduces of given sizes, and when they began and ended."""

    def __init__(self, placement: Any):
        import tensorflow as tf

        self.tf, self.strategy, self.options = tf, placement.strategy, placement.options
        self.dtype = tf.as_dtype(_DTYPE.value)

    def run(
        self, size: int, iterations: int, tensors: int = 1, bytes_per_pack: int = 0
    ) -> dict[str, Any]:
        """All-reduces ``size`` bytes, cut into ``tensors``, ``iterations`` times.

        Returns:
            For each iteration, of the replicas of this worker: when the last was ready and when the
            last was done (seconds since 1970), and the seconds that the call from Python added to
            the work of the graph; elements that were wrong in all.
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

    @functools.lru_cache(maxsize=1)  # noqa: B019 - one object for the life of the process
    def _function(self, count: int, tensors: int, bytes_per_pack: int) -> Any:
        """Traced for these shapes alone, as the step of a training is."""
        body = functools.partial(self._on_replica, bytes_per_pack=bytes_per_pack)
        return self.tf.function(
            lambda patterns, turn: self.strategy.run(body, args=(patterns, turn))
        )

    def _on_replica(self, patterns: Sequence[Any], turn: Any, *, bytes_per_pack: int) -> Any:
        """Stamps float64 [4]: entered, ready, done, left; wrong elements, int64 scalar."""
        from ctl.reduce import all_reduce

        tf, replicas = self.tf, self.strategy.num_replicas_in_sync
        entered = self._stamp()
        with tf.control_dependencies([entered]):
            me = tf.cast(tf.distribute.get_replica_context().replica_id_in_sync_group, self.dtype)
            # Different on each replica and in each turn; the sums are small whole numbers.
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
        """The time when ``after`` were there, float64 scalar."""
        with self.tf.control_dependencies(after):
            now = self.tf.timestamp()
        # Automatic control dependencies would put the stamps of all replicas in one row.
        now.graph.experimental_acd_manager.run_independently(now.op)
        return now


def main() -> None:
    answer = answerer()
    try:
        placement = place()
    except UsageError as error:  # this operation does not work on this device
        answer(unavailable=str(error))
        return
    about = {
        "replicas": placement.strategy.num_replicas_in_sync,
        "device": placement.description,
    }
    serve(about, Measured(placement).run, answer)


if __name__ == "__main__":
    run_command(main, sys.modules["__main__"].__doc__)
