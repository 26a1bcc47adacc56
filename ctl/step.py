"""One training step on a replica's share of a batch: forward, backward, reduce, clip, apply.

`ctl.loop.Loop` runs the step on every replica with ``strategy.run``. To change a phase, override
its method::

    class MyStep(ctl.TrainStep):
        def loss(self, batch):                       # per-example losses, shape [n]
            images, labels = batch
            return my_losses(labels, self.model(self.preprocess(images), training=True))

A replica differentiates the *sum* of its per-example losses divided by the *global* batch size, and
gradients are summed over replicas. N replicas therefore equal one replica on the same global batch,
however the examples are split. If batches have an unknown leading dimension or sample weights, the
valid examples are counted, and their number is summed in the same packs as the gradients.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from ctl.base.autograph import graph_function
from ctl.base.bounds import checked
from ctl.base.models import split
from ctl.base.names import EMBEDDING_PLANS, SPARSE_ROWS, check_name
from ctl.distributed import local_batch, replicas, workers
from ctl.errors import UsageError
from ctl.phases import flops, labels, noinline, norms, penalties, sample_weights
from ctl.phases.apply import Updater
from ctl.phases.base_step import BaseStep, EvalStep
from ctl.phases.checks import (
    check_clipped,
    check_overrides,
    check_unsynchronized,
    checked_gradients,
    naming_keys,
    refuses_summaries,
    warn_of_float16,
)
from ctl.phases.losses import cross_entropy
from ctl.phases.norms import global_norm
from ctl.phases.observer import NO_OBSERVER, Observer
from ctl.phases.optimizers import Optimizers, are_plain, check_built_for, from_name
from ctl.phases.plan.plan import TableWay
from ctl.phases.seeds import Seeds
from ctl.phases.sparse_rows import Tables, split_tables
from ctl.phases.statistics import Statistics, StatisticsSnapshot
from ctl.phases.trace_guards import TraceGuards, TraceKey
from ctl.reduce import BESIDE, COUNT, all_reduce, gather_context, map_values, values_of

Gradients = list[tf.Tensor | tf.IndexedSlices | None]  # rows only of `ctl.phases.sparse_rows`


class TrainStep(BaseStep):
    """One training step on one replica. Create it, like the model, in ``strategy.scope()``.

    Args:
        model: a Keras 3 model. Layers frozen before `build` stay frozen. Or a dict of models by
            name, ``{"g": ..., "d": ...}``: ``step.model["g"]`` is one of them.
        optimizer: a Keras 3 optimizer or its name, see `ctl.optimizers.check_optimizer`; or a list
            of parameter groups ``(optimizer, variables[, schedule])``. Variables belong to the
            model or to layers that are attributes of the step. A layer, also one in a list, stands
            for its trainable variables. For a dict of models, a dict with an optimizer, or
            ``(optimizer, schedule)``, for each that trains; or one optimizer for all.
        loss_fn: ``(labels, outputs) -> losses [n]``, which gets labels and outputs in one rank, as
            in ``fit``: [n] becomes [n, 1] if the other is that; or a loss of Keras, by name or as
            an object, whose reduction is left out. Of a cross entropy by Keras's name, the last
            layer of the model decides whether it takes logits.
        metrics: Keras metrics or their names, updated with ``(labels, outputs)``. Examples of
            weight 0 are left out; each other one counts once.
        weighted_metrics: Keras metrics in which each example counts its weight.
        weighting: by what the sum of the losses times their weights is divided: ``"examples"``, the
            number of weights that are not 0, or ``"sum_of_weights"``, which must be at least 0.
        class_weight: weights of classes, for labels that are integers [n], or 0 and 1 of any type:
            above 0; 1 for classes that it does not name. The weights of the examples are multiplied
            with them. `loss` then gets batches with weights.
        clip_norm: maximum global norm of the reduced gradient; None does not clip.
        accumulate_steps: number of micro-batches per batch of a replica. They go through the model
            one after the other. Their gradients are summed and then reduced once.
        ema_decay: decay of a moving average of the weights, see `ctl.phases.apply.Updater`.
        loss_scale: scales the loss dynamically for float16, see `ctl.phases.apply.LossScale`.
        on_nan: with ``"stop"``, the loop stops at a loss that is not finite. With ``"skip"``, the
            update is skipped when a reduced gradient is not finite. Its table is in
            ``ctl/phases/README.md``.
        log_norms: logs norms of gradient, weights and update, see `ctl.phases.norms`.
        bytes_per_pack: maximum bytes per all-reduce, see `ctl.reduce.make_packs`.
        options: options of the all-reduce, see `ctl.strategy.Placement`.
        jit_compile: compiles forward and backward with XLA, for batches of static shape. On one
            replica, XLA compiles the whole step, and several steps at once if batches come in
            blocks. None decides by rule, see `ctl.control.jit`.
        jit_update: compiles the update with XLA, see `ctl.phases.apply.Updater`.
        sparse_rows: which embedding tables are trained by rows: ``"auto"``, ``"on"``, ``"lazy"`` or
            ``"off"``, see `ctl.phases.sparse_rows.Tables`.
        embedding_plan: where these tables are: ``"replicated"``, on every replica;
            ``"sharded"``: their rows are split over all replicas, see `ctl.phases.shards`, or over
            the parameter servers, see `ctl.phases.server_shards`. ``"auto"`` decides for each
            table, see `ctl.phases.table_plan`; parameter servers split all that can be.
        random_seed: seed of the run, see `seed`.
        own: values of the options that a subclass declares, see `ctl.option`.

    Attributes:
        strategy: None until `build`.
        observer: watches the phases and the all-reduce, see `ctl.phases.observer`.
    """

    training = True
    flops: float | None = None  # of each example, see `ctl.phases.flops`; None before the trace
    eval_step: type[EvalStep] = EvalStep  # what `ctl.train --step` and `ctl.evaluate` evaluate with

    def __init__(
        self,
        model: keras.Model | Mapping[str, keras.Model],
        optimizer: Optimizers | str | None = None,
        loss_fn: Callable[[tf.Tensor, tf.Tensor], tf.Tensor] | str = cross_entropy,
        *,
        metrics: Sequence[keras.metrics.Metric | str] | None = (),
        weighted_metrics: Sequence[keras.metrics.Metric | str] | None = (),
        weighting: str = "examples",
        class_weight: Mapping[int, float] | None = None,
        clip_norm: float | None = None,
        accumulate_steps: int = 1,
        ema_decay: float | None = None,
        loss_scale: bool = False,
        on_nan: str = "stop",
        log_norms: bool = False,
        bytes_per_pack: int = 0,
        options: tf.distribute.experimental.CommunicationOptions | None = None,
        jit_compile: bool | None = None,
        jit_update: bool | None = None,
        sparse_rows: str = "auto",
        embedding_plan: str = "replicated",
        random_seed: int = 0,
        **own: Any,
    ):
        super().__init__(
            model, loss_fn, metrics, weighted_metrics=weighted_metrics, weighting=weighting, **own
        )
        if on_nan not in ("stop", "skip"):
            raise UsageError(f"on_nan is {on_nan!r}; it must be 'stop' or 'skip'")
        self.optimizer = from_name(optimizer, self.model)
        given = class_weight is not None
        self.class_weight = sample_weights.checked_classes(class_weight) if given else None
        self.clip_norm = checked("clip_norm", clip_norm)
        self.accumulate_steps = checked("accumulate_steps", accumulate_steps)
        self.ema_decay = checked("ema_decay", ema_decay)
        self.loss_scale = loss_scale
        self.on_nan = on_nan
        self.log_norms = log_norms
        self.bytes_per_pack = checked("bytes_per_pack", bytes_per_pack)
        self.options = options
        self.jit_compile = jit_compile
        self.jit_by_rule: bool | None = None  # the last decision of `ctl.control.jit`
        self.jit_update = jit_update
        check_name("sparse_rows", sparse_rows, SPARSE_ROWS)
        self.sparse_rows = sparse_rows
        check_name("embedding_plan", embedding_plan, EMBEDDING_PLANS)
        self.embedding_plan = embedding_plan
        self.table_plan: tuple[TableWay, ...] = ()  # of `ctl.phases.table_plan`
        self.seeds = Seeds(random_seed)
        self.strategy: Any = None
        self.observer: Observer = NO_OBSERVER

    def build(self, strategy: tf.distribute.Strategy, schedule: Callable | None = None) -> None:
        """Creates optimizer slots, counters and averages. The loop calls it once.

        Raises:
            UsageError: the step was built before, or its model or optimizer cannot be used.
        """
        check_overrides(self)
        warn_of_float16(self)
        replicas.check_sums(strategy)
        self.check_scope(strategy)
        self._check_layers(strategy)
        if replicas.is_asynchronous(strategy) and (self.jit_update or self.jit_compile):
            raise UsageError(
                "XLA works within one process: with parameter servers, leave jit_update and "
                "jit_compile out (--jit_compile=rule)"
            )
        self.tracked.check_layers()
        if not self.model.trainable_variables:
            raise UsageError(
                f"model {self.model.name} has no trainable variables: if it is not built, call it "
                "on one batch of features first; else set trainable in the layers to train"
            )
        self.strategy = strategy
        self.synchronizes = replicas.synchronizes(strategy, self.tracked.layer)
        self.logged.create(strategy)
        with split_tables(self) as shards:
            alone = are_plain(self.optimizer)  # slots may be large, and are equal on all workers
            with workers.own_initial_values(strategy) if alone else strategy.scope():
                self.updater = Updater(
                    self.optimizer,
                    self.model.trainable_variables,
                    statistics=replicas.statistics_of(replicas.training_norms(self.model)),
                    schedule=schedule,
                    ema_decay=self.ema_decay,
                    loss_scale=self.loss_scale,
                    skip_nonfinite=self.on_nan == "skip",
                    jit_update=self.jit_update,
                )
            self.tables = self.updater.tables = Tables(self, shards)
        if not self.overrides("apply"):
            check_built_for(self.updater.groups)
        check_unsynchronized(self)
        self.per_replica_variables.create(strategy, self.unsynchronized_variables())
        self.trainable_variables = [v.value for v in self.updater.trainable_variables]
        self.trainable_mask = (True,) * len(self.trainable_variables)  # see `Loop.train_only`
        self.tracked.check(self.trainable_variables)
        self.statistics = Statistics(
            self.tracked.layer,
            self.replica_statistics(),
            strategy,
            plain=[
                *self.tracked.raw_variables,
                *self.per_replica_variables.variables,
                *self.logged.variables,
            ],
            micro_batches=self.accumulate_steps > 1,
            undoes=self.updater.judges_finiteness,
        )
        self.single_replica = replicas.is_alone(strategy)
        self.noinline = noinline.is_needed(strategy, self.tracked.layer)
        replicas.offset_dropout_seeds(strategy, self.tracked.layer)
        self._training_norms = {*replicas.training_norms(self.tracked.layer)}
        self.trace_guards = TraceGuards(self)

    def check_model(self) -> None:
        """Raises `UsageError` if the model does not allow ``jit_compile``, if its trainable
        variables or BatchNorm layers have changed since `build`, or if ``clip_norm`` is out of
        bounds."""
        checked("clip_norm", self.clip_norm)
        self._check_layers(self.strategy)
        now, built = self.model.trainable_variables, self.updater.of_model
        if [id(v) for v in now] != [id(v) for v in built]:
            names = {id(v): v.path for v in [*now, *built]}
            changed = {id(v) for v in now} ^ {id(v) for v in built}
            which = ", ".join(sorted(names[i] for i in changed)) or "their order"
            thawed = len(now) > len(built)
            other = (
                "make a new optimizer, step and loop" if thawed else "use loop.train_only(layers)"
            )
            raise UsageError(
                f"the trainable variables of model {self.model.name} have changed since the step "
                f"was built ({which}): set layer.trainable before that, or {other}"
            )
        toggled = {*replicas.training_norms(self.tracked.layer)} ^ self._training_norms
        if toggled:
            raise UsageError(
                f"{min(layer.name for layer in toggled)}.trainable was changed after the step was "
                "built, which would have no effect on its statistics: set it before that"
            )

    def _check_layers(self, strategy: tf.distribute.Strategy) -> None:
        for check in (replicas.check_central_storage, replicas.check_synchronized):
            check(strategy, self.tracked.layer, self.accumulate_steps, bool(self.jit_compile))

    def attach(self, loop: Any) -> None:
        """The `ctl.Loop` calls this once, at the end of its constructor. Override it to add actions
        to the loop, or to choose what trains first (`Loop.train_only`)."""

    @property
    def trace_key(self) -> TraceKey:
        """The loop keeps one trace of the step per key. Raises `UsageError`, see
        `TraceGuards.version_for`."""
        self.tables.check(self.jit_compile)
        version = self.trace_guards.version_for(self)
        return TraceKey(self.observer, self.bytes_per_pack, self.jit_compile, version)

    @property
    def global_step(self) -> tf.Variable:
        """Number of global batches seen, int64 scalar. It is also the position in the data."""
        return self.updater.global_step

    def state(self) -> dict[str, list[tf.Variable]]:
        """Variables that a checkpoint must hold so that training resumes bit for bit, by group. Of
        several models, each has its groups."""
        groups = {
            "model": [v.value for v in self.model.variables],
            "step": self.tracked.extra_variables,
            "replicas": self.per_replica_variables.saved,
            "rows": [v for one in self.tables.deferred for v in one.variables],
            **self.updater.state(),
        }
        of = {"model": self.model.variables, "ema": self.updater.averaged_variables}
        state = split(self.model, groups, of)
        return {group: variables for group, variables in state.items() if variables}

    def reduced_specs(self) -> list[tf.Variable | tf.TensorSpec]:
        """Shapes and dtypes of the tensors that `sum_gradients` may sum, in order: gradients (some
        may be None), statistics of the replica, number of valid examples (if counted). An
        overridden `sum_gradients` gets the gradients only."""
        if self.has_custom_all_reduce:
            return [
                tf.TensorSpec(v.shape, local_batch.wide(v.dtype)) for v in self.trainable_variables
            ]
        dense = [v for v in self.trainable_variables if v not in self.tables]
        return [*dense, *self.statistics.specs(), tf.TensorSpec([], tf.float32)]

    # The step itself, on one replica ------------------------------------------------------------

    def __call__(self, batch: Any) -> tuple[tf.Tensor, tf.Tensor]:
        """Trains on this replica's part of one global batch.

        Returns:
            ``(loss, total)``, float32 scalars: the replica's loss divided by the number of valid
            examples of the global batch (or the sum of their weights), and that number. The sum of
            the losses over replicas is the mean loss of the global batch. Both are 0 if the update
            was skipped.
        """
        if self.class_weight:
            batch = sample_weights.with_classes(batch, self.class_weight)
        count, snapshot = self.count(batch), self.statistics.snapshot(batch)
        with penalties.counted(self, batch, count):
            loss, gradients = self.forward_backward(batch, count)
        self.observer.mark("backward", gradients)
        loss, total, gradients = self.reduce(loss, count, gradients, snapshot)
        finite = self.finite(gradients) if self.updater.judges_finiteness else None
        with self.norms_logged(gradients):
            gradients = self.clip(gradients)
            self.apply(gradients, finite)
        return self.outcome(loss, total, finite, snapshot)

    def forward_backward(self, batch: Any, count: int | tf.Tensor) -> tuple[tf.Tensor, Gradients]:
        """Computes the replica's loss (float32 scalar) and gradients; updates the metrics.

        If ``count`` (see `count`) is an integer, the global batch size is known while tracing, and
        both are divided by it here. If it is a tensor, both are sums, in float32 at least, and
        `reduce` divides them.
        """
        if isinstance(count, int):
            return self._micro_batches(batch, count * self.strategy.num_replicas_in_sync)
        # The backward pass computes means, because float16 may overflow on sums. If gradients cross
        # replicas, as in a synchronized BatchNorm, all replicas must divide by the same number.
        summed = functools.partial(all_reduce, options=self.options, scope=COUNT)
        size = penalties.size(batch, count)
        power = local_batch.power_of_two(summed([size])[0] if self.synchronizes else size)
        loss, gradients = self._micro_batches(batch, power)

        def undivided(gradient: tf.Tensor) -> tf.Tensor:
            wide = local_batch.widened(gradient)
            return wide * tf.cast(power, wide.dtype)

        return loss * power, [None if g is None else map_values(undivided, g) for g in gradients]

    def _micro_batches(self, batch: Any, divisor: Any) -> tuple[tf.Tensor, Gradients]:
        """Computes loss and gradients of all micro-batches of ``batch``, a replica's examples. Both
        are divided by ``divisor``. Gradients of several micro-batches are in float32 at least."""
        run = functools.partial(self._micro_batch, self._gradient_fn(), divisor)
        if self.accumulate_steps == 1:
            return run(batch, 0)
        no_gradient = [False] * len(self.trainable_variables)

        def body(micro_batch: Callable, part: Any, loss: Any, totals: Any) -> tuple[Any, Any, Any]:
            more, gradients = run(micro_batch(part), part)
            no_gradient[:] = [g is None for g in gradients]
            pairs = zip(totals, gradients, strict=True)
            totals = [t if g is None else self.tables.add(t, g) for t, g in pairs]
            return part + 1, loss + more, totals

        # Sums of float16 overflow early.
        zeros = [self.tables.zeros(v, local_batch.wide(v.dtype)) for v in self.trainable_variables]
        shapes = [self.tables.shape(v) for v in self.trainable_variables]
        loss, totals = 0.0, zeros
        # With fewer examples than `accumulate_steps`, there are fewer micro-batches.
        groups = local_batch.micro_batches(batch, self.accumulate_steps)
        done = sum(parts for parts, _ in groups)
        with replicas.drawing_alike(self.tracked.layer, done, self.accumulate_steps):
            for parts, micro_batch in groups:
                # With one iteration at a time, one micro-batch is in memory.
                _, loss, totals = tf.while_loop(
                    lambda part, *_, parts=parts: part < parts,
                    functools.partial(body, micro_batch),
                    (0, loss, totals),
                    shape_invariants=(tf.TensorShape([]), tf.TensorShape([]), shapes),
                    parallel_iterations=1,
                )
        return loss, [None if no else t for t, no in zip(totals, no_gradient, strict=True)]

    def _micro_batch(
        self, gradient_fn: Callable, divisor: Any, batch: Any, number: int | tf.Tensor
    ) -> tuple[tf.Tensor, Gradients]:
        """Computes loss and gradients of micro-batch ``number``; updates the metrics."""
        computed, empty = local_batch.pad_empty(batch)
        if empty is not None and self.synchronizes:
            local_batch.refuse_empty(empty)
        in_graph = self.accumulate_steps > 1 or bool(self.jit_compile)
        counted = self.tracked.counted_unless(empty, *self.logged.variables)
        with counted, gather_context(divisor, empty, self.options, in_graph):
            loss, gradients, outputs = gradient_fn(computed, divisor, self.seeds.place(number))
        gradients = checked_gradients(self, gradients, self.trainable_variables)
        gradients = self.tables.gradients(gradients, self.trainable_variables)
        (loss, gradients), outputs = local_batch.mask_empty(empty, (loss, gradients), outputs)
        self.update_metrics_of(batch, outputs)
        return loss, gradients

    def _gradient_fn(self) -> Callable:
        """Returns `loss_and_gradients` with a third argument, see `ctl.phases.seeds.Seeds.place`.

        Each pass gets a new function. A function keeps its trace, but a second pass may depend on a
        Python value that has changed since the first.
        """

        def placed(batch: Any, divisor: Any, place: tf.Tensor) -> Any:
            with (
                self.seeds.inside(place),
                flops.counted(self, batch),
                labels.nan_for_wrong_ids(self.tracked.layer, self.jit_compile),
                refuses_summaries(self),
            ):
                return self.loss_and_gradients(batch, divisor)

        if self.jit_compile:
            return graph_function(placed, jit_compile=True)
        if self.noinline and self.accumulate_steps > 1:  # the loop over micro-batches calls it
            return noinline.noinline(placed)
        return placed

    def loss_and_gradients(self, batch: Any, divisor: Any) -> tuple[tf.Tensor, Gradients, Any]:
        """Forward and backward pass, compiled by XLA with ``jit_compile``. Returns the loss divided
        by ``divisor``, its gradients (times the loss scale), and outputs for the metrics."""
        several = len(self.updater.groups) > 1
        with tf.GradientTape(persistent=several) as tape, tf.name_scope("ctl_forward"):
            loss, outputs = self.forward(batch)
            self.observer.mark("forward", loss if outputs is None else outputs)
            divisor = float(divisor) if isinstance(divisor, int) else divisor
            losses = tf.nest.map_structure(lambda one: one / divisor, loss)
        with tf.name_scope("ctl_backward"):
            if not isinstance(losses, list):
                return losses, self.backward(tape, losses), outputs
            gradients = self.updater.by_group(functools.partial(self.backward, tape), losses)
            return tf.add_n(losses), gradients, outputs

    def forward(self, batch: Any) -> tuple[tf.Tensor | list[tf.Tensor], Any]:
        """Returns ``(loss, outputs)`` of a (micro-)batch. ``loss`` is the sum of the losses with
        regularization, a float32 scalar; a list of sums if `loss` returns a list. ``outputs`` are
        for the metrics, or None."""
        with naming_keys(batch):
            losses = self.loss(batch)
        loss, outputs = self.sum_of(losses, batch)
        penalty = penalties.total(self, batch)
        if penalty is None:
            return loss, outputs
        if not isinstance(loss, list):
            return loss + penalty, outputs
        zero = penalty - tf.stop_gradient(penalty)  # its value is 0, its gradient the penalty's
        return [loss[0] + penalty, *(one + zero for one in loss[1:])], outputs

    def backward(
        self, tape: tf.GradientTape, loss: tf.Tensor, variables: Sequence[tf.Variable] | None = None
    ) -> Gradients:
        """Returns the gradient of ``loss``, times the loss scale, for each of ``variables``; by
        default for all trainable variables. It is dense, or the rows of an embedding table (see
        `ctl.phases.sparse_rows`), or None where ``loss`` does not depend on the variable."""
        scale = self.updater.loss_scale
        seed = None if scale is None else tf.cast(scale.scale, loss.dtype)
        variables = self.trainable_variables if variables is None else variables
        gradients = tape.gradient(loss, variables, output_gradients=seed)
        return self.tables.gradients(gradients, variables)

    def reduce(
        self, loss: tf.Tensor, count: Any, gradients: Gradients, snapshot: StatisticsSnapshot
    ) -> tuple[tf.Tensor, Any, Gradients]:
        """Sums gradients over replicas with `sum_gradients`, and rows of tables with
        `Tables.sum_rows`.

        The packs also carry the number of valid examples, unless it is known while tracing, and
        the moving statistics that each replica has updated with its own part of the batch.

        Args:
            loss, gradients: as returned by `forward_backward`.
            count: as returned by `count`.
            snapshot: the statistics before the forward pass.

        Returns:
            The replica's loss divided by the global batch size, that size (an integer if ``count``
            is one), and the gradients of the mean loss of the global batch, equal on every replica.
        """
        gradients = self.tables.gradients(gradients, self.trainable_variables)
        dense = [g for g in gradients if isinstance(g, tf.Tensor)]
        counted = [] if isinstance(count, int) else [tf.cast(count, tf.float32)]
        others = [*self.statistics.terms(snapshot), *counted]
        scale = self.updater.loss_scale and self.updater.loss_scale.scale
        if not self.has_custom_all_reduce:
            reduced = self.sum_gradients([*dense, *others])
            dense, others = reduced[: len(dense)], reduced[len(dense) :]
        else:
            dense, others = self._reduce_with_custom_sum(dense, others, scale)
            scale = None
        total = others.pop() if counted else count * self.strategy.num_replicas_in_sync
        self.statistics.assign(others, snapshot, self.strategy.num_replicas_in_sync)
        divisors = [] if scale is None else [scale]
        if counted:
            divisors.insert(0, local_batch.or_one(total))
            loss /= divisors[0]

        def mean(variable: tf.Variable, gradient: tf.Tensor) -> tf.Tensor:
            for divisor in divisors:
                gradient /= tf.cast(divisor, gradient.dtype)
            return tf.cast(gradient, variable.dtype)

        left = iter(dense)
        sums = [next(left) if isinstance(g, tf.Tensor) else g for g in gradients]
        sums = self.tables.sum_rows(sums, self.trainable_variables, self.options)
        pairs = zip(self.trainable_variables, sums, strict=True)
        return (
            loss,
            total,
            [g if g is None else map_values(functools.partial(mean, v), g) for v, g in pairs],
        )

    def _reduce_with_custom_sum(
        self, gradients: list[tf.Tensor], others: list[tf.Tensor], scale: tf.Tensor | None
    ) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
        """Returns the sums of ``gradients``, without the loss ``scale``, with an overridden
        `sum_gradients`, and those of ``others`` with ctl's all-reduce. If a gradient of any replica
        has a NaN or Inf, all sums of gradients are NaN.

        Raises:
            UsageError: the override returned another number of tensors, or other shapes.
        """
        wide = [local_batch.widened(g) for g in gradients]
        if scale is not None:
            wide = [g / tf.cast(scale, g.dtype) for g in wide]
        broken = tf.reduce_any([tf.reduce_any(~tf.math.is_finite(g)) for g in wide])
        broken = tf.where(broken, math.nan, 0.0)
        *others, broken = all_reduce([*others, broken], options=self.options, scope=BESIDE)
        sums = self.sum_gradients(wide)
        given, returned = ([tuple(t.shape) for t in tensors] for tensors in (wide, sums))
        if given != returned:
            raise UsageError(f"sum_gradients() was given shapes {given}, and returned {returned}")
        return [s + tf.cast(broken, s.dtype) for s in sums], others

    def sum_gradients(self, gradients: list[tf.Tensor]) -> list[tf.Tensor]:
        """Sums dense tensors over replicas, with `ctl.reduce.all_reduce`.

        An override, for instance a compressed sum, gets this replica's gradients without the loss
        scale, in float32 at least, and those of embedding tables as a whole, not by rows. It must
        return tensors of the same shapes, equal on all replicas. ctl notices a NaN or Inf on any
        replica, even if the override hides it. ctl then sums the number of examples and the
        statistics in a separate all-reduce.
        """
        return self.observer.all_reduce(
            gradients, bytes_per_pack=self.bytes_per_pack, options=self.options
        )

    def overrides(self, method: str, base: type[BaseStep] | None = None) -> bool:
        """Whether a subclass, or this object, replaces ``method`` of ``base``, by default of
        `TrainStep`."""
        return super().overrides(method, base or TrainStep)

    @property
    def has_custom_all_reduce(self) -> bool:
        """Whether `sum_gradients` is overridden."""
        return self.overrides("sum_gradients")

    def norms_logged(self, gradients: Gradients) -> contextlib.AbstractContextManager[None]:
        """With ``log_norms``, logs norms of the update that is made inside; otherwise adds nothing
        to the graph. See `ctl.phases.norms.logged`."""
        if not self.log_norms:
            return contextlib.nullcontext()
        return norms.logged(self.trainable_variables, gradients, self.logged.add)

    def finite(self, gradients: Gradients) -> tf.Tensor:
        """Whether the reduced gradients have no NaN or Inf: bool scalar, equal on all replicas."""
        values = [values_of(g) for g in gradients if g is not None]
        return tf.reduce_all([tf.reduce_all(tf.math.is_finite(v)) for v in values])

    def clip(self, gradients: Gradients) -> Gradients:
        """Clips the global norm (Pascanu et al. 2013, arXiv:1211.5063, section 3.2)."""
        if self.clip_norm is None:
            return gradients
        return tf.clip_by_global_norm(gradients, self.clip_norm, global_norm(gradients))[0]

    def apply(self, gradients: Gradients, finite: tf.Tensor | None = None) -> None:
        """Applies reduced gradients with `ctl.phases.apply.Updater`, in the same way on all
        replicas. Raises `UsageError` if ``clip`` returned something else."""
        check_clipped(self, gradients)
        tf.distribute.get_replica_context().merge_call(self.updater, args=(gradients, finite))

    def outcome(
        self, loss: tf.Tensor, count: Any, finite: tf.Tensor | None, snapshot: StatisticsSnapshot
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns ``loss`` and ``count``, the size of the global batch. If ``finite`` is false,
        returns zeros and restores the statistics. None: finiteness is not checked."""
        count = tf.cast(count, tf.float32)
        if finite is None:
            return loss, count
        self.statistics.undo_unless(finite, snapshot)
        return tf.where(finite, loss, 0.0), tf.where(finite, count, 0.0)

    def seed(self, salt: int | str = 0, *, per_replica: bool = True) -> tf.Tensor:
        """Returns a seed, int32 [2], for `tf.random.stateless_normal` and similar functions.

        It is a function of ``random_seed``, the step and ``salt``, and by default also of the
        replica and the micro-batch. There is no state to save, so a resume changes nothing.
        """
        return self.seeds.make(salt, self.global_step, per_replica)

    def replica_statistics(self) -> list[tf.Variable]:
        """Variables that each replica updates separately in the forward pass, and that `reduce`
        replaces by their mean. By default, the moving statistics of BatchNorm layers that train and
        are not synchronized. Override it to add variables of your layers."""
        layers = replicas.training_norms(self.tracked.layer)
        separate = replicas.statistics_of(layer for layer in layers if not layer.synchronized)
        return [variable.value for variable in separate]
