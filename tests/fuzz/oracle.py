"""The oracle: trains a case on one device without ctl, and predicts how ctl ends.

It differentiates the mean loss of the whole global batch at once. Only where a layer sees which
examples are together (BatchNormalization) or how often it is called (state of its own), it follows
what ctl/README.md promises: each replica normalizes over its own part, micro-batches go through the
model one after the other, and statistics are averaged over replicas, weighted by their examples.
Without micro-batches, the variance includes that between the means of the replicas.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from .cases import CLASSES, WRONG, Case, smallest_call
from .models import (
    MOMENTUM,
    change_model,
    counted,
    losses_of,
    make_model,
    make_optimizer,
    rate_of,
    scale_of,
    weights_of,
)

# See the docstring of the package.
NOISE = 16.0
MARGIN = 16.0
_UNITS = {"float64": 2.0**-53, "float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}


class End(NamedTuple):
    """How a training ends.

    Attributes:
        verdict: "equal", "refused", "diverged", or "unclear": rounding decides whether a float16
            gradient overflows.
        text: regular expression of the error; "" for "equal".
        values: of the variables at the end, by name; also "loss" and "label", if they are defined.
        largest_at_first: the largest of each variable before the first step, by name: rounding is
            relative to that, too, where a step replaces a large weight by a small one, as of Ftrl.
        skipped: the steps whose gradient was not finite.
    """

    verdict: str
    text: str = ""
    values: dict[str, np.ndarray] = {}  # noqa: RUF012
    largest_at_first: dict[str, float] = {}  # noqa: RUF012
    skipped: tuple[int, ...] = ()


class Tolerance(NamedTuple):
    """The end of a training, and by how much each value may differ."""

    end: End
    allowed: dict[str, float]


def predict(case: Case, arrays: Any, batches: list[Any]) -> Tolerance:
    """Trains ``case`` on ``batches``; ``arrays`` are all examples."""
    refusal = _refused_early(case, arrays)
    if case.wrong:  # either of two faults may be found first
        refusal = f"{WRONG[case.wrong][1]}|{refusal or WRONG[case.wrong][1]}"
    if refusal:
        return Tolerance(End("refused", refusal), {})
    end = _train(case, batches)
    if end.verdict != "equal":
        return Tolerance(end, {})
    unit = unit_of(case)
    others = [_train(case, batches, noise=sign * NOISE * unit) for sign in (1, -1)]
    if "float16" in case.policy:
        # A replica divides by its own count, so that its gradients may be larger than here.
        larger = 2.0 * case.replicas * (8.0 if case.weights or case.class_weight else 1.0)
        others.append(_train(case, batches, scaled=larger))
    if any(o[:2] != end[:2] or o.skipped != end.skipped for o in others):
        return Tolerance(End("unclear"), {})
    allowed = {}
    for name, value in end.values.items():
        if not np.issubdtype(value.dtype, np.inexact) and value.dtype.name != "bfloat16":
            allowed[name] = 0.0
            continue
        wide, own = value.astype(np.float64), _UNITS[value.dtype.name]
        # The weights are rounded once a step. Statistics of a batch are as exact as activations.
        rounding = case.steps * own + (0.0 if name.startswith("trainable") else unit)
        with np.errstate(invalid="ignore"):  # Inf - Inf
            changes = [wide - other.values[name].astype(np.float64) for other in others[:2]]
            change = np.nan_to_num(np.abs(changes)).max(initial=0.0)
        largest = max(_largest(value), end.largest_at_first.get(name, 0.0))
        allowed[name] = MARGIN * change + 8.0 * rounding * largest
    return Tolerance(end, allowed)


def _largest(value: np.ndarray) -> float:
    wide = np.abs(value.astype(np.float64))
    return wide.max(initial=0.0, where=np.isfinite(wide))


def unit_of(case: Case) -> float:
    """Unit roundoff of the type that the model and its loss compute in."""
    computes = keras.dtype_policies.get(case.policy).compute_dtype
    return max(_UNITS[computes], _UNITS["float32"])


# Refusals -----------------------------------------------------------------------------------------


def _refused_early(case: Case, arrays: Any) -> str:
    """What must be refused before a batch is read."""
    size = case.sizes[0]
    # Their batch size is known before.
    if case.source != "dataset":
        if size % case.replicas:
            return f"batch size {size} is not divisible by {case.replicas} replicas"
        if case.accumulate_steps > size // case.replicas:
            return f"accumulate_steps={case.accumulate_steps}, but a replica has"
    if case.source == "memory" and case.heads == 1 and (refusal := _refused_labels(arrays[1])):
        return refusal
    synchronized = case.norm == "synchronized" and _trains_norm(case) and case.replicas > 1
    if synchronized and (case.accumulate_steps > 1 or case.jit_compile):
        return "a synchronized BatchNormalization .* neither --accumulate_steps nor --jit_compile"
    taken = {"Muon": ("float32",), "Adafactor": ("float32", "float64", "bfloat16")}
    if case.optimizer in taken:
        trained = make_model(case).trainable_variables
        if any(v.dtype not in taken[case.optimizer] for v in trained):
            return f"optimizer {case.optimizer} cannot train .*: keep the weights in float32"
    if case.weights == "integers":
        return "the weights .third part. of a batch have dtype int64"
    if case.features == "sparse" and case.accumulate_steps > 1:
        return "accumulate_steps cannot split sparse tensors"
    return ""


def _refused_labels(labels: Any) -> str:
    classes = labels["class"] if isinstance(labels, dict) else labels
    wrong = [int(label) for label in classes if not 0 <= int(label) < CLASSES]
    return f"label {wrong[0]} .*is out of range.*labels must be 0 to {CLASSES - 1}" if wrong else ""


def _refused_batch(case: Case, batch: Any) -> str:
    """What must be refused when the step meets ``batch``."""
    rows = tf.nest.flatten(batch)[0].shape[0]
    empty = any(not len(part) for part in _shares(rows, case.replicas))
    if empty and case.features == "sparse":
        return "a replica got no examples .* sparse"
    if empty and _trains_norm(case) and case.norm == "synchronized":
        return "a replica got no examples .* synchronized BatchNormalization"
    if case.weighting == "sum_of_weights" and (weights_of(case, batch) < 0).any():
        return "a weight is below 0, .*weighting='examples'"
    return _refused_labels(batch[1])


def _refused_change(case: Case) -> str:
    """What must be refused when the change is made."""
    if case.change == "rate" and case.schedule:
        return "optimizer.learning_rate was set to .* because it has a schedule"
    if case.change == "trainable":
        return "the trainable variables of model .* have changed since the step was built"
    return ""


# Training -----------------------------------------------------------------------------------------


def _trains_norm(case: Case) -> bool:
    return case.norm != "none" and case.frozen != "norm"


def _shares(rows: int, replicas: int) -> list[np.ndarray]:
    """The examples of each replica: as TensorFlow splits a batch, the last ones may get none."""
    share = -(-rows // replicas)
    return [np.arange(rows)[r * share : (r + 1) * share] for r in range(replicas)]


def _calls(case: Case, rows: int) -> list[list[np.ndarray]]:
    """The examples of each call of the model, for each replica whose calls matter."""
    if not _trains_norm(case) and not case.state:
        return [[np.arange(rows)]]
    parts = case.accumulate_steps
    shares = _shares(rows, 1 if case.norm == "synchronized" else case.replicas)
    calls = []
    for share in shares:
        if len(share):
            # The longer micro-batches are the last ones.
            pieces = np.array_split(share[::-1], min(len(share), parts))
            calls.append([piece[::-1] for piece in pieces[::-1]])
    return calls


class _Training:
    """The state of a plain training loop.

    Args:
        case: what to train.
        noise: how far to move each gradient, relative to the largest; of either sign.
        scaled: factor of the loss while it is differentiated, to see what overflows.
    """

    def __init__(self, case: Case, noise: float, scaled: float):
        self.case, self.noise, self.scaled = case, noise, scaled
        self.model = make_model(case)
        self.variables = self.model.trainable_variables
        self.norms = (
            self.model.get_layer("norm").non_trainable_variables if _trains_norm(case) else []
        )
        self.optimizer = make_optimizer(case)
        self.optimizer.build(self.variables)
        self.averages: list[np.ndarray] = []
        self.loss_scale, self.finite_steps = 2.0**15, 0
        self.skipped: list[int] = []
        self.updates = 0
        self.random = np.random.default_rng(1)
        self.changed = False

    def step(self, number: int, batch: Any) -> float:
        """Makes one step. Returns the mean loss, NaN if the training has diverged."""
        case, state = self.case, self.model.non_trainable_variables
        self.changed = case.changed(number)
        change_model(case, self.model, self.changed)
        before = [v.numpy() for v in state]
        loss, gradients = self.differentiate(batch)
        finite = all(np.isfinite(g).all() for g in gradients if g is not None)
        if (case.loss_scale or case.on_nan == "skip") and not finite:
            for variable, value in zip(state, before, strict=True):
                variable.assign(value)
            self.skipped.append(number)
            self.loss_scale, self.finite_steps = max(self.loss_scale / 2, 1.0), 0
            return 0.0
        self.update(number, gradients)
        return loss

    def differentiate(self, batch: Any) -> tuple[float, list]:
        """The mean loss of ``batch`` and its gradients, in float64; updates the state."""
        case, state = self.case, self.model.non_trainable_variables
        before = [v.numpy() for v in state]
        features, labels, *_ = batch
        rows = tf.nest.flatten(features)[0].shape[0]
        weights = weights_of(case, batch)
        total = counted(case, weights) or 1.0  # without examples, the loss and its gradients are 0
        # A sum over examples that cancels is no more exact than its terms.
        weights = weights * (1.0 + self.noise * self.signs(rows))
        scale = self.scaled * (self.loss_scale if case.loss_scale else 1.0)
        loss, sums, after = 0.0, [None] * len(self.variables), []
        for calls in _calls(case, rows):
            for variable, value in zip(state, before, strict=True):
                variable.assign(value)
            for examples in calls:
                part = tf.nest.map_structure(lambda a, e=examples: a[e], (features, labels))
                with tf.GradientTape() as tape:
                    of_all = len(examples) / rows * bool(weights.any())
                    mean = self.mean_loss(*part, weights[examples], total, of_all)
                    scaled = mean * scale
                found = tape.gradient(scaled, [v.value for v in self.variables])
                if case.change == "train_only" and self.changed:
                    trained = {*map(id, self.model.get_layer("logits").trainable_variables)}
                    pairs = zip(found, self.variables, strict=True)
                    found = [g if id(v) in trained else None for g, v in pairs]
                loss += float(mean)
                sums = [_plus(s, g) for s, g in zip(sums, found, strict=True)]
            values = {v.name: v.numpy().astype(np.float64) for v in self.norms}
            after.append((sum(map(len, calls)) / rows, values))
        self.combine(after)
        gradients = [None if s is None else s / scale for s in sums]
        return loss, self.moved(gradients)

    def combine(self, after: list[tuple[float, dict[str, np.ndarray]]]) -> None:
        """Assigns the statistics. ``after``: each replica's share of the examples, and its own."""
        for variable in self.norms:
            value = sum(share * values[variable.name] for share, values in after)
            if variable.name == "moving_variance" and self.case.accumulate_steps == 1:
                mean = sum(share * values["moving_mean"] for share, values in after)
                spread = sum(share * (values["moving_mean"] - mean) ** 2 for share, values in after)
                moved = 0.0 if self.case.norm == "renorm" else 1.0 - MOMENTUM
                value = value + (spread / moved if moved else 0.0)  # (moved * distance)**2 / moved
            variable.assign(np.asarray(value).astype(variable.numpy().dtype))

    def mean_loss(
        self, features: Any, labels: Any, weights: Any, total: float, of_all: float
    ) -> tf.Tensor:
        """The part of these examples in the mean loss of the global batch; ``of_all`` of them are
        these."""
        if self.case.features == "bytes":
            features = features.astype(np.float32) * np.float32(1 / 255)
        outputs = self.model(features, training=True)
        if self.case.heads == 2:
            losses = losses_of(labels, outputs)
        else:
            logits = tf.nn.log_softmax(tf.cast(outputs, tf.float32))
            losses = -tf.gather(logits, labels.astype(np.int64), axis=1, batch_dims=1)
        loss = tf.reduce_sum(losses * weights.astype(np.float32)) / total
        loss *= scale_of(self.case, self.changed)
        penalties = [tf.cast(penalty, tf.float32) for penalty in self.model.losses]
        if self.case.penalty:  # Keras puts it before those of weights
            loss += penalties.pop(0) * of_all
        for penalty in penalties:
            loss += penalty * (counted(self.case, weights) / total)
        return loss

    def moved(self, gradients: list) -> list:
        """``gradients``, each moved at random by ``noise`` times the largest."""
        largest = max(np.abs(g).max(initial=0.0) for g in gradients if g is not None)
        if not self.noise or not np.isfinite(largest):
            return gradients
        bound = self.noise * largest
        alone = smallest_call(self.case) == 1
        moved = []
        for gradient, variable in zip(gradients, self.variables, strict=True):
            if gradient is not None:
                # What is exactly 0, such as the row of a word that does not occur, is exact. But
                # where a normalization removes a bias, or has one example, terms cancel to 0.
                cancels = self.case.norm != "none" and (alone or variable.path == "hidden/bias")
                inexact = cancels | (gradient != 0)
                gradient = gradient + bound * self.signs(gradient.shape) * inexact
            moved.append(gradient)
        return moved

    def signs(self, shape: Any) -> np.ndarray:
        return self.random.choice([-1.0, 1.0], shape)

    def update(self, number: int, gradients: list) -> None:
        case = self.case
        if case.clip_norm is not None:
            norm = math.sqrt(sum((g**2).sum() for g in gradients if g is not None))
            factor = case.clip_norm / max(norm, case.clip_norm) if np.isfinite(norm) else np.nan
            gradients = [None if g is None else g * factor for g in gradients]
        pairs = [(g, v) for g, v in zip(gradients, self.variables, strict=True) if g is not None]
        rounding = 2 * _UNITS["float32"] * np.sign(self.noise)  # the type of the rate
        rate = schedule(case, number) or rate_of(case)
        rate *= 0.5 if case.change == "rate" and self.changed else 1.0
        self.optimizer.learning_rate = rate * (1.0 + rounding)
        self.optimizer.apply([tf.cast(g, v.dtype) for g, v in pairs], [v for _, v in pairs])
        if case.ema_decay is not None:
            decay = case.ema_decay if self.updates else 0.0
            weights = self.weights()
            pairs = zip(self.averages or weights, weights, strict=True)
            self.averages = [(decay * a + (1.0 - decay) * w).astype(w.dtype) for a, w in pairs]
        self.updates += 1
        self.finite_steps += 1

    def weights(self) -> list[np.ndarray]:
        """And statistics, in the types of their averages: float32, or wider as the variable."""
        averaged = [*self.variables, *self.norms]
        wide = [np.promote_types(np.float32, v.dtype) for v in averaged]
        return [v.numpy().astype(t) for v, t in zip(averaged, wide, strict=True)]

    def largest(self) -> dict[str, float]:
        """The largest of each variable by name."""
        largest = {name: _largest(value) for name, value in self.values().items()}
        if self.case.optimizer == "Ftrl":
            # Its weights are -linear * rate / sqrt(accumulator), with 0.1 in the accumulator.
            weights = max(largest[f"trainable {v.path}"] for v in self.variables)
            linear = weights * math.sqrt(0.1) / rate_of(self.case)
            largest |= {name: linear for name in largest if name.endswith("_linear")}
        return largest

    def values(self) -> dict[str, np.ndarray]:
        """The variables by name, in the order of ctl's."""
        values = {f"trainable {v.path}": v.numpy() for v in self.variables}
        values |= {f"state {v.path}": v.numpy() for v in self.model.non_trainable_variables}
        values |= slots_of(self.optimizer)
        if self.case.ema_decay is not None:
            values |= {f"ema {i}": a for i, a in enumerate(self.averages or self.weights())}
        if self.case.loss_scale:
            values["loss scale"] = np.float64(self.loss_scale)
        return values | {"skipped": np.int64(len(self.skipped))}


