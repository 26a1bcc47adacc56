"""Data as programs have them: arrays, a PyDataset of Keras, a tf.data.Dataset."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

import ctl
from ctl.data import GlobalBatches, InMemory, PyDatasetBatches, Streaming, adapters, as_dataset
from ctl.errors import UsageError

X = np.arange(40, dtype="float32").reshape(20, 2)
Y = np.arange(20) % 2


class Batches(keras.utils.PyDataset):
    """Five batches: four of 4, and one of 3."""

    def __len__(self):
        return 5

    def __getitem__(self, index):
        return X[4 * index : 4 * index + 4][: 3 if index == 4 else 4], Y[4 * index : 4 * index + 4]

    def numbers(self):
        return [int(self[index][0][0, 0]) for index in range(5)]


class Right(Batches):
    def __getitem__(self, index):
        features, labels = super().__getitem__(index)
        return features, labels[: len(features)]


def firsts(dataset, start=0, count=5):
    """The first feature of each batch."""
    return [int(batch[0][0, 0]) for batch in dataset.batches(start).take(count)]


def step():
    model = keras.Sequential([keras.Input([2]), keras.layers.Dense(2)])
    return ctl.TrainStep(model, "sgd", "sparse_categorical_crossentropy")


def test_arrays(monkeypatch):
    made = as_dataset((X, Y), global_batch_size=4)
    assert type(made) is InMemory and made.training and made.global_batch_size == 4
    assert made.fingerprint() == InMemory((X, Y), global_batch_size=4).fingerprint()
    evaluation = as_dataset({"x": X, "y": tf.constant(Y)}, training=False)
    assert not evaluation.training and evaluation.num_examples == 20
    monkeypatch.setattr(adapters, "_RESIDENT_BYTES", 100)
    assert type(as_dataset((X, Y), global_batch_size=4)) is Streaming
    loop = ctl.Loop(step(), (X, Y), global_batch_size=8)
    assert loop.dataset.global_batch_size == 8


def test_a_py_dataset():
    train = as_dataset(Right(workers=2))
    assert isinstance(train, PyDatasetBatches) and train.batches_per_epoch == 5
    order = firsts(train, count=15)
    numbers = Right().numbers()
    assert all(sorted(order[5 * e : 5 * e + 5]) == numbers for e in range(3))
    assert order[:5] != order[5:10]
    assert firsts(train, 7, 8) == order[7:]  # a resume
    evaluation = as_dataset(Right(), training=False)
    assert firsts(evaluation, count=9) == numbers
    assert [len(y) for _, y in evaluation.batches()] == [4, 4, 4, 4, 3]
    assert train.fingerprint() == as_dataset(Right()).fingerprint()


def test_a_resume_reads_no_earlier_batch():
    read = []

    class Counted(Right):
        def __getitem__(self, index):
            read.append(index)
            return super().__getitem__(index)

    made = as_dataset(Counted(), training=False)
    read.clear()
    assert firsts(made, 3) == Right().numbers()[3:]
    assert read == [3, 4]


@pytest.mark.slow
def test_it_trains_and_evaluates_as_its_arrays(mirrored):
    with mirrored(2).scope():
        trained = step()
        evaluator = ctl.Evaluator(ctl.EvalStep(trained.model), Right(), strategy=mirrored(2))
    loop = ctl.Loop(trained, Right(), strategy=mirrored(2), evaluator=evaluator)
    results = loop.train_and_evaluate(epochs=2)
    assert loop.global_step == 10 and [*loop.history.evaluations] == [5, 10]
    rest = np.r_[0:19]
    expected = ctl.losses.cross_entropy(tf.constant(Y[rest]), trained.model(X[rest]))
    assert results["loss"] == pytest.approx(float(tf.reduce_mean(expected)), rel=1e-5)


def test_an_end_of_epoch_of_its_own_is_named(warnings_of):
    class Shuffles(Right):
        def on_epoch_end(self):
            raise AssertionError

    as_dataset(Right())
    assert not warnings_of()
    ctl.Loop(step(), Shuffles()).train(epochs=2)
    (warning,) = [w for w in warnings_of() if "on_epoch_end" in w]
    assert warning.startswith("Shuffles.on_epoch_end() is not called: ")


class Empty(Right):
    def __len__(self):
        return 0


class Endless(Right):
    @property
    def num_batches(self):
        return None


class Unlike(Right):
    def __getitem__(self, index):
        features, labels = super().__getitem__(index)
        return features.astype("float64") if index == 2 else features, labels


class Frame:
    """As one of pandas."""

    def to_numpy(self):
        return X


@pytest.mark.parametrize(
    ("data", "options", "says"),
    [
        ((X, Y), {}, "^arrays need the size of a global batch: give global_batch_size=32"),
        ("photos", {}, "^a str is not a dataset: give arrays"),
        ([X, Y], {}, "^a list is not a dataset: give a tuple of arrays"),
        (iter([X]), {}, "^a list_iterator is .*from_generator"),
        ((lambda: (yield X)), {}, "^a function is not a dataset: .*from_generator"),
        ((), {}, "^a tuple is not a dataset"),
        ((X, Y.tolist()), {}, "^the data have a list in place of an array: give numpy.asarray of"),
        ((X, [[1, 2], [3]]), {}, "^the data have a list .*: pad them, with keras.utils.pad_sequ"),
        ((X, Y, None), {}, "^the data have a NoneType in place of an array: leave it out"),
        ((tf.ragged.constant([[1], []]), Y), {}, r"a RaggedTensor in place .*\)\).batch\(…\)$"),
        (Frame(), {}, r"^a Frame is not a dataset: .*'fare'.*\.to_numpy\(\), data\['label'\]\.to"),
        ({"x": Frame()}, {}, r"^the data have a Frame in place of .*: give its to_numpy\(\)"),
        (tf.data.Dataset.from_tensor_slices((X, Y)), {}, "single examples: .*, with .batch"),
        (Right(), {"global_batch_size": 4}, "^global_batch_size=4 has no effect on Right, "),
        (Empty(), {}, "^Empty has no batches"),
        (Endless(), {"training": False}, "^Endless has no length, so its evaluation would never"),
        (Right(workers=2, use_multiprocessing=True), {}, "^Right has use_multiprocessing=True, "),
    ],
)
def test_what_is_refused(data, options, says):
    with pytest.raises(UsageError, match=says):
        as_dataset(data, **options)


def test_batches_of_another_size_are_refused():
    dataset = tf.data.Dataset.from_tensor_slices((np.zeros([9, 4]), np.zeros(9, int)))
    batches = dataset.batch(4)
    right = (batches, batches.prefetch(1), batches.shuffle(2).repeat(), dataset.batch(2).batch(4))
    for data in right:
        assert as_dataset(data, global_batch_size=4).global_batch_size == 4
        with pytest.raises(UsageError, match="^global_batch_size=8, but the .* of 4 examples: giv"):
            as_dataset(data, global_batch_size=8)
    unknown = batches.map(lambda x, y: (tf.repeat(x, 2, 0), tf.repeat(y, 2, 0)))
    assert as_dataset(unknown, global_batch_size=8).global_batch_size == 8


def test_items_that_differ_are_named():
    loop = ctl.Loop(step(), Unlike())
    with pytest.raises(UsageError, match=r"^Unlike\[2\] has an array float64 \[4, 2\], where item"):
        loop.train(5)


def test_a_user_may_have_an_endless_one():
    loop = ctl.Loop(step(), Endless())
    loop.train(3)
    with pytest.raises(UsageError, match="^the length of an epoch of Endless is unknown: give unt"):
        loop.train(epochs=2)


def test_a_dataset_of_ctl_stays():
    made = InMemory((X, Y), global_batch_size=4)
    assert as_dataset(made) is made is as_dataset(made, global_batch_size=4)
    batches = tf.data.Dataset.from_tensor_slices((X, Y)).batch(4)
    assert isinstance(as_dataset(batches), GlobalBatches)
