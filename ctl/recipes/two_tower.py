"""Two towers retrieve items: one network makes a vector of a user, another one of an item, and the
items whose vectors have the largest products with that of the user are found.

The loss of an example is a softmax over the items of the global batch, also on other replicas, so N
replicas equal one. A popular item is in more batches, so it is a negative too often: the log of its
frequency is subtracted from its logit. The loss then estimates that of a softmax over all items.
The user's item elsewhere in the batch is no negative. With ``--accumulate_steps``, which needs one
replica, negatives are those of the micro-batch.

Yi et al. 2019, "Sampling-bias-corrected neural modeling for large corpus item recommendations",
doi:10.1145/3298689.3346996, section 3: the corrected softmax of a batch, unit vectors, and a
temperature. The paper estimates frequencies in a stream of data; here, the data have them. An
evaluation logs the recall: how often the item is among the ``--recall_at`` best of all items::

    python -m ctl.train --model_dir=/tmp/two_tower --step=ctl.recipes.two_tower:TwoTower \\
        --dataset=ctl.recipes.two_tower:datasets --model=ctl.recipes.two_tower:make_model \\
        --global_batch_size=1024 --learning_rate=3e-3 --epochs=5

Its ``recall_at_10`` is 0.44 in the end, and 0.14 with ``--nosampling_correction``.
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf
from absl import flags
from keras import layers

import ctl
from ctl import BaseStep, UsageError, local_batch

flags.DEFINE_integer("users", 10_000, "Number of users.", lower_bound=1)
flags.DEFINE_integer("items", 10_000, "Number of items.", lower_bound=1)


class Towers(BaseStep):
    """What training and evaluation share.

    Args:
        model: a dict of two: ``user`` and ``item``, from ids [n] to vectors of one size. That of
            the items is a `keras.Sequential` that begins with an Embedding, which says how many
            items there are.

    Raises:
        UsageError: ``model`` is something else.
    """

    softmax_temperature: float = ctl.option(
        0.1, "Temperature: divides the products of the vectors.", lower_bound=1e-3
    )

    def __init__(self, model: Any, *args: Any, **options: Any):
        both = hasattr(model, "keys") and {*model} == {"user", "item"}
        if not both or not isinstance(model["item"].layers[0], layers.Embedding):
            raise UsageError(
                f"{type(self).__name__} needs a dict of two models, user and item, of which item "
                "is a keras.Sequential that begins with an Embedding: give "
                "--model=ctl.recipes.two_tower:make_model"
            )
        super().__init__(model, *args, **options)

    def vectors(self, name: str, ids: tf.Tensor) -> tf.Tensor:
        """What the tower ``name`` makes of ``ids``, float32 [n, size]."""
        return tf.cast(self.model[name](ids, training=self.training), tf.float32)

    def logits(self, users: tf.Tensor, items: tf.Tensor) -> tf.Tensor:
        """Of the vectors of each user and each item, float32 [users, items]."""
        return tf.matmul(users, items, transpose_b=True) / self.softmax_temperature


class Evaluation(Towers, ctl.EvalStep):
    """The loss of a softmax over all items, and the recall. A batch is ``({"user": ids [n]}, items
    [n])``. Computes the vectors of all items for each batch, so give large batches."""

    recall_at: int = ctl.option(10, "Number of items that are retrieved.", lower_bound=1)

    def loss(self, batch: Any) -> tf.Tensor:
        features, items = local_batch.pair(batch)
        every = self.vectors("item", tf.range(self.model["item"].layers[0].input_dim))
        logits = self.logits(self.vectors("user", features["user"]), every)
        found = tf.math.in_top_k(items, logits, self.recall_at)
        self.log(f"recall_at_{self.recall_at}", tf.cast(found, tf.float32))
        return tf.nn.sparse_softmax_cross_entropy_with_logits(items, logits)


class TwoTower(Towers, ctl.TrainStep):
    """Trains two towers. A batch is ``({"user": ids [n], "log_frequency": float32 [n]}, items
    [n])``, with the log of the fraction of the training examples that have this item. A factor that
    all fractions share changes nothing."""

    eval_step = Evaluation
    sampling_correction: bool = ctl.option(
        True, "Subtract the log of the frequency of an item from its logit."
    )

    def loss(self, batch: Any) -> tf.Tensor:
        features, items = local_batch.pair(batch)
        every = ctl.reduce.all_gather(self.vectors("item", items))
        logits = self.logits(self.vectors("user", features["user"]), every)
        if self.sampling_correction:
            logits -= ctl.reduce.all_gather(features["log_frequency"])
        columns = ctl.reduce.first_row(items) + tf.range(tf.shape(items)[0])
        own = tf.one_hot(columns, tf.shape(logits)[1], on_value=True, off_value=False)
        again = (items[:, tf.newaxis] == ctl.reduce.all_gather(items)) & ~own
        logits = tf.where(again, -1e9, logits)
        return tf.nn.sparse_softmax_cross_entropy_with_logits(columns, logits)


def make_model() -> dict[str, keras.Model]:
    """A `tower` for ``--users``, and one for ``--items``."""
    values: Any = flags.FLAGS
    return {"user": tower(values["users"].value), "item": tower(values["items"].value)}


def tower(count: int, width: int = 32) -> keras.Model:
    """From ids below ``count``, [n], to unit vectors, float32 [n, width]."""
    parts = [keras.Input([], dtype="int64"), layers.Embedding(count, width)]
    parts += [layers.Dense(2 * width, "relu"), layers.Dense(width, dtype="float32")]
    return keras.Sequential([*parts, layers.UnitNormalization(dtype="float32")])


def datasets(global_batch_size: int, seed: int = 0) -> tuple[ctl.data.InMemory, ctl.data.InMemory]:
    """`choices` of so many ``--users`` and ``--items``, to train and to evaluate on."""
    options: dict[str, Any] = {"global_batch_size": global_batch_size, "seed": seed}
    values: Any = flags.FLAGS
    training, held_out = choices(values["users"].value, values["items"].value)
    train = ctl.data.InMemory(training, **options)
    return train, ctl.data.InMemory(held_out, training=False, **options)


def choices(users: int, items: int) -> tuple[Any, Any]:
    """Makes up 20 choices of each user to train on, and one more to evaluate on.

    There are about as many kinds of items as items of a kind. Each user has a favourite kind, from
    which 4 of 5 choices are; the others are from any kind. Within a kind, the k-th item is chosen
    1/k as often as the first.

    Returns:
        The arrays of all examples, as a batch of `TwoTower`, and as one of `Evaluation`.
    """
    random = np.random.default_rng(0)
    kinds = int(items**0.5)
    favourites = random.integers(kinds, size=users)
    popularity = 1.0 / np.arange(1, items // kinds + 1)

    def draw(of_each: int) -> tuple[np.ndarray, np.ndarray]:
        who = np.repeat(np.arange(users), of_each)
        loyal = random.random(len(who)) < 0.8
        kind = np.where(loyal, favourites[who], random.integers(kinds, size=len(who)))
        rank = random.choice(len(popularity), len(who), p=popularity / popularity.sum())
        return who, rank * kinds + kind

    who, chosen = draw(20)
    log_frequency = np.log(np.bincount(chosen)[chosen] / len(chosen)).astype("float32")
    other, held_out = draw(1)
    return ({"user": who, "log_frequency": log_frequency}, chosen), ({"user": other}, held_out)
