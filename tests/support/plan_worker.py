"""What a worker of tests/phases/plan/test_lints.py runs: plans steps of several kinds as one of two
workers, then begins to train with a worker that reduces one tensor more.

python plan_worker.py OUT
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from ctl.base import console
from ctl.distributed import cluster

console.log_to_terminal()
console.load_tensorflow()

import keras  # noqa: E402
import tensorflow as tf  # noqa: E402
from helpers import BATCH, CLASSES, FEATURES, examples, mlp  # noqa: E402
from paths import BENCHMARKS  # noqa: E402
from worker_end import run_to_end  # noqa: E402

import ctl  # noqa: E402
from ctl.distributed.strategy import make_multi_worker  # noqa: E402
from ctl.phases.plan.collectives import plan_of  # noqa: E402
from ctl.reduce import all_reduce  # noqa: E402

sys.path.append(str(BENCHMARKS / "peers"))

from sent_bytes import sent_bytes  # noqa: E402

OUT = Path(sys.argv[1])
STEPS = 20
me = cluster.resolve(None, None)


class OneMore(ctl.TrainStep):
    """Worker 1 reduces one tensor more, of the same shape as one of the others."""

    def reduce(self, loss, count, gradients, snapshot):
        loss, count, gradients = super().reduce(loss, count, gradients, snapshot)
        if me.index == 1:
            all_reduce([gradients[-1]], options=self.options)
        return loss, count, gradients


def wide(units: int) -> keras.Model:
    hidden = [keras.layers.Dense(units), keras.layers.Dense(units)]
    return keras.Sequential([keras.layers.Input([FEATURES]), *hidden, keras.layers.Dense(CLASSES)])


def ending(strategy: tf.distribute.Strategy):
    """A function that takes batches from data that end, and reduces nothing itself."""
    dataset = tf.data.Dataset.range(8).batch(2)
    iterator = iter(strategy.experimental_distribute_dataset(dataset))

    @tf.function
    def take(iterator):
        for _ in tf.range(2):
            strategy.run(lambda batch: batch + 1, args=(next(iterator),))

    return take.get_concrete_function(iterator)


def wire(loop: ctl.Loop) -> dict[str, float]:
    """What this worker has sent in some steps, and what the plan says of them."""
    loop.train(2)
    ctl.workers.barrier(loop.strategy, 60)
    before = sent_bytes()
    loop.train(2 + STEPS)
    ctl.workers.barrier(loop.strategy, 60)
    planned = sum(c.wire_bytes for c in loop.plan().collectives if c.in_loop)
    return {"counted": sent_bytes() - before, "planned": planned * STEPS}


def main() -> None:
    placement = make_multi_worker(me, collective_timeout=60, startup_timeout=60)

    def loop(model, step=ctl.TrainStep, **options) -> ctl.Loop:
        with placement.strategy.scope():
            made = step(model(), keras.optimizers.SGD(), options=placement.options, **options)
        data = ctl.data.InMemory(examples(), global_batch_size=BATCH)
        return ctl.Loop(made, data, strategy=placement.strategy)

    kinds = {
        "clean": loop(mlp),
        "packs": loop(lambda: wide(800), bytes_per_pack=2**20),
        "one more": loop(mlp, OneMore),
        "one pack": loop(lambda: wide(800)),
        "micro-batches": loop(lambda: wide(800), accumulate_steps=2),
        "compiled": loop(lambda: wide(800), jit_compile=True),
        "large": loop(lambda: wide(3000)),
    }
    # Compared, so planned by both workers, and first: they trace them in the same order.
    of_both = "clean", "packs", "one more"
    planned = kinds if me.index == 0 else of_both
    plans = {name: kinds[name].plan().to_json() for name in planned}
    if me.index == 0:
        plans["data that end"] = plan_of(
            ending(placement.strategy), placement.strategy, {}, (), workers=2
        ).to_json()
    (OUT / f"plans-{me.index}.json").write_text(json.dumps(plans))
    if me.index == 0:
        compiled = kinds["packs"].plan(xla=True).to_json()
        (OUT / "compiled.json").write_text(json.dumps(compiled))
    ctl.workers.barrier(placement.strategy, 300)
    (OUT / f"wire-{me.index}.json").write_text(json.dumps(wire(kinds["packs"])))
    kinds["one more"].train(1)


def run() -> None:
    tf.random.set_seed(0)
    run_to_end(main)


if __name__ == "__main__":
    run()
