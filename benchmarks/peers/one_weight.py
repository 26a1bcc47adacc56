"""One weight, trained by Keras `fit` or by a `ctl.Loop`, for the programs of `claims.py`.

The weight starts at 0, the optimizer is SGD with learning rate 1.0, and the loss of an example is
``label * weight``. So the gradient of an example is its label, and a step subtracts the mean label
of its batch: the right weight is known without a reference run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple


class Seen(NamedTuple):
    """What a program did, in words, and whether README.md says that it does this."""

    text: str
    as_said: bool


def make_model():
    """``outputs = inputs * weight``, [batch, 1]."""
    import keras

    return keras.Sequential(
        [keras.Input([1]), keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")]
    )


def make_embedding():
    """The weight is the only row of an `Embedding`; inputs are zeros [batch, 1]."""
    import keras

    row = keras.layers.Embedding(1, 1, embeddings_initializer="zeros")
    return keras.Sequential([keras.Input([1]), row, keras.layers.Flatten()])


def _data(labels: Sequence[float], ids: bool = False):
    import numpy as np

    labels = np.array(labels, "float32")[:, None]
    return np.zeros_like(labels) if ids else np.ones_like(labels), labels


def _loss(labels, outputs):
    return labels[:, 0] * outputs[:, 0]


def sgd(**arguments):
    """A function that makes the optimizer."""
    import keras

    return lambda: keras.optimizers.SGD(1.0, **arguments)


def fit(
    strategy,
    labels: Sequence[float],
    batch_size: int,
    optimizer: Callable[[], Any],
    model: Callable[[], Any] = make_model,
    callbacks: Sequence[Any] = (),
    **options: Any,
) -> float:
    """The weight after one epoch of `fit`; ``options`` are for `compile`."""
    with strategy.scope():
        network = model()
        network.compile(optimizer(), loss=_loss, **options)
    network.fit(
        *_data(labels, ids=model is make_embedding),
        batch_size=batch_size,
        shuffle=False,
        verbose=0,
        callbacks=list(callbacks),
    )
    return network.get_weights()[0].item()


def make_loop(
    strategy,
    labels: Sequence[float],
    batch_size: int,
    optimizer: Callable[[], Any],
    model: Callable[[], Any] = make_model,
    checkpoints=None,
    actions: Sequence[Any] = (),
    **options: Any,
):
    """A `ctl.Loop` on the same data, and a function that returns its weight. ``options`` are for
    `ctl.TrainStep`."""
    import tensorflow as tf

    import ctl

    with strategy.scope():
        step = ctl.TrainStep(model(), optimizer(), _loss, **options)
    batches = tf.data.Dataset.from_tensor_slices(_data(labels, ids=model is make_embedding))
    loop = ctl.Loop(
        step,
        batches.batch(batch_size),
        strategy=strategy,
        checkpoints=checkpoints,
        actions=actions,
    )
    return loop, lambda: step.model.get_weights()[0].item()


def train(strategy, labels: Sequence[float], batch_size: int, *args: Any, **options: Any) -> float:
    """The weight after one epoch of a `ctl.Loop`."""
    loop, weight = make_loop(strategy, labels, batch_size, *args, **options)
    loop.train(-(-len(labels) // batch_size))
    return weight()


def _moved(weight: float, right: float) -> tuple[str, bool]:
    import math

    if math.isclose(weight, right, rel_tol=1e-4, abs_tol=1e-6):
        return f"the weight is {weight:g}, as it should", True
    return f"the weight is {weight:g} instead of {right:g}", False


def misses(weight: float, right: float) -> Seen:
    """As said when ``weight`` is not ``right``."""
    text, is_right = _moved(weight, right)
    return Seen(text, not is_right)


def reaches(weight: float, right: float) -> Seen:
    """As said when ``weight`` is ``right``."""
    return Seen(*_moved(weight, right))


def fails(run: Callable[[], float], kind: type[Exception], says: str) -> Seen:
    """As said when ``run`` raises ``kind`` with a message that contains ``says``."""
    try:
        weight = run()
    except Exception as error:
        _, found, rest = " ".join(str(error).split()).partition(says)
        text = found + rest if found else str(error)
        return Seen(
            f"{type(error).__name__}: {text[:200]}", isinstance(error, kind) and bool(found)
        )
    return Seen(f"trains; the weight is {weight:g}", False)
