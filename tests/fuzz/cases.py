"""One training as data, and hypothesis strategies that draw valid ones."""

from __future__ import annotations

import dataclasses
import json
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

CLASSES = 3
FLOATS = {"dense", "image", "two", "sparse"}  # features with numbers that may be NaN
INTEGERS = ("int64", "int32", "int16", "int8", "uint8", "uint16", "uint32", "uint64")
OPTIMIZERS = (
    *("SGD", "Momentum", "Adam", "AdamW", "RMSprop", "Adagrad", "Adadelta", "Adamax", "Ftrl"),
    *("Lion", "Lamb", "Adafactor", "Nadam", "Muon", "ScheduleFreeAdamW"),
)
# Those that move rows of an embedding table without a gradient, which ctl defers.
DEFERRED = ("Momentum", "RMSprop", "Adam", "AdamW", "Ftrl")

# What may be changed between two calls.
CHANGES = ("scale", "rate", "slope", "activation", "trainable", "train_only")
# Arguments that are refused before the first step: the value, and what the error says.
WRONG: dict[str, tuple[Any, str]] = {
    f"{name}={value}": (value, text or f"{name} must be .*not")
    for name, values, text in (
        ("clip_norm", (0, -1.0, math.inf, math.nan, True, "1"), ""),
        ("accumulate_steps", (0, -1, 2.0, True, None), ""),
        ("ema_decay", (1.5, -0.5, math.nan, 1), ""),
        ("bytes_per_pack", (-1, 2.5), ""),
        ("steps_per_loop", (0, -1, 2.5), ""),
        ("until", (10.5, math.inf, None, "9"), ""),
        ("evaluate_every", (-1, 0, 0.5), ""),
        ("on_nan", ("ignore", None), "on_nan is .*must be 'stop' or 'skip'"),
        ("loss_fn", ("msee", 3), "loss_fn.*give a function|unknown loss_fn .*did you mean"),
        ("metrics", ("accuracy", [3]), "metrics must be a list"),
        ("checkpoints", (3,), "checkpoints is .*CheckpointManager"),
    )
    for value in values
}


# What `check_step` is tried on. The steps that are right, each with the options that it is not
# written for: its state has a place for each example of a whole batch, or orders the examples.
RIGHT_STEPS: dict[str, set[str]] = {
    "a2c": {"sizes", "accumulate_steps"},
    "byol": set(),
    "fedavg": set(),
    "hard examples": {"accumulate_steps"},
    "lookahead": set(),
    "maml": set(),
    "moco": {"sizes", "accumulate_steps"},
    "muon": set(),
    "pcgrad": {"loss_scale"},  # `passes.reduced` takes the scale out
    "pinn": set(),
    "r-drop": set(),
    "scheduled sampling": {"accumulate_steps"},
    "truncated bptt": {"sizes", "accumulate_steps"},
    "wgan-gp": set(),
}
# Mistakes in a step, and those that methods make, too.
COMPOSED = (
    *("reduced twice", "averaged", "clipped before", "applied never", "applied twice"),
    *("by the share", "maximum", "np.random", "tf.random", "drawn alike", "counter"),
    *("counter of steps", "hidden state", "changed attribute", "changed module", "in half"),
)
MISTAKES = (
    *COMPOSED,
    *("reduced again", "never reduced", "never divided", "its own count", "counts one", "a mean"),
    *("penalty of each", "metrics of one", "drifts", "one loss", "top k", "batch statistics"),
    *("broadcast", "numpy", "tensor on self", "changed class", "changed array", "cached function"),
    *("cached pass", "second optimizer", "no loss", "no gradients", "no backward", "other order"),
    *("no weights", "never accumulates", "unscaled", "unread option", "uint8", "in inference"),
    *("shuffle", "small rate", "batch norm", "dropout"),
)
# Muon hides a wrong scale of the gradient; see tests/support/right_steps.py for the others.
NOT_COMPOSED = {"muon", "fedavg", "pcgrad", "wgan-gp", "r-drop"}
_METHODS = [name for name in RIGHT_STEPS if name not in NOT_COMPOSED]
BATCH = 16  # examples in memory of a checked step
# What a case keeps that has a right step, or a mistake that other options would hide or rename.
_OF_RIGHT = ("checked", "source", "sizes", "replicas", "accumulate_steps", "clip_norm", "ema_decay")
_OF_RIGHT += ("loss_scale", "on_nan", "bytes_per_pack", "jit_update", "seed")
_OF_MISTAKES = ("checked", "ema_decay", "on_nan", "bytes_per_pack", "jit_update", "seed")


