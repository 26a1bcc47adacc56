"""A mixture of experts: a router sends each token of an image to one of several small networks.

Fedus, Zoph and Shazeer 2021, arXiv:2101.03961, section 2: switch routing (equations 1 and 2, with
k = 1) in float32, and the loss that balances the load of the experts (equations 4 to 6), whose
default weight is that of section 2.2. The fraction of tokens that an expert gets is that of the
global batch, so N replicas equal one; it has no gradient, so the rest is a sum over examples. An
expert takes all tokens that come: the paper drops those above a capacity (equation 3), which would
depend on how examples are split over replicas. All experts are on all replicas::

    python -m ctl.train --model_dir=/tmp/moe --step=ctl.recipes.moe:Balanced \\
        --model=ctl.recipes.moe:make_model --experts=4 --balance_weight=0.01

The log has ``balance``, about 1 when all experts get equally many tokens and ``--experts`` when one
gets all, and the fraction that each gets: ``load0_3`` is that of expert 3 in layer 0.
"""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf
from absl import flags
from keras import layers

import ctl
from ctl import UsageError, local_batch

flags.DEFINE_integer("experts", 4, "Experts per mixture layer.", lower_bound=1)


@keras.saving.register_keras_serializable("ctl")
class Switch(layers.Layer):
    """Sends each token to the expert that its router prefers: two dense layers.

    Maps float [n, tokens, width] to the same shape, and to the probabilities of the router, float32
    [n, tokens, experts]. XLA cannot compile it: how many tokens an expert gets is not known before.

    Args:
        experts: their number.
        hidden: units of the first layer of each.
    """

    def __init__(self, experts: int, hidden: int, **options: Any):
        super().__init__(**options)
        self.experts, self.hidden = experts, hidden

    def get_config(self) -> dict[str, Any]:
        return super().get_config() | {"experts": self.experts, "hidden": self.hidden}

    def build(self, shape: tuple[int | None, ...]) -> None:
        """Makes the router and the experts for tokens of the width ``shape[-1]``."""
        width: Any = shape[-1]
        self.router = layers.Dense(self.experts, "softmax", use_bias=False, dtype="float32")
        self.networks = [
            keras.Sequential(
                [
                    layers.Dense(self.hidden, "relu", dtype=self.dtype_policy),
                    layers.Dense(width, dtype=self.dtype_policy),
                ]
            )
            for _ in range(self.experts)
        ]
        for layer in (self.router, *self.networks):
            layer.build((None, width))

    def call(self, x: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """The tokens ``x`` after their experts, and the probabilities of the router."""
        tokens = tf.reshape(x, [-1, x.shape[-1]])
        probabilities = self.router(tokens)  # equation 1
        chosen = tf.argmax(probabilities, axis=-1, output_type=tf.int32)
        gates = tf.cast(tf.reduce_max(probabilities, axis=-1, keepdims=True), x.dtype)
        parts = tf.dynamic_partition(tokens, chosen, self.experts)
        rows = tf.dynamic_partition(tf.range(tf.shape(chosen)[0]), chosen, self.experts)
        outputs = [network(part) for network, part in zip(self.networks, parts, strict=True)]
        y = gates * tf.dynamic_stitch(rows, outputs)  # equation 2
        shape = [-1, x.shape[1], self.experts]
        return tf.reshape(y, tf.shape(x)), tf.reshape(probabilities, shape)


class Balanced(ctl.TrainStep):
    """Trains a functional model of which some layers are `Switch`. A batch is ``(features,
    labels)``. With ``accumulate_steps`` on one replica, fractions are those of the micro-batch.

    Raises:
        UsageError: no layer of the model is a `Switch`.
    """

    balance_weight: float = ctl.option(0.01, "Weight of the load balancing loss.", lower_bound=0.0)

    def __init__(self, *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        switches = [layer for layer in self.model.layers if isinstance(layer, Switch)]
        if not switches:
            raise UsageError("the model has no Switch: give --model=ctl.recipes.moe:make_model")
        outputs = [self.model.output, *(switch.output[1] for switch in switches)]
        self.routed = keras.Model(self.model.inputs, outputs)

    def loss(self, batch: Any) -> tuple[tf.Tensor, tf.Tensor]:
        """The losses, [n], and the logits."""
        features, labels = local_batch.pair(batch)
        logits, *routed = self.routed(self.preprocess(features), training=True)
        losses = self.loss_fn(labels, logits)
        for layer, probabilities in enumerate(routed):
            losses += self.balance_weight * self.unbalanced(layer, probabilities)
        return losses, logits

    def unbalanced(self, layer: int, probabilities: tf.Tensor) -> tf.Tensor:
        """What each example adds to equation 4 divided by alpha, float32 [n]: the mean over its
        tokens. ``probabilities`` are those of the router of ``layer``, [n, tokens, experts]."""
        experts = probabilities.shape[-1]
        chosen = ctl.reduce.all_gather(tf.argmax(probabilities, axis=-1, output_type=tf.int32))
        fractions = tf.reduce_mean(tf.one_hot(chosen, experts), axis=[0, 1])  # equation 5
        loss = experts * tf.reduce_sum(fractions * tf.reduce_mean(probabilities, axis=1), axis=-1)
        self.log("balance", loss)
        for expert in range(experts):
            self.log(f"load{layer}_{expert}", fractions[expert])
        return loss


def make_model(image_shape: tuple[int, ...], num_classes: int) -> keras.Model:
    """The mean over the tokens of an image, its patches of 7x7 pixels, after one `Switch`."""
    experts: Any = flags.FLAGS["experts"].value
    images = keras.Input(image_shape, name="image")
    x = layers.Conv2D(64, 7, 7, "same", activation="relu")(images)
    x = layers.Reshape([-1, 64])(x)
    y, _ = Switch(experts, 128)(layers.LayerNormalization()(x))
    x = layers.GlobalAveragePooling1D()(x + y)
    return keras.Model(images, layers.Dense(num_classes, dtype="float32")(x), name="moe")
