"""What one of two workers runs: methods of the literature that need more than a gradient. At the
end, one worker changes its copy of the weights a little.

python methods_worker.py OUT
"""

from __future__ import annotations

import sys
from pathlib import Path

from ctl.base import console
from ctl.distributed import cluster

console.log_to_terminal()
console.load_tensorflow()

import keras  # noqa: E402
import numpy as np  # noqa: E402
from contrastive import contrastive, views  # noqa: E402
from sam import sam_loop  # noqa: E402
from worker_end import run_to_end  # noqa: E402

import ctl  # noqa: E402
from ctl.distributed.strategy import make_multi_worker  # noqa: E402
from ctl.recipes.zero1 import ZeRO1  # noqa: E402

OUT = Path(sys.argv[1])
SIZES = [9, 13, 6, 9]
me = cluster.resolve(None, None)


def main() -> None:
    placement = make_multi_worker(me, collective_timeout=60, startup_timeout=60)
    loops = {
        "contrastive": contrastive(placement.strategy, views(SIZES), options=placement.options),
        "zero1": sam_loop(
            placement.strategy, kind=ZeRO1, sizes=SIZES, static=False, options=placement.options
        ),
        "sam": sam_loop(placement.strategy, sizes=SIZES, static=False, options=placement.options),
    }
    for name, loop in loops.items():
        loop.train(len(SIZES))
        np.savez(OUT / f"{name}-{me.index}.npz", *loop.step.model.get_weights())
    compare = ctl.Every(ctl.CompareReplicas(loop.step), steps=2)
    loop.actions.append(compare)
    loop.train(8)
    if me.index == 1:
        kernel = loop.step.model.trainable_variables[0].value
        kernel.assign(np.nextafter(kernel.numpy(), 10, dtype=np.float32))
    loop.train(12)


def run() -> None:
    keras.utils.set_random_seed(0)
    run_to_end(main)


if __name__ == "__main__":
    run()
