"""Small trainings with every recipe. What one of two workers runs: those that ask what workers are.

python recipes_worker.py OUT
"""

from __future__ import annotations

import os
import re
import sys
from functools import partial
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
import test_distillation  # noqa: E402
import test_dp_sgd  # noqa: E402
import test_gan  # noqa: E402
import test_gpt  # noqa: E402
import test_lora  # noqa: E402
import test_mean_teacher  # noqa: E402
import test_mixup  # noqa: E402
import test_moe  # noqa: E402
import test_powersgd  # noqa: E402
import test_simclr  # noqa: E402
import test_two_tower  # noqa: E402
import test_unfreezing  # noqa: E402
import test_vae  # noqa: E402
import test_wgan_gp  # noqa: E402
import test_zero1  # noqa: E402
from helpers import make_loop  # noqa: E402
from paths import ROOT  # noqa: E402
from worker_end import run_to_end  # noqa: E402

from ctl.distributed.strategy import make_multi_worker  # noqa: E402
from ctl.recipes.diloco import DiLoCo  # noqa: E402
from ctl.recipes.distillation import Distillation  # noqa: E402
from ctl.recipes.gradient_noise_scale import NoiseScale  # noqa: E402
from ctl.recipes.local_sgd import LocalSGD  # noqa: E402
from ctl.recipes.sam import SAM  # noqa: E402

STEPS = 4
RECIPES = ROOT / "ctl/recipes"


def distillation(strategy, **options):
    path = "teacher.keras"  # workers share the name, in a directory of each
    test_distillation.save_teacher(path)
    return make_loop(strategy, step_class=Distillation, teacher=path, **options)


# Each makes a loop for a strategy, with these ``checkpoints`` if they are given.
LOOPS = {
    "sam": partial(make_loop, step_class=SAM),
    "mixup": test_mixup.make,
    "distillation": distillation,
    "mean_teacher": test_mean_teacher.make,
    "gradient_noise_scale": partial(make_loop, step_class=NoiseScale),
    "lora": test_lora.make,
    "gpt": test_gpt.make,
    "vae": test_vae.make,
    "gan": test_gan.make,
    "wgan_gp": test_wgan_gp.make,
    "ddpm": test_ddpm.make,
    "simclr": test_simclr.make,
    "two_tower": test_two_tower.make,
    "compressed fp16": partial(test_compressed.make, compressor="fp16"),
    "compressed int8": partial(test_compressed.make, compressor="int8"),
    "compressed topk": partial(test_compressed.make, compressor="topk"),
    "powersgd": test_powersgd.make,
    "dp_sgd": partial(test_dp_sgd.make, noise=1.0),
    "zero1": test_zero1.make,
    "local_sgd": partial(rounds.make, kind=LocalSGD),
    "diloco": partial(rounds.make, kind=DiLoCo),
    "moe": test_moe.make,
    "unfreezing": test_unfreezing.make,
}

# Replicas of these exchange more than the step itself does, or have a state of their own. The
# others use workers as `ctl.TrainStep` does (tests/distributed/test_multi_worker.py).
EXCHANGES = re.compile(r"all_reduce|all_gather|merge_call|per_replica|def (sum_gradients|reduce)\b")


def asks_for_workers(name: str) -> bool:
    """Whether it is of these, its base class is, or it is that of several models."""
    recipe = RECIPES / f"{name.split()[0]}.py"
    return name in {"diloco", "gan"} or bool(EXCHANGES.search(recipe.read_text("utf-8")))


# Of one class with "compressed int8", with the same state and exchange; the base class of DiLoCo.
LIKE_ANOTHER = {"compressed fp16", "compressed topk", "local_sgd"}

# A noise scale adds no collective: a step with it trains as one without it, see
# tests/recipes/test_gradient_noise_scale.py. tests/test_methods.py has two workers with "zero1".
ELSEWHERE = {"gradient_noise_scale", "zero1"}

ON_WORKERS = [
    name for name in LOOPS if asks_for_workers(name) and name not in LIKE_ANOTHER | ELSEWHERE
]


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
    for name in ON_WORKERS:
        [values] = trained(strategy, name)
        np.savez(f"{name}.npz", *values)


def run() -> None:
    run_to_end(main)


if __name__ == "__main__":
    run()