def slots_of(
    optimizer: keras.optimizers.Optimizer, parts: Mapping[int, Any] | None = None
) -> dict[str, np.ndarray]:
    """The state of ``optimizer`` by name, without the learning rate. ``parts`` stand for variables
    that are split, by their ids."""
    variables = [v for v in optimizer.variables if not v.path.endswith("learning_rate")]
    # Keras numbers the product of Nadam, which has no name.
    names = [v.name.rstrip("_0123456789") for v in variables]
    return {
        f"slot {i} {name}": (parts or {}).get(id(v.value), v).numpy()
        for i, (name, v) in enumerate(zip(names, variables, strict=True))
    }


def schedule(case: Case, step: Any) -> Any:
    """The rate at ``step``, a number or a tensor; None without a schedule."""
    if case.schedule == "decay":
        return rate_of(case) * 0.8**step
    if case.schedule == "cosine":  # warm-up of one step, then to 0 at step 6
        warm = min((step + 1) / 2, 1.0)
        return rate_of(case) * warm * 0.5 * (1.0 + math.cos(math.pi * max(step - 1, 0) / 5))
    return None


def _plus(total: Any, gradient: Any) -> Any:
    if gradient is None:
        return total
    dense = tf.convert_to_tensor(gradient).numpy().astype(np.float64)
    return dense if total is None else total + dense


