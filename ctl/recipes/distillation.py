"""Distillation: a small model learns the softened outputs of a trained teacher, and the labels.

The loss of an example is ``(1 - w) T^2 H(p_T, q_T) + w loss_fn``. ``p_T`` and ``q_T`` are the
softmax of the logits of the teacher and of the model, divided by the temperature T; H is the cross
entropy. The factor T^2 keeps the gradients of both parts in proportion when T changes.

Hinton, Vinyals and Dean 2015, arXiv:1503.02531, section 2. The defaults are those of its speech
models, section 4. This trains a teacher, and then distills it::

    python -m ctl.train --model_dir=/tmp/teacher --model=convnet
    python -m ctl.train --model_dir=/tmp/student --model=dense \\
        --step=ctl.recipes.distillation:Distillation --teacher=/tmp/teacher/export/model.keras
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

import ctl
from ctl import local_batch


class Distillation(ctl.TrainStep):
    """Distills a teacher. Both models are functional or sequential, and return logits.

    Raises:
        UsageError: there is no such file, it holds no model, or the shapes of the models differ.
    """

    teacher: str | None = ctl.option(None, "Teacher model, a .keras file.", type=str, fixed=True)
    teacher_temperature: float = ctl.option(2.0, "Temperature of the logits.", lower_bound=1e-3)
    label_share: float = ctl.option(
        0.5, "Weight of the loss on the labels.", lower_bound=0.0, upper_bound=1.0
    )

    def __init__(self, *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        self.taught_by = ctl.checkpoint.load_model(self.teacher, "teacher", like=self.model)
        self.taught_by.trainable = False

    def loss(self, batch: Any) -> tuple[tf.Tensor, tf.Tensor]:
        """The losses, [n], and the outputs of the model."""
        hard, logits = super().loss(batch)
        features, _, weights = local_batch.unpack(batch)
        taught = self.taught_by(self.preprocess(features), training=False)
        t = self.teacher_temperature
        taught, softer = (tf.cast(x, tf.float32) / t for x in (taught, logits))
        soft = tf.nn.softmax_cross_entropy_with_logits(tf.nn.softmax(taught), softer)
        soft *= t**2 * (1.0 if weights is None else tf.cast(weights, tf.float32))
        return (1.0 - self.label_share) * soft + self.label_share * hard, logits
