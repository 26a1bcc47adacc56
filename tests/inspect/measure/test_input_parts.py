"""The slow part of an input is named: made with sleeps, so that the truth is known."""

from __future__ import annotations

import re
import time

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import BATCH as BATCH_OF_LOOP
from helpers import CLASSES, make_loop

from ctl.data import Augmented, InMemory, Streaming
from ctl.data.sources import Items
from ctl.distributed import workers
from ctl.inspect.commands.run import _input
from ctl.inspect.measure import input_parts as of_parts
from ctl.inspect.measure.input_parts import _seconds, explain, input_parts
from ctl.inspect.measure.verdict import bounds
from ctl.inspect.session import Inspection

EXAMPLES, BATCH, FEATURES, SLOW = 40, 8, 12, 0.01


def stream(slow: str) -> Streaming:
    """An example takes 10 ms to read or to decode; the sleeps of several run at once."""

    def sleep(row):
        time.sleep(SLOW)
        return row

    def decode(example):
        features, label = example
        if slow == "decoding":
            features = tf.ensure_shape(tf.numpy_function(sleep, [features], tf.float32), [FEATURES])
        return features, label

    def example(row):
        return (sleep if slow == "reading" else np.asarray)(row), row[0].astype(np.int64)

    source = Items(np.zeros([EXAMPLES, FEATURES], np.float32), example, decode=decode)
    return Streaming(source, global_batch_size=BATCH)


@pytest.mark.slow
@pytest.mark.parametrize("slow", ["reading", "decoding"])
def test_the_slow_part_is_named(mirrored, slow):
    loop = make_loop(mirrored(2), data=stream(slow), steps_per_loop=10)
    with Inspection(loop, steps=8) as seen:
        loop.train(20)
    assert next(iter(bounds(seen.timeline))) == "input"
    first, second = _input(loop, seen.timeline)
    parts = {name: float(ms) for name, ms in re.findall(r"[:,] ([a-z ]+) ([\d.]+) ms", first)}
    assert list(parts) == ["reading", "decoding", "handing over"]
    assert max(parts, key=parts.get) == slow
    assert parts[slow] > BATCH * SLOW / 8 * 1e3  # examples of a share sleep in at most 6 threads
    assert second.startswith(f"{slow.title()} is the bound: try ")


def test_elements_that_are_made_at_once():
    """A thread has made those of several calls before the clock starts."""

    def elements():
        for number in range(1000):
            if number % 16 == 0:
                time.sleep(SLOW)
            yield tf.constant(number)

    ahead = tf.data.Dataset.from_generator(
        elements, output_signature=tf.TensorSpec([], tf.int32)
    ).prefetch(64)
    assert _seconds(ahead, 16) > 0.8 * SLOW / 16


def test_calls_that_run_at_the_same_time():
    """They end together, and those after them begin together."""
    calls = 48

    def sleep(number):
        time.sleep(SLOW)
        return number

    slow = tf.data.Dataset.range(1000).map(
        lambda n: tf.numpy_function(sleep, [n], tf.int64), num_parallel_calls=calls
    )
    options = tf.data.Options()
    options.threading.private_threadpool_size = calls
    assert _seconds(slow.with_options(options), calls) > 0.8 * SLOW / calls


def test_data_are_handed_over_in_blocks(mirrored, monkeypatch):
    """As the loop reads them; the time is that of a batch."""
    seen = []

    def seconds(elements, together=1):
        seen.append(tf.nest.flatten(next(iter(elements)), expand_composites=True)[0].shape)
        return 64.0

    monkeypatch.setattr(of_parts, "_seconds", seconds)
    loop = make_loop(mirrored(2))
    parts = input_parts(loop)
    assert parts == {"the order of examples": 64.0, "handing over": 2.0, "gathering": 64.0}
    assert seen == [[BATCH_OF_LOOP], [BATCH_OF_LOOP // 2, 32], [BATCH_OF_LOOP // 2, FEATURES]]


@pytest.mark.slow
def test_parts_of_other_data(mirrored, monkeypatch):
    random = np.random.default_rng(0)
    images = random.integers(256, size=[64, 12, 12, 3], dtype=np.uint8)
    data = InMemory((images, np.zeros(64, np.int64)), global_batch_size=BATCH)

    def model():
        layers = [keras.layers.Flatten(), keras.layers.Dense(CLASSES)]
        return keras.Sequential([keras.Input([12, 12, 3]), *layers])

    loop = make_loop(mirrored(2), data=Augmented(data, "crop:2,randaugment:2:9"), model=model)
    parts = input_parts(loop)
    assert list(parts) == ["the order of examples", "handing over", "augmenting"]
    assert min(parts.values()) > 0
    parts["augmenting"] += sum(parts.values())
    first, second = explain(parts, step=1.5 * sum(parts.values()))
    assert f"augmenting {parts['augmenting'] * 1e3:.2f} ms" in first
    assert second.startswith("Augmenting is the bound: try fewer or cheaper operations")
    assert "wait for cores" in explain(parts, step=100 * sum(parts.values()))[1]

    own = tf.data.Dataset.from_tensors((tf.zeros([BATCH, FEATURES]), tf.zeros([BATCH], tf.int64)))
    loop = make_loop(mirrored(1), data=own.repeat())
    assert list(input_parts(loop)) == ["the tf.data.Dataset", "handing over"]
    # A worker must not wait for others, which time nothing.
    monkeypatch.setattr(workers, "is_multi_worker", lambda strategy: True)
    monkeypatch.setattr(workers, "cluster_of", lambda strategy: type("", (), {"workers": "ab"}))
    assert list(input_parts(loop)) == ["the tf.data.Dataset"]
