"""Time stamps inside the step.

A mark is a ``tf.timestamp()`` that waits only for the tensors whose completion it records. After
``step.observer = Marks(step, Ring(step, keep=20))``, the loop traces the step again, with marks.
After ``step.observer = NO_OBSERVER``, it uses the trace without marks. The marks, in the order of
the step:

======================  ==========================================================================
``input``               the replica has its part of the global batch
``forward``             the outputs of the model are computed (the mean loss is computed later)
``backward``            all gradients are computed
``ready0``, ``done0``   pack 0 can be reduced, pack 0 is reduced; then ``ready1``, ``done1``, ...
``apply``               all variables are updated
======================  ==========================================================================

On a GPU, a stamp is the time when the host enqueued the work, not when the device finished it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import tensorflow as tf

from ctl.base import tf_internals
from ctl.distributed import local_batch, replicas
from ctl.errors import UsageError
from ctl.phases.observer import ObservedStep, Observer
from ctl.reduce import all_reduce, make_packs


def mark_names(step: ObservedStep) -> tuple[str, ...]:
    """Names of all marks that a built ``step`` can have, in the order of the step."""
    specs = step.reduced_specs()
    widened = [tf.TensorSpec(s.shape, local_batch.wide(s.dtype)) for s in specs]  # see `TrainStep`
    packs = max(len(make_packs(s, step.bytes_per_pack)) for s in (specs, widened))
    around = [f"{moment}{pack}" for pack in range(packs) for moment in ("ready", "done")]
    return ("input", "forward", "backward", *around, "apply")


def stamp(waits_for: Sequence[tf.Tensor]) -> tf.Tensor:
    """Returns the time at which all of ``waits_for`` are computed, float64 seconds since the epoch,
    with a resolution of 1 us. Call it in a graph, after a check with
    `tf_internals.why_no_timestamps`."""
    with tf.control_dependencies(waits_for):
        time = tf.timestamp()
    tf_internals.run_independently(time.op)  # otherwise it would also wait for all earlier stamps
    return time


class Store(Protocol):
    """Receives the stamps of a step. All methods are called in replica context, while tracing."""

    @property
    def names(self) -> Sequence[str]:
        """The marks to stamp."""

    def begin(self, number: tf.Tensor) -> None:
        """Starts a step. ``number`` is an int64 scalar: the batches seen before the step."""

    def stamp(self, name: str, time: tf.Tensor, in_step: bool) -> None:
        """Receives the stamp ``time`` (see `stamp`) of the mark ``name``. ``in_step`` is False for
        a mark in the body of a loop, which is stamped several times per step."""

    def finish(self) -> None:
        """Ends the step."""


class Marks(Observer):
    """Observer that stamps the marks of a step into stores.

    Args:
        step: a built step.
        stores: a `Ring`, a `Latest`, or both.

    Attributes:
        pack_bytes: bytes of each pack, set when the step is traced. A tensor whose shape is unknown
            while tracing counts as 0 bytes. Empty if marks cannot cover all packs: the step does
            not call `all_reduce` exactly once, or has more packs than `mark_names`.
        in_order: whether each pack waits for the one before it, as TensorFlow's collectives do; set
            when the step is traced.

    Raises:
        UsageError: this TensorFlow cannot stamp (see `tf_internals.why_no_timestamps`).
    """

    stamps = True

    def __init__(self, step: ObservedStep, *stores: Store):
        reason = tf_internals.why_no_timestamps()
        if reason:
            raise UsageError(reason)
        self.step = step
        self.stores = stores
        self.pack_bytes: list[int] = []
        self.in_order = False
        self._graphs: dict[int, tf.Graph] = {}  # the graph in which each replica is traced
        self._sums: dict[int, int] = {}  # calls of `all_reduce` in that trace

    def begin(self, batch: Any) -> Any:
        """Stamps ``input``. Returns ``batch`` with a dependency on the stamp; otherwise the stamp
        would run late. Raises `UsageError` where the step runs without a graph."""
        if tf.executing_eagerly():
            raise UsageError(
                "time stamps need the graph of the step: leave out eager (--eager), or the "
                "inspection"
            )
        time = self.mark("input", batch)
        with tf.control_dependencies([] if time is None else [time]):
            return tf.nest.map_structure(tf.identity, batch, expand_composites=True)

    def mark(self, name: str, tensors: Any) -> tf.Tensor | None:
        """Stamps the time at which all of ``tensors`` are computed, a nest of tensors, variables
        and None. For a variable, the stamp waits for all earlier updates in the program. ``name``
        is one of `mark_names`.

        Returns the stamp, see `stamp`; None if no store asks for it, or if XLA compiles this place.
        """
        with tf.name_scope("ctl_mark"):
            if name == "input":
                number = self.step.global_step.read_value()  # before its increment
                self._graphs[replicas.number()] = number.graph
                self._sums[replicas.number()] = 0
                for store in self.stores:
                    store.begin(number)
            stores = [store for store in self.stores if name in store.names]
            in_step = tf.compat.v1.get_default_graph() is self._graphs[replicas.number()]
            if not stores:
                return None
            if self.step.jit_compile and not in_step:
                return None  # XLA has no kernel for a time stamp
            waits_for = [
                t.read_value() if isinstance(t, tf.Variable) else t
                for t in tf.nest.flatten(tensors, expand_composites=True)
                if t is not None
            ]
            time = stamp(waits_for)
            for store in stores:
                store.stamp(name, time, in_step)
            return time

    def end(self) -> None:
        """Stamps ``apply``."""
        self.mark("apply", self.step.trainable_variables)
        for store in self.stores:
            store.finish()
        last = f"done{len(self.pack_bytes) - 1}"
        stamped = all(last in store.names for store in self.stores)
        if self._sums[replicas.number()] != 1 or not stamped:
            self.pack_bytes = []

    def all_reduce(
        self, tensors: Sequence[tf.Tensor], *, bytes_per_pack: int = 0, **options: Any
    ) -> list[tf.Tensor]:
        """Calls `ctl.reduce.all_reduce` and stamps each pack before and after."""
        self._sums[replicas.number()] += 1
        sums = all_reduce(tensors, bytes_per_pack=bytes_per_pack, **options)
        packs = make_packs(tensors, bytes_per_pack)
        self.pack_bytes = [
            sum((tensors[i].shape.num_elements() or 0) * tensors[i].dtype.size for i in pack)
            for pack in packs
        ]
        self.in_order = bool(sums) and any(
            operation.type == "CollectiveReduceV2" for operation in sums[0].graph.get_operations()
        )
        for number, pack in enumerate(packs):
            self.mark(f"ready{number}", [tensors[i] for i in pack])
            self.mark(f"done{number}", [sums[i] for i in pack])
        return sums


class Ring:
    """Store for the stamps of the last ``keep`` steps, on each replica. Costs one scatter of a row
    per step.

    Raises:
        UsageError: replicas share one copy of every variable.
    """

    def __init__(self, step: ObservedStep, keep: int):
        self.names = mark_names(step)
        self.keep = keep
        empty = np.full([keep, 1 + len(self.names)], np.nan)
        self._rows = _variable(step, empty, "ctl_marks")
        self._copies = step.strategy.experimental_local_results(self._rows)
        self._empty = empty
        # Number and stamps of the step that each replica is tracing.
        self._steps: dict[int, tuple[tf.Tensor, dict[str, tf.Tensor]]] = {}

    def begin(self, number: tf.Tensor) -> None:
        """See `Store`."""
        self._steps[replicas.number()] = number, {}

    def stamp(self, name: str, time: tf.Tensor, in_step: bool) -> None:
        """See `Store`."""
        if in_step:  # otherwise the tensor cannot leave the body of its loop
            self._steps[replicas.number()][1][name] = time

    def finish(self) -> None:
        """See `Store`."""
        number, times = self._steps.pop(replicas.number())
        missing = tf.constant(np.nan, tf.float64)
        row = [tf.cast(number, tf.float64), *(times.get(name, missing) for name in self.names)]
        tf.raw_ops.ResourceScatterUpdate(
            resource=self._rows.handle, indices=number % self.keep, updates=tf.stack(row)
        )

    def clear(self) -> None:
        """Deletes the stamps of all steps."""
        for copy in self._copies:
            copy.assign(self._empty)

    def read(self) -> tuple[np.ndarray, np.ndarray]:
        """Reads the stamps. Call it between two calls of the loop.

        Returns:
            ``(numbers, stamps)``. ``numbers`` is int64 [S], ascending: the batches seen before each
            step. ``stamps`` is float64 [R, S, M], in seconds since the epoch, for the R replicas of
            this process and the M marks of ``names``. A mark without a stamp is NaN: ``forward``
            with XLA or micro-batches.
        """
        rows = np.stack([copy.numpy() for copy in self._copies])
        rows = rows[:, ~np.isnan(rows[:, :, 0]).any(axis=0)]
        rows = rows[:, np.argsort(rows[0, :, 0])]
        return rows[0, :, 0].astype(np.int64), rows[:, :, 1:]


class Latest:
    """Store for the last stamp of each mark. Another thread can read it while the step is stuck
    (see `ctl.control.flight`).

    Each mark has its own variable and costs one assignment. A shared vector would make the marks
    wait for each other. Each value encodes the number of the step as well as the time, since two
    separate variables could be assigned in another order than the marks.

    Attributes:
        names: the marks, in the order of the step. ``apply`` is left out: it waits for all
            variables, which is expensive (`benchmarks/inspect_overhead.py`).

    Raises:
        UsageError: replicas share one copy of every variable.
    """

    # A value is (step modulo _STEPS) * _SPAN + seconds since the epoch, which are below _SPAN until
    # 2106. It is below 2**44, so a float64 holds it to 4 ms.
    _SPAN, _STEPS = 2**32, 4096

    def __init__(self, step: ObservedStep):
        self.names = tuple(name for name in mark_names(step) if name != "apply")
        self._last = {name: _variable(step, -1.0, f"ctl_latest_{name}") for name in self.names}
        local = step.strategy.experimental_local_results
        self._copies = [local(v) for v in self._last.values()]
        self._offsets: dict[int, tf.Tensor] = {}  # of the step that each replica is tracing

    def begin(self, number: tf.Tensor) -> None:
        """See `Store`."""
        self._offsets[replicas.number()] = tf.cast(number % self._STEPS, tf.float64) * self._SPAN

    def stamp(self, name: str, time: tf.Tensor, in_step: bool) -> None:
        """See `Store`. Keeps the latest stamp of several micro-batches."""
        del in_step
        self._last[name].assign(time + self._offsets[replicas.number()])

    def finish(self) -> None:
        """See `Store`."""

    def read(self, number: int) -> np.ndarray:
        """Reads the stamps, at any time and from any thread. Takes some ms while a step runs.

        Args:
            number: the batches seen before the step of interest.

        Returns:
            float64 [R, M]: seconds since the epoch, for the R replicas of this process and the M
            marks of ``names``. NaN where a replica's last stamp is of another step.
        """
        last = np.array([[copy.numpy() for copy in copies] for copies in self._copies]).T
        steps, times = np.divmod(last, self._SPAN)
        return np.where((last >= 0) & (steps == number % self._STEPS), times, np.nan)


def _variable(step: ObservedStep, value: Any, name: str) -> tf.Variable:
    """Makes a float64 variable with a separate value on each replica, which TensorFlow does not
    aggregate."""
    if replicas.shares_variables(step.strategy):
        raise UsageError(
            "central_storage with several replicas keeps one copy of every variable, so replicas "
            "cannot be told apart; inspect with --strategy=mirrored"
        )
    with step.strategy.scope():
        return tf.Variable(
            value,
            dtype=tf.float64,
            trainable=False,
            synchronization=tf.VariableSynchronization.ON_READ,
            aggregation=tf.VariableAggregation.NONE,
            name=name,
        )