@dataclass(frozen=True)
class Case:
    """One training. Every default is the simplest value."""

    # The model.
    features: str = "dense"  # dense, image, bytes, ids, ragged, sparse, two
    norm: str = "none"  # none, batch, renorm, synchronized: a BatchNormalization layer
    frozen: str = ""  # hidden, norm: a layer that does not train
    shared: bool = False  # a layer is used twice
    idle: bool = False  # a trainable variable has no gradient
    state: bool = False  # a layer counts its calls in a variable
    infinite: bool = False  # a layer has a constant Inf
    regularizer: str = ""  # L1, L2
    penalty: str = ""  # activity, layer: a loss that depends on the examples
    heads: int = 1  # 2: a classifier and a regression
    policy: str = "float32"  # of Keras
    float32_head: bool = False  # the last layer is float32 under any policy

    # The batches.
    sizes: tuple[int, ...] = (4, 4)  # examples of each
    source: str = "dataset"  # memory: `InMemory`; static: a dataset of static shapes
    # flat [n], column [n, 1], zeros (half of them), nothing (in batch 0), signed (sum 0), integers
    weights: str = ""
    weighting: str = "examples"  # sum_of_weights
    class_weight: bool = False  # the classes have weights, too
    labels: str = "int64"
    fault: str = ""  # nan, label
    relu: bool = False  # hides the nan from the loss, on a CPU
    fault_row: int = 0
    bad_label: int = CLASSES

    ends: bool = False  # the data end before the training
    evaluated: bool = False  # the trained model is, on the same batches

    # The options.
    replicas: int = 1
    strategy: str = "mirrored"  # default, central, ring
    twice: bool = False  # two passes with other losses, which sum to the loss
    accumulate_steps: int = 1
    clip_norm: float | None = None
    ema_decay: float | None = None
    loss_scale: bool = False
    on_nan: str = "stop"
    jit_compile: bool = False
    jit_update: bool = False
    optimizer: str = "SGD"
    weight_decay: float | None = None
    schedule: str = ""  # decay, cosine
    bytes_per_pack: int = 0
    by_rows: bool = False  # small embedding tables, too
    sharded: bool = False  # their rows are split over the replicas
    planned: bool = False  # by `embedding_plan="auto"`
    waits: bool = False  # tables get their values from the loop: `ctl.uninitialized_tables`
    steps_per_loop: int | None = None

    change: str = ""  # one of `CHANGES`
    change_step: int = 1  # the first that has the change
    back: bool = False  # the next step is as before
    wrong: str = ""  # one of `WRONG`: no step is run
    # Calls `ctl.testing.check_step` instead: the name of a right step, or of a mistake, which may
    # be "in" a right step.
    checked: str = ""

    pause: int = 0  # save after this many steps, and resume; 0 does not
    seed: int = 0

    def __str__(self) -> str:
        """JSON of what differs from the defaults."""
        changed = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if getattr(self, field.name) != field.default
        }
        return json.dumps(changed)

    @property
    def steps(self) -> int:
        return len(self.sizes)

    def changed(self, step: int) -> bool:
        """Whether ``step``, counted from 0, has the change."""
        end = self.change_step + 1 if self.back else self.steps
        return bool(self.change) and self.change_step <= step < end


def parsed(values: dict[str, Any]) -> Case:
    """The case of a JSON object; what is left out is simplest."""
    return Case(**(values | ({"sizes": tuple(values["sizes"])} if "sizes" in values else {})))


