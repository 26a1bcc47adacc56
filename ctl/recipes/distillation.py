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

import os
from typing import Any

import keras
import tensorflow as tf
from absl import flags

import ctl
from ctl import share
from ctl.errors import UsageError

flags.DEFINE_string("teacher", None, "The .keras file of the model to distill.")
flags.DEFINE_float("teacher_temperature", 2.0, "Divides the logits.", lower_bound=1e-3)
flags.DEFINE_float(
    "label_share", 0.5, "Weight of the loss of the labels.", lower_bound=0.0, upper_bound=1.0
)


class Distillation(ctl.TrainStep):
    """Distills a teacher. Both models are functional or sequential, and return logits.

    Args:
        teacher: path of a ``.keras`` file; its model takes and returns what ``model`` does.
        temperature: T, above 0.
        label_share: w, in [0, 1].
        arguments, options: see `ctl.TrainStep`. Those above are the flags by default.

    Raises:
        UsageError: there is no such file, it holds no model, or one of other shapes.
    """

    def __init__(
        self,
        *arguments: Any,
        teacher: str | os.PathLike[str] | None = None,
        temperature: float | None = None,
        label_share: float | None = None,
        **options: Any,
    ):
        super().__init__(*arguments, **options)
        own: Any = flags.FLAGS
        path = own["teacher"].value if teacher is None else teacher
        self.temperature = temperature or own["teacher_temperature"].value
        self.label_share = own["label_share"].value if label_share is None else label_share
        self.teacher = load_teacher(path, self.model)

    def loss(self, batch: Any) -> tuple[tf.Tensor, tf.Tensor]:
        """The losses, [n], and the outputs of the model."""
        hard, logits = super().loss(batch)
        features, _, weights = share.unpack(batch)
        taught = self.teacher(self.preprocess(features), training=False)
        taught, softer = (tf.cast(x, tf.float32) / self.temperature for x in (taught, logits))
        soft = tf.nn.softmax_cross_entropy_with_logits(tf.nn.softmax(taught), softer)
        soft *= self.temperature**2 * (1.0 if weights is None else tf.cast(weights, tf.float32))
        return (1.0 - self.label_share) * soft + self.label_share * hard, logits


def load_teacher(path: str | os.PathLike[str] | None, student: keras.Model) -> keras.Model:
    """Returns the frozen model of a ``.keras`` file. Raises `UsageError`, see `Distillation`."""
    if path is None:
        raise UsageError("distillation needs --teacher: the .keras file of a trained model")
    try:
        teacher = keras.models.load_model(path, compile=False)
    except Exception as error:  # Keras raises many kinds for a file that is damaged
        reason = str(error).partition("\n")[0]
        raise UsageError(f"cannot load the teacher {path}: {reason}") from error
    shapes = [(one.input_shape, one.output_shape) for one in (teacher, student)]
    if shapes[0] != shapes[1]:
        (takes, gives), (wanted_in, wanted_out) = shapes
        raise UsageError(
            f"the teacher {path} does not fit: it takes {takes} and returns {gives}, the model "
            f"{student.name} takes {wanted_in} and returns {wanted_out}"
        )
    teacher.trainable = False
    return teacher
