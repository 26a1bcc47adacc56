"""Weights of examples and of classes mean what Keras means, whatever the shares of a batch."""

from __future__ import annotations

import functools
import logging

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import (
    BATCH,
    CLASSES,
    FEATURES,
    accuracy,
    batches_of,
    cut,
    examples,
    keras_loss,
    largest_difference,
    make_loop,
    mlp,
    sgd,
)

from ctl.control.evaluator import Evaluator
from ctl.data import InMemory
from ctl.errors import DivergedError, UsageError
from ctl.phases.base_step import EvalStep
from ctl.step import TrainStep

# The last batch of one example leaves the second of 2 replicas without any.
COUNT = 2 * BATCH + 1
OF_CLASSES = {0: 0.5, 1: 5.0, 3: 2.0}


def weighted_accuracy() -> keras.metrics.Metric:
    return keras.metrics.SparseCategoricalAccuracy("weighted_accuracy")


def seeded_mlp() -> keras.Model:
    keras.utils.set_random_seed(1)
    return mlp()


def results_of(scalars) -> list[float]:
    return [scalars[name] for name in ("loss", "accuracy", "weighted_accuracy")]


@functools.cache
def fitted(class_weight: bool) -> tuple[list[float], list[np.ndarray], list[float]]:
    """What Keras reports for an epoch, the weights of the model after it, and an evaluation of
    them: with weights of classes, or of examples."""
    features, labels = examples(COUNT)
    model = seeded_mlp()
    model.compile(
        sgd()(),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=[accuracy()],
        weighted_metrics=[weighted_accuracy()],
    )
    given = {"class_weight": OF_CLASSES} if class_weight else {"sample_weight": of_examples()}
    history = model.fit(
        features, labels, batch_size=BATCH, shuffle=False, verbose=0, **given
    ).history
    evaluated = model.evaluate(
        features, labels, BATCH, sample_weight=of_examples(), verbose=0, return_dict=True
    )
    scalars = {name: values[0] for name, values in history.items()}
    return results_of(scalars), model.get_weights(), results_of(evaluated)


def of_examples() -> np.ndarray:
    return np.random.default_rng(3).uniform(0.2, 3.0, COUNT).astype(np.float32)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("replicas", "class_weight", "options"),
    [
        (1, False, {"jit_compile": True}),
        (2, True, {"accumulate_steps": 3}),
        (2, False, {"loss_scale": True}),
    ],
    ids=str,
)
def test_equals_fit_and_evaluate_of_keras(mirrored, replicas, class_weight, options):
    """Loss, accuracy, weighted accuracy, and the weights that were trained."""
    arrays = examples(COUNT)
    if class_weight:
        options = options | {"class_weight": OF_CLASSES}
    else:
        arrays = *arrays, of_examples()
    strategy = mirrored(replicas)
    with strategy.scope():
        metrics = [weighted_accuracy()]
    loop = make_loop(
        strategy,
        model=seeded_mlp,
        optimizer=sgd(),
        data=batches_of(cut(arrays)),
        weighted_metrics=metrics,
        **options,
    )
    scalars = loop.train(3)
    reported, trained, evaluated = fitted(class_weight)
    assert results_of(scalars) == pytest.approx(reported, rel=1e-5)
    assert abs(scalars["accuracy"] - scalars["weighted_accuracy"]) > 1e-2
    assert largest_difference(loop.step.model.get_weights(), trained) <= 1e-6
    with strategy.scope():
        step = EvalStep(
            loop.step.model, metrics=[accuracy()], weighted_metrics=[weighted_accuracy()]
        )
    weighted = batches_of(cut((*examples(COUNT), of_examples())))
    results = Evaluator(step, weighted, strategy=strategy).run()
    assert results_of(results) == pytest.approx(evaluated, rel=1e-5)


def drawn(kind: str) -> np.ndarray:
    """Weights of which half are 0, and those of the first share of each batch: of any size, or of
    any sign, whose sum in the first batch is 0."""
    random = np.random.default_rng(5)
    weights = random.integers(0, 2, COUNT).astype(np.float32)
    weights *= np.arange(COUNT) % BATCH >= BATCH // 2
    if kind == "sized":
        weights *= random.uniform(0.2, 3.0, COUNT)
    if kind == "signed":
        weights *= random.choice([-0.5, 1.0, 2.0], COUNT)
        weights[BATCH - 1] -= weights[:BATCH].sum()
    return weights.astype(np.float32)


