"""A worker that trains a network of dense layers on request of `scaling.py`.

It can also train without the all-reduce, which shows what the all-reduce costs without any time
stamps, and run all-reduces alone, as `all_reduce_worker.py` does.
"""

from __future__ import annotations

import functools
import sys
import time
from typing import Any

from absl import flags
from all_reduce_worker import Measured, place
from lines import serve

from ctl.flags.parsing import group, run_command

with group("What is trained"):
    _BATCH = flags.DEFINE_integer("batch", 64, "examples of a replica (weak), of all (strong)")
    _LAYERS = flags.DEFINE_integer("layers", 4, "dense layers, two variables each")
    _WIDTH = flags.DEFINE_integer("width", 512, "of each layer")
    _PACK = flags.DEFINE_integer("bytes_per_pack", 0, "as in ctl.train")

_FEATURES = (28, 28, 1)
_CLASSES = 10


class Trained:
    """Trains one network in several ways. Each way has its own loop, made at the first request."""

    def __init__(self, placement: Any):
        self.placement = placement
        self.replicas = placement.strategy.num_replicas_in_sync

    def run(self, steps: int, strong: bool, alone: bool) -> dict[str, Any]:
        """Trains ``steps`` steps.

        Args:
            steps: how many.
            strong: --batch is the global batch; otherwise it is the batch of each replica.
            alone: without the all-reduce.

        Returns:
            ``seconds``.
        """
        loop = self._loop(strong, alone)
        start = time.perf_counter()
        loop.train(loop.global_step + steps, progress=False)
        return {"seconds": time.perf_counter() - start}

    @functools.lru_cache  # noqa: B019 - one object in the process
    def _loop(self, strong: bool, alone: bool) -> Any:
        import keras

        import ctl

        class Alone(ctl.TrainStep):
            def reduce(self, loss, count, gradients, snapshot):
                return loss, count, gradients

            def unsynchronized_variables(self):
                return [v.value for v in self.model.trainable_variables]

        keras.utils.set_random_seed(1)
        with self.placement.strategy.scope():
            model = keras.Sequential([keras.layers.Input(_FEATURES), keras.layers.Flatten()])
            for _ in range(_LAYERS.value):
                model.add(keras.layers.Dense(_WIDTH.value, activation="relu"))
            model.add(keras.layers.Dense(_CLASSES))
            step = (Alone if alone else ctl.TrainStep)(
                model,
                keras.optimizers.SGD(1e-3),
                bytes_per_pack=_PACK.value,
                options=self.placement.options,
            )
        dataset = ctl.data.synthetic(
            _FEATURES,
            _CLASSES,
            global_batch_size=_BATCH.value * (1 if strong else self.replicas),
        )
        return ctl.Loop(step, dataset, strategy=self.placement.strategy, steps_per_loop=sys.maxsize)

    def gradient_bytes(self) -> int:
        """Bytes of the float32 gradients of one replica."""
        model = self._loop(False, False).step.model
        return 4 * sum(v.value.shape.num_elements() for v in model.trainable_variables)


def build() -> tuple[dict[str, Any], Any]:
    if flags.FLAGS.strategy == "multi_worker" or flags.FLAGS.replicas:
        placement = place()
    else:
        from ctl.distributed.strategy import make_strategy

        placement = make_strategy()
    trained, measured = Trained(placement), Measured(placement)

    def reply(what: str = "all_reduce", **request: Any) -> dict[str, Any]:
        return (trained if what == "train" else measured).run(**request)

    about = {"replicas": trained.replicas, "gradient_bytes": trained.gradient_bytes()}
    return about | {"device": placement.description}, reply


if __name__ == "__main__":
    run_command(lambda: serve(build), sys.modules["__main__"].__doc__)
