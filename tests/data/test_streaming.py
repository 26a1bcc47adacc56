from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_datasets as tfds
import tiny_tfds

from ctl.data.feed import distribute
from ctl.data.streaming import Streaming
from ctl.data.tfds_source import Source, find
from ctl.errors import UsageError


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """The first byte of an image is the number of its example."""
    tfds.disable_progress_bar()
    root = str(tmp_path_factory.mktemp("tfds"))
    tiny_tfds.prepare(tiny_tfds.CtlTinyColor, root, shards=5)
    tiny_tfds.prepare(tiny_tfds.CtlTinyUnlabelled, root)
    return {
        "train": Source(find("ctl_tiny_color", root), "train"),
        "validation": Source(find("ctl_tiny_color", root), "validation"),
        "resized": Source(find("ctl_tiny_color", root), "train", (9, 7, 3)),
        "unlabelled": Source(find("ctl_tiny_unlabelled", root), "train"),
    }


def numbers(dataset: Streaming, start: int, count: int) -> np.ndarray:
    batches = dataset.batches(start).take(count).as_numpy_iterator()
    return np.stack([images[:, 0, 0, 0] for images, _ in batches])


def test_every_epoch_has_every_example_once_in_a_new_order(sources):
    dataset = Streaming(sources["train"], global_batch_size=8, seed=3, shuffle_buffer=16)
    epochs = numbers(dataset, 0, 25).reshape(4, 50)  # 25 batches of 8 are 4 epochs of 50
    for epoch in epochs:
        assert sorted(epoch) == list(range(50))
    assert len({tuple(epoch) for epoch in epochs}) == 4
    # Shards are read in a new order too: the same example would else come early in every epoch.
    assert len({tuple(sorted(epoch[:10])) for epoch in epochs}) == 4


@pytest.mark.parametrize("start", [1, 6, 7, 20])
def test_a_late_start_continues_the_same_sequence(sources, start):
    dataset = Streaming(sources["train"], global_batch_size=8, seed=3, shuffle_buffer=16)
    whole = numbers(dataset, 0, start + 10)
    np.testing.assert_array_equal(numbers(dataset, start, 10), whole[start:])


def test_order_depends_on_the_seed_and_not_on_the_global_one(sources):
    def order(seed: int) -> np.ndarray:
        return numbers(Streaming(sources["train"], global_batch_size=8, seed=seed), 0, 10)

    tf.random.set_seed(1)
    first = order(3)
    tf.random.set_seed(2)
    np.testing.assert_array_equal(first, order(3))
    assert (first != order(4)).any()


def test_shuffling_leaves_the_global_seed_alone(sources):
    tf.random.set_seed(7)
    expected = tf.random.uniform([4]).numpy()
    tf.random.set_seed(7)
    Streaming(sources["train"], global_batch_size=8).batches()
    np.testing.assert_array_equal(tf.random.uniform([4]), expected)


@pytest.mark.parametrize("replicas", [1, 2, 4])
def test_global_batches_are_the_same_under_any_number_of_replicas(sources, mirrored, replicas):
    strategy = mirrored(replicas)
    dataset = Streaming(sources["train"], global_batch_size=8, seed=3)
    expected = dataset.batches(37).take(10).as_numpy_iterator()
    iterator = distribute(strategy, dataset.batches(37))
    for images, labels in expected:
        element = dataset.on_replica(next(iterator), dataset.resident(strategy))
        for whole, part in zip((images, labels), element, strict=True):
            parts = strategy.experimental_local_results(part)
            assert all(p.shape[0] == 8 // replicas for p in parts)
            np.testing.assert_array_equal(whole, np.concatenate([p.numpy() for p in parts]))


def test_training_batches_are_endless_and_static(sources):
    batches = Streaming(sources["train"], global_batch_size=8).batches()
    assert batches.cardinality() == tf.data.INFINITE_CARDINALITY
    assert batches.element_spec == (
        tf.TensorSpec([8, 4, 6, 3], tf.uint8),
        tf.TensorSpec([8], tf.int64),
    )


@pytest.mark.parametrize("replicas", [1, 2, 4])
def test_evaluation_has_every_example_once_and_in_order(sources, mirrored, replicas):
    strategy = mirrored(replicas)
    source = sources["validation"]
    dataset = Streaming(source, global_batch_size=5, training=False)
    assert dataset.batches().cardinality() == 2 and dataset.batches(1).cardinality() == 1
    seen = []
    for images, _ in distribute(strategy, dataset.batches()):
        for part in strategy.experimental_local_results(images):
            seen.extend(part.numpy()[:, 0, 0, 0])
    np.testing.assert_array_equal(seen, source.read()[0][:, 0, 0, 0])


def test_images_are_resized(sources):
    dataset = Streaming(sources["resized"], global_batch_size=8)
    images, labels = next(iter(dataset.batches()))
    assert images.shape == (8, 9, 7, 3) and images.dtype == tf.uint8
    np.testing.assert_array_equal(images.numpy()[:, 8, 6, 2] % 5, labels)


def test_labels_that_are_missing_are_found_at_once(sources):
    with pytest.raises(UsageError, match="no labels"):
        Streaming(sources["unlabelled"], global_batch_size=8)


def test_a_batch_larger_than_the_data(sources):
    with pytest.raises(UsageError, match="51 is larger than the dataset: it has 50"):
        Streaming(sources["train"], global_batch_size=51)


def test_fingerprint_tells_content_and_order(sources):
    def of(split: str = "train", **kwargs) -> dict:
        return Streaming(sources[split], global_batch_size=7, **kwargs).fingerprint()

    assert of() == of()
    for other in (of("validation"), of(seed=1), of(shuffle_buffer=3)):
        assert other != of()
    assert of("validation")["content"] != of()["content"]
