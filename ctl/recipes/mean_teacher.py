"""Mean teacher: the model agrees with the average of its own weights, also on unlabelled examples.

The loss of an example is that of its label, unless the label is -1, plus the consistency cost: the
mean squared difference between the probabilities of the model and those of the teacher, which sees
other noise. The teacher is the moving average of ``--ema_decay``, which ctl keeps, saves and
evaluates. The weight of the cost grows with the step s as ``exp(-5 (1 - s / rampup)^2)``.

Tarvainen and Valpola 2017, arXiv:1703.01780, section 2 and appendix B.1, which also names the
defaults. There the decay is 0.99 while the weight grows; here it is one number::

    python -m ctl.train --model_dir=/tmp/mean-teacher --ema_decay=0.999 \\
        --step=ctl.recipes.mean_teacher:MeanTeacher
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

import ctl
from ctl import UsageError, local_batch


class MeanTeacher(ctl.TrainStep):
    """Trains with a mean teacher. Labels are classes, integers [n]; -1 for an example without one.

    Raises:
        UsageError: there is no ``ema_decay``.
    """

    consistency_weight: float = ctl.option(100.0, "Final consistency weight.", lower_bound=0.0)
    consistency_rampup: int = ctl.option(40_000, "Steps of its ramp-up.", lower_bound=1)
    input_noise: float = ctl.option(
        0.15, "Standard deviation of Gaussian noise on preprocessed features.", lower_bound=0.0
    )

    def __init__(self, *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        if self.ema_decay is None:
            raise UsageError("the teacher is an average of the weights: give --ema_decay=0.999")

    def loss(self, batch: Any) -> tuple[tf.Tensor, tf.Tensor]:
        """The losses, [n], and the outputs of the model for the noisy features."""
        features, labels, weights = local_batch.unpack(batch)
        features = self.preprocess(features)
        outputs = self.model(self.noisy(features, "student"), training=True)
        labelled = labels >= 0
        losses = self.loss_fn(tf.where(labelled, labels, 0), outputs)
        losses = tf.where(labelled, losses, 0.0)
        taught = tf.stop_gradient(self.teach(self.noisy(features, "teacher")))
        probabilities = (tf.nn.softmax(tf.cast(x, tf.float32)) for x in (outputs, taught))
        distance = tf.reduce_mean(tf.math.squared_difference(*probabilities), axis=-1)
        self.log("consistency", distance)
        done = tf.cast(self.global_step, tf.float32) / self.consistency_rampup
        left = 1.0 - tf.minimum(done, 1.0)
        losses += self.consistency_weight * tf.exp(-5.0 * left**2) * distance
        return losses if weights is None else losses * tf.cast(weights, losses.dtype), outputs

    def update_metrics(self, batch: Any, outputs: Any) -> None:
        """Updates the metrics with the labelled examples."""
        features, labels, weights = local_batch.unpack(batch)
        labelled = tf.cast(labels >= 0, tf.float32)
        weights = labelled if weights is None else labelled * tf.cast(weights, tf.float32)
        super().update_metrics((features, tf.maximum(labels, 0), weights), outputs)

    def noisy(self, features: tf.Tensor, name: str) -> tf.Tensor:
        """Adds noise that differs for each ``name``, step, replica and micro-batch."""
        noise = tf.random.stateless_normal(
            tf.shape(features), self.seed(name), dtype=features.dtype
        )
        return features + self.input_noise * noise

    def teach(self, features: tf.Tensor) -> tf.Tensor:
        """The outputs of the model with its averaged weights, with Dropout and with the statistics
        of the batch. It leaves no trace in the model."""
        variables = self.model.trainable_variables
        averages = self.updater.ema[: len(variables)]
        weights = [tf.cast(a, v.dtype) for a, v in zip(averages, variables, strict=True)]
        # As the pass of the model has left them, so that Dropout draws another mask.
        others = [v.value for v in self.model.non_trainable_variables]
        penalties = len(self.model.losses)
        outputs, _ = self.model.stateless_call(weights, others, features, training=True)
        if len(self.model.losses) != penalties:
            raise UsageError(
                "MeanTeacher calls the model twice, which drops the losses of layers (add_loss, "
                "activity_regularizer): remove them, or add them in loss()"
            )
        return outputs
