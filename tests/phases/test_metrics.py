"""Metrics by the names that Keras has for them."""

from __future__ import annotations

import keras
import numpy as np
import pytest

import ctl
from ctl.errors import UsageError
from ctl.phases import metrics

KERAS = keras.metrics
RANDOM = np.random.default_rng(0)
CLASSES = RANDOM.integers(0, 3, 20)
FEATURES = RANDOM.normal(size=(50, 3)).astype("float32")
BINARY = FEATURES.sum(axis=1, keepdims=True) + RANDOM.normal(size=(50, 1)) > 0


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
    with pytest.raises(UsageError, match="^metric FBetaScore of Keras takes probabilities, and"):
        metrics.from_name("FBetaScore", True)


@pytest.mark.parametrize(
    ("labels", "outputs", "loss"),
    [
        (CLASSES, 3, "cross_entropy"),
        (CLASSES, 3, "sparse_categorical_crossentropy"),
        (np.eye(3)[CLASSES], 3, "categorical_crossentropy"),
        (CLASSES > 0, 1, "binary_crossentropy"),
        (CLASSES > 0, 1, "binary_cross_entropy"),
        (np.eye(3)[CLASSES], 3, "binary_crossentropy"),
    ],
)
def test_an_f1_score_by_name_is_the_mean_over_the_classes(labels, outputs, loss):
    """By its definition: twice the true positives by these and all that are or are called true."""
    model = keras.Sequential([keras.Input([4]), keras.layers.Dense(outputs)])
    arrays = RANDOM.normal(size=(20, 4)).astype("float32"), labels.astype("float32")
    logits = model(arrays[0]).numpy()
    if not loss.endswith("_entropy"):
        model.layers[-1].activation = keras.activations.get(
            "sigmoid" if loss.startswith("binary") else "softmax"
        )
    if loss.startswith("binary"):
        predicted, real = logits > 0, labels.reshape([20, -1]) > 0
    else:
        predicted = np.eye(3)[logits.argmax(1)] > 0
        real = np.eye(3)[labels if labels.ndim == 1 else labels.argmax(1)] > 0
    by_class = 2 * (predicted & real).sum(0) / (predicted.sum(0) + real.sum(0))
    for name in ("f1", "f1_score", "F1Score"):
        step = ctl.EvalStep(model, loss, [name])
        data = ctl.data.InMemory(arrays, global_batch_size=8, training=False)
        found = ctl.Evaluator(step, data).run()[name]
        assert found == pytest.approx(by_class.mean(), rel=1e-5)


