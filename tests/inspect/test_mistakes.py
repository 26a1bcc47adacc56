"""What a classifier gets wrong: exact on any number of replicas, and a page that opens offline."""

from __future__ import annotations

import base64
import json
import math
import re
from xml.etree import ElementTree

import keras
import numpy as np
import pytest
import tensorflow as tf

from ctl.data import InMemory
from ctl.data.dataset import DatasetInfo
from ctl.errors import UsageError
from ctl.inspect import mistakes
from ctl.logs.runs import to_json
from ctl.phases.base_step import EvalStep

CLASSES, COUNT = 3, 29
NAMES = ("cat", "<b>dog", "bird")


def images():
    random = np.random.default_rng(0)
    return random.integers(0, 256, [COUNT, 4, 5, 1], np.uint8), random.integers(0, CLASSES, COUNT)


def model():
    keras.utils.set_random_seed(5)
    layers = [keras.Input([4, 5, 1]), keras.layers.Flatten(), keras.layers.Dense(CLASSES)]
    return keras.Sequential(layers)


def collected(strategy, worst=5):
    """29 examples in batches of 9 are on 4 replicas 3, 3, 3, 0, and at last 1, 1, 0, 0."""
    info = DatasetInfo("animals", split="test", num_classes=CLASSES, class_names=NAMES)
    data = InMemory(images(), global_batch_size=9, training=False, info=info)
    with strategy.scope():
        step = EvalStep(model())
    return mistakes.collect(step, data, strategy, worst), step


def test_it_is_what_numpy_finds_on_any_number_of_replicas(mirrored):
    features, labels = images()
    one, step = collected(mirrored(1))
    outputs = step.model(features.astype("float32") / 255).numpy()
    logs = outputs - np.log(np.exp(outputs).sum(axis=1, keepdims=True))
    losses, predicted = -logs[np.arange(COUNT), labels], outputs.argmax(axis=1)
    expected = np.zeros([CLASSES, CLASSES], int)
    for label, guess in zip(labels, predicted, strict=True):
        expected[label, guess] += 1
    np.testing.assert_array_equal(one.confusion, expected)
    worst = np.argsort(-losses)[:5]
    assert [example.number for example in one.worst] == worst.tolist()
    for example in one.worst:
        n = example.number
        assert (example.label, example.predicted) == (labels[n], predicted[n])
        assert example.loss == pytest.approx(losses[n], rel=1e-5)
        assert example.probability == pytest.approx(np.exp(logs[n].max()), rel=1e-5)
        np.testing.assert_array_equal(tf.io.decode_png(example.png), features[n])
    four, _ = collected(mirrored(4))
    np.testing.assert_array_equal(four.confusion, one.confusion)
    assert [e.number for e in four.worst] == [e.number for e in one.worst]
    assert [e.png for e in four.worst] == [e.png for e in one.worst]
    everything, _ = collected(mirrored(1), worst=100)
    assert len(everything.worst) == COUNT
    check_page(one)


def test_examples_without_a_loss_are_the_worst(mirrored):
    """A loss that is NaN, of pictures that hold NaN; JSON has no such number."""
    features, labels = images()
    features = features.astype("float32") / 255
    features[[3, 20, 28], 0, 0, 0] = np.nan
    data = InMemory((features, labels), global_batch_size=9, training=False)
    with mirrored(1).scope():
        step = EvalStep(model())
    found = mistakes.collect(step, data, mirrored(1), worst=5)
    assert [one.number for one in found.worst[:3]] == [3, 20, 28]
    assert [math.isnan(one.loss) for one in found.worst] == [True] * 3 + [False] * 2
    assert found.worst[3].loss >= found.worst[4].loss
    shown = tf.io.decode_png(found.worst[0].png).numpy()
    np.testing.assert_array_equal(shown.ravel()[1:], (features[3].ravel()[1:] * 255).round())
    stored = json.loads(to_json(found.to_json()), parse_constant=pytest.fail)
    assert [one["loss"] for one in stored["worst"][:3]] == ["NaN"] * 3
    fewer = mistakes.collect(step, data, mirrored(1), worst=2)
    assert [one.number for one in fewer.worst] == [3, 20]


def check_page(found):
    page = mistakes.make_page(found, "step 3 of <run>", ["accuracy 0.5"])
    root = ElementTree.fromstring(page.partition("\n")[2])
    assert "<b>dog" in "".join(root.itertext()) and "<run>" in "".join(root.itertext())
    pictures = re.findall(r'src="data:image/png;base64,([^"]+)"', page)
    assert [base64.b64decode(picture) for picture in pictures] == [e.png for e in found.worst]
    assert not re.search(r'(src|href)="(?!data:)', page) and "<script" not in page
    assert "img-src data:" in page and "default-src 'none'" in page
    cells = [part for part in root.iter() if re.fullmatch(r"h\d", part.get("class") or "")]
    assert len(cells) == CLASSES**2
    lines = mistakes.table(found)
    assert max(map(len, lines)) <= 80
    total = found.confusion.sum(axis=1)
    for name, row, count, line in zip(NAMES, found.confusion, total, lines[1:4], strict=True):
        assert line.split()[:2] == [name, str(count)]
        assert any(one.split() == [name, *map(str, row)] for one in lines[-3:])
    stored = json.loads(json.dumps(found.to_json()))
    assert stored["confusion"] == found.confusion.tolist()
    assert "png" not in stored["worst"][0]


