"""A program ends though threads of TensorFlow still call its functions, and keeps its arrays."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import tensorflow as tf

from ctl.base.tf_internals import pipeline
from ctl.data import GlobalBatches, Streaming
from ctl.data.feed import open_batches

PROGRAM = """
import time
import __main__
import numpy as np
import tensorflow as tf
from ctl.data import Streaming
from ctl.data.feed import open_batches
from ctl.data.sources import Items

def example(row):
    time.sleep(0.05)
    return row

def run():
    data = Streaming(Items(np.zeros([64, 2]), example), global_batch_size=4)
    __main__.iterator = open_batches(data, tf.distribute.OneDeviceStrategy("/cpu:0"))
    next(__main__.iterator)
"""


def test_a_program_that_reads_ahead_ends(zygote, tmp_path):
    """Without `ctl.data.callbacks`, it hangs, or is aborted: its iterator is freed last."""
    (tmp_path / "reads_ahead.py").write_text(PROGRAM)
    zygote.run("reads_ahead", path=[tmp_path])


@pytest.mark.parametrize("source", ["generator", "streamed", "decoded"])
def test_an_array_of_the_user_is_never_written_to(source):
    """TensorFlow writes the result into the array, though it is half of a tensor in use."""
    array = aligned([4, 1 << 15])  # small ones of several batches are read together
    array[:] = 1.0
    if source == "generator":
        spec = tf.TensorSpec(array.shape, array.dtype)
        batches = tf.data.Dataset.from_generator(
            lambda: itertools.repeat(array), output_signature=spec
        )
        data = GlobalBatches(batches)
    else:
        kind = Same if source == "streamed" else SameDecoded
        data = Streaming(kind(array), global_batch_size=4)
    iterator = open_batches(data, tf.distribute.OneDeviceStrategy("/cpu:0"))

    @tf.function(autograph=False)
    def doubled_half():
        return tf.nest.flatten(next(iterator))[-1][2:] * 2.0

    for _ in range(3):
        np.testing.assert_array_equal(doubled_half(), 2.0)
    np.testing.assert_array_equal(array, 1.0)


class Same:
    """A source that gives the same array each time."""

    def __init__(self, array):
        self.array = array

    def __len__(self):
        return len(self.array)

    def read(self, indices):
        return self.array if len(indices) == len(self.array) else self.array[: len(indices)]


class SameDecoded(Same):
    def decode(self, row):
        return tf.reshape(row, [-1])


def aligned(shape):
    """Zeros that TensorFlow uses without a copy."""
    size = 4 * math.prod(shape)
    memory = np.zeros(size + 64, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + size].view(np.float32).reshape(shape)


ARRAY = np.zeros([8, 4], np.float32)


def in_python(row):
    return tf.numpy_function(lambda row: row, [row], tf.float32)


def test_python_is_found_wherever_it_is_called():
    dataset, spec = tf.data.Dataset, tf.TensorSpec(ARRAY.shape)
    generator = dataset.from_generator(lambda: iter([ARRAY]), output_signature=spec)
    one = dataset.from_tensors(ARRAY)
    mapped = one.map(tf.function(lambda row: tf.function(in_python)(row)))
    inside = dataset.range(2).interleave(lambda _: one.map(in_python))
    captured = dataset.range(2).flat_map(lambda _: generator)
    zipped = dataset.zip((one, generator.cache().repeat().prefetch(1)))
    for found in (generator, mapped, inside, captured, zipped):
        assert pipeline(found).may_call_python


def test_other_data_are_not_copied():
    rows = tf.data.Dataset.from_tensor_slices(ARRAY).shuffle(8).map(lambda row: row * 2)
    both = tf.data.Dataset.zip((rows.batch(2), rows.batch(2))).prefetch(1)
    assert not pipeline(both).may_call_python
    assert not pipeline(tf.data.TFRecordDataset([])).may_call_python
