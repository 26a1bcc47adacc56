"""Mixtures of datasets, in which each has its share of the examples at every moment.

The order is fixed and not drawn: at any position, each part has had its weight times the position,
to within one example. So a start anywhere needs no count of earlier draws, and short trainings have
the right shares, too.
"""

from __future__ import annotations

import dataclasses
import heapq
import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import tensorflow as tf

from ctl.data.in_memory import InMemory
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
                f"weights of a mixture must be numbers of few digits, such as 0.7 and 0.3, not "
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

    def merge(self, start: int, parts: Sequence[tf.data.Dataset]) -> tf.data.Dataset:
        """The elements of endless ``parts`` from position ``start`` on; each part must begin at its
        number in `counts`."""
        table, period = tf.constant(self._parts), self._period
        positions = tf.data.Dataset.counter(start)
        return tf.data.Dataset.choose_from_datasets(
            parts, positions.map(lambda position: table[position % period])
        )


class Mixture(InMemory):
    """Mixes the examples of datasets in memory, so that every batch has each with its weight.

    Each dataset keeps its own order, and repeats when its examples are used up; an epoch is as many
    examples as all have together. The order is a function of the seeds, the weights and the
    position, see `Interleave`.
    """

    def __init__(self, parts: Sequence[tuple[InMemory, float]]):
        """Mixes ``parts``, ``[(dataset, weight), ...]``.

        They are datasets to train on, of one structure, shape, dtype and global batch size. Weights
        need not sum to 1.

        Raises:
            UsageError: the datasets do not fit together, or a weight is not above 0.
        """
        datasets = [dataset for dataset, _ in parts]
        self.parts, self.weights = datasets, [weight for _, weight in parts]
        self._interleave = Interleave(self.weights)
        if not all(isinstance(d, InMemory) and d.training for d in datasets):
            raise UsageError("mix takes datasets in memory (ctl.data.InMemory) to train on")
        _check_alike("examples", [_form(d.arrays) for d in datasets])
        _check_alike("global batch sizes", [d.global_batch_size for d in datasets])
        classes = [d.info.num_classes for d in datasets]
        name = " + ".join(dict.fromkeys(d.info.name for d in datasets))
        super().__init__(
            tf.nest.map_structure(lambda *a: np.concatenate(a), *(d.arrays for d in datasets)),
            global_batch_size=datasets[0].global_batch_size,
            seed=datasets[0].seed,
            info=dataclasses.replace(
                datasets[0].info,
                name=name,
                num_classes=None if None in classes else max(filter(None, classes)),
            ),
        )
        shares = ", ".join(f"{weight:g} of {d.num_examples}" for d, weight in parts)
        self.description += f", mixed: {shares}"

    def _shuffled(self, start_step: int) -> tf.data.Dataset:
        start = start_step * self.global_batch_size
        streams, first = [], 0
        for dataset, begin in zip(self.parts, self._interleave.counts(start), strict=True):
            one_by_one = InMemory(dataset.arrays, global_batch_size=1, seed=dataset.seed)
            offset = tf.constant(first, tf.int64)
            indices = one_by_one.batches(begin).unbatch()
            streams.append(indices.map(lambda index, offset=offset: index + offset))
            first += dataset.num_examples
        mixed = self._interleave.merge(start, streams)
        return mixed.batch(self.global_batch_size, drop_remainder=True)

    def fingerprint(self) -> dict[str, Any]:
        """See `Dataset.fingerprint`."""
        return {
            "mixture": [d.fingerprint() for d in self.parts],
            "weights": self.weights,
        }


mix = Mixture


def _form(arrays: Any) -> Any:
    return tf.nest.map_structure(lambda a: f"{a.dtype}{list(a.shape[1:])}", arrays)


def _check_alike(what: str, values: Sequence[Any]) -> None:
    for value in values:
        if value != values[0]:
            raise UsageError(f"datasets of a mixture have other {what}: {values[0]} and {value}")