def test_a_class_without_examples():
    found = mistakes.Report(["a", "b"], np.array([[0, 0], [1, 3]]), [])
    assert found.accuracies == [None, 0.75]
    assert [found.confused(0), found.confused(1)] == [None, 0]
    assert mistakes.table(found)[1].split() == ["a", "0"]


def test_only_classifications(mirrored):
    features, _ = images()
    data = InMemory((features, np.ones(COUNT, "f")), global_batch_size=9, training=False)
    loss = keras.losses.MeanSquaredError(reduction=None)
    step = EvalStep(model(), lambda labels, outputs: loss(labels[:, None], outputs))
    with pytest.raises(UsageError, match="--report needs a classifier"):
        mistakes.collect(step, data, mirrored(1))


@pytest.mark.parametrize("activation", [None, "sigmoid"])
@pytest.mark.parametrize("shape", [[-1], [-1, 1]])
def test_two_classes_of_one_output(mirrored, activation, shape):
    features, labels = images()
    labels = (labels > 0).astype("float32").reshape(shape)
    made = keras.Sequential(
        [keras.Input([4, 5, 1]), keras.layers.Flatten(), keras.layers.Dense(1, activation)]
    )
    info = DatasetInfo("mail", class_names=("ham", "spam"))
    data = InMemory((features, labels), global_batch_size=9, training=False, info=info)
    found = mistakes.collect(EvalStep(made, "binary_crossentropy"), data, mirrored(1))
    outputs = made(features.astype("float32") / 255).numpy()[:, 0]
    share = outputs if activation else 1 / (1 + np.exp(-outputs))
    expected = np.zeros([2, 2], int)
    np.add.at(expected, (labels.ravel().astype(int), (share > 0.5).astype(int)), 1)
    np.testing.assert_array_equal(found.confusion, expected)
    assert [*found.classes] == ["ham", "spam"]
    for example in found.worst:
        wanted = max(share[example.number], 1 - share[example.number])
        assert example.probability == pytest.approx(wanted, rel=1e-5)
    smooth = InMemory((features, labels * 0.9), global_batch_size=9, training=False)
    with pytest.raises(UsageError, match="^--report needs a classifier.* labels of 0 and 1"):
        mistakes.collect(EvalStep(made, "binary_crossentropy"), smooth, mirrored(1))


@pytest.mark.parametrize("one_hot", [True, False])
def test_probabilities_of_a_softmax(mirrored, one_hot):
    features, labels = images()
    made = model()
    made.layers[-1].activation = keras.activations.softmax
    loss = "categorical_crossentropy" if one_hot else "sparse_categorical_crossentropy"
    given = np.eye(CLASSES, dtype="float32")[labels] if one_hot else labels
    data = InMemory((features, given), global_batch_size=9, training=False)
    found = mistakes.collect(EvalStep(made, loss), data, mirrored(1))
    outputs = made(features.astype("float32") / 255).numpy()
    assert found.confusion.trace() == (outputs.argmax(1) == labels).sum()
    for example in found.worst:
        assert example.label == labels[example.number]
        assert example.probability == pytest.approx(outputs[example.number].max(), rel=1e-5)


@pytest.mark.parametrize("flag", ["--watch", "--loss=mean_squared_error", "--loss=mae"])
def test_wrong_flags(zygote_without_tensorflow, tmp_path, flag):
    arguments = [f"--model_dir={tmp_path}", f"--report={tmp_path}", flag]
    command = zygote_without_tensorflow.run("ctl.evaluate", *arguments, exit_code=2)
    assert command.stderr.startswith("--report ") and command.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("count", "widest"), [(3, 200), (10, 500), (25, 1040), (26, 1040), (100, 1040)]
)
def test_the_matrix_is_as_large_as_its_labels_need(count, widest):
    """Labels are whole and do not touch; a few classes are no poster, 100 fit a page."""
    names = [f"class {n}" for n in range(count)]
    drawn = ElementTree.fromstring(mistakes.draw(mistakes.Report(names, np.eye(count), [])))
    assert float(drawn.get("width")) == float(drawn.get("viewBox").split()[2]) <= widest
    labels = [e for e in drawn.iter("text") if e.text in names]
    assert sorted(e.text for e in labels) == sorted(2 * names)
    rows = [float(e.get("y")) for e in labels if "y" in e.get("class", "").split()]
    assert len(rows) == count and min(np.diff(rows)) >= 8
    assert float(drawn.get("viewBox").split()[3]) <= widest + 20