def valid(case: Case) -> Case:
    """``case`` without what contradicts the rest of it."""
    if case.checked:
        return _valid_checked(case)
    changes: dict[str, Any] = {}
    rows = sum(case.sizes)
    if case.features in ("ragged", "sparse"):
        changes |= {"jit_compile": False, "source": "dataset"}  # XLA has no such tensors
    if changes.get("source", case.source) != "dataset":
        changes |= {"sizes": (case.sizes[0],) * case.steps}
        rows = case.sizes[0] * case.steps
    if case.fault == "nan" and case.features not in FLOATS:
        changes |= {"fault": ""}
    in_memory = changes.get("source", case.source) == "memory" and case.heads == 1
    skips = case.on_nan == "skip" or case.loss_scale or case.weights == "nothing"
    if case.fault == "label" and not in_memory and (skips or case.heads == 2):
        # XLA makes a NaN of a label that is no class. ctl skips that, or does not know the loss.
        changes |= {"jit_compile": False}
    if case.relu and changes.get("fault", case.fault) != "nan":
        changes |= {"relu": False}
    if case.change == "scale" and case.fault == "label":  # of a loss of its own, not checked
        changes |= {"fault": ""}
    if case.heads == 2:  # the labels are not classes alone
        changes |= {"class_weight": False}
    if case.weights == "signed" and case.weighting == "sum_of_weights":
        # Refused, if nothing else is at fault and not by XLA, which makes a NaN of it.
        changes |= {"features": "dense", "norm": "none", "fault": "", "jit_compile": False}
    if case.state and case.replicas > 1:  # it counts micro-batches, which may differ in number
        changes |= {"accumulate_steps": 1}
    if case.norm != "none" and case.optimizer != "Momentum" and smallest_call(case, **changes) == 1:
        changes |= {"optimizer": "SGD"}
    if case.strategy == "default":
        changes |= {"replicas": 1}
    if case.strategy == "ring":  # an error in the graph would end all its collectives
        changes |= {"replicas": 2, "fault": "", "ends": False}
        changes |= {"weights": ""} if case.weights == "signed" else {}
    if case.strategy == "central" and case.replicas == 1:
        changes |= {"strategy": "mirrored"}
    elif case.strategy == "central":  # TensorFlow cannot update variables in the forward pass then
        changes |= {"accumulate_steps": 1, "jit_compile": False, "state": False, "twice": False}
        changes |= {"frozen": "norm"} if case.norm != "none" else {}
    if changes.get("frozen", case.frozen) == "norm" and case.norm == "none":
        changes |= {"frozen": ""}
    if (
        case.norm == "synchronized" and case.replicas > 1
    ):  # refused, see tests/phases/test_checks.py
        changes |= {"penalty": "", "twice": False}
    if changes.get("source", case.source) == "memory" or case.fault:
        changes |= {"ends": False}
    if case.heads == 1 and case.float32_head and case.policy == "float32":
        changes |= {"float32_head": False}
    if case.change == "trainable" and case.frozen == "hidden":
        changes |= {"change": ""}
    if case.features not in ("ids", "two", "ragged") or case.twice or case.change == "scale":
        changes |= {"by_rows": False}  # there is no table, or the step has phases of its own
    split = changes.get("by_rows", case.by_rows) and changes.get("replicas", case.replicas) > 1
    split &= case.strategy in ("mirrored", "ring")
    # What is deferred has tables in float32.
    deferred = case.optimizer in DEFERRED and case.policy not in ("bfloat16", "float16")
    split &= case.optimizer in ("SGD", "Adagrad") or deferred
    split &= (case.accumulate_steps, case.ema_decay, case.weight_decay) == (1, None, None)
    if not split or case.jit_compile or case.frozen or case.penalty:
        changes |= {"sharded": False}  # the table is not trained by rows, or in a loop
    if case.features not in ("ids", "two", "ragged"):
        changes |= {"waits": False}
    changes |= {"pause": min(case.pause, case.steps - 1), "fault_row": case.fault_row % rows}
    changes |= {"change_step": max(1, min(case.change_step, case.steps - 1))}
    if case.steps == 1:
        changes |= {"change": ""}
    return dataclasses.replace(case, **changes)


def _valid_checked(case: Case) -> Case:
    """`valid` of a case with a checked step, which has a model and examples of its own."""
    right = case.checked in RIGHT_STEPS
    kept = _OF_RIGHT if right else _OF_MISTAKES
    case = Case(**{name: getattr(case, name) for name in kept})
    if not right:
        return case
    unfit, replicas = RIGHT_STEPS[case.checked], 3 if case.replicas == 3 else 2  # 4 take 10 s
    changes: dict[str, Any] = {"replicas": replicas}
    if "sizes" in unfit or case.source != "dataset":
        changes |= {"source": "memory", "sizes": (BATCH,)}
    else:  # at least one example for each replica
        changes |= {"sizes": (min(max(case.sizes[0], replicas), BATCH),)}
    if "accumulate_steps" in unfit:
        changes |= {"accumulate_steps": 1}
    if "loss_scale" in unfit:
        changes |= {"loss_scale": False}
    return dataclasses.replace(case, **changes)


