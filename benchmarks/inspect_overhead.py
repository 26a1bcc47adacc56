"""What do marks cost? Times the step with and without them, in interleaved blocks of one process.

    python benchmarks/inspect_overhead.py --model=dense --global_batch_size=64
    python benchmarks/inspect_overhead.py --model=dense --replicas=2 --bytes_per_pack=100000

All variants train in the same loop, each with its own trace. For each, the table shows the time of
a block over that of the plain block in the same round: median and 10th to 90th percentile, in wall
time and in CPU time of the process. CPU time depends less on other programs. "plain again" is the
noise.
"""

from __future__ import annotations

import time

import numpy as np
from absl import flags

from ctl.flags.parsing import group, run_command

with group("What is measured"):
    _MODEL = flags.DEFINE_string("model", "dense", "a model of ctl.jobs.models")
    _BATCH = flags.DEFINE_integer("global_batch_size", 64, "examples per step", lower_bound=1)
    _REPLICAS = flags.DEFINE_integer("replicas", 1, "replicas", lower_bound=1)
    _PACK = flags.DEFINE_integer("bytes_per_pack", 0, "most bytes in one pack", lower_bound=0)
with group("How"):
    _ROUNDS = flags.DEFINE_integer("rounds", 40, "blocks of each variant", lower_bound=1)
    _STEPS = flags.DEFINE_integer("steps", 200, "steps of a block", lower_bound=1)
    _WARM_UP = flags.DEFINE_integer("warm_up", 3, "blocks of each that are not timed")


def main() -> None:
    import keras

    import ctl
    from ctl.phases.marks import Latest, Marks, Ring
    from ctl.phases.observer import NO_OBSERVER

    placement = ctl.make_strategy(replicas=_REPLICAS.value)
    keras.utils.set_random_seed(0)
    with placement.strategy.scope():
        model = ctl.models.make_model(_MODEL.value, (28, 28, 1), 10)
        step = ctl.TrainStep(model, keras.optimizers.Adam(), bytes_per_pack=_PACK.value)
    data = ctl.data.load(global_batch_size=_BATCH.value)
    loop = ctl.Loop(step, data, strategy=placement.strategy, steps_per_loop=_STEPS.value)
    variants = {
        "plain": NO_OBSERVER,
        "plain again": NO_OBSERVER,
        "window": Marks(step, Ring(step, 21)),
        "latest (flight recorder)": Marks(step, Latest(step)),
        "both": Marks(step, Ring(step, 21), Latest(step)),
    }
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in variants}
    order = list(variants)
    for number in range(_WARM_UP.value + _ROUNDS.value):
        order = order[1:] + order[:1]
        for name in order:
            step.observer = variants[name]
            start, used = time.perf_counter(), time.process_time()
            loop.train(loop.global_step + _STEPS.value, progress=False)
            if number >= _WARM_UP.value:
                took = time.perf_counter() - start, time.process_time() - used
                seconds[name].append(took)
    plain = np.array(seconds["plain"]) / _STEPS.value
    clock, cores = np.median(plain, axis=0) * 1e3
    print(f"plain step: {clock:.3f} ms, {cores:.3f} ms of cores; {len(plain)} rounds")
    print(f"{'ratio to plain':26} clock (p10-p90)        cores (p10-p90)")
    for name, took in seconds.items():
        ratios = np.percentile(np.array(took) / _STEPS.value / plain, [10, 50, 90], axis=0).T
        cells = [f"{median:.3f} ({low:.3f}-{high:.3f})" for low, median, high in ratios]
        print(f"{name:26} {cells[0]:22} {cells[1]}")


if __name__ == "__main__":
    run_command(main, __doc__)
