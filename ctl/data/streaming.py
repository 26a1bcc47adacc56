"""Data larger than memory: each worker reads and decodes its share of each batch, anywhere."""

from __future__ import annotations

import collections
import functools
import hashlib
import os
import threading
import time
from typing import Any

import numpy as np
import tensorflow as tf
from absl import logging

from ctl.base.autograph import with_autograph
from ctl.data import callbacks
from ctl.data.arrays import native
from ctl.data.dataset import (
    DatasetInfo,
    NotResident,
    check_batch_size,
    distribution_options,
    fingerprint,
)
from ctl.data.errors import NO_CLASS, SKIP, translate_data_errors
from ctl.data.order import VERSION, Shuffle, check_block
from ctl.data.records import BadRecord
from ctl.data.sources import as_source, sample
from ctl.errors import UsageError

# Calls that read at the same time. Threads wait for the disk most of that time.
_READERS = 4

# Operations of `decode` that give the same bits for all examples of a batch together, in a tenth of
# the time for small ones.
_PARSING = {"Placeholder", "Const", "Identity", "NoOp", "ParseExampleV2", "Cast", "Reshape"}

# A call has a fixed cost, so it reads several small shares of a worker: at most so much of one step
# or, of tiny records, of several.
_TOGETHER_EXAMPLES, _TOGETHER_BYTES = 128, 16 << 20
_STEPS_EXAMPLES, _STEPS_BYTES = 512, 1 << 17

# Nobody waits longer for the name of an example that cannot be decoded.
_CULPRIT_SECONDS = 10.0

# Bad records in a row after which the data, and not a record, are at fault.
_BAD_IN_A_ROW = 100

ON_BAD_RECORD = ("stop", "skip")