def test_steps_take_names():
    model = keras.Sequential([keras.Input([2]), keras.layers.Dense(3)])
    step = ctl.TrainStep(model, "adam", metrics=["accuracy", "mse"], weighted_metrics=["acc"])
    assert [metric.name for metric in step.given_metrics] == ["accuracy", "mse", "acc"]
    none = {"metrics": None, "weighted_metrics": None}  # as Keras's compile() has them
    for plain in (ctl.TrainStep(model, "adam", **none), ctl.EvalStep(model, **none)):
        assert plain.given_metrics == []
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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("replicas", "labels", "activation", "loss", "make"),
    [
        (1, RANDOM.normal(size=20), None, "mse", keras.metrics.R2Score),
        (2, RANDOM.normal(size=(20, 3)), None, "mse", keras.metrics.R2Score),
        (1, np.eye(3)[CLASSES], "softmax", "categorical_crossentropy", keras.metrics.F1Score),
        (2, np.eye(3)[CLASSES], "softmax", "mse", lambda **_: keras.metrics.AUC(multi_label=True)),
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


@pytest.mark.parametrize(
    ("metric", "says"),
    [
        (KERAS.Recall(class_id=1, name="m"), "^metric m has class_id, .* a subclass of Recall"),
        (KERAS.Precision(class_id=1, name="m"), "^metric m has class_id, .* of Precision"),
        (KERAS.OneHotMeanIoU(3, name="m"), "^metric m takes labels .* subclass of OneHotMeanIoU"),
        (KERAS.MeanIoU(3, name="m"), "^metric m takes classes .*: make it with sparse_y_pred=Fal"),
    ],
)
def test_metrics_of_one_hot_labels_are_refused_for_classes(metric, says):
    model = keras.Sequential([keras.Input([3]), keras.layers.Dense(3, "softmax")])
    classes = np.zeros(len(FEATURES), int)
    step = ctl.EvalStep(model, "sparse_categorical_crossentropy", [metric])
    with pytest.raises(UsageError, match=says):
        ctl.Evaluator(step, (FEATURES, classes))
    right = KERAS.MeanIoU(3, sparse_y_pred=False, name="right")
    theirs = KERAS.MeanIoU(3, sparse_y_pred=False)
    theirs.update_state(classes, model(FEATURES))
    step = ctl.EvalStep(model, "sparse_categorical_crossentropy", [right])
    result = ctl.Evaluator(step, (FEATURES, classes)).run()["right"]
    assert result == pytest.approx(float(theirs.result()))


@pytest.mark.parametrize("kind", [KERAS.KLDivergence, KERAS.BinaryCrossentropy, KERAS.F1Score])
def test_labels_of_one_axis_meet_their_outputs(kind):
    """Not those of other examples."""
    options = {"threshold": 0.5} if kind is KERAS.F1Score else {}
    model = keras.Sequential([keras.Input([3]), keras.layers.Dense(1, "sigmoid")])
    labels = BINARY[:, 0].astype("float32")
    step = ctl.EvalStep(model, "binary_crossentropy", [kind(name="m", **options)])
    theirs = kind(**options)
    theirs.update_state(labels[:, None], model(FEATURES))
    result = ctl.Evaluator(step, (FEATURES, labels)).run()["m"]
    assert result == pytest.approx(float(np.ravel(theirs.result())[0]), rel=1e-5)


def test_labels_of_another_rank_are_one_line_in_an_evaluation_of_any_size():
    model = keras.Sequential([keras.Input([3]), keras.layers.Dense(2, "softmax")])
    for metric in (KERAS.AUC(name="m"), KERAS.BinaryAccuracy(name="m")):
        step = ctl.EvalStep(model, "sparse_categorical_crossentropy", [metric])
        with pytest.raises(UsageError, match="^metric m takes no labels of shape .*: for two cla"):
            ctl.Evaluator(step, (FEATURES, np.zeros(len(FEATURES), int))).run()


@pytest.mark.parametrize("loss", ["cross_entropy", "binary_crossentropy"])
def test_an_accuracy_of_equal_numbers_is_refused(loss):
    model = keras.Sequential([keras.Input([3]), keras.layers.Dense(1 + (loss[0] == "c"))])
    step = ctl.TrainStep(model, "sgd", loss, metrics=[KERAS.Accuracy(name="equal")])
    with pytest.raises(UsageError, match="^metric equal is the share of .*: give 'accuracy'$"):
        ctl.Loop(step, (FEATURES, np.zeros(len(FEATURES), int)), global_batch_size=4)


def test_an_auc_of_one_hot_labels_is_refused_for_classes():
    model = keras.Sequential([keras.Input([3]), keras.layers.Dense(3)])
    auc = KERAS.AUC(multi_label=True, from_logits=True, name="auc")
    step = ctl.TrainStep(model, "sgd", metrics=[auc])
    with pytest.raises(UsageError, match=r"^metric auc has multi_label, .* are classes \[n\]"):
        ctl.Loop(step, (FEATURES, np.zeros(len(FEATURES), int)), global_batch_size=4)


def test_a_metric_for_two_classes_is_one_line():
    model = keras.Sequential([keras.Input([4]), keras.layers.Dense(3, "softmax")])
    step = ctl.TrainStep(model, "sgd", "sparse_categorical_crossentropy", metrics=["precision"])
    loop = ctl.Loop(step, (np.zeros([20, 4], np.float32), CLASSES), global_batch_size=8)
    says = (
        r"^metric precision takes no labels of shape \[8\] with outputs of shape \[8, 3\]: give ac"
    )
    with pytest.raises(UsageError, match=says):
        loop.train(1)


def test_a_metric_of_probabilities_names_the_loss_for_two_classes():
    model = keras.Sequential([keras.Input([4]), keras.layers.Dense(2)])
    step = ctl.TrainStep(model, "sgd", metrics=["auc"])
    loop = ctl.Loop(step, (np.zeros([20, 4], np.float32), CLASSES > 0), global_batch_size=8)
    says = r"^metric auc takes .*: for two classes, give --loss=binary_cross_entropy, with"
    with pytest.raises(UsageError, match=says):
        loop.train(1)


def with_activation(kind, activation, *args, **options):
    class Applied(kind):
        def update_state(self, labels, outputs, sample_weight=None):
            super().update_state(labels, activation(outputs), sample_weight)

    return Applied(*args, name="applied", **options)


def named(kind, *args, **options):
    """A metric with a name: other tests count on the first name of each class."""
    return lambda: kind(*args, name="named", **options)


PAIRS = (
    (KERAS.AUC, {"from_logits": True}),
    (KERAS.Precision, {"thresholds": 0.0}),
    (KERAS.Recall, {"thresholds": 0.0}),
    (KERAS.TruePositives, {"thresholds": 0.0}),
    (KERAS.TrueNegatives, {"thresholds": 0.0}),
    (KERAS.FalsePositives, {"thresholds": 0.0}),
    (KERAS.FalseNegatives, {"thresholds": 0.0}),
    (KERAS.BinaryAccuracy, {"threshold": 0.0}),
    (KERAS.BinaryIoU, {"threshold": 0.0}),
    (KERAS.BinaryCrossentropy, {"from_logits": True}),
)
OF_ARGUMENTS = (
    (KERAS.SensitivityAtSpecificity, 0.5),
    (KERAS.SpecificityAtSensitivity, 0.5),
    (KERAS.PrecisionAtRecall, 0.5),
    (KERAS.RecallAtPrecision, 0.5),
    (KERAS.F1Score, "micro", 0.5),
    (KERAS.FBetaScore, "micro", 2.0, 0.5),
    (KERAS.KLDivergence,),
)
SUBCLASS = r"give a subclass of {} .*\(labels, keras.ops.sigmoid\(outputs\), sample_weight\)$"
BINARY_REMEDIES = [
    (f"make it with {name}={value}$", named(kind), named(kind, **{name: value}))
    for kind, options in PAIRS
    for name, value in options.items()
] + [
    (
        SUBCLASS.format(kind.__name__),
        named(kind, *args),
        lambda kind=kind, args=args: with_activation(kind, keras.ops.sigmoid, *args),
    )
    for kind, *args in OF_ARGUMENTS
]


def check_remedy(says, given, remedy, model, loss, labels, activation):
    """``given`` is refused; ``remedy`` has the number of ``given`` for probabilities."""
    labels = labels.astype("float32")
    step = ctl.TrainStep(model, "sgd", loss, metrics=[given()])
    with pytest.raises(UsageError, match=f"takes probabilities, and model .*: {says}"):
        ctl.Loop(step, (FEATURES, labels), global_batch_size=10)
    with pytest.raises(UsageError, match=f"takes probabilities, and model .*: {says}"):
        ctl.Evaluator(ctl.EvalStep(model, loss, [given()]), (FEATURES, labels))
    metric, theirs = remedy(), given()
    evaluator = ctl.Evaluator(ctl.EvalStep(model, loss, [metric]), (FEATURES, labels))
    theirs.update_state(labels, activation(model(FEATURES)))
    np.testing.assert_allclose(evaluator.run()[metric.name], theirs.result(), rtol=1e-5)


@pytest.mark.parametrize(("says", "given", "remedy"), BINARY_REMEDIES)
def test_a_metric_of_probabilities_is_refused_with_a_remedy(says, given, remedy):
    model = keras.Sequential([keras.Input([3]), keras.layers.Dense(1)])
    model.layers[0].kernel.assign([[1.0], [0.7], [1.2]])
    check_remedy(says, given, remedy, model, "binary_cross_entropy", BINARY, keras.ops.sigmoid)


@pytest.mark.parametrize(
    ("says", "given", "remedy"),
    [
        (
            "make it with from_logits=True$",
            named(KERAS.CategoricalCrossentropy),
            named(KERAS.CategoricalCrossentropy, from_logits=True),
        ),
        (
            r"give a subclass of AUC .*keras.ops.softmax\(outputs\)",
            named(KERAS.AUC),
            lambda: with_activation(KERAS.AUC, keras.ops.softmax),
        ),
    ],
)
def test_a_metric_of_a_softmax_is_refused_with_a_remedy(says, given, remedy):
    model = keras.Sequential([keras.Input([3]), keras.layers.Dense(3)])
    labels = np.eye(3)[np.argmax(FEATURES, axis=1)]
    softmax = keras.ops.softmax
    check_remedy(says, given, remedy, model, "categorical_crossentropy", labels, softmax)


def test_ctl_s_names_are_refused_where_they_would_apply_a_sigmoid_to_a_softmax():
    with pytest.raises(UsageError, match="^metric auc of Keras takes probabilities"):
        metrics.from_name("auc", True, keras.losses.CategoricalCrossentropy())
    found = metrics.from_name(
        "categorical_crossentropy", True, keras.losses.categorical_crossentropy
    )
    assert found.get_config()["from_logits"]


def test_accuracy_of_several_labels_is_that_of_each():
    """Keras's compares the largest output with the largest label."""
    inputs = RANDOM.normal(size=(20, 3)).astype("float32")
    labels = (inputs > 0.3).astype("int64")
    model = keras.Sequential(
        [keras.Input([3]), keras.layers.Dense(3, kernel_initializer="identity")]
    )
    for loss in ("binary_crossentropy", keras.losses.BinaryCrossentropy(from_logits=True)):
        step = ctl.EvalStep(model, loss, ["accuracy"])
        data = ctl.data.InMemory((inputs, labels), global_batch_size=20, training=False)
        found = ctl.Evaluator(step, data).run()["accuracy"]
        assert found == pytest.approx(np.mean((inputs > 0) == labels), abs=1e-6)


@pytest.mark.parametrize("name", ["categorical_accuracy", "TopKCategoricalAccuracy"])
def test_a_metric_of_one_hot_labels_is_refused_for_classes(name):
    model = keras.Sequential([keras.Input([3]), keras.layers.Dense(3)])
    step = ctl.TrainStep(model, "sgd", metrics=[name])
    with pytest.raises(UsageError, match=f"^metric {name} takes one-hot labels.* give Sparse.*Cat"):
        ctl.Loop(step, (FEATURES, np.zeros(len(FEATURES), int)), global_batch_size=4)


@pytest.mark.parametrize(
    ("activation", "loss", "make"),
    [
        (None, "binary_cross_entropy", named(KERAS.Precision, thresholds=0.3)),
        (None, "binary_cross_entropy", named(KERAS.Precision, top_k=1)),
        (None, "binary_cross_entropy", named(KERAS.AUC, thresholds=[-1.0, 0.0, 1.0])),
        (None, "binary_cross_entropy", lambda: with_activation(KERAS.AUC, keras.ops.sigmoid)),
        (None, "binary_cross_entropy", lambda: "auc"),
        (None, "mse", named(KERAS.BinaryAccuracy)),  # numbers that are 0 or 1
        (None, lambda labels, outputs: (labels - outputs)[:, 0] ** 2, named(KERAS.AUC)),
        ("sigmoid", "binary_crossentropy", named(KERAS.AUC)),
        ("sigmoid", "cross_entropy", lambda: "auc"),  # the loss of an evaluation may mean nothing
        ("tanh", lambda labels, outputs: (labels - outputs)[:, 0] ** 2, named(KERAS.AUC)),
    ],
)
def test_metrics_that_may_be_right_are_taken(activation, loss, make):
    model = keras.Sequential([keras.Input([3]), keras.layers.Dense(1, activation)])
    metric = ctl.EvalStep(model, loss, [make()]).metrics[0]
    metrics.check_given([metric], ctl.EvalStep(model, loss).loss_fn, model)


class Subclassed(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1)

    def call(self, inputs):
        return self.dense(inputs)


def test_what_a_model_gives_may_be_known_by_its_loss_in_a_training_alone():
    arrays = FEATURES, BINARY.astype("float32")
    loss = "binary_cross_entropy"
    with pytest.raises(UsageError, match="^metric auc takes probabilities, and model subclassed"):
        step = ctl.TrainStep(Subclassed(), "sgd", loss, metrics=[KERAS.AUC(name="auc")])
        ctl.Loop(step, arrays, global_batch_size=10)
    ctl.Evaluator(ctl.EvalStep(Subclassed(), loss, [named(KERAS.AUC)()]), arrays)


def test_a_metric_of_logits_is_refused_for_probabilities():
    model = keras.Sequential([keras.Input([3]), keras.layers.Dense(1, "sigmoid")])
    auc = KERAS.AUC(from_logits=True, name="auc")
    evaluated = ctl.EvalStep(model, "binary_crossentropy", [auc])
    says = r"^metric auc takes logits .* ends in a sigmoid: make it without from_logits$"
    with pytest.raises(UsageError, match=says):
        ctl.Evaluator(evaluated, (FEATURES, BINARY))


def test_an_f1_score_of_one_output_needs_a_threshold():
    model = keras.Sequential([keras.Input([3]), keras.layers.Dense(1, "sigmoid")])
    arrays = FEATURES, BINARY.astype("float32")
    no_threshold = ctl.EvalStep(model, "binary_crossentropy", [KERAS.F1Score("micro")])
    says = r"^metric f1_score has no threshold, .* has 1 output: give F1Score\(threshold=0.5\)"
    with pytest.raises(UsageError, match=says):
        ctl.Evaluator(no_threshold, arrays)
    f1 = KERAS.F1Score("micro", threshold=0.5, name="f1")
    guessed, real = model.predict(FEATURES, verbose=0) > 0.5, BINARY
    by_hand = 2 * (guessed & real).sum() / (guessed.sum() + real.sum())
    result = ctl.Evaluator(ctl.EvalStep(model, "binary_crossentropy", [f1]), arrays).run()["f1"]
    assert result == pytest.approx(by_hand, rel=1e-5)


class Measures(ctl.TrainStep):
    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.auc = KERAS.AUC(name="auc")

    def loss(self, batch):
        losses, outputs = super().loss(batch)
        self.auc.update_state(batch[1], outputs)
        return losses, outputs


class MeasuresProbabilities(Measures):
    def loss(self, batch):
        losses, outputs = ctl.TrainStep.loss(self, batch)
        self.auc.update_state(batch[1], keras.ops.sigmoid(outputs))
        return losses, outputs


@pytest.mark.parametrize("kind", [Measures, MeasuresProbabilities])
def test_a_metric_of_probabilities_in_an_attribute_is_warned_of(kind, caplog):
    model = keras.Sequential([keras.Input([3]), keras.layers.Dense(1)])
    step = kind(model, "sgd", "binary_cross_entropy")
    ctl.Loop(step, (FEATURES, BINARY.astype("float32")), global_batch_size=10)
    warned = "metric auc takes probabilities, and model" in caplog.text
    assert warned == (kind is Measures)


def test_a_result_of_one_element_is_a_number():
    """As that of Keras's F1Score for one output, and of a step that logs a batch of one."""

    class Logs(ctl.TrainStep):
        def loss(self, batch):
            losses, outputs = super().loss(batch)
            self.log("first", losses[:1])
            return losses, outputs

    model = keras.Sequential([keras.Input([3]), keras.layers.Dense(1, "sigmoid")])
    model.layers[0].kernel.assign([[1.0], [1.0], [1.0]])  # as the labels are made
    f1 = KERAS.F1Score(threshold=0.5, name="f1")
    step = Logs(model, "sgd", "binary_crossentropy", metrics=[f1])
    results = ctl.Loop(step, (FEATURES, BINARY.astype("float32")), global_batch_size=10).train(2)
    assert 0 < results["f1"] <= 1 and results["first"] > 0


@pytest.mark.parametrize("name", ["loss", "mean_loss"])
def test_a_metric_in_place_of_the_loss_is_named(name, caplog):
    """As of Keras's tutorial of a train_step, which nobody updates here."""

    class Own(ctl.TrainStep):
        def __init__(self, *args):
            super().__init__(*args)
            self.loss_tracker = KERAS.Mean(name=name)

    model = keras.Sequential([keras.Input([3]), keras.layers.Dense(2)])
    data = FEATURES, np.zeros(len(FEATURES), int)
    ctl.Loop(Own(model, "sgd"), data, global_batch_size=10)
    assert ("Own has a metric called loss, which" in caplog.text) == (name == "loss")


def test_classes_of_the_user_get_what_the_step_has():
    """A subclass may make one-hot labels and classes of what it gets, as in fit."""

    class OfClass(KERAS.Recall):
        def update_state(self, labels, outputs, sample_weight=None):
            labels = keras.ops.one_hot(labels, 2)
            super().update_state(labels, outputs, sample_weight)

    class OfSecond(KERAS.AUC):
        def update_state(self, labels, outputs, sample_weight=None):
            super().update_state(labels, outputs[:, 1], sample_weight)

    model = keras.Sequential([keras.Input([3]), keras.layers.Dense(2, "softmax")])
    classes = BINARY[:, 0].astype("int64")
    made = [OfClass(class_id=1, name="of_class"), OfSecond(name="of_second")]
    step = ctl.EvalStep(model, "sparse_categorical_crossentropy", made)
    found = ctl.Evaluator(step, (FEATURES, classes)).run()
    recall, auc = KERAS.Recall(class_id=1), KERAS.AUC()
    recall.update_state(np.eye(2)[classes], model(FEATURES))
    auc.update_state(classes, model(FEATURES)[:, 1])
    assert found["of_class"] == pytest.approx(float(recall.result()))
    assert found["of_second"] == pytest.approx(float(auc.result()))


def test_a_function_that_keras_cannot_look_up():
    assert metrics.from_name("log_cosh").name == "log_cosh"
