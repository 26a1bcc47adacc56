"""Metrics by the names that Keras has for them."""

from __future__ import annotations

import keras
import numpy as np
import pytest

import ctl
from ctl.errors import UsageError
from ctl.phases import metrics

RANDOM = np.random.default_rng(0)
CLASSES = RANDOM.integers(0, 3, 20)


@pytest.mark.parametrize(
    ("labels", "outputs", "logits", "expected"),
    [
        (CLASSES, 3, True, keras.metrics.SparseCategoricalAccuracy),
        (CLASSES[:, None], 3, False, keras.metrics.SparseCategoricalAccuracy),
        (np.eye(3)[CLASSES], 3, False, keras.metrics.CategoricalAccuracy),
        (CLASSES > 0, 1, False, keras.metrics.BinaryAccuracy),
        (CLASSES > 0, 1, True, lambda: keras.metrics.BinaryAccuracy(threshold=0.0)),
    ],
)
def test_accuracy_is_that_of_the_shapes(labels, outputs, logits, expected):
    outputs = RANDOM.normal(0.4, 0.3, size=(20, outputs)).astype("float32")
    theirs = expected()
    for name in metrics.ACCURACY:
        ours = metrics.from_name(name, logits)
        assert ours.name == name
        for metric in (ours, theirs):
            metric.reset_state()
            metric.update_state(labels.astype("float32"), outputs)
        assert 0 < float(ours.result()) == float(theirs.result())


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("auc", keras.metrics.AUC),
        ("precision", keras.metrics.Precision),
        ("Recall", keras.metrics.Recall),
        ("FalsePositives", keras.metrics.FalsePositives),
        ("binary_accuracy", keras.metrics.BinaryAccuracy),
        ("BinaryIoU", keras.metrics.BinaryIoU),
        ("binary_crossentropy", keras.metrics.BinaryCrossentropy),
    ],
)
def test_metrics_of_probabilities_take_logits(name, kind):
    random = np.random.default_rng(0)
    logits = random.normal(size=(50, 3)).astype("float32")
    labels = random.integers(0, 2, (50, 3))
    ours = metrics.from_name(name, True)
    ours.update_state(labels, logits)
    theirs = kind()
    theirs.update_state(labels, 1 / (1 + np.exp(-logits)))
    assert float(ours.result()) == pytest.approx(float(theirs.result()), abs=1e-6)
    plain = metrics.from_name(name)  # outputs as they are
    plain.update_state(labels, 1 / (1 + np.exp(-logits)))
    assert float(plain.result()) == pytest.approx(float(theirs.result()), abs=1e-6)


def test_metrics_that_take_no_logits_are_refused():
    with pytest.raises(UsageError, match="^metric F1Score of Keras takes probabilities, and t"):
        metrics.from_name("F1Score", True)