@functools.cache
def reference(kind: str, weighting: str, class_weight: bool = False) -> tuple:
    """Plain steps on whole batches: mean loss, accuracies, and the weights that were trained."""
    model, total, divisors = seeded_mlp(), 0.0, 0.0
    metrics = accuracy(), weighted_accuracy()
    for features, labels, weights in cut((*examples(COUNT), drawn(kind))):
        there = (weights != 0).astype(np.float32)
        if class_weight:
            weights = weights * np.array([OF_CLASSES.get(k, 1.0) for k in labels], np.float32)
        divisor = there.sum() if weighting == "examples" else weights.sum()
        with tf.GradientTape() as tape:
            logits = model(features)
            loss = tf.reduce_sum(keras_loss(labels, logits) * weights)
            mean = loss / (divisor or 1.0)
        variables = [v.value for v in model.trainable_variables]
        for variable, gradient in zip(variables, tape.gradient(mean, variables), strict=True):
            variable.assign_sub(0.1 * gradient)
        total, divisors = total + float(loss), divisors + divisor
        for metric, weight in zip(metrics, (there, weights), strict=True):
            metric.update_state(labels, logits, weight)
    scalars = [total / divisors, *(float(metric.result()) for metric in metrics)]
    return scalars, model.get_weights()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("replicas", "kind", "weighting", "options"),
    [
        (2, "sized", "examples", {"accumulate_steps": 3}),
        (2, "signed", "examples", {"class_weight": OF_CLASSES}),
        (2, "sized", "sum_of_weights", {"class_weight": OF_CLASSES, "accumulate_steps": 2}),
    ],
    ids=str,
)
def test_each_rule_on_any_shares(mirrored, replicas, kind, weighting, options):
    strategy = mirrored(replicas)
    with strategy.scope():
        metrics = [weighted_accuracy()]
    loop = make_loop(
        strategy,
        model=seeded_mlp,
        optimizer=sgd(),
        data=batches_of(cut((*examples(COUNT), drawn(kind)))),
        weighted_metrics=metrics,
        weighting=weighting,
        **options,
    )
    wanted, trained = reference(kind, weighting, "class_weight" in options)
    assert results_of(loop.train(3)) == pytest.approx(wanted, rel=1e-5)
    assert largest_difference(loop.step.model.get_weights(), trained) <= 1e-6


def data_of(*third: np.ndarray, labels=None) -> tf.data.Dataset:
    features, classes = examples(BATCH)
    batch = features, classes if labels is None else labels, *third
    return tf.data.Dataset.from_tensors(batch).repeat()


