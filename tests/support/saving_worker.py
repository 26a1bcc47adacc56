"""What a worker of tests/test_loop_saving.py runs: a training that saves once in a while, where the
clock of one worker is fast. Says at which steps this worker has taken part in a save.

python saving_worker.py OUT
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from ctl.base import console
from ctl.distributed import cluster

console.load_tensorflow()

import keras  # noqa: E402
from helpers import examples, mlp  # noqa: E402
from worker_end import run_to_end  # noqa: E402

import ctl  # noqa: E402
from ctl.distributed.strategy import make_multi_worker  # noqa: E402

UNTIL = 60


def main() -> None:
    me, out = cluster.resolve(None, None), Path(sys.argv[1])
    strategy = make_multi_worker(me).strategy
    keras.utils.set_random_seed(0)
    with strategy.scope():
        step = ctl.TrainStep(mlp(), "adam")
    data = ctl.data.InMemory(examples(), global_batch_size=16)
    checkpoints = ctl.CheckpointManager(out / "checkpoints", save_every_seconds=0.5)
    loop = ctl.Loop(step, data, strategy=strategy, checkpoints=checkpoints, steps_per_loop=2)
    save, saved = loop.save, []

    def noted(*args, **options):
        saved.append(loop.global_step)
        save(*args, **options)

    loop.save = noted
    record = loop._pace.record_duration
    if me.index == 1:
        loop._pace.record_duration = lambda s, steps, mean: record(100 * s, steps, mean)
    loop.train(UNTIL)
    checkpoints.close()
    (out / f"saved-{me.index}.json").write_text(json.dumps(saved))
    ctl.workers.leave_together(strategy)


def run() -> None:
    run_to_end(main)


if __name__ == "__main__":
    run()
