"""`ctl.Loop` as its users call it, on the embedded dataset, in memory."""

from __future__ import annotations

import worker
from absl import flags

from ctl.flags.parsing import group

with group("This peer"):
    _OFF = flags.DEFINE_boolean("off", False, "jit_compile is off, and not decided by the rule")


def build(setting: worker.Setting):
    import keras
    import tensorflow as tf

    import ctl
    from ctl.distributed import cluster
    from ctl.distributed.strategy import make_multi_worker

    keras.utils.set_random_seed(1)
    if setting.workers:
        me = cluster.Cluster(setting.workers, setting.worker_index, "--workers")
        placement = make_multi_worker(me)
    else:
        placement = ctl.make_strategy(replicas=setting.replicas)
    dataset = ctl.data.load(global_batch_size=setting.global_batch_size)
    with placement.strategy.scope():
        step = ctl.TrainStep(
            ctl.models.make_model(
                setting.model, dataset.info.image_shape, dataset.info.num_classes
            ),
            keras.optimizers.Adam(1e-3),
            metrics=[keras.metrics.SparseCategoricalAccuracy(name="accuracy")],
            options=placement.options,
            jit_compile=setting.jit_compile or (False if _OFF.value else None),
        )

    def end_window(status) -> None:
        if status.final:
            status.reset()

    loop = ctl.Loop(step, dataset, strategy=placement.strategy, actions=[end_window])

    def train(steps: int) -> float:
        return loop.train(loop.global_step + steps, progress=False)["loss"]

    return train, {
        "versions": {"tensorflow": tf.__version__, "keras": keras.__version__},
        "device": placement.description,
        "jit_compile": step.jit_compile,
    }


if __name__ == "__main__":
    worker.serve(build)
