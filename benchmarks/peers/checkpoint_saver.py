"""Saves and restores a state of a given size with ctl and with TensorFlow's own manager, as told.

The state is trained by a loop that updates all of it at every step, as an optimizer does. So a save
that keeps the loop waiting, or slows the steps that follow, shows in the time of the loop.
"""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

from absl import flags
from lines import answerer, serve

from ctl.flags import group, run

with group("This peer"):
    _MEGABYTES = flags.DEFINE_float("megabytes", 1.0, "size of the state, 10^6 bytes")
    _VARIABLES = flags.DEFINE_integer("variables", 20, "float32 variables of equal size")
    _DIRECTORY = flags.DEFINE_string("directory", None, "where to save; a temporary one by default")


def build(directory: Path):
    import tensorflow as tf

    import ctl

    each = max(1, round(_MEGABYTES.value * 1e6 / 4 / _VARIABLES.value))
    variables = [tf.Variable(tf.ones([each])) for _ in range(_VARIABLES.value)]
    step_of = tf.Variable(0, dtype=tf.int64)

    @tf.function
    def train(steps: tf.Tensor) -> None:
        for _ in tf.range(steps):
            for variable in variables:
                variable.assign_add(tf.ones([each]) * 1e-3)
            step_of.assign_add(1)

    state = {"model": variables, "counters": [step_of]}
    ours = ctl.CheckpointManager(directory / "ctl", keep=1)
    theirs = tf.train.CheckpointManager(
        tf.train.Checkpoint(model=variables, step=step_of), str(directory / "tf"), max_to_keep=1
    )

    def run_steps(seconds: float) -> int:
        """How many steps it took to train for so long."""
        end, steps = time.perf_counter() + seconds, 0
        while time.perf_counter() < end:
            train(tf.constant(1))
            steps += 1
        return steps

    def save_ours() -> None:
        ours.save(int(step_of.numpy()), state)

    def save_theirs() -> None:
        theirs.save(int(step_of.numpy()))

    def flush() -> None:
        """What TensorFlow leaves undone: `save` returns with the bytes in the page cache."""
        for path in Path(directory / "tf").iterdir():
            with path.open("rb") as file:
                os.fsync(file.fileno())

    def save(who: str) -> dict[str, float]:
        """One save in the midst of training; times in seconds."""
        save, finish = (save_ours, ours.wait) if who == "ctl" else (save_theirs, flush)
        run_steps(0.2)
        begin = time.perf_counter()
        train(tf.constant(5))
        step_seconds = (time.perf_counter() - begin) / 5
        begin = time.perf_counter()
        save()
        stands_still = time.perf_counter() - begin
        train(tf.constant(1))
        next_step = time.perf_counter() - begin - stands_still
        finish()
        return {
            "stands_still": stands_still,
            "next_step": next_step,
            "step": step_seconds,
            "durable": time.perf_counter() - begin,
        }

    def restore(who: str) -> dict[str, float]:
        begin = time.perf_counter()
        if who == "ctl":
            ours.restore(state)
        else:
            theirs.restore_or_initialize()
        return {"restore": time.perf_counter() - begin}

    def reply(what: str, who: str) -> dict[str, float]:
        return {"save": save, "restore": restore}[what](who)

    about = {"versions": {"tensorflow": tf.__version__}, "bytes": 4 * each * len(variables)}
    return about, reply


def main() -> None:
    answer = answerer()
    with tempfile.TemporaryDirectory(dir=_DIRECTORY.value) as directory:
        serve(*build(Path(directory)), answer)


if __name__ == "__main__":
    run(main, __doc__)