def smallest_call(case: Case, **changes: Any) -> int:
    """The fewest examples that a BatchNormalization sees at once. The gradients before one example
    are 0 but for rounding, and most optimizers divide them by their own size."""
    smallest = []
    for size in changes.get("sizes", case.sizes):
        share = size if case.norm == "synchronized" else -(-size // case.replicas)
        for rows in {share, size % share or share}:
            smallest.append(rows // min(rows, case.accumulate_steps))
    return min(smallest)


def _bad_labels(dtype: str) -> list[int]:
    """Labels of ``dtype`` that are no classes. The last ones are classes if they lose bits."""
    bits = int(dtype.lstrip("uint"))
    negative = [] if dtype.startswith("u") else [-1, -(2 ** (bits - 1))]
    wraps = [2**32 + 1] if bits == 64 else []
    return [CLASSES, *negative, *wraps]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Draws valid cases."""

    def rarely(one_in: int) -> bool:
        return draw(st.integers(0, one_in - 1)) == one_in - 1

    def choice(*values: Any) -> Any:
        return draw(st.sampled_from(values))

    replicas = choice(1, 1, 2, 2, 3, 4)
    source = choice("dataset", "dataset", "memory", "static")
    size = st.one_of(st.integers(1, 9), st.integers(1, 70))
    if source != "dataset" and not rarely(10):
        size = size.map(lambda n: n + -n % replicas)
    labels = choice(*INTEGERS)
    composed = f"{choice(*COMPOSED)} in {choice(*_METHODS)}"
    checked = choice(choice(*RIGHT_STEPS), choice(*MISTAKES), composed)
    case = Case(
        features=choice("dense", "image", "bytes", "ids", "two", "ragged", "sparse"),
        norm=choice("none", "none", "batch", "batch", "renorm", "synchronized"),
        frozen=choice("", "", "hidden", "norm"),
        shared=rarely(4),
        idle=rarely(6),
        state=rarely(4),
        infinite=rarely(8),
        regularizer=choice("", "", "L1", "L2"),
        penalty=choice("", "", "activity", "layer"),
        heads=choice(1, 1, 2),
        policy=choice(
            *("float32", "float32", "float32", "float64", "bfloat16", "float16"),
            *("mixed_bfloat16", "mixed_float16"),
        ),
        float32_head=choice(True, False),
        sizes=tuple(draw(st.lists(size, min_size=2, max_size=4))),
        source=source,
        weights="integers"
        if rarely(30)
        else choice("", "", "", "flat", "column", "zeros", "nothing", "signed"),
        weighting=choice("examples", "sum_of_weights"),
        class_weight=rarely(4),
        labels=labels,
        fault=choice("nan", "label") if rarely(6) else "",
        fault_row=draw(st.integers(0, 279)),
        bad_label=choice(*_bad_labels(labels)),
        ends=rarely(4),
        evaluated=rarely(3),
        replicas=replicas,
        strategy=choice("mirrored", "mirrored", "mirrored", "ring", "default", "central"),
        twice=rarely(6),
        accumulate_steps=choice(1, 1, 2, 3, 5),
        clip_norm=choice(None, None, 0.05, 1.0),
        ema_decay=choice(None, None, 0.9),
        loss_scale=rarely(4),
        on_nan=choice("stop", "skip"),
        jit_compile=rarely(8),
        jit_update=rarely(8),
        optimizer=choice(*OPTIMIZERS),
        weight_decay=choice(None, None, 0.1),
        schedule=choice("", "", "decay", "cosine"),
        bytes_per_pack=choice(0, 0, 1, 64),
        by_rows=choice(False, True),
        sharded=choice(False, True),
        planned=choice(False, True),
        waits=choice(False, True),
        steps_per_loop=choice(None, 1, 2),
        change=choice(*CHANGES) if rarely(4) else "",
        change_step=draw(st.integers(1, 3)),
        back=choice(True, False),
        wrong=choice(*WRONG) if rarely(15) else "",
        checked=checked if rarely(5) else "",
        pause=draw(st.integers(1, 3)) if rarely(4) else 0,
        seed=draw(st.integers(0, 99)),
        relu=choice(False, True),
    )
    return valid(case)


def drawn(count: int, number: int) -> list[Case]:
    """``count`` cases of the seed ``number``; always the same for one version of hypothesis."""
    found: dict[Case, None] = {}

    @seed(number)
    @settings(
        max_examples=4 * count,
        phases=[Phase.generate],
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(cases())
    def collect(case: Case) -> None:
        found[case] = None

    collect()
    # Cases that hypothesis draws one after the other are often alike.
    return random.Random(number).sample(list(found), min(count, len(found)))


def simpler(case: Case) -> Iterator[Case]:
    """Cases that are nearer to the simplest one than ``case``, the simplest first."""
    tried = {case}
    sizes = [(4,) * case.steps, *(case.sizes[:n] for n in range(1, case.steps)), case.sizes[1:]]
    sizes += [tuple(max(1, n // 2) for n in case.sizes)]
    sizes += [tuple(n - (i == j and n > 1) for j, n in enumerate(case.sizes)) for i in range(4)]
    values = {
        field.name: [field.default]
        for field in dataclasses.fields(case)
        if getattr(case, field.name) != field.default
    }
    values["sizes"] = [s for s in sizes if s]
    for name in ("replicas", "accumulate_steps", "pause", "fault_row"):
        values.setdefault(name, [])
        values[name] += range(1, getattr(case, name))
    for name, choices in values.items():
        for value in choices:
            new = valid(dataclasses.replace(case, **{name: value}))
            if new not in tried:
                tried.add(new)
                yield new