class TestSumOfWeights:
    """A weight below 0 could make their sum 0, or nearly 0."""

    weights = np.array([1.0, -1.0] * (BATCH // 2), np.float32)

    def test_is_refused_below_0(self, mirrored):
        loop = make_loop(mirrored(2), data=data_of(self.weights), weighting="sum_of_weights")
        reason = "^a weight is below 0, .* give weights of at least 0, or weighting='examples'$"
        with pytest.raises(UsageError, match=reason):
            loop.train(1)
        step = EvalStep(mlp(), weighting="sum_of_weights")
        with pytest.raises(UsageError, match=reason):
            Evaluator(step, data_of(self.weights).take(1)).run()

    def test_is_nan_under_xla(self):
        """Which ends or skips as any other."""
        options = {"weighting": "sum_of_weights", "jit_compile": True}
        with pytest.raises(DivergedError, match="the loss is nan at step 1"):
            make_loop(data=data_of(self.weights), **options).train(2)


class TestClassWeight:
    def test_is_of_the_training_alone(self):
        """And it is the same as weights in the batch."""
        classes = examples(BATCH)[1]
        factors = np.array([OF_CLASSES.get(k, 1.0) for k in classes], np.float32)
        given = make_loop(data=data_of(factors), seed=1)
        loop = make_loop(data=data_of(), seed=1, class_weight=OF_CLASSES)
        assert loop.train(3)["loss"] == pytest.approx(given.train(3)["loss"], rel=1e-6)
        results = [
            Evaluator(EvalStep(of.step.model), data_of().take(1), strategy=of.strategy).run()[
                "loss"
            ]
            for of in (loop, given)
        ]
        assert results[0] == pytest.approx(results[1], rel=1e-5)

    @pytest.mark.parametrize(
        ("class_weight", "reason"),
        [
            ([1.0, 2.0], "^class_weight must be a dict such as"),
            ({"cat": 2.0}, "^class_weight has the class 'cat': classes are integers from 0$"),
            ({-1: 2.0}, "has the class -1"),
            ({1: 0.0}, "^class_weight of class 1 must be a number above 0, not 0.0$"),
            ({1: "2"}, "must be a number above 0"),
            ({CLASSES: 2.0}, f"^class_weight has the class {CLASSES}, but the model has {CLASSES}"),
        ],
        ids=str,
    )
    def test_other_values_are_refused(self, class_weight, reason):
        with pytest.raises(UsageError, match=reason):
            make_loop(data=data_of(), class_weight=class_weight)

    @pytest.mark.parametrize(
        "labels", [np.zeros([BATCH, CLASSES], np.int32), np.array(["no"] * BATCH)], ids=str
    )
    def test_labels_that_are_no_classes_are_refused(self, labels):
        loop = make_loop(data=data_of(labels=labels), class_weight={0: 2.0}, step_class=OwnLoss)
        with pytest.raises(UsageError, match=r"^class_weight needs labels that are classes"):
            loop.train(1)

    @pytest.mark.parametrize("dtype", [np.float32, bool])
    def test_labels_may_be_0_and_1_of_any_type(self, dtype):
        """As binary_cross_entropy takes them."""
        weights = {1: 20.0, 0: 0.5}
        options = {"model": binary, "loss_fn": "binary_cross_entropy", "seed": 1}
        labels = np.arange(BATCH) % 3 == 0
        factors = np.where(labels, 20.0, 0.5).astype(np.float32)
        given = make_loop(data=data_of(factors, labels=labels.astype(np.float32)), **options)
        data = data_of(labels=labels.astype(dtype))
        loop = make_loop(data=data, class_weight=weights, **options)
        assert loop.train(3)["loss"] == pytest.approx(given.train(3)["loss"], rel=1e-6)

    def test_other_floats_are_no_classes(self):
        options = {"model": binary, "loss_fn": "binary_cross_entropy", "class_weight": {1: 2.0}}
        labels = np.full([BATCH], 0.5, np.float32)
        loop = make_loop(data=data_of(labels=labels), **options)
        with pytest.raises(UsageError, match="^class_weight needs .*, or 0 and 1, and one is anot"):
            loop.train(1)
        in_memory = InMemory((examples(BATCH)[0], labels), global_batch_size=BATCH)
        with pytest.raises(UsageError, match="^class_weight needs .*, or 0 and 1, and one is 0.5"):
            make_loop(data=in_memory, **options)
        # XLA has no such checks, so the batch is read again.
        loop = make_loop(data=data_of(labels=labels), jit_compile=True, **options)
        with pytest.raises(UsageError, match="or 0 and 1, and one in the batch of step 1 is 0.5"):
            loop.train(1)

    def test_an_own_loss_must_use_it(self):
        loop = make_loop(data=data_of(), class_weight={0: 2.0}, step_class=OwnLoss)
        with pytest.raises(UsageError, match=r"^loss\(\) of OwnLoss does not use the weights"):
            loop.train(1)

    def test_a_change_is_traced_again(self):
        loop = make_loop(data=data_of(), seed=1, class_weight={0: 2.0}, optimizer=sgd(0.0))
        losses = [loop.train(1)["loss"]]
        loop.step.class_weight[0] = 4.0
        loop.scalars.reset()
        losses.append(loop.train(2)["loss"])
        fresh = make_loop(data=data_of(), seed=1, class_weight={0: 4.0}, optimizer=sgd(0.0))
        assert losses[1] == fresh.train(1)["loss"] != losses[0]


def binary() -> keras.Model:
    return keras.Sequential([keras.Input([FEATURES]), keras.layers.Dense(1)])


class OwnLoss(TrainStep):
    def loss(self, batch):
        return tf.reduce_sum(self.model(batch[0], training=True) ** 2, axis=1)


@pytest.mark.parametrize("kind", [TrainStep, EvalStep])
def test_a_wrong_rule_is_refused(kind):
    arguments = [mlp(), sgd()()] if kind is TrainStep else [mlp()]
    with pytest.raises(UsageError, match="unknown weighting 'sum'.*examples, sum_of_weights"):
        kind(*arguments, weighting="sum")


def test_one_name_in_both_lists_is_that_of_fit():
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    given = {"metrics": ["accuracy"], "weighted_metrics": ["accuracy"]}
    plain = seeded_mlp()
    plain.compile("sgd", loss, **given)
    features, labels = examples(COUNT)
    evaluated = plain.evaluate(
        features, labels, sample_weight=of_examples(), verbose=0, return_dict=True
    )
    step = EvalStep(plain, loss, **given)
    results = Evaluator(step, (features, labels, of_examples())).run()
    names = "accuracy", "weighted_accuracy"
    assert [results[name] for name in names] == pytest.approx([evaluated[name] for name in names])


def test_metrics_of_one_name_are_refused():
    with pytest.raises(UsageError, match="^two metrics are called accuracy, .* give another name="):
        EvalStep(mlp(), metrics=[accuracy()], weighted_metrics=[accuracy()])


@pytest.mark.slow
@pytest.mark.parametrize("weighting", ["examples", "sum_of_weights"])
def test_the_log_says_which_rule_is_used(caplog, weighting):
    """Once, and only where batches have weights."""
    with caplog.at_level(logging.INFO, "absl"):
        make_loop(data=data_of(), evaluate=20).train_and_evaluate(2, evaluate_every=1)
        assert "weighting=" not in caplog.text
        loop = make_loop(data=data_of(np.ones(BATCH, np.float32)), weighting=weighting)
        loop.train(2)
    assert caplog.text.count("TrainStep: batches have weights: losses are divided by") == 1
    assert caplog.text.count(f"(weighting={weighting})") == 1