def test_steps_take_names():
    model = keras.Sequential([keras.Input([2]), keras.layers.Dense(3)])
    step = ctl.TrainStep(model, "adam", metrics=["accuracy", "mse"], weighted_metrics=["acc"])
    assert [metric.name for metric in step.given_metrics] == ["accuracy", "mse", "acc"]
    evaluates = ctl.EvalStep(model, "mse", ["mae", keras.metrics.Mean("mean")])
    assert [metric.name for metric in evaluates.given_metrics] == ["mae", "mean"]
    for given, says in {
        "acuracy": "^Keras has no metric 'acuracy': did you mean 'accuracy'?",
        "MeanIoU": "^metric MeanIoU needs arguments: give an object of keras.metrics",
    }.items():
        with pytest.raises(UsageError, match=says):
            ctl.TrainStep(model, "adam", metrics=[given])
    with pytest.raises(UsageError, match="^metrics must be a list of names, such as"):
        ctl.TrainStep(model, "adam", metrics="accuracy")


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize(
    ("labels", "activation", "loss", "make"),
    [
        (RANDOM.normal(size=20), None, "mse", keras.metrics.R2Score),
        (RANDOM.normal(size=(20, 3)), None, "mse", keras.metrics.R2Score),
        (np.eye(3)[CLASSES], "softmax", "categorical_crossentropy", keras.metrics.F1Score),
        (np.eye(3)[CLASSES], "softmax", "mse", lambda **_: keras.metrics.AUC(multi_label=True)),
    ],
)
def test_variables_of_the_first_update(mirrored, replicas, labels, activation, loss, make):
    """A trace cannot make them."""
    options = {"average": "macro"} if make is keras.metrics.F1Score else {}
    arrays = RANDOM.normal(size=(20, 4)).astype("float32"), labels.astype("float32")
    strategy = mirrored(replicas)
    with strategy.scope():
        outputs = keras.layers.Dense(labels.shape[-1] if labels.ndim > 1 else 1, activation)
        model = keras.Sequential([keras.Input([4]), outputs])
        step = ctl.TrainStep(model, "sgd", loss, metrics=[make(**options)])
        metric = make(**options)
        evaluated = ctl.EvalStep(model, loss, metrics=[metric])
    evaluator = ctl.Evaluator(evaluated, arrays, strategy=strategy)
    loop = ctl.Loop(step, arrays, global_batch_size=8, strategy=strategy, evaluator=evaluator)
    assert step.given_metrics[0].name in loop.train(3)
    theirs = make(**options)
    theirs.update_state(arrays[1], model(arrays[0]))
    np.testing.assert_allclose(evaluator.run()[metric.name], theirs.result(), rtol=1e-5)


def test_a_metric_that_makes_some_variables_late_is_evaluated():
    arrays = RANDOM.normal(size=(20, 4)).astype("float32"), RANDOM.normal(size=20)
    model = keras.Sequential([keras.Input([4]), keras.layers.Dense(1)])
    r2 = keras.metrics.R2Score()
    evaluator = ctl.Evaluator(ctl.EvalStep(model, "mse", metrics=[r2]), arrays)
    evaluator.trace()  # which, other than a first call, can make no variables
    theirs = keras.metrics.R2Score()
    theirs.update_state(arrays[1][:, None], model(arrays[0]))
    np.testing.assert_allclose(evaluator.run()["r2_score"], theirs.result(), rtol=1e-5)


def test_a_metric_of_other_shapes_is_one_line():
    model = keras.Sequential([keras.Input([4]), keras.layers.Dense(3, "softmax")])
    f1 = keras.metrics.F1Score(average="macro")
    step = ctl.TrainStep(model, "sgd", "sparse_categorical_crossentropy", metrics=[f1])
    with pytest.raises(UsageError, match="^metric f1_score: FBetaScore expects 2D inputs"):
        ctl.Loop(step, (np.zeros([20, 4], np.float32), CLASSES), global_batch_size=8)


def test_a_metric_for_two_classes_is_one_line():
    model = keras.Sequential([keras.Input([4]), keras.layers.Dense(3, "softmax")])
    step = ctl.TrainStep(model, "sgd", "sparse_categorical_crossentropy", metrics=["precision"])
    loop = ctl.Loop(step, (np.zeros([20, 4], np.float32), CLASSES), global_batch_size=8)
    says = (
        r"^metric precision takes no labels of shape \[8\] with outputs of shape \[8, 3\]: choose"
    )
    with pytest.raises(UsageError, match=says):
        loop.train(1)


def test_a_metric_of_probabilities_names_the_loss_for_two_classes():
    model = keras.Sequential([keras.Input([4]), keras.layers.Dense(2)])
    step = ctl.TrainStep(model, "sgd", metrics=["auc"])
    loop = ctl.Loop(step, (np.zeros([20, 4], np.float32), CLASSES > 0), global_batch_size=8)
    says = r"^metric auc takes .* for two classes, train one output with --loss=binary_cross_entr"
    with pytest.raises(UsageError, match=says):
        loop.train(1)
