"""Saves and restores a state with ctl or with `tf.train.CheckpointManager`, on request.

A loop updates all of the state at every step, as an optimizer does. So the time of the loop shows a
save that stops it or slows the next steps.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from absl import flags
from lines import serve

from ctl.errors import UsageError
from ctl.flags.parsing import group, run_command

with group("This peer"):
    _MEGABYTES = flags.DEFINE_float("megabytes", 1.0, "size of the state, 10^6 bytes")
    _VARIABLES = flags.DEFINE_integer("variables", 20, "float32, of equal size", lower_bound=1)
    _DIRECTORY = flags.DEFINE_string("directory", None, "where to save")


def build():
    """Facts of the state, and the function that answers a request."""
    if _DIRECTORY.value is None:
        raise UsageError("give --directory")
    directory = Path(_DIRECTORY.value)

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

    def save_ours() -> None:
        ours.save(int(step_of.numpy()), state)

    def save_theirs() -> None:
        theirs.save(int(step_of.numpy()))

    def flush() -> None:
        """TensorFlow's `save` leaves the bytes in the page cache; this writes them to the disk."""
        for path in Path(directory / "tf").iterdir():
            with path.open("rb") as file:
                os.fsync(file.fileno())

    def save(who: str) -> dict[str, float]:
        """One save during training; times in seconds."""
        save, finish = (save_ours, ours.wait) if who == "ctl" else (save_theirs, flush)
        train(tf.constant(10))
        begin = time.perf_counter()
        train(tf.constant(10))
        a_step = (time.perf_counter() - begin) / 10
        begin = time.perf_counter()
        save()
        stands_still = time.perf_counter() - begin
        train(tf.constant(1))
        delay = time.perf_counter() - begin - a_step
        finish()
        durable = time.perf_counter() - begin
        return {"stands_still": stands_still, "delay": delay, "durable": durable}

    def restore(who: str) -> dict[str, float]:
        begin = time.perf_counter()
        if who == "ctl":
            ours.restore(state)
        else:
            theirs.restore_or_initialize()
        return {"restored": time.perf_counter() - begin}

    def reply(who: str) -> dict[str, float]:
        return save(who) | restore(who)

    about = {"versions": {"tensorflow": tf.__version__}, "bytes": 4 * each * len(variables)}
    return about, reply


if __name__ == "__main__":
    run_command(lambda: serve(build), __doc__)