def _train(case: Case, batches: list[Any], noise: float = 0.0, scaled: float = 1.0) -> End:
    """Trains until the end or until what ctl must end with."""
    training = _Training(case, noise, scaled)
    first = training.largest()
    losses = counts = 0.0
    for number, batch in enumerate(batches):
        if case.changed(number) and _refused_change(case):
            return End("refused", _refused_change(case))
        refusal = _refused_batch(case, batch)
        if refusal:
            return End("refused", refusal)
        loss = training.step(number, batch)
        if not math.isfinite(loss):
            same_call = batches[number + 1 : number + (case.steps_per_loop or len(batches))]
            if any(_refused_batch(case, later) for later in same_call):
                return End("unclear")  # either fault may be found first
            later = r"\d+;|is not finite at step|The state has a NaN" if case.relu else ""
            return End("diverged", f"(the loss is .* at step {later or f'{number + 1};'})")
        if number + 1 == case.pause and not _finite(training.values()):
            return End("diverged", "The state has a NaN or Inf")
        if number not in training.skipped:
            count = counted(case, weights_of(case, batch))
            losses, counts = losses + loss * count, counts + count
    values = training.values()
    trained = {name: value for name, value in values.items() if name.startswith("trainable")}
    if not _finite(trained):  # of the last update; no loss shows it
        return End("diverged", "is not finite at step .*;")
    if counts:
        values["loss"] = np.float32(losses / counts)
    return End("equal", "", values, first, tuple(training.skipped))


def _finite(values: dict[str, np.ndarray]) -> bool:
    changing = (v for name, v in values.items() if v.dtype.kind != "i" and "cap/cap" not in name)
    return all(np.isfinite(v).all() for v in changing)
