"""Compressed sums equal a reference in numpy that keeps what each replica loses."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import (
    BATCH,
    CLASSES,
    FEATURES,
    assert_replicas_agree,
    examples,
    keras_loss,
    largest_difference,
    make_loop,
    precision,
)

from ctl.errors import UsageError
from ctl.jobs.dry_run import _plan
from ctl.recipes.compressed import Compressed

STEPS, RATE, SHARE = 4, 0.1, 0.05
KINDS = ["fp16", "int8", "topk"]


def model() -> keras.Model:
    parts = [keras.layers.Dense(40, "tanh"), keras.layers.Dense(CLASSES)]
    return keras.Sequential([keras.Input([FEATURES]), *parts])


def make(strategy, compressor="int8", *, kind=Compressed, dtype="float32", **options):
    if kind is Compressed:
        options |= {"compressor": compressor, "topk_share": SHARE}
    features, labels = examples(BATCH * STEPS)
    with precision(dtype):
        return make_loop(
            strategy,
            model=model,
            optimizer=lambda: keras.optimizers.SGD(RATE, momentum=0.9),
            step_class=kind,
            data=tf.data.Dataset.from_tensor_slices((features.astype(dtype), labels))
            .batch(BATCH, drop_remainder=True)
            .repeat(),
            loss_fn=keras_loss,
            seed=1,
            **options,
        )


def compressed(whole: np.ndarray, kind: str) -> np.ndarray:
    """What is left of a vector, float32."""
    if kind == "fp16":
        return whole.astype(np.float16).astype(np.float32)
    sent = np.zeros_like(whole)
    if kind == "topk":
        most = np.argsort(-np.abs(whole))[: round(SHARE * len(whole))]
        sent[most] = whole[most]
    for start in range(0, len(whole), 512) if kind == "int8" else ():
        bucket = whole[start : start + 512]
        scale = np.abs(bucket).max() / np.float32(127)
        sent[start : start + 512] = np.round(bucket / scale) * scale
    return sent


def reference(kind: str, replicas: int) -> tuple[list[np.ndarray], np.ndarray]:
    """The weights, and what each replica has left, on one device. In float64, so that no rounding
    differs but those that are meant."""
    keras.utils.set_random_seed(1)
    with precision("float64"):
        trained = model()
    variables = [v.value for v in trained.trainable_variables]
    optimizer = keras.optimizers.SGD(RATE, momentum=0.9)
    left: list = [np.float32(0.0)] * replicas
    features, labels = examples(BATCH * STEPS)
    for step in range(STEPS):
        total = np.float16(0.0) if kind == "fp16" else np.float32(0.0)
        for replica in range(replicas):
            first = step * BATCH + replica * BATCH // replicas
            part = slice(first, first + BATCH // replicas)
            with tf.GradientTape() as tape:
                losses = keras_loss(labels[part], trained(features[part].astype("float64")))
                loss = tf.reduce_sum(losses) / BATCH
            flat = np.concatenate([np.ravel(g) for g in tape.gradient(loss, variables)])
            whole = flat.astype(np.float32) + left[replica]
            sent = compressed(whole, kind)
            left[replica] = whole - sent
            total = total + sent.astype(total.dtype)
        ends = np.cumsum([np.prod(v.shape) for v in variables])[:-1]
        parts = zip(np.split(total, ends), variables, strict=True)
        optimizer.apply(
            [tf.reshape(tf.cast(g, tf.float64), v.shape) for g, v in parts],
            trained.trainable_variables,
        )
    return trained.get_weights(), np.stack(left)


@pytest.mark.slow
@pytest.mark.parametrize(("replicas", "kind"), [(1, "int8"), (2, "fp16"), (2, "topk"), (4, "int8")])
def test_it_equals_a_reference(mirrored, replicas, kind):
    loop = make(mirrored(replicas), kind, dtype="float64")
    loop.train(STEPS)
    weights, left = reference(kind, replicas)
    assert largest_difference(loop.step.model.get_weights(), weights) <= 1e-6
    copies = loop.strategy.experimental_local_results(loop.step.left)
    assert largest_difference([c.numpy() for c in copies], left) <= 1e-6
    assert_replicas_agree(loop.strategy, loop.step.model.variables)


@pytest.mark.slow
def test_how_many_bytes_move(ring2):
    """With each, one number says whether a gradient is finite."""
    size = 12 * 40 + 40 + 40 * CLASSES + CLASSES
    loop = make(ring2, "fp16")
    plan = loop.plan()
    assert [c.bytes for c in plan.other if c.in_loop] == [4]
    (pack,) = plan.collectives
    assert (pack.name, pack.dtype, pack.bytes) == ("pack0", "float16", 2 * size)
    assert _plan(loop).endswith("pack0 float16 0.0 MiB (CollectiveReduceV2), 1 other 0.0 MiB")
    loop = make(ring2, "int8")
    plan = loop.plan()
    assert [c.bytes for c in plan.other if c.in_loop] == [4]
    assert [(c.kind, c.bytes) for c in plan.collectives] == [("ConcatV2", 2 * (512 + 4))]
    assert not plan.lints
    whole = tf.random.normal([size])
    assert 4 * tf.size(loop.step.to_int8(whole)) == 2 * (512 + 4)
    assert 4 * tf.size(loop.step.to_topk(whole)) == 8 * round(SHARE * size)


def test_large_gradients_stay_finite_in_float16(mirrored):
    """What does not fit is left for the next steps; a bucket of zeros has no scale."""
    strategy = mirrored(2)
    step = make(strategy, "fp16").step
    shapes = [v.shape for v in step.trainable_variables]

    @tf.function
    def run():
        return strategy.run(lambda: step.sum_gradients([tf.fill(s, 6e4) for s in shapes]))

    sums = [strategy.experimental_local_results(one)[0].numpy() for one in run()]
    assert all((one == 65504.0).all() for one in sums)
    left = strategy.experimental_local_results(step.left)[1].numpy()
    assert (left == 6e4 - 65504.0 / 2).all()
    assert not step.of_int8(step.to_int8(tf.zeros([step.size]))).numpy().any()


def test_a_gradient_that_is_missing(mirrored):
    loop = make(mirrored(1))
    loop.train_only([loop.step.model.layers[-1]])
    with pytest.raises(UsageError, match="^Compressed needs gradients of exactly the variables"):
        loop.train(1)
