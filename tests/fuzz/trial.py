"""Trains one case with ctl, and compares its end with the oracle's."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import re
import tempfile
from collections.abc import Callable
from typing import Any, NamedTuple
from unittest import mock

import keras
import numpy as np
import tensorflow as tf
from graphs import freed_afterwards

from ctl.checkpoint import CheckpointManager
from ctl.control.evaluator import Evaluator
from ctl.data import InMemory
from ctl.data.global_batches import GlobalBatches
from ctl.distributed.local_batch import rows
from ctl.distributed.replicas import has_one_copy
from ctl.errors import DivergedError, UsageError
from ctl.jobs.trials import preserved
from ctl.loop import Loop
from ctl.phases import passes, sparse_rows, table_plan
from ctl.phases.base_step import EvalStep
from ctl.phases.losses import cross_entropy
from ctl.phases.uninitialized import uninitialized_tables
from ctl.schedule import Cosine
from ctl.step import TrainStep

from . import checked, oracle
from .cases import DEFERRED, WRONG, Case
from .models import (
    CLASS_WEIGHT,
    arrays_of,
    change_model,
    cut,
    losses_of,
    make_model,
    make_optimizer,
    rate_of,
    scale_of,
    weights_of,
)

Mirrored = Callable[..., tf.distribute.Strategy]  # see tests/support/ctl_fixtures.py


class Verdict(NamedTuple):
    """``kind`` is "equal", "refused", "diverged", "unclear" or "bug"; ``text`` is one line."""

    kind: str
    text: str = ""


class Dense:
    """Makes dense tensors of ragged and sparse ones, as a user would."""

    def preprocess(self, features: Any) -> Any:
        if isinstance(features, tf.RaggedTensor):
            return features.to_tensor(shape=[None, 5])
        if isinstance(features, tf.SparseTensor):
            return tf.ensure_shape(tf.sparse.to_dense(features), [None, 6])
        return super().preprocess(features)  # type: ignore[misc]


class Plain(Dense, TrainStep):
    """Has no phase of gradients of its own, which would get dense ones."""

    def __init__(self, *args: Any, twice: bool, **options: Any):
        super().__init__(*args, **options)


class Step(Dense, TrainStep):
    """May make two passes that differ by a Python value: together, they are one."""

    def __init__(self, *args: Any, twice: bool, **options: Any):
        super().__init__(*args, **options)
        self.twice, self.factor = twice, 1.0

    def loss_and_gradients(self, batch: Any, divisor: Any) -> tuple[Any, list, Any]:
        loss, gradients, outputs = super().loss_and_gradients(batch, divisor)
        return (
            loss * self.factor,
            [None if g is None else g * tf.cast(self.factor, g.dtype) for g in gradients],
            outputs,
        )

    def forward_backward(self, batch: Any, count: Any) -> tuple[Any, list]:
        if not self.twice:
            return super().forward_backward(batch, count)
        self.factor = -0.5
        with passes.state_kept(self):
            less, others = super().forward_backward(batch, count)
        self.factor = 1.5
        loss, gradients = super().forward_backward(batch, count)
        pairs = zip(gradients, others, strict=True)
        return loss + less, [None if g is None else g + other for g, other in pairs]


class Scaled(Step):
    """Its losses are multiplied by a Python value. Its labels are not checked, so not all are."""

    scale = 1.0

    def loss(self, batch: Any) -> Any:
        losses, outputs = super().loss(batch)
        return losses * self.scale, outputs


class Evaluates(Dense, EvalStep):
    """Logs the number of its examples, a constant if their shape is static."""

    def loss(self, batch: Any) -> Any:
        if not has_one_copy(tf.distribute.get_strategy()):
            self.log("examples", tf.ones(rows(batch)), reduce="sum")
        return super().loss(batch)


def judge(case: Case, mirrored: Mirrored) -> Verdict:
    """Trains ``case`` with ctl, and says whether it ended as the oracle predicts."""
    try:
        with freed_afterwards():
            return _judge(case, mirrored)
    finally:
        keras.utils.clear_session()  # collects garbage
        gc.freeze()  # TensorFlow keeps the rest, so later collections need not look at it


def _judge(case: Case, mirrored: Mirrored) -> Verdict:
    if case.checked:
        return Verdict(*checked.verdict(case))
    arrays = arrays_of(case)
    dataset, batches = _data(case, arrays)
    expected, allowed = oracle.predict(case, arrays, batches)
    if expected.verdict == "unclear":
        return Verdict("unclear")
    with tempfile.TemporaryDirectory() as directory:
        return _compare(case, dataset, _strategy(case, mirrored), directory, expected, allowed)


def _strategy(case: Case, mirrored: Mirrored) -> tf.distribute.Strategy:
    if case.strategy == "central":
        devices = [f"/cpu:{number}" for number in range(case.replicas)]
        return tf.distribute.experimental.CentralStorageStrategy(devices, "/cpu:0")
    if case.strategy == "default":
        return tf.distribute.get_strategy()
    return (
        mirrored(case.replicas, ring=True) if case.strategy == "ring" else mirrored(case.replicas)
    )


def _compare(
    case: Case,
    dataset: Any,
    strategy: tf.distribute.Strategy,
    directory: str,
    expected: oracle.End,
    allowed: dict[str, float],
) -> Verdict:
    wanted = f"expected: {expected.verdict} {expected.text}"
    try:
        loop, scalars = _train(case, dataset, strategy, directory)
        if expected.verdict != "equal":
            return Verdict("bug", f"trained to the end; {wanted}")
        if case.ends:  # the losses of the last steps are not known
            expected.values.pop("loss", None)
        wrong = _difference(loop, scalars, expected, allowed)
        if not wrong and case.pause:
            wrong = _resumed(case, dataset, strategy, directory, loop)
        if not wrong and case.evaluated:
            wrong = _evaluated(case, dataset, strategy, loop)
        return Verdict("bug", wrong) if wrong else Verdict("equal")
    except Exception as error:  # noqa: BLE001
        kind = {UsageError: "refused", DivergedError: "diverged"}.get(type(error))
        if kind == expected.verdict and re.search(expected.text, str(error)):
            return Verdict(kind, re.sub(r"-?\d+", "#", str(error)))
        line = " ".join(str(error).split())  # of a long text, begin and end
        line = line if len(line) < 500 else f"{line[:250]} … {line[-250:]}"
        return Verdict("bug", f"{type(error).__name__}: {line}; {wanted}")


def _data(case: Case, arrays: Any) -> tuple[Any, list[Any]]:
    """The dataset for ctl, and its global batches as arrays."""
    if case.source == "memory":
        dataset = InMemory(arrays, global_batch_size=case.sizes[0], seed=case.seed)
        order = list(dataset.batches().take(case.steps).as_numpy_iterator())
        return dataset, [tf.nest.map_structure(lambda a, i=i: a[i], arrays) for i in order]
    batches = cut(case, arrays)
    kinds = {"ragged": tf.RaggedTensor.from_tensor, "sparse": tf.sparse.from_dense}
    kind = kinds.get(case.features, tf.convert_to_tensor)
    padding = {"padding": 0} if case.features == "ragged" else {}
    elements = [
        (tf.nest.map_structure(lambda a: kind(a, **padding), features), *rest)
        for features, *rest in batches
    ]

    def spec(value: Any) -> Any:
        if isinstance(value, tf.RaggedTensor):
            return tf.RaggedTensorSpec([None, None], value.dtype)
        shape = [len(value) if case.source == "static" else None, *value.shape[1:]]
        if isinstance(value, tf.SparseTensor):
            return tf.SparseTensorSpec([None, *value.shape[1:]], value.dtype)
        return tf.TensorSpec(shape, value.dtype)

    signature = tf.nest.map_structure(spec, elements[0])
    return tf.data.Dataset.from_generator(lambda: elements, output_signature=signature), batches


def _make_loop(case: Case, dataset: Any, strategy: tf.distribute.Strategy, directory: str) -> Loop:
    with strategy.scope():
        options = {
            "loss_fn": losses_of if case.heads == 2 else cross_entropy,
            "metrics": [keras.metrics.MeanMetricWrapper(_class_of, name="label")],
            "clip_norm": case.clip_norm,
            "accumulate_steps": case.accumulate_steps,
            "ema_decay": case.ema_decay,
            "on_nan": case.on_nan,
            "bytes_per_pack": case.bytes_per_pack,
            "sparse_rows": "on" if case.sharded and case.optimizer in DEFERRED else "auto",
            "embedding_plan": "auto"
            if case.planned
            else ("sharded" if case.sharded else "replicated"),
        }
        wrong = _wrong(case)
        kind = Scaled if case.change == "scale" else Plain if case.by_rows else Step
        with uninitialized_tables() if case.waits else contextlib.nullcontext():
            model = make_model(case)
        step = kind(
            model,
            make_optimizer(case),
            twice=case.twice,
            weighting=case.weighting,
            class_weight=CLASS_WEIGHT if case.class_weight else None,
            loss_scale=case.loss_scale,
            jit_compile=case.jit_compile,
            jit_update=case.jit_update,
            **options | {name: value for name, value in wrong.items() if name in options},
        )
    rate = rate_of(case)
    schedules = {
        "decay": lambda number: rate * 0.8 ** tf.cast(number, tf.float32),
        "cosine": Cosine(rate, total_steps=6, warmup_steps=1),
    }
    checkpoints = CheckpointManager(directory) if case.pause else None
    least = 0 if case.by_rows else sparse_rows.LEAST_BYTES
    with (
        mock.patch.object(sparse_rows, "LEAST_BYTES", least),
        mock.patch.object(table_plan, "LEAST_BYTES", least),
        mock.patch.object(
            table_plan, "_available", lambda _: -(10**12) if case.sharded else 10**12
        ),
    ):
        return Loop(
            step,
            GlobalBatches(dataset, training=False) if case.ends else dataset,
            strategy=strategy,
            schedule=schedules.get(case.schedule),
            checkpoints=wrong.get("checkpoints", checkpoints),
            steps_per_loop=wrong.get("steps_per_loop", case.steps_per_loop),
        )


def _wrong(case: Case) -> dict[str, Any]:
    """The argument that is refused, and its value."""
    return {case.wrong.partition("=")[0]: WRONG[case.wrong][0]} if case.wrong else {}


def _class_of(labels: Any, outputs: Any) -> tf.Tensor:
    return tf.cast(labels["class"] if isinstance(labels, dict) else labels, tf.float32)


def _train(
    case: Case, dataset: Any, strategy: tf.distribute.Strategy, directory: str
) -> tuple[Loop, dict[str, float]]:
    loop = _make_loop(case, dataset, strategy, directory)
    if case.wrong:
        _call_wrongly(case, loop)
    if case.pause:
        _train_to(case, loop, case.pause)
        loop.save(wait=True)
        assert loop.checkpoints
        loop.checkpoints.close()
    return loop, _train_to(case, loop, case.steps)


def _call_wrongly(case: Case, loop: Loop) -> None:
    """Must be refused without a step."""
    wrong = _wrong(case)
    try:
        if "evaluate_every" in wrong:
            loop.train_and_evaluate(case.steps, **wrong)
        else:
            loop.train(wrong.get("until", 1))
    finally:
        assert not loop.global_step, f"trained to step {loop.global_step}"


def _train_to(case: Case, loop: Loop, end: int) -> dict[str, float]:
    """Trains up to step ``end``, with the change of the case at its step."""
    for step in range(loop.global_step, end):
        if case.changed(step) != case.changed(step - 1):
            if step > loop.global_step:
                loop.train(step, total=_until(case))
            _change(case, loop, case.changed(step))
    return loop.train(_until(case) if end == case.steps else end, total=_until(case))


def _change(case: Case, loop: Loop, changed: bool) -> None:
    step = loop.step
    change_model(case, step.model, changed)
    if case.change == "scale":
        step.scale = scale_of(case, changed)
    if case.change == "rate":
        step.optimizer.learning_rate = rate_of(case) * (0.5 if changed else 1.0)
    if case.change == "train_only":
        loop.train_only([step.model.get_layer("logits")] if changed else None)


def _until(case: Case) -> int:
    return case.steps + 3 * case.ends


def _difference(
    loop: Loop, scalars: dict[str, float], expected: oracle.End, allowed: dict[str, float]
) -> str:
    """What differs from the oracle, in one line; "" if nothing does."""
    known = expected.values.keys() & scalars.keys()
    values = _values(loop) | {name: np.float32(scalars[name]) for name in known}
    if values.keys() != expected.values.keys():
        return f"other values: {sorted(values.keys() ^ expected.values.keys())}"
    for name, wanted in expected.values.items():
        got = values[name].astype(np.float64)
        wanted = wanted.astype(np.float64)
        with np.errstate(invalid="ignore"):
            wrong = (got != wanted) & ~(np.abs(got - wanted) <= allowed[name])
        wrong &= ~(np.isnan(got) & np.isnan(wanted))
        if wrong.any():
            where = np.unravel_index(wrong.argmax(), wrong.shape)
            return (
                f"{name}{[int(i) for i in where]} is {got[where]:.9g}, not {wanted[where]:.9g} "
                f"(within {allowed[name]:.2g})"
            )
    for name, copies in _bits(loop).items():
        if len(set(copies)) > 1:
            return f"replicas differ in {name}"
    return ""


def _values(loop: Loop) -> dict[str, np.ndarray]:
    """As `oracle._Training.values`."""
    model, updater = loop.step.model, loop.step.updater
    values = {f"trainable {v.path}": v.numpy() for v in model.trainable_variables}
    values |= {f"state {v.path}": v.numpy() for v in model.non_trainable_variables}
    with preserved(loop.step):
        for table in loop.step.tables.deferred:
            table.bring_up_to_date()
        values |= oracle.slots_of(loop.step.optimizer, loop.step.tables.parts)
    values |= {f"ema {i}": v.numpy() for i, v in enumerate(updater.ema)}
    if updater.loss_scale:
        values["loss scale"] = updater.loss_scale.scale.numpy().astype(np.float64)
    return values | {"skipped": np.int64(updater.skipped_so_far())}


def _bits(loop: Loop) -> dict[str, list[bytes]]:
    """Every variable of the state, on every replica; of a table that is split, all rows once."""
    parts = loop.step.tables.parts
    copies = loop.strategy.experimental_local_results
    return {
        f"{key}[{i}] {variable.name}": [
            copy.numpy().tobytes()
            for copy in ([parts[id(variable)]] if id(variable) in parts else copies(variable))
        ]
        for key, variables in loop.step.state().items()
        for i, variable in enumerate(variables)
    }


def _resumed(
    case: Case, dataset: Any, strategy: tf.distribute.Strategy, directory: str, straight: Loop
) -> str:
    """Restores the checkpoint of the pause into new objects, with other weights at first. Returns
    what differs at the end from the training that went on, "" if nothing does."""
    other = dataclasses.replace(case, seed=case.seed + 1)
    loop = _make_loop(other, dataset, strategy, directory)
    assert loop.checkpoints
    lost = case.change == "activation" and case.changed(case.pause - 1)  # JSON has no functions
    saved = loop.restore(changed=not lost or case.changed(case.pause))
    loop.checkpoints.close()
    if not saved or saved.step != case.pause:
        return f"restored {saved}, not step {case.pause}"
    if lost:
        change_model(case, loop.step.model, True)
    _train_to(case, loop, case.steps)
    # Keras numbers models and optimizers, so names may differ.
    pairs = zip(_bits(straight).items(), _bits(loop).values(), strict=True)
    return next((f"resumed, {name} differs" for (name, a), b in pairs if a != b), "")


def _evaluated(case: Case, dataset: Any, strategy: tf.distribute.Strategy, loop: Loop) -> str:
    """Evaluates the model of ``loop``. Returns what is counted wrongly, "" if nothing is."""
    arrays = arrays_of(case)
    weights = weights_of(case, arrays, trains=False)
    if not weights.any():  # refused
        return ""
    if case.source == "memory":
        dataset = InMemory(arrays, global_batch_size=case.sizes[0], training=False)
    with strategy.scope():
        metric = keras.metrics.MeanMetricWrapper(_class_of, name="label")
        loss_fn = losses_of if case.heads == 2 else cross_entropy
        weighted = [keras.metrics.MeanMetricWrapper(_class_of, name="weighted")]
        options = {"weighted_metrics": weighted, "weighting": case.weighting}
        step = Evaluates(loop.step.model, loss_fn, metrics=[metric], **options)
    results = Evaluator(step, dataset, strategy=strategy).run()
    labels = np.asarray(_class_of(arrays[1], None))
    wanted = {"label": labels[weights != 0].mean(), "examples": len(labels)}
    if (weights >= 0).all():  # else the sum may cancel
        wanted["weighted"] = (labels * weights).sum() / weights.sum()
    wrong = {k: v for k, v in wanted.items() if abs(results.get(k, v) - v) > 1e-5 * max(1.0, v)}
    return f"evaluated: {results}, not {wrong}" if wrong else ""
