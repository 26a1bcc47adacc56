"""Applies gradients that are already reduced: optimizer, weight decay, EMA, loss scale.

Keras's ``optimizer.apply`` would reduce them a second time, clip before that reduction, and check
finiteness on one replica. This module calls the optimizer's documented ``update_step`` through
``strategy.extended.update``, which reduces nothing and does the same on every replica.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf
from keras.optimizers.schedules import LearningRateSchedule

from ctl.base.autograph import with_autograph
from ctl.distributed import replicas
from ctl.errors import UsageError
from ctl.phases import shared_programs
from ctl.phases.optimizers import (
    Group,
    Here,
    Optimizers,
    before_update,
    common_variables,
    copies_of_weights,
    is_decayed,
    is_plain,
    make_groups,
    slots_of,
    update_variable,
    with_rate,
)

# Variables per compiled function. The cost of a call grows faster than its number of variables, and
# several functions run at once (`benchmarks/model_size.py`).
_VARIABLES_PER_UPDATE = 32


def is_compiled(device: str) -> bool:
    """Whether XLA compiles the update on ``device`` by default: on CPUs, which were measured. XLA
    works within one process, and so not on parameter servers."""
    return "CPU" in device.upper() and "/job:ps/" not in device


class LossScale:
    """Dynamic loss scale for float16 (Micikevicius et al. 2018, arXiv:1710.03740, section 3.2).

    The scale doubles after ``growth_steps`` finite steps in a row. It halves after a step with a
    gradient that is not finite; `Updater` skips the update of that step.

    Args:
        initial: initial scale.
        growth_steps: finite steps in a row before the scale doubles.

    Attributes:
        scale: float32 scalar variable.
        finite_steps: int64 scalar variable: finite steps since the scale changed.
    """

    def __init__(self, initial: float = 2.0**15, growth_steps: int = 2000):
        self.growth_steps = growth_steps
        self.scale = _counter("loss_scale", initial, tf.float32)
        self.finite_steps = _counter("finite_steps", 0, tf.int64)

    def good(self) -> None:
        """Counts a finite step; doubles the scale when there are enough in a row, up to 2^127."""
        grow = self.finite_steps + 1 >= self.growth_steps
        doubled = tf.minimum(self.scale, 2.0**126) * 2.0
        self.scale.assign(tf.where(grow, doubled, self.scale))
        self.finite_steps.assign(tf.where(grow, tf.zeros([], tf.int64), self.finite_steps + 1))

    def bad(self) -> None:
        """Halves the scale, to 1 at least, after gradients that are not finite."""
        self.scale.assign(tf.maximum(self.scale * 0.5, 1.0))
        self.finite_steps.assign(0)


class Updater:
    """Applies reduced gradients to the variables of a model. Create it in the strategy's scope.

    Args:
        optimizer: one optimizer, or parameter groups, see `ctl.phases.optimizers`. As in Keras,
            ``weight_decay`` is decoupled and applied before the update, except to the variables
            that the optimizer excludes.
        variables: the trainable `keras.Variable` objects of the model.
        statistics: moving statistics of BatchNorm. ``ema_decay`` averages them too, because the
            statistics of the trained weights do not fit averaged weights.
        schedule: learning rate as a function of the step; by default the optimizer's.
        ema_decay: decay of an exponential moving average of ``variables``; None keeps no average.
            As in Keras, the average starts as the weights after the first update.
        loss_scale: whether to scale the loss for float16, see `LossScale`.
        skip_nonfinite: whether to skip an update when a gradient has a NaN or Inf.
        jit_update: whether XLA compiles the update: one pass over memory replaces a dozen kernels
            per variable. None compiles it on CPUs only, which were measured. Use False for an
            optimizer that XLA cannot compile.

    Attributes:
        groups: the parameter groups.
        of_model: ``variables``.
        trainable_variables: all variables that are trained, in the order of the gradients:
            ``variables``, then other variables of the groups.
        global_step: int64 scalar variable: batches seen.
        skipped: int64 scalar variable: updates skipped because a gradient was not finite.
        averaged_variables: ``variables`` and ``statistics``; empty without ``ema_decay``.
        ema: the averages of ``averaged_variables``.

    Raises:
        UsageError: see `ctl.optimizers.make_groups`.
    """

    def __init__(
        self,
        optimizer: Optimizers,
        variables: Sequence[keras.Variable],
        *,
        statistics: Sequence[keras.Variable] = (),
        schedule: Callable[[Any], Any] | None = None,
        ema_decay: float | None = None,
        loss_scale: bool = False,
        skip_nonfinite: bool = False,
        jit_update: bool | None = None,
    ):
        self.groups = make_groups(optimizer, variables, schedule)
        for group in self.groups:
            getattr(group.schedule, "memory", None)  # makes its variable in this scope
        # Listed now, because Keras drops the rate of an optimizer that gets a schedule later.
        self._of_optimizers = [v.value for g in self.groups for v in g.optimizer.variables]
        self.of_model = list(variables)
        grouped = [v for group in self.groups for v in group.variables]
        self.trainable_variables = list({id(v): v for v in [*variables, *grouped]}.values())
        self._group_of = {id(v): n for n, group in enumerate(self.groups) for v in group.variables}
        self.averaged_variables = [] if ema_decay is None else [*variables, *statistics]
        averaged_statistics = [] if ema_decay is None else list(statistics)
        self.variables = [*self.trainable_variables, *averaged_statistics]
        self.ema_decay = ema_decay
        self.jit_update = jit_update
        self.judges_finiteness = loss_scale or skip_nonfinite
        self.global_step = _counter("global_step", 0, tf.int64)
        self.skipped = _counter("skipped", 0, tf.int64)
        self.loss_scale = LossScale() if loss_scale else None
        self.tables: Any = {}  # those that are trained by rows, see `ctl.phases.sparse_rows`
        self.ema = [replicas.average_like(v) for v in self.averaged_variables]
        copied = [(e, v.value) for v, e in zip(self.averaged_variables, self.ema, strict=True)]
        self._copies = [
            *copied,
            *(pair for g in self.groups for pair in copies_of_weights(g.optimizer)),
        ]
        self._average_of = dict(zip(map(id, self.averaged_variables), self.ema, strict=True))

    def state(self) -> dict[str, list[tf.Variable]]:
        """Variables that a checkpoint must hold, by group."""
        state = {
            "optimizer": self._of_optimizers,
            "counters": [self.global_step, self.skipped],
        }
        if self.ema:
            state["ema"] = self.ema
        if self.loss_scale:
            state["loss_scale"] = [self.loss_scale.scale, self.loss_scale.finite_steps]
        return state

    def group_of(self, variable: keras.Variable) -> Group:
        """The parameter group of a trained ``variable``."""
        return self.groups[self._group_of[id(variable)]]

    def renew_copies(self) -> None:
        """Until the first update, gives averages, and slots that begin as the weights, the weights
        that the model has now: it may have loaded them since this updater was made."""
        updates = sum(int(group.optimizer.iterations.numpy()) for group in self.groups)
        if self._copies and updates == 0:
            for copy, variable in self._copies:
                copy.assign(tf.cast(variable, copy.dtype))

    def skipped_so_far(self) -> int:
        """Number of skipped updates; 0 if finiteness is not checked."""
        return int(self.skipped.numpy()) if self.judges_finiteness else 0

    def optimizers(self) -> dict[str, keras.optimizers.Optimizer]:
        """The optimizers by name: "optimizer", "optimizer 2", ..."""
        numbers = range(1, len(self.groups) + 1)
        names = ["optimizer" + (f" {n}" if n > 1 else "") for n in numbers]
        return dict(zip(names, [group.optimizer for group in self.groups], strict=True))

    def held_rates(self, scheduled: bool) -> dict[str, float]:
        """The learning rates that are variables of optimizers, by `optimizers`: of those that have
        a schedule, which is used instead, or of the others."""
        rates = {
            name: optimizer.learning_rate
            for (name, optimizer), group in zip(self.optimizers().items(), self.groups, strict=True)
            if (group.schedule is not None) == scheduled
        }
        variables = {n: rate for n, rate in rates.items() if isinstance(rate, keras.Variable)}
        return {name: float(variable.value.numpy()) for name, variable in variables.items()}

    def learning_rates(self, step: tf.Tensor | None = None) -> list[tf.Tensor]:
        """Returns the learning rate of each group in the update at ``step`` (by default the next
        one), float32 scalars."""
        ago = None if step is None else self.global_step - step
        step = self.global_step if step is None else step

        def rate(group: Group) -> Any:
            if group.schedule:
                return with_autograph(group.schedule)(step)
            schedule = group.optimizer._learning_rate  # the public name is the rate of the next one
            if ago is not None and isinstance(schedule, LearningRateSchedule):
                return schedule(tf.maximum(group.optimizer.iterations.value - ago, 0))
            value = group.optimizer.learning_rate
            return value.value if isinstance(value, keras.Variable) else value

        return [tf.convert_to_tensor(rate(group)) for group in self.groups]

    def by_group(
        self, gradients_of: Callable[..., list[tf.Tensor | None]], losses: list[tf.Tensor]
    ) -> list[tf.Tensor | None]:
        """Returns ``gradients_of(loss, variables)`` of one loss per group, in the order of
        ``trainable_variables``.

        Raises:
            UsageError: the number of losses is not the number of groups.
        """
        if len(losses) != len(self.groups):
            raise UsageError(
                f"loss() returned a list of {len(losses)} losses, and the optimizer has "
                f"{len(self.groups)} parameter groups: return one for each"
            )
        by_variable: dict[int, tf.Tensor | None] = {}
        for loss, group in zip(losses, self.groups, strict=True):
            gradients = gradients_of(loss, [v.value for v in group.variables])
            by_variable.update(zip(map(id, group.variables), gradients, strict=True))
        return [by_variable[id(variable)] for variable in self.trainable_variables]

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """While inside, the model has the averaged weights, if there are any."""
        self.renew_copies()
        pairs = list(zip(self.averaged_variables, self.ema, strict=True))
        trained = [variable.value.read_value() for variable, _ in pairs]
        try:
            for variable, average in pairs:
                variable.value.assign(tf.cast(average.read_value(), variable.value.dtype))
            yield
        finally:
            for (variable, _), value in zip(pairs, trained, strict=True):
                variable.value.assign(value)

    def __call__(
        self,
        strategy: tf.distribute.Strategy,
        gradients: Sequence[tf.Tensor | None],
        finite: tf.Tensor | None = None,
    ) -> None:
        """Makes one update. Call it in cross-replica context, through ``merge_call``.

        Args:
            strategy: the strategy of this context.
            gradients: reduced, equal on every replica; None leaves the variable unchanged. Rows of
                a table, each of them once, leave the others unchanged.
            finite: bool scalar, equal on every replica; None if finiteness is not checked.
        """
        if not self.judges_finiteness:
            self._update(strategy, gradients)
        else:
            # The all-reduce has already run on every replica; neither branch has a collective.
            tf.cond(
                strategy.experimental_local_results(finite)[0],
                lambda: self._update(strategy, gradients),
                self._skip,
            )
        # Counts the step only after its all-reduce: a step that is stuck there is not done.
        reduced = [strategy.experimental_local_results(g) for g in gradients if g is not None]
        with tf.control_dependencies(tf.nest.flatten(reduced, expand_composites=True)):
            self.global_step.assign_add(1)

    def _update(self, strategy: tf.distribute.Strategy, gradients: Sequence) -> None:
        rates = self.learning_rates()
        gradients = [*gradients, *[None] * (len(self.variables) - len(gradients))]
        pairs = zip(self.variables, gradients, strict=True)
        # A step that has no gradients here makes its update itself, as `ctl.recipes.zero1` does.
        trained = {self._group_of[id(v)] for v, g in pairs if g is not None} or {
            *range(len(self.groups))
        }
        iterations = [group.optimizer.iterations.value for group in self.groups]
        first = tf.equal(tf.add_n(iterations), 0) if self.ema else None
        devices: dict[str, list[int]] = {}
        by_rows = [i for i, g in enumerate(gradients) if _is_rows(strategy, g)]
        for index, variable in enumerate(self.variables):
            if index not in by_rows:
                devices.setdefault(variable.value.device, []).append(index)
        kinds = [self._kind(i, g) for i, g in enumerate(gradients)]
        for number in sorted(trained):
            before_update(self.groups[number].optimizer, rates[number])
        common = [v for group in self.groups for v in common_variables(group.optimizer)]
        compiled = shared_programs.ProgramCache()
        for device, indices in _in_parts(devices, kinds):
            # One function updates all of them. The first variable determines the device.
            update = functools.partial(self._update_device, indices)
            compiles = is_compiled(device) if self.jit_update is None else self.jit_update
            if compiles and not tf.executing_eagerly():
                kind = tuple(kinds[i] for i in indices)
                variables = [v for i in indices for v in self._updated(i)]
                update = functools.partial(compiled.call, update, kind, variables, common)
            strategy.extended.update(
                self.variables[indices[0]].value,
                lambda _, *args, update=update: update(*args),
                args=([gradients[i] for i in indices], rates, first),
                group=False,
            )
        for index in by_rows:
            number = self._group_of[id(self.variables[index])]
            table, rate = self.tables[self.variables[index].value], rates[number]
            for value, rows, here in table.updates(gradients[index]):
                update = functools.partial(
                    self._update_rows, table, here, self.groups[number].optimizer
                )
                strategy.extended.update(value, update, args=(rows, rate), group=False)
        # Not Keras's own increment: it reads and then assigns, so concurrent workers lose counts.
        for number in sorted(trained):  # Adam corrects by the number of its own updates
            iterations[number].assign_add(1)
        if self.loss_scale:
            self.loss_scale.good()

    def _kind(self, index: int, gradient: Any) -> Hashable:
        """Returns a key that is equal for variables with equal updates, see
        `ctl.phases.shared_programs`."""
        variable = self.variables[index]
        kind = tuple(variable.shape), variable.dtype, id(variable) in self._average_of
        if gradient is None:
            return kind
        number = self._group_of[id(variable)]
        optimizer = self.groups[number].optimizer
        if variable.constraint is not None or not is_plain(optimizer):
            return id(variable)  # user code may treat each variable differently
        slots = len(slots_of(optimizer, variable))  # Muon's say how it trains the variable
        return *kind, number, slots, is_decayed(optimizer, variable)

    def _updated(self, index: int) -> list[tf.Variable]:
        """Returns what an update assigns to: the variable, its average and its slots."""
        variable = self.variables[index]
        average, number = self._average_of.get(id(variable)), self._group_of.get(id(variable))
        slots = [] if number is None else slots_of(self.groups[number].optimizer, variable)
        return [variable.value, *([] if average is None else [average]), *slots]

    def _update_device(
        self,
        indices: Sequence[int],
        gradients: Sequence[tf.Tensor | None],
        rates: Sequence[tf.Tensor],
        first: tf.Tensor | None,
    ) -> None:
        """Updates the variables at ``indices``, in the update context of their device."""
        optimizers = [with_rate(g.optimizer, r) for g, r in zip(self.groups, rates, strict=True)]
        for index, gradient in zip(indices, gradients, strict=True):
            variable = self.variables[index]
            value = variable.value
            if gradient is not None:
                number = self._group_of[id(variable)]
                update_variable(optimizers[number], variable, gradient)
                if variable.constraint is not None:
                    value.assign(variable.constraint(value))
            if id(variable) in self._average_of:
                average = self._average_of[id(variable)]
                decay = tf.constant(self.ema_decay, average.dtype)
                momentum = tf.where(first, tf.zeros_like(decay), decay)
                average.assign(momentum * average + (1.0 - momentum) * tf.cast(value, decay.dtype))

    def _update_rows(
        self,
        table: Any,
        here: Here,
        optimizer: keras.optimizers.Optimizer,
        value: tf.Variable,
        gradient: tf.IndexedSlices,
        rate: tf.Tensor,
    ) -> None:
        table.update(with_rate(optimizer, rate), gradient, here)

    def _skip(self) -> None:
        self.skipped.assign_add(1)
        if self.loss_scale:
            self.loss_scale.bad()


def _in_parts(
    devices: dict[str, list[int]], kinds: Sequence[Hashable]
) -> Iterator[tuple[str, list[int]]]:
    """Yields the variables of each device in parts, see `ctl.phases.shared_programs.make_parts`."""
    for device, indices in devices.items():
        for part in shared_programs.make_parts([kinds[i] for i in indices], _VARIABLES_PER_UPDATE):
            yield device, [indices[i] for i in part]


def _is_rows(strategy: tf.distribute.Strategy, gradient: Any) -> bool:
    return isinstance(strategy.experimental_local_results(gradient)[0], tf.IndexedSlices)


def _counter(name: str, initial: float, dtype: tf.DType) -> tf.Variable:
    return tf.Variable(
        initial,
        dtype=dtype,
        trainable=False,
        aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA,
        name=name,
    )
