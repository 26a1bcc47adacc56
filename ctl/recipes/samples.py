"""Images that a model generates, as one PNG after each evaluation, for `vae`, `gan` and `ddpm`."""

from __future__ import annotations

from typing import Any

import tensorflow as tf
from absl import flags

import ctl

SEED = (0, 0)  # of an evaluation, so that only the weights change what it gives
_ROWS = 8


class Sampling(ctl.EvalStep):
    """Draws a square of images after each evaluation, from the same noise each time.

    Args:
        samples: path of the PNG; by default ``samples.png`` in ``--model_dir``, if that is a flag
            of the program, else none is written.
    """

    def __init__(self, *args: Any, samples: str | None = None, **options: Any):
        super().__init__(*args, **options)
        values: Any = flags.FLAGS
        if samples is None and "model_dir" in values and values["model_dir"].value:
            samples = str(ctl.checkpoint.local(values["model_dir"].value) / "samples.png")
        # All workers evaluate, and one writes.
        self.samples = samples if ctl.workers.is_chief(tf.distribute.get_strategy()) else None

    def sampled(self, count: int) -> tf.Tensor:
        """So many images from the noise of `SEED`, float [count, height, width, channels] in
        [0, 1]."""
        raise NotImplementedError

    def results(self) -> dict[str, float]:
        """As `ctl.EvalStep`. The evaluator calls it once, at the end."""
        if self.samples:
            tf.io.write_file(self.samples, tf.io.encode_png(tiled(self.sampled(_ROWS**2), _ROWS)))
        return super().results()


def tiled(images: tf.Tensor, rows: int) -> tf.Tensor:
    """Images in [0, 1], [rows * columns, height, width, channels], as one image in uint8."""
    _, height, width, channels = images.shape
    grid = tf.reshape(images, [rows, -1, height, width, channels])
    grid = tf.reshape(tf.transpose(grid, [0, 2, 1, 3, 4]), [rows * height, -1, channels])
    return tf.cast(tf.round(255.0 * tf.cast(grid, tf.float32)), tf.uint8)
