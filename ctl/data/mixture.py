"""Mixtures of datasets, in which each has its share of the examples at every moment."""

from __future__ import annotations

import dataclasses
import functools
import heapq
import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import tensorflow as tf

from ctl.data.dataset import DatasetInfo
from ctl.data.in_memory import InMemory, endless
from ctl.data.sources import Arrays
from ctl.data.streaming import Streaming
from ctl.errors import UsageError

_LONGEST_PERIOD = 1_000_000  # positions; longer tables take more than seconds


class Interleave:
    """Which part is at each position: part i is among the first p ones w[i] * p times, rounded up
    or down, where w are the weights divided by their sum.

    The earliest deadline comes first, which is always possible for one sequence: Baruah, Cohen,
    Plaxton and Varvel 1996, "Proportionate progress: a notion of fairness in resource allocation".

    Args:
        weights: above 0. Floats count as the decimal numbers that Python prints.

    Raises:
        UsageError: there is no weight, one is not above 0, or the order has no short period.
    """

    def __init__(self, weights: Sequence[float | Fraction]):
        if not weights or not all(math.isfinite(w) and w > 0 for w in weights):
            raise UsageError(f"weights of a mixture must be above 0, not {list(weights)}")
        exact = [Fraction(str(weight)) for weight in weights]
        scale = math.lcm(*(weight.denominator for weight in exact))
        numbers = [int(weight * scale) for weight in exact]
        common = math.gcd(*numbers)
        self._numbers = [number // common for number in numbers]
        self._period = sum(self._numbers)
        if self._period > _LONGEST_PERIOD:
            raise UsageError(
                f"weights of a mixture must be short decimals such as 0.7 and 0.3, not "
                f"{', '.join(map(str, weights))}"
            )
        self._parts = self._order()
        ones = self._parts[:, np.newaxis] == np.arange(len(weights))
        self._before = np.concatenate([np.zeros([1, len(weights)], int), ones.cumsum(axis=0)])

    def _order(self) -> np.ndarray:
        """The part at each position of a period, int64 [period]."""
        period, order = self._period, np.empty(self._period, np.int64)
        later = [(0, part, 0) for part in range(len(self._numbers))]  # first position allowed
        now: list[tuple[int, int, int]] = []  # last position allowed
        for position in range(period):
            while later and later[0][0] <= position:
                _, part, done = heapq.heappop(later)
                last = -(-(done + 1) * period // self._numbers[part]) - 1
                heapq.heappush(now, (last, part, done))
            _, part, done = heapq.heappop(now)
            order[position] = part
            heapq.heappush(later, ((done + 1) * period // self._numbers[part], part, done + 1))
        return order

    def counts(self, position: int) -> list[int]:
        """How often each part is among the first ``position`` ones."""
        periods, rest = divmod(position, self._period)
        return [
            periods * number + int(before)
            for number, before in zip(self._numbers, self._before[rest], strict=True)
        ]

    def locate(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The part at each of ``positions``, int64 [n], and how often it was there before."""
        periods, rests = np.divmod(positions, self._period)
        parts = self._parts[rests]
        return parts, periods * np.array(self._numbers)[parts] + self._before[rests, parts]

    def locate_tensor(self, positions: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """The same for tensors."""
        rests = positions % self._period
        parts = tf.gather(self._parts, rests)
        before = tf.gather(self._before, rests), parts
        numbers = tf.gather(tf.constant(self._numbers, tf.int64), parts)
        return parts, positions // self._period * numbers + tf.gather(*before, batch_dims=1)

    def merge(self, start: int, parts: Sequence[tf.data.Dataset]) -> tf.data.Dataset:
        """The elements of endless ``parts`` from position ``start`` on; each part must begin at its
        number in `counts`."""
        table, period = tf.constant(self._parts), self._period
        positions = tf.data.Dataset.counter(start)
        return tf.data.Dataset.choose_from_datasets(
            parts, positions.map(lambda position: table[position % period])
        )


class Mixture(InMemory):
    """A mixture in memory, see `mix`."""

    def __init__(self, parts: Sequence[tuple[InMemory, float]]):
        datasets = [dataset for dataset, _ in parts]
        self.parts, self.weights = datasets, [weight for _, weight in parts]
        self._interleave = Interleave(self.weights)
        super().__init__(
            tf.nest.map_structure(lambda *a: np.concatenate(a), *(d.arrays for d in datasets)),
            global_batch_size=datasets[0].global_batch_size,
            seed=datasets[0].seed,
            info=_info(datasets),
        )
        self.description += f", mixed: {_shares(parts)}"

    def _shuffled(self, start_step: int) -> tf.data.Dataset:
        batch = self.global_batch_size
        steps = max(1, self.num_examples // batch)  # about an epoch: a chunk permutes whole epochs

        def rows_of(part: int, numbers: tf.Tensor) -> tf.Tensor:
            """The examples of a part at its positions ``numbers``, which follow each other."""
            dataset = self.parts[part]
            size = dataset.num_examples
            # Sums of one number, or of none: then there is no epoch.
            first, end = tf.reduce_sum(numbers[:1]), tf.reduce_sum(numbers[-1:] + 1)
            epochs = tf.range(first // size, -(-end // size))
            rows = tf.reshape(tf.map_fn(dataset.permutation, epochs), [-1])
            return rows[first % size :][: end - first]

        def batches_from(step: tf.Tensor) -> tf.Tensor:
            positions = step * batch + tf.range(steps * batch, dtype=tf.int64)
            parts, numbers = self._interleave.locate_tensor(positions)
            places, rows, first = [], [], 0
            for part, dataset in enumerate(self.parts):
                here = parts == part
                places.append(tf.cast(tf.where(here)[:, 0], tf.int32))
                rows.append(first + rows_of(part, tf.boolean_mask(numbers, here)))
                first += dataset.num_examples
            return tf.reshape(tf.dynamic_stitch(places, rows), [steps, batch])

        return endless(tf.data.Dataset.range(start_step, tf.int64.max, steps).map(batches_from))

    def fingerprint(self) -> dict[str, Any]:
        """See `Dataset.fingerprint`."""
        return _fingerprint(self)


class StreamedMixture(Streaming):
    """A mixture of streams, see `mix`. A worker reads the examples of its own replicas only."""

    def __init__(self, parts: Sequence[tuple[Streaming, float]]):
        streams = [stream for stream, _ in parts]
        self.parts, self.weights = streams, [weight for _, weight in parts]
        self._interleave = Interleave(self.weights)
        self._joined = _Joined(streams)
        super().__init__(
            self._joined,
            global_batch_size=streams[0].global_batch_size,
            seed=streams[0].seed,
            info=_info(streams),
        )
        self.description += f", mixed: {_shares(parts)}"

    def keys(self, positions: np.ndarray) -> np.ndarray:
        """See `Streaming.keys`. The epoch is that of the part."""
        parts, numbers = self._interleave.locate(positions)
        keys = np.empty([len(positions), 2], np.int64)
        for part, stream in enumerate(self.parts):
            rows = parts == part
            keys[rows] = stream.keys(numbers[rows]) + [0, self._joined.firsts[part]]
        return keys

    def fingerprint(self) -> dict[str, Any]:
        """See `Dataset.fingerprint`."""
        return _fingerprint(self)


class _Joined:
    """The examples of streams, one stream after the other: a source.

    What the streams read differs, so a row has a place for each stream, which is empty but for one;
    `decode` takes that. If no stream decodes, a row is the example.
    """

    def __init__(self, streams: Sequence[Streaming]):
        self._streams = streams
        self.firsts = np.cumsum([0, *(stream.num_examples for stream in streams)])
        self._nothing = [stream.read(np.zeros(1, np.int64)) for stream in streams]
        if any(stream.decodes for stream in streams):
            self.decode = self._decode

    def __len__(self) -> int:
        return int(self.firsts[-1])

    def _locate(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        parts = np.searchsorted(self.firsts, indices, side="right") - 1
        return parts, indices - self.firsts[parts]

    def where(self, index: int) -> str:
        """See `ctl.data.sources.Source`."""
        (part,), (number,) = self._locate(np.array([index]))
        return self._streams[part].where(int(number))

    def read(self, indices: np.ndarray) -> Any:
        """See `ctl.data.sources.Source`."""
        parts, numbers = self._locate(indices)
        places = []
        for part, stream in enumerate(self._streams):
            rows = np.flatnonzero(parts == part)
            nest = stream.read(numbers[rows]) if len(rows) else self._nothing[part]
            places.append(
                tf.nest.map_structure(lambda a, rows=rows: _spread(a, rows, len(parts)), nest)
            )
        if hasattr(self, "decode"):
            return parts, numbers, tuple(places)
        return tf.nest.map_structure(
            lambda *leaves: np.stack(leaves)[parts, np.arange(len(parts))], *places
        )

    def _decode(self, row: Any) -> Any:
        part, number, places = row
        branches = [
            functools.partial(stream.decode, (number, place))
            for stream, place in zip(self._streams, places, strict=True)
        ]
        return tf.switch_case(tf.cast(part, tf.int32), branches)


def _spread(array: np.ndarray, rows: np.ndarray, count: int) -> np.ndarray:
    """[count, ...], with ``array`` in ``rows`` and nothing elsewhere."""
    spread = np.full([count, *array.shape[1:]], b"" if array.dtype == object else 0, array.dtype)
    spread[rows] = array[: len(rows)]
    return spread


def mix(parts: Sequence[tuple[InMemory | Streaming, float]]) -> Mixture | StreamedMixture:
    """Mixes the examples of datasets, so that every batch has each with its weight.

    Each dataset keeps its own order, and repeats when its examples are used up; an epoch is as many
    examples as all have together. The order is a function of the seeds, the weights and the
    position, see `Interleave`. The result is in memory if all datasets are. Else it is streamed,
    also what is in memory, in the order of a `Streaming` of that seed.

    Args:
        parts: ``[(dataset, weight), ...]``. The datasets are to train on, of one structure, shape,
            dtype and global batch size; they may be mixtures. Weights need not sum to 1.

    Raises:
        UsageError: the datasets do not fit together, or a weight is not above 0.
    """
    for dataset, _ in parts:
        if not isinstance(dataset, InMemory | Streaming) or not dataset.training:
            raise UsageError(
                "mix takes datasets in memory (ctl.data.InMemory) or streams (ctl.data.Streaming) "
                "to train on; wrap the mixture if you augment"
            )
    if parts:
        _check_alike("examples", [_form(d) for d, _ in parts])
        _check_alike("global batch sizes", [d.global_batch_size for d, _ in parts])
    in_memory = [(d, weight) for d, weight in parts if type(d) is InMemory]
    if len(in_memory) == len(parts):
        return Mixture(in_memory)
    return StreamedMixture([(_streamed(dataset), weight) for dataset, weight in parts])


def _streamed(dataset: InMemory | Streaming) -> Streaming:
    if isinstance(dataset, Streaming):
        return dataset
    if isinstance(dataset, Mixture):
        parts = [_streamed(part) for part in dataset.parts]
        return StreamedMixture(list(zip(parts, dataset.weights, strict=True)))
    return Streaming(
        Arrays(dataset.arrays),
        global_batch_size=dataset.global_batch_size,
        seed=dataset.seed,
        info=dataset.info,
    )


def _info(datasets: Sequence[InMemory | Streaming]) -> DatasetInfo:
    classes = [d.info.num_classes for d in datasets]
    return dataclasses.replace(
        datasets[0].info,
        name=" + ".join(dict.fromkeys(d.info.name for d in datasets)),
        num_classes=None if None in classes else max(filter(None, classes)),
    )


def _shares(parts: Sequence[tuple[InMemory | Streaming, float]]) -> str:
    return ", ".join(f"{weight:g} of {dataset.num_examples}" for dataset, weight in parts)


def _fingerprint(mixture: Mixture | StreamedMixture) -> dict[str, Any]:
    return {
        "mixture": [dataset.fingerprint() for dataset in mixture.parts],
        "weights": mixture.weights,
    }


def _form(dataset: InMemory | Streaming) -> Any:
    if isinstance(dataset, InMemory):
        return tf.nest.map_structure(lambda a: f"{a.dtype}{list(a.shape[1:])}", dataset.arrays)
    return tf.nest.map_structure(
        lambda spec: f"{np.dtype(spec.dtype.as_numpy_dtype)}{list(spec.shape)}",
        dataset.example_spec,
    )


def _check_alike(what: str, values: Sequence[Any]) -> None:
    for value in values:
        if value != values[0]:
            raise UsageError(
                f"datasets of a mixture differ in their {what}: {values[0]} and {value}"
            )
