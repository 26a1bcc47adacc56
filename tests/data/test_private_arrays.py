"""Which datasets may give arrays of the user."""

import numpy as np
import tensorflow as tf

from ctl.base.tf_internals import may_call_python

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
        assert may_call_python(found)


def test_other_data_are_not_copied():
    rows = tf.data.Dataset.from_tensor_slices(ARRAY).shuffle(8).map(lambda row: row * 2)
    assert not may_call_python(tf.data.Dataset.zip((rows.batch(2), rows.batch(2))).prefetch(1))
    assert not may_call_python(tf.data.TFRecordDataset([]))
