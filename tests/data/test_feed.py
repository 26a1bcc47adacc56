import numpy as np
import pytest
import tensorflow as tf

from ctl.base.tf_internals import devices_without_autotuning
from ctl.data import InMemory
from ctl.data.feed import Waited, batch_of, distribute, next_block, open_feed
from ctl.data.global_batches import GlobalBatches


def taker(strategy, most):
    """A function of a feed and of counts: the next global batches, in calls for so many, as the
    loop has them; at most ``most`` of a block at once."""

    @tf.function
    def take(feed, steps):
        position = feed.position
        batches = tf.TensorArray(tf.int64, steps, element_shape=[None])
        done = 0
        while done < steps:
            block, position = next_block(feed, position, tf.minimum(steps - done, most))
            for number in tf.range(block.first, block.end):
                batch = strategy.run(batch_of, args=(block, number, feed.batches_per_block))
                parts = strategy.experimental_local_results(batch)
                batches = batches.write(done, tf.concat(parts, 0))
                done += 1
        return batches.stack(), position

    def taken(feed, *counts):
        found = []
        for steps in counts:
            batches, position = take(feed, tf.constant(steps))
            found.append(batches.numpy())
            feed = feed._replace(position=position)
        return np.concatenate(found)

    return taken


@pytest.mark.slow
@pytest.mark.parametrize(("replicas", "most"), [(0, 1), (0, 32), (1, 32), (2, 1), (4, 32)])
def test_batches_in_blocks_are_those_of_the_dataset(mirrored, replicas, most):
    """Several blocks, over epoch borders, by calls that end in the middle of one."""
    strategy = mirrored(replicas) if replicas else tf.distribute.get_strategy()
    dataset, taken = InMemory(np.arange(50), global_batch_size=12), taker(strategy, most)
    for start in (0, 7):
        want = np.stack(list(dataset.batches(start).take(80).as_numpy_iterator()))
        feed = open_feed(dataset, strategy, start)
        assert feed.batches_per_block > 1
        np.testing.assert_array_equal(taken(feed, 1, 31, 1, 40, 7), want)


def test_what_is_not_said_to_be_small_comes_one_by_one(mirrored):
    dataset = GlobalBatches(tf.data.Dataset.range(8).batch(4, drop_remainder=True))
    feed = open_feed(dataset, mirrored(2), 0)
    assert isinstance(feed.position, Waited) and feed.batches_per_block == 1
    batches = taker(mirrored(2), most=32)(feed, 3)
    assert batches.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7], [0, 1, 2, 3]]


def test_nor_on_the_devices_of_a_strategy(mirrored, monkeypatch):
    """TensorFlow's private function is still there, and is itself again afterwards."""
    from tensorflow.python.data.ops import multi_device_iterator_ops as module

    original, calls = module._create_device_dataset, []
    spy = lambda *args: calls.append(args) or original(*args)  # noqa: E731
    monkeypatch.setattr(module, "_create_device_dataset", spy)
    iterator = distribute(mirrored(2), GlobalBatches(tf.data.Dataset.range(8).batch(2)).batches())
    assert len(calls) == 2
    with devices_without_autotuning():
        assert module._create_device_dataset(*calls[0]).options().autotune.enabled is False
    assert module._create_device_dataset is spy
    assert next(iterator).values[1].numpy() == [1]
