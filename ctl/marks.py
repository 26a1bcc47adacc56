"""Time stamps inside the step.

A mark is a ``tf.timestamp()`` that waits for the tensors whose moment it records, and for nothing
else. After ``step.observer = Marks(step, Ring(step, keep=20))`` the loop traces the step again,
with marks; after ``step.observer = NO_OBSERVER`` it goes back to the trace without. The marks, in
the order of the step:

======================  ==========================================================================
``input``               the replica has its part of the global batch
``forward``             the outputs of the model are there (not the mean loss: it is computed later)
``backward``            all gradients are there
``ready0``, ``done0``   pack 0 can be reduced, pack 0 is reduced; then ``ready1``, ``done1``, ...
``apply``               all variables are updated
======================  ==========================================================================

On a GPU a stamp says when the host had enqueued the work, not when the device had done it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import tensorflow as tf

from ctl import private
from ctl.errors import UsageError
from ctl.observer import Observer
from ctl.reduce import all_reduce, make_packs
from ctl.replicas import shares_variables

if TYPE_CHECKING:
    from ctl.step import TrainStep


def mark_names(step: TrainStep) -> tuple[str, ...]:
    """The names of all marks that ``step`` (built) can have, in the order of the step."""
    packs = len(make_packs(step.reduced_specs(), step.bytes_per_pack))
    around = [f"{moment}{pack}" for pack in range(packs) for moment in ("ready", "done")]
    return ("input", "forward", "backward", *around, "apply")


def stamp(waits_for: Sequence[tf.Tensor]) -> tf.Tensor:
    """The time when all of these tensors are there: float64 scalar, seconds since the epoch, 1 us
    ticks. In a graph only; ask `private.no_marks` first."""
    with tf.control_dependencies(waits_for):
        time = tf.timestamp()
    private.run_independently(time.op)  # or it would wait for all stamps before it, too
    return time


class Store(Protocol):
    """Takes the stamps of a step while the step is traced, in replica context.

    Attributes:
        names: the marks that it wants.
    """

    names: Sequence[str]

    def begin(self, number: tf.Tensor) -> None:
        """The marks of step ``number`` follow; int64 scalar, batches seen before it."""

    def stamp(self, name: str, time: tf.Tensor, in_step: bool) -> None:
        """``time`` as of `stamp`. Not ``in_step``: the mark is in the body of a loop inside the
        step, several times a step."""

    def finish(self) -> None:
        """There are no more marks in this step."""


class Marks(Observer):
    """Stamps moments of the step into every store.

    Args:
        step: a built step.
        stores: a `Ring`, a `Latest`, or both.

    Attributes:
        pack_bytes: bytes of each pack, known once the step was traced; 0 for a pack of a shape that
            is not known while tracing.
        in_order: whether each pack waits for the one before it, as collectives do; known then, too.

    Raises:
        UsageError: this TensorFlow cannot stamp, or replicas share one copy of every variable.
    """

    stamps = True

    def __init__(self, step: TrainStep, *stores: Store):
        reason = private.no_marks()
        if reason:
            raise UsageError(reason)
        self.step = step
        self.stores = stores
        self.pack_bytes: list[int] = []
        self.in_order = False
        self._graphs: dict[int, tf.Graph] = {}  # what each replica is traced in

    def begin(self, batch: Any) -> Any:
        """Stamps ``input``. Returns ``batch``, delayed until the stamp is taken: nothing else
        depends on the stamp, so without this it would run late."""
        time = self.mark("input", batch)
        with tf.control_dependencies([] if time is None else [time]):
            return tf.nest.map_structure(tf.identity, batch, expand_composites=True)

    def mark(self, name: str, tensors: Any) -> tf.Tensor | None:
        """Stamps the moment at which all of ``tensors`` are there.

        Args:
            name: one of `mark_names`.
            tensors: a nest of tensors, variables and Nones; of a variable, the moment at which what
                the program did to it so far is done.

        Returns:
            The stamp, see `stamp`; None where nobody wants it or it cannot be.
        """
        with tf.name_scope("ctl_mark"):
            if name == "input":
                number = self.step.global_step.read_value()  # before it is counted up
                self._graphs[_replica()] = number.graph
                for store in self.stores:
                    store.begin(number)
            stores = [store for store in self.stores if name in store.names]
            in_step = tf.compat.v1.get_default_graph() is self._graphs[_replica()]
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
        self.mark("apply", [v.value for v in self.step.model.trainable_variables])
        for store in self.stores:
            store.finish()

    def all_reduce(
        self, tensors: Sequence[tf.Tensor], *, bytes_per_pack: int = 0, **options: Any
    ) -> list[tf.Tensor]:
        """`ctl.reduce.all_reduce`, with stamps around each pack."""
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
    """The stamps of the last ``keep`` steps, one row per step, on each replica: a window.

    Costs one scatter of a row per step.
    """

    def __init__(self, step: TrainStep, keep: int):
        self.names = mark_names(step)
        self.keep = keep
        empty = np.full([keep, 1 + len(self.names)], np.nan)
        self._rows = _variable(step, empty, "ctl_marks")
        self._copies = step.strategy.experimental_local_results(self._rows)
        self._empty = empty
        self._steps: dict[int, tuple[tf.Tensor, dict[str, tf.Tensor]]] = {}  # under trace

    def begin(self, number: tf.Tensor) -> None:
        self._steps[_replica()] = number, {}

    def stamp(self, name: str, time: tf.Tensor, in_step: bool) -> None:
        if in_step:  # else it cannot leave the loop's body
            self._steps[_replica()][1][name] = time

    def finish(self) -> None:
        number, times = self._steps.pop(_replica())
        missing = tf.constant(np.nan, tf.float64)
        row = [tf.cast(number, tf.float64), *(times.get(name, missing) for name in self.names)]
        tf.raw_ops.ResourceScatterUpdate(
            resource=self._rows.handle, indices=number % self.keep, updates=tf.stack(row)
        )

    def clear(self) -> None:
        """Forgets all steps."""
        for copy in self._copies:
            copy.assign(self._empty)

    def read(self) -> tuple[np.ndarray, np.ndarray]:
        """What is there, between two calls of the loop.

        Returns:
            The numbers of the steps, int64 [S], ascending: batches seen before each; and the stamps
            on this process's replicas, float64 [R, S, M], seconds; NaN where a mark is not stamped:
            ``forward`` inside what XLA compiles or with micro-batches.
        """
        rows = np.stack([copy.numpy() for copy in self._copies])
        rows = rows[:, ~np.isnan(rows[:, :, 0]).any(axis=0)]
        rows = rows[:, np.argsort(rows[0, :, 0])]
        return rows[0, :, 0].astype(np.int64), rows[:, :, 1:]


class Latest:
    """When each mark was last stamped and in which step, one variable for each, assigned at the
    mark itself: what another thread can read while the step is stuck (see `ctl.watch.flight`).

    Costs one assignment per mark: a shared vector would make marks wait for each other. The step
    rides along in the number of seconds, since what is in the same order as a stamp need not be
    stamped in that order.

    Attributes:
        names: the marks, in the order of the step; not ``apply``, which waits for all variables and
            is dear (`benchmarks/inspect_overhead.py`): a step is counted when its packs are done.
    """

    # Step modulo _STEPS times _SPAN, plus seconds since the epoch (below _SPAN until 2106), are
    # below 2**44: a float64 has them to 4 ms.
    _SPAN, _STEPS = 2**32, 4096

    def __init__(self, step: TrainStep):
        self.names = tuple(name for name in mark_names(step) if name != "apply")
        self._last = {name: _variable(step, -1.0, f"ctl_latest_{name}") for name in self.names}
        local = step.strategy.experimental_local_results
        self._copies = [local(v) for v in self._last.values()]
        self._offsets: dict[int, tf.Tensor] = {}  # under trace, by replica

    def begin(self, number: tf.Tensor) -> None:
        self._offsets[_replica()] = tf.cast(number % self._STEPS, tf.float64) * self._SPAN

    def stamp(self, name: str, time: tf.Tensor, in_step: bool) -> None:
        del in_step  # of several micro-batches the last one that came so far is shown
        self._last[name].assign(time + self._offsets[_replica()])

    def finish(self) -> None:
        pass

    def read(self, number: int) -> np.ndarray:
        """At any time, from any thread; takes some milliseconds while a step runs.

        Args:
            number: of a step, batches seen before it.

        Returns:
            Stamps, float64 [R, M], seconds; NaN where a replica's last stamp is of another step.
        """
        last = np.array([[copy.numpy() for copy in copies] for copies in self._copies]).T
        steps, times = np.divmod(last, self._SPAN)
        return np.where((last >= 0) & (steps == number % self._STEPS), times, np.nan)


def _variable(step: TrainStep, value: Any, name: str) -> tf.Variable:
    """A float64 variable of which each replica has its own, that nothing combines."""
    if shares_variables(step.strategy):
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


def _replica() -> int:
    number = tf.distribute.get_replica_context().replica_id_in_sync_group
    return int(tf.get_static_value(number))  # a tensor where there is one replica
