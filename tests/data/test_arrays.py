"""Arrays of the user's: each is taken for what it is, or refused, whichever way it enters."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from ctl.data import InMemory, Streaming, mix
from ctl.data.errors import translate_data_errors
from ctl.data.sources import Items, mapped
from ctl.errors import UsageError


class Own:
    """A source of the user's."""

    def __init__(self, array):
        self.array = array

    def __len__(self):
        return len(self.array)

    def read(self, indices):
        return self.array[indices]


class Decoded(Own):
    def decode(self, number):
        return tf.identity(number)


def saved(array, folder):
    np.save(folder / "array.npy", array)
    return mapped(folder / "array.npy")


# Each makes a dataset of an array, of 4 examples in each batch.
WAYS = {
    "memory": lambda a, _, **o: InMemory(a, **o),
    "array": lambda a, _, **o: Streaming(a, **o),
    "mapped": lambda a, folder, **o: Streaming(saved(a, folder), **o),
    "items": lambda a, _, **o: Streaming(Items(list(a[:, None])), **o),
    "own": lambda a, _, **o: Streaming(Own(a), **o),
    "decoded": lambda a, _, **o: Streaming(Decoded(a), **o),
}
MIXTURES = {
    "mixture": lambda a, _, **o: mix([(InMemory(a, **o), 1)]),
    "mixed stream": lambda a, _, **o: mix([(Streaming(a, **o), 1), (InMemory(a, **o), 1)]),
    "mixed decoded": lambda a, _, **o: mix([(Streaming(Decoded(a), **o), 1)]),
}


def batch_of(dataset) -> np.ndarray:
    element = next(iter(dataset.batches()))
    return dataset.on_replica(element, dataset.resident(tf.distribute.get_strategy())).numpy()


@pytest.mark.parametrize("dtype", [">f4", ">u2", ">i8"])
@pytest.mark.parametrize("way", [*WAYS, *MIXTURES])
def test_another_order_of_bytes(way, dtype, tmp_path):
    array = np.array([3, 70, 1000, 4], dtype)
    make = (WAYS | MIXTURES)[way]
    for training in (True, False) if way in WAYS else (True,):
        batch = batch_of(make(array, tmp_path, global_batch_size=4, training=training))
        assert batch.dtype == array.dtype.newbyteorder("=")
        if way.startswith("mixed"):  # two epochs of two examples each
            assert set(batch.ravel()) <= set(array)
        else:
            assert sorted(batch.ravel()) == sorted(array)


def test_names_in_another_order_of_bytes():
    names = np.array(["é", "cat", "", "a dog"], ">U5")
    for way in ("memory", "array", "items"):
        batch = batch_of(WAYS[way](names, None, global_batch_size=4, training=False))
        assert [name.decode() for name in batch.ravel()] == names.tolist()


def test_a_mapped_file_stays_mapped(tmp_path):
    """It has a TiB, of holes."""
    shape = (2**36, 4)
    np.lib.format.open_memmap(tmp_path / "array.npy", "w+", ">f4", shape)[-1] = 3
    dataset = Streaming(mapped(tmp_path / "array.npy"), global_batch_size=2)
    last = dataset.read(np.array([shape[0] - 1]))
    assert last.tolist() == [[3.0] * 4] and last.dtype == np.float32


RECORDS = np.zeros(4, [("age", "i4"), ("fare", "f4")])
REFUSED = {
    "records": (RECORDS, "the array has the type .*age"),
    "dates": ((np.zeros(4), np.zeros(4, "M8[D]")), r"the array \[1\] has the type datetime64\[D\]"),
    "times": ({"x": {"t": np.zeros(4, "m8[s]")}}, r"the array \['x'\]\['t'\] has the type timed"),
    "wide": ({"x": np.zeros(4, "g"), "y": np.zeros(4)}, r"the array \['x'\] has the type float128"),
    "objects": (np.array([1, 2, 3, 4], object), "the array has Python objects .int.: make"),
    "some objects": (np.array(["a", None, "b", "c"], object), r"objects \(NoneType\)"),
    "masked": (np.ma.array(np.zeros(4), mask=[0, 0, 1, 0]), "the array has masked values"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_tensor_holds(name):
    arrays, says = REFUSED[name]
    for make in (InMemory, Streaming):
        with pytest.raises(UsageError, match=says) as error:
            dataset = make(arrays, global_batch_size=4, training=False)
            with translate_data_errors(dataset):
                list(dataset.batches())
        assert "\n" not in str(error.value)


def test_the_hash_of_strings_is_not_that_of_their_addresses():
    def of(*names):
        array = np.array([name.encode() for name in names], object)
        kinds = InMemory(array, global_batch_size=1), Streaming(array, global_batch_size=1)
        return [dataset.fingerprint() for dataset in kinds]

    one, again, other = of("one", "two"), of("one", "two"), of("one", "too")
    assert one == again and all(a != b for a, b in zip(one, other, strict=True))


def test_what_a_tensor_holds():
    for array in (
        np.array([b"a", "é", np.str_("c"), b""], object),
        np.ma.array(np.zeros(4)),
        np.zeros(4, tf.bfloat16.as_numpy_dtype),
        np.zeros(4, bool),
        np.zeros([4, 0]),
        np.zeros([4, 2], ">f4")[:, ::-1],
    ):
        for make in (InMemory, Streaming):
            dataset = make(array, global_batch_size=4, training=False)
            assert len(batch_of(dataset)) == 4
            assert dataset.fingerprint() == dataset.fingerprint()


@pytest.mark.parametrize("later", [1.5, True, "a", 2**70])
def test_examples_of_another_type_than_the_first(later):
    """Also in one batch: they are not cast."""
    for items in ([1, later], [{"x": 1}, {"x": later}]):
        dataset = Streaming(items, global_batch_size=2, training=False)
        with pytest.raises(UsageError, match="example 1: .* (is|has) .*: make (all|numb)"):
            dataset.read(np.arange(2))
    words = [["a", "b"], ["a longer word", ""]]
    dataset = Streaming(words, global_batch_size=2, training=False)
    assert batch_of(dataset).tolist() == [[w.encode() for w in pair] for pair in words]
