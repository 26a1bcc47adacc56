"""Small trainings with every recipe. What one of two workers runs: all of them.

python recipes_worker.py OUT
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from ctl.base import console
from ctl.distributed import cluster

console.log_to_terminal()
console.load_tensorflow()
sys.path.append(str(Path(__file__).parents[1] / "recipes"))

import keras  # noqa: E402
import numpy as np  # noqa: E402
import rounds  # noqa: E402
import test_compressed  # noqa: E402
import test_ddpm  # noqa: E402
import test_dp_sgd  # noqa: E402
import test_gan  # noqa: E402
import test_gpt  # noqa: E402
import test_lora  # noqa: E402
import test_mixup  # noqa: E402
import test_moe  # noqa: E402
import test_powersgd  # noqa: E402
import test_simclr  # noqa: E402
import test_unfreezing  # noqa: E402
import test_vae  # noqa: E402
from helpers import CLASSES, FEATURES, make_loop  # noqa: E402
from worker_end import run_to_end  # noqa: E402

from ctl.distributed.strategy import make_multi_worker  # noqa: E402
from ctl.recipes.diloco import DiLoCo  # noqa: E402
from ctl.recipes.distillation import Distillation  # noqa: E402
from ctl.recipes.gradient_noise_scale import NoiseScale  # noqa: E402
from ctl.recipes.local_sgd import LocalSGD  # noqa: E402
from ctl.recipes.mean_teacher import MeanTeacher  # noqa: E402
from ctl.recipes.mixup import CutMix  # noqa: E402
from ctl.recipes.sam import SAM  # noqa: E402
from ctl.recipes.zero1 import ZeRO1  # noqa: E402

STEPS = 4


def distillation(strategy):
    keras.utils.set_random_seed(5)
    teacher = keras.Sequential([keras.Input([FEATURES]), keras.layers.Dense(CLASSES)])
    teacher.save("teacher.keras")  # a name that workers share, in a directory of each
    return make_loop(strategy, step_class=Distillation, teacher="teacher.keras")


def cutmix(strategy):
    # What makes tensors must wait for the strategy of the workers.
    return make_loop(
        strategy, step_class=CutMix, model=test_mixup.network, data=test_mixup.data(), mix_alpha=0.5
    )


def plain(kind: type, **options):
    return lambda strategy: make_loop(strategy, step_class=kind, **options)


def of(module, *args):
    return lambda strategy: module.make(strategy, *args)


# Each makes a loop for a strategy.
LOOPS = {
    "sam": plain(SAM),
    "mixup": cutmix,
    "distillation": distillation,
    "mean_teacher": plain(MeanTeacher, ema_decay=0.9),
    "gradient_noise_scale": plain(NoiseScale),
    "lora": of(test_lora),
    "gpt": of(test_gpt),
    "vae": of(test_vae),
    "gan": of(test_gan),
    "ddpm": of(test_ddpm),
    "simclr": of(test_simclr),
    "compressed fp16": of(test_compressed, "fp16"),
    "compressed int8": of(test_compressed, "int8"),
    "compressed topk": of(test_compressed, "topk"),
    "powersgd": of(test_powersgd),
    "dp_sgd": of(test_dp_sgd),
    "zero1": plain(ZeRO1),
    "local_sgd": of(rounds, LocalSGD),
    "diloco": of(rounds, DiLoCo),
    "moe": of(test_moe),
    "unfreezing": of(test_unfreezing),
}


def trained(strategy, name: str) -> list[list[np.ndarray]]:
    """The variables of the model after `STEPS` steps, on each replica of this process."""
    keras.utils.set_random_seed(3)
    loop = LOOPS[name](strategy)
    loop.train(STEPS)
    copies = [strategy.experimental_local_results(v.value) for v in loop.step.model.variables]
    return [[copy.numpy() for copy in one] for one in zip(*copies, strict=True)]


def main() -> None:
    out = Path(sys.argv[1])
    me = cluster.resolve(None, None)
    strategy = make_multi_worker(me, collective_timeout=60, startup_timeout=60).strategy
    os.chdir(out / f"process-{me.index}")
    for name in LOOPS:
        [values] = trained(strategy, name)
        np.savez(f"{name}.npz", *values)


def run() -> None:
    run_to_end(main)


if __name__ == "__main__":
    run()
