"""The gradient noise scale: the batch size above which larger batches help little.

A step compares the squared norms of the gradients of small batches (the micro-batches of all
replicas) with that of the global batch. Their difference gives unbiased estimates of ``|G|^2``, the
squared norm of the true gradient, and of ``tr(S)``, the variance of the gradient of one example.
The log has the means of both over all steps since the last record, and their ratio: the simple
noise scale, in examples. As a ratio, it is biased and noisy; take a large ``--log_every``. The
training is that of `ctl.TrainStep`, without a further collective.

McCandlish, Kaplan, Amodei et al. 2018, arXiv:1812.06162, equation 2.9 and appendix A.1, whose
moving averages are the means here::

    python -m ctl.train --model_dir=/tmp/noise --replicas=2 --log_every=500 \\
        --step=ctl.recipes.gradient_noise_scale:NoiseScale
    python -m ctl.train --model_dir=/tmp/noise-one --accumulate_steps=4 --log_every=500 \\
        --step=ctl.recipes.gradient_noise_scale:NoiseScale
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

import ctl
from ctl import UsageError, global_norm


class Squares(keras.metrics.Metric):
    """Means of squared norms of gradients, and what follows from them."""

    def __init__(self) -> None:
        super().__init__(name="noise")
        # For small and for large batches: the number of them, the sum of their squared norms, and
        # the sum of 1 / examples.
        self.sums = self.add_variable([2, 3], "zeros", name="sums")

    def update_state(
        self, large: int, gradients: Sequence[tf.Tensor | None], examples: Any, scale: Any = 1.0
    ) -> None:
        """Adds a batch of so many ``examples``, whose mean loss has the gradient ``scale`` times
        ``gradients``. Leaves out what is not finite: an update of float16 that is skipped."""
        examples = tf.cast(examples, tf.float32)
        row = tf.stack([1.0, (scale * global_norm(gradients)) ** 2, 1.0 / examples])
        row = tf.where(tf.reduce_all(tf.math.is_finite(row)), row, 0.0)
        self.sums.assign_add(tf.one_hot(large, 2)[:, tf.newaxis] * row)

    def result(self) -> dict[str, Any]:
        """A batch of b examples has a squared norm of ``|G|^2 + tr(S) / b`` in the mean."""
        small, large = (row[1:] / row[0] for row in tf.unstack(tf.convert_to_tensor(self.sums)))
        variance = (small[0] - large[0]) / (small[1] - large[1])
        square = large[0] - variance * large[1]
        return {
            "noise_scale": variance / square,
            "gradient_variance": variance,
            "gradient_square": square,
        }


class NoiseScale(ctl.TrainStep):
    """Logs ``noise_scale``, in examples, ``gradient_variance`` and ``gradient_square``. Arguments
    as for `ctl.TrainStep`. Examples are taken to have equal weights."""

    def __init__(self, *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        self.squares = Squares()

    def build(self, strategy: tf.distribute.Strategy, schedule: Any = None) -> None:
        """Raises `UsageError` if there is only one size of batches."""
        super().build(strategy, schedule)
        if strategy.num_replicas_in_sync * self.accumulate_steps == 1:
            raise UsageError(
                "the noise scale compares two sizes of batches: give --accumulate_steps=2, or use "
                "several replicas"
            )

    def loss_and_gradients(
        self, batch: Any, divisor: Any
    ) -> tuple[tf.Tensor, list[tf.Tensor | None], Any]:
        """See `ctl.TrainStep.loss_and_gradients`; of a micro-batch."""
        loss, gradients, outputs = super().loss_and_gradients(batch, divisor)
        examples = tf.cast(self.count(batch), tf.float32)
        scale = tf.cast(divisor, tf.float32) / examples
        if self.updater.loss_scale:
            scale /= self.updater.loss_scale.scale
        self.squares.update_state(0, gradients, examples, scale)
        return loss, gradients, outputs

    def reduce(self, loss: tf.Tensor, count: Any, gradients: list, snapshot: Any) -> tuple:
        """See `ctl.TrainStep.reduce`; of the global batch."""
        loss, total, gradients = super().reduce(loss, count, gradients, snapshot)
        self.squares.update_state(1, gradients, total)
        return loss, total, gradients