class Streaming(NotResident):
    """Examples that are read and decoded in every epoch, from a source that gives any of them.

    Epochs and evaluations are as those of `ctl.data.InMemory`, and a start costs the same at any
    step. Each worker reads and decodes only the examples of its own replicas; the global batches
    are the same for any number of workers and replicas.

    An element of `batches` and `shares` is ``(keys, batch)``. ``keys``, int64 [n, 2], are the epoch
    and the index of each example; `on_replica` drops them.

    Attributes:
        example_spec: a nest of `tf.TensorSpec`, of one example.
        decodes: whether the source decodes what it reads.
        skips: whether bad records are skipped.
        faster: what to try if steps wait for the batches.
    """

    faster = (
        "smaller images or examples in the files, block=16 (--shuffle_block=16) where the storage "
        "is slow, --resident_limit_mib if all fit in memory decoded; `python -m ctl.inspect run` "
        "with the same flags names the slowest part"
    )

    def __init__(
        self,
        source: Any,
        *,
        global_batch_size: int,
        seed: int = 0,
        training: bool = True,
        block: int = 1,
        on_bad_record: str = "stop",
        info: DatasetInfo | None = None,
        description: str = "",
    ):
        """Reads one example of ``source`` as a check.

        Args:
            source: the examples, see `ctl.data.sources.as_source`.
            global_batch_size: examples per batch.
            seed: of the order of examples.
            training: whether to shuffle and repeat.
            block: number of neighbours in the source that are shuffled, and read, together. More
                than 1 pays where the storage is slow at random reads.
            on_bad_record: ``stop`` the run with the name of the record, or ``skip`` it: the next
                example of the source that can be read takes its place, and a warning counts it.
            info: what is known of the data; by default what the source says.
            description: one line for the log.

        Raises:
            UsageError: the data are damaged or not suitable, or there are fewer examples than a
                training batch.
        """
        self._source = as_source(source)
        self.decodes = hasattr(self._source, "decode")
        self.num_examples = len(self._source)
        check_batch_size(global_batch_size, self.num_examples, training)
        check_block(block, self.num_examples, training)
        if on_bad_record not in ON_BAD_RECORD:
            raise UsageError(f"on_bad_record must be stop or skip, not {on_bad_record!r}")
        self.global_batch_size = global_batch_size
        self.seed = seed
        self.training = training
        self.block = block
        self.info = info or getattr(self._source, "info", None) or DatasetInfo("data")
        self.description = (
            description or f"{self.info.name}, {self.num_examples} examples, streamed"
        )
        self.skips = on_bad_record == "skip"
        self._skipped: set[int] = set()
        self._lock = threading.Lock()
        self._order = Shuffle(self.num_examples, seed, block)
        self._cores = len(os.sched_getaffinity(0))
        # For `culprit`: more calls of `read` than are not yet decoded.
        self._read_last: collections.deque = collections.deque(maxlen=16 + 2 * self._cores)
        if hasattr(self._source, "check") and not self.skips:
            self._source.check()
        # All other examples must have the structure, the types and the shapes of the first.
        self._first = self.read(np.zeros(1, np.int64))
        self._spec = tf.nest.map_structure(
            lambda array: tf.TensorSpec(array.shape[1:], array.dtype), self._first
        )
        rows = (leaf[0] for leaf in tf.nest.flatten(self._first))
        self._bytes_of_first = 1 + sum(getattr(row, "nbytes", 0) or len(row) for row in rows)
        with translate_data_errors(self):
            self.example_spec: Any = self._decode_first()

    def _decode_first(self) -> Any:
        """The specs of a decoded example. TensorFlow knows which sizes vary."""
        if not self.decodes:
            return self._spec
        self._decode_row = tf.function(self._source.decode)
        graph = self._decode_row.get_concrete_function(self._spec)
        traced = graph.structured_outputs
        parses = all(operation.type in _PARSING for operation in graph.graph.get_operations())
        self._decodes_together = parses and not self.skips
        leaves = tf.nest.flatten(traced)
        if not leaves or not all(isinstance(leaf, tf.Tensor) for leaf in leaves):
            kinds = ", ".join(sorted({type(leaf).__name__ for leaf in leaves})) or "nothing"
            raise UsageError(
                f"{self.description}: decode() returns {kinds}: make a nest of tensors of it, each "
                "of one shape"
            )
        if not self.skips:
            self._decode_row(
                tf.nest.map_structure(lambda array: tf.constant(array[0]), self._first)
            )
        return tf.nest.map_structure(
            lambda output: tf.TensorSpec(output.shape, output.dtype), traced
        )

    # Batches ------------------------------------------------------------------------------------

    def batches(self, start_step: int = 0) -> tf.data.Dataset:
        """Returns the global batches from ``start_step`` on: `shares` of a single replica."""
        return self.shares(start_step, range(1), 1)

    def shares(self, start_step: int, replicas: range, num_replicas: int) -> tf.data.Dataset:
        """Returns the parts of the global batches from ``start_step`` on for some replicas.

        An element is the part of one replica of one batch, and has no examples where these are
        used up: 9 examples for 4 replicas are 3, 3, 3 and 0. Elements are in the order of the
        steps, and of the ``replicas`` of a step.

        Args:
            start_step: of the first batch.
            replicas: those of a worker, of ``range(num_replicas)``.
            num_replicas: of all workers.
        """
        shares = self.decoded(self.undecoded(start_step, replicas, num_replicas))
        return shares.prefetch(2 * len(replicas))

    def undecoded(self, start_step: int, replicas: range, num_replicas: int) -> tf.data.Dataset:
        """Returns the `shares` as the source gives them: ``(keys, rows)``."""
        batch, width = self.global_batch_size, len(replicas)
        steps = max(start_step, -(-self.num_examples // batch))
        end = tf.int64.max if self.training else width * steps
        static, together = self.equal_shares(num_replicas)
        specs = [
            tf.TensorSpec([static and together * static, *spec.shape], spec.dtype)
            for spec in (tf.TensorSpec([2], tf.int64), *tf.nest.flatten(self._spec))
        ]

        def read_shares(first: np.ndarray) -> list[np.ndarray]:
            return self._read_shares(int(first), together, replicas, num_replicas)

        def read(first: tf.Tensor) -> Any:
            leaves = callbacks.call(read_shares, [first], specs)
            if together > 1:
                leaves = [tf.reshape(leaf, [together, static, *leaf.shape[1:]]) for leaf in leaves]
            return leaves[0], tf.nest.pack_sequence_as(self._spec, leaves[1:])

        firsts = tf.data.Dataset.range(start_step * width, end, together)
        shares = firsts.map(read, num_parallel_calls=_READERS, deterministic=True)
        if together > 1:
            shares = shares.unbatch()  # of TensorFlow 2.21 crashes on empty ones: none is here
        if self.training:
            shares = shares.apply(
                tf.data.experimental.assert_cardinality(tf.data.INFINITE_CARDINALITY)
            )
        options = distribution_options()
        options.threading.private_threadpool_size = self._cores + _READERS  # those that read wait
        return shares.with_options(options)

    def equal_shares(self, num_replicas: int) -> tuple[int | None, int]:
        """Returns the examples of each share, None if they differ; the shares that a call reads."""
        size, rest = divmod(self.global_batch_size, num_replicas)
        if rest or not self.training:
            return None, 1
        most = min(_TOGETHER_EXAMPLES, _TOGETHER_BYTES // self._bytes_of_first) // size
        of_steps = 1
        if getattr(self._source, "reads_quickly", False):
            of_steps = min(_STEPS_EXAMPLES, _STEPS_BYTES // self._bytes_of_first) // size
        return size, max(1, min(num_replicas, most), of_steps)

    def decoded(self, undecoded: tf.data.Dataset) -> tf.data.Dataset:
        """Returns the `shares` of what `undecoded` gave: ``(keys, batch)``."""

        def decode(keys: tf.Tensor, rows: Any) -> Any:
            return keys, self._decoded(keys[:, 1], rows)

        return undecoded.map(decode, num_parallel_calls=self._cores, deterministic=True)

    def _read_shares(
        self, first: int, count: int, replicas: range, num_replicas: int
    ) -> list[np.ndarray]:
        """The keys, int64 [n, 2], and the leaves of what the source has for ``count`` shares."""
        numbers = range(first, first + count)
        positions = [self._positions(number, replicas, num_replicas) for number in numbers]
        keys = self.keys(np.concatenate(positions))
        if not len(keys):
            rows = tf.nest.map_structure(lambda array: array[:0], self._first)
        else:
            rows = self.read(keys[:, 1])
        return [keys, *tf.nest.flatten(rows)]

    def _positions(self, number: int, replicas: range, num_replicas: int) -> np.ndarray:
        """The positions of the examples of one share, int64 [n]."""
        step, replica = divmod(number, len(replicas))
        begin = step * self.global_batch_size
        end = begin + self.global_batch_size
        if not self.training:
            end = min(end, self.num_examples)
        size = -(-(end - begin) // num_replicas)
        first = min(begin + replicas[replica] * size, end)
        return np.arange(first, min(first + size, end))

    def keys(self, positions: np.ndarray) -> np.ndarray:
        """The epoch and the index of the examples at ``positions``, int64 [n], as int64 [n, 2]."""
        indices = self._order(positions) if self.training else positions
        return np.stack([positions // self.num_examples, indices], axis=1)

    # Reading and decoding -----------------------------------------------------------------------

    def read(self, indices: np.ndarray) -> Any:
        """What the source has at ``indices``, int64 [n]: a nest of arrays [n, ...]. Others are in
        the place of bad ones if these are skipped.

        Raises:
            UsageError: one cannot be read.
        """
        rows = indices.copy()
        while True:
            try:
                data = self._source.read(rows)
                break
            except BadRecord as bad:
                if not self.skips:
                    raise UsageError(
                        f"{self.description}: the data are damaged: {bad.what}; prepare them "
                        f"again, or {SKIP}"
                    ) from bad
                self._note(bad.index, bad.what)
                rows[rows == bad.index] = self._after(bad.index)
            except OSError as error:
                what = f"cannot read {error.filename or 'the data'}: {error.strerror}"
                raise UsageError(f"{self.description}: {what}") from error
        self._read_last.append(rows)
        if isinstance(data, list):
            strings = np.empty(len(data), object)
            strings[:] = data
            data = strings
        # Of other arrays of text, `tf.numpy_function` takes only ASCII.
        data = native(data, self.description, strings=object)
        wanted = getattr(self, "_first", data)
        try:
            tf.nest.assert_same_structure(wanted, data)
        except (ValueError, TypeError) as error:
            raise UsageError(
                f"{self.description}: some examples differ in structure from the first: "
                "give all the same structure"
            ) from error
        for first, now in zip(tf.nest.flatten(wanted), tf.nest.flatten(data), strict=True):
            if now.shape[:1] != rows.shape:
                raise UsageError(
                    f"{self.description}: read() of {len(rows)} examples gave an array of shape "
                    f"{list(now.shape)}: the first axis must have one row for each"
                )
            if (first.dtype, first.shape[1:]) != (now.dtype, now.shape[1:]):
                raise UsageError(
                    f"{self.description}: some examples are {now.dtype} {list(now.shape[1:])}, but "
                    f"the first is {first.dtype} {list(first.shape[1:])}: give all the same dtype "
                    "and shape"
                )
        return data

    def _after(self, index: int) -> int:
        """The example after ``index`` that is not known to be bad."""
        most = min(_BAD_IN_A_ROW, self.num_examples)
        for step in range(1, most):
            if (found := (index + step) % self.num_examples) not in self._skipped:
                return found
        raise UsageError(
            f"{self.description}: {self.where(index)} and {most - 1} examples after it are "
            "damaged: too many to skip; prepare the data again"
        )

    def _note(self, index: int, what: str) -> None:
        with self._lock:
            if index not in self._skipped:
                self._skipped.add(index)
                logging.warning("skipped %s (%d in all)", what, len(self._skipped))

    def where(self, index: int) -> str:
        """Says where an example is, for messages."""
        where = getattr(self._source, "where", None)
        return where(index) if where else f"example {index}"

    def _decoded(self, indices: tf.Tensor, rows: Any) -> Any:
        """The batch of what the source gave for ``indices``, int64 [n]."""
        spec = self.example_spec
        if self.decodes and self._decodes_together:
            decode, rows = with_autograph(self._source.decode), callbacks.own_memory(rows)
            batch = tf.vectorized_map(decode, rows, fallback_to_while_loop=False)
        elif self.decodes:
            batch = tf.map_fn(self.decode, (indices, rows), fn_output_signature=spec)
        else:
            batch = callbacks.own_memory(rows)
        classes = self.info.num_classes
        labels = batch[1] if isinstance(batch, tuple) and len(batch) > 1 else None
        if not classes or not isinstance(labels, tf.Tensor) or not labels.dtype.is_integer:
            return batch
        # XLA would turn a label that is no class into a loss of NaN.
        known = tf.reduce_all((labels >= 0) & (labels < classes))
        smallest = tf.reduce_min(labels)
        wrong = tf.where(smallest < 0, smallest, tf.reduce_max(labels))
        with tf.control_dependencies([tf.debugging.Assert(known, [NO_CLASS, wrong, classes])]):
            return (batch[0], tf.identity(labels), *batch[2:])

    def decode(self, pair: tuple[tf.Tensor, Any]) -> Any:
        """An example of its index, int64 [], and what `read` gave for it; the first after it that
        can be decoded if bad ones are skipped."""
        index, row = pair
        if not self.decodes:
            return row
        decode, specs = with_autograph(self._source.decode), tf.nest.flatten(self._spec)
        if not self.skips:
            return decode(row)

        def decode_after(step: tf.Tensor) -> Any:
            leaves = callbacks.call(self._read_after, [index, step], specs)
            return decode(tf.nest.pack_sequence_as(self._spec, leaves))

        # Only a dataset drops errors.
        own = tf.data.Dataset.from_tensors(0).map(lambda _: decode(row))
        others = tf.data.Dataset.range(1, _BAD_IN_A_ROW).map(decode_after)
        candidates = own.ignore_errors().concatenate(others.ignore_errors())
        return candidates.take(1).get_single_element()

    def _read_after(self, index: np.ndarray, step: np.ndarray) -> list[np.ndarray]:
        """The leaves of the example ``step`` after ``index``, because those before it are bad."""
        bad = int(index + step - 1) % self.num_examples
        self._note(bad, f"{self.where(bad)}: it cannot be decoded")
        rows = self.read(np.array([(index + step) % self.num_examples]))
        return [leaf[0] for leaf in tf.nest.flatten(rows)]

    def culprit(self) -> str:
        """Which of the examples that were read last cannot be decoded; "" if none was found.

        Raises:
            UsageError: they are decoded to different shapes, which make no batch.
        """
        until, first = time.monotonic() + _CULPRIT_SECONDS, ""
        for indices in list(self._read_last) if self.decodes else ():
            for index in indices.tolist() if time.monotonic() < until else ():
                row = tf.nest.map_structure(
                    lambda leaf: tf.constant(leaf[0]), self.read(np.array([index]))
                )
                try:
                    outputs = self._decode_row(row)
                except tf.errors.OpError:
                    return self.where(index)
                shapes = str([output.shape.as_list() for output in tf.nest.flatten(outputs)])
                if shapes != (first := first or shapes) and self.global_batch_size > 1:
                    raise UsageError(
                        f"{self.description}: decode() makes shapes {shapes} of "
                        f"{self.where(index)}, and {first} of others: make all alike"
                    )
        return ""

    # The interface of datasets ------------------------------------------------------------------

    def on_replica(self, element: Any, resident: tuple[()]) -> Any:
        """See `Dataset.on_replica`."""
        return element[1]

    def fingerprint(self) -> dict[str, Any]:
        """Returns what identifies the data and the order, see `ctl.data.sources.sample`."""
        content = getattr(self._source, "content_hash", str)().encode()
        result = fingerprint(self, hashlib.sha256(content).hexdigest())
        return {**result, "order": VERSION, "block": self.block, "samples": self._sample}

    @functools.cached_property
    def _sample(self) -> str | None:
        return sample(self._source)
