"""The order of streamed examples: a permutation of each epoch, evaluated at any position.

Data in memory have `InMemory._shuffled`. Here, NumPy permutes up to `_MOST_PERMUTED` examples.
Beyond, the permutation is a keyed bijection, so that neither memory nor the time of a start grows
with the data: a Feistel network (Luby and Rackoff 1988, "How to construct pseudorandom permutations
from pseudorandom functions") on the smallest 2^b that has room, walked until it falls below n
(Black and Rogaway 2002, "Ciphers with arbitrary finite domains"). Its round function is the
finalizer of SplitMix64 (Steele, Lea and Flood 2014, "Fast splittable pseudorandom number
generators").
"""

from __future__ import annotations

import threading

import numpy as np

from ctl.errors import UsageError

# Identifies the order in fingerprints. Change it with any change of the order.
VERSION = "a function of seed, epoch and position, 1"

_MOST_PERMUTED = 1 << 22  # 16 MiB as int32, of which three are kept
_ROUNDS = 8
_MASK64 = (1 << 64) - 1


def check_block(block: int, num_examples: int, training: bool) -> None:
    """Raises `UsageError` if a training cannot be shuffled in blocks of so many examples."""
    if block < 1:
        raise UsageError(f"the block of a shuffle must be at least 1, not {block}")
    if training and block > 1 and num_examples < 2 * block:
        raise UsageError(
            f"blocks of {block} leave {num_examples} examples unshuffled: use blocks "
            f"(--shuffle_block) of at most {max(1, num_examples // 2)}"
        )


class Shuffle:
    """An endless sequence of epochs, each with a new permutation of ``num_examples``.

    Args:
        num_examples: examples of an epoch.
        seed: of all permutations.
        block: number of neighbours that stay together. Whole blocks are permuted; what is left of
            an epoch, less than a block, is its end.
    """

    def __init__(self, num_examples: int, seed: int, block: int = 1):
        self.num_examples = num_examples
        self.block = block
        self._seed = seed & _MASK64
        self._blocks = num_examples // block
        self._permutations: dict[int, np.ndarray] = {}
        self._lock = threading.Lock()

    def __call__(self, positions: np.ndarray) -> np.ndarray:
        """Returns the indices of examples, int64 [k], at ``positions``, int64 [k].

        Position p is the example p % num_examples of epoch p // num_examples.
        """
        epochs, offsets = np.divmod(np.asarray(positions, np.int64), self.num_examples)
        blocks, within = np.divmod(offsets, self.block)
        for epoch in np.unique(epochs).tolist():
            rows = np.flatnonzero((epochs == epoch) & (blocks < self._blocks))
            offsets[rows] = self._permuted(epoch, blocks[rows]) * self.block + within[rows]
        return offsets

    def _permuted(self, epoch: int, blocks: np.ndarray) -> np.ndarray:
        if self._blocks > _MOST_PERMUTED:
            return permuted(blocks, self._blocks, self._philox(epoch).random_raw(_ROUNDS))
        with self._lock:  # several threads read ahead
            if epoch not in self._permutations:
                for old in sorted(self._permutations)[:-2]:
                    del self._permutations[old]
                # The stream of the class Generator may change between versions; this one may not.
                random = np.random.RandomState(self._philox(epoch))
                rows = np.arange(self._blocks, dtype=np.int32)
                random.shuffle(rows)
                self._permutations[epoch] = rows
            return self._permutations[epoch][blocks].astype(np.int64)

    def _philox(self, epoch: int) -> np.random.Philox:
        return np.random.Philox(key=np.array([self._seed, epoch], np.uint64))


def are_classes(labels: np.ndarray) -> bool:
    """Whether ``labels``, [N] or [N, 1], are numbers of classes: integers from 0, or, of another
    type, 0 and 1."""
    if labels.shape[1:] not in ((), (1,)) or labels.dtype.kind not in "iufb":
        return False
    if labels.dtype.kind in "iu":
        return bool((labels >= 0).all())
    return bool(np.isin(labels, (0, 1)).all())


def oversampled(labels: np.ndarray, seed: int = 0) -> np.ndarray:
    """Examples of which each class has as many as the largest, int64 [classes x largest].

    Each example of a class is there equally often, or once more than others, which ``seed`` draws.

    Args:
        labels: the class of each example, integers [N].
        seed: of the examples that are there once more.
    """
    random = np.random.RandomState(seed & 0xFFFFFFFF)  # its numbers are those of any version
    classes, counts = np.unique(labels, return_counts=True)
    rows = [random.permutation(np.flatnonzero(labels == one)) for one in classes]
    return np.sort(np.concatenate([np.resize(one, counts.max()) for one in rows]))


def permuted(positions: np.ndarray, size: int, keys: np.ndarray) -> np.ndarray:
    """Returns the images of ``positions`` under a permutation of 0 … ``size`` - 1.

    Args:
        positions: int64 [k], each below ``size``.
        size: 2 to 2^62.
        keys: uint64 [rounds], which choose the permutation.
    """
    bits = max(2, (size - 1).bit_length())
    result = np.asarray(positions).astype(np.uint64)
    outside = np.arange(len(result))
    while len(outside):
        result[outside] = _feistel(result[outside], bits, keys)
        outside = outside[result[outside] >= size]
    return result.astype(np.int64)


def _feistel(values: np.ndarray, bits: int, keys: np.ndarray) -> np.ndarray:
    """A bijection of 0 … 2^bits - 1. Each round changes one half by the other, in turns."""
    low_bits = np.uint64(bits // 2)
    low_mask = np.uint64((1 << (bits // 2)) - 1)
    high_mask = np.uint64((1 << (bits - bits // 2)) - 1)
    high, low = values >> low_bits, values & low_mask
    for number, key in enumerate(keys):
        if number % 2:
            low = low ^ (_mix(high + key) & low_mask)
        else:
            high = high ^ (_mix(low + key) & high_mask)
    return (high << low_bits) | low


def _mix(values: np.ndarray) -> np.ndarray:
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
