"""The names that flags accept and builders know, and the errors for other names.

Imports no TensorFlow, because flags are checked before TensorFlow is loaded.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

from ctl.errors import UsageError

MODELS = ("convnet", "dense", "resnet20", "tiny_transformer")
# Those of `ctl.losses`, and those of Keras with their classes in `keras.losses`.
LOSSES = ("cross_entropy", "binary_cross_entropy", "mean_squared_error")
KERAS_LOSSES = {
    "sparse_categorical_crossentropy": "SparseCategoricalCrossentropy",
    "categorical_crossentropy": "CategoricalCrossentropy",
    "binary_crossentropy": "BinaryCrossentropy",
    "mean_absolute_error": "MeanAbsoluteError",
    "mse": "MeanSquaredError",
    "mae": "MeanAbsoluteError",
    "huber": "Huber",
    "log_cosh": "LogCosh",
    "hinge": "Hinge",
    "squared_hinge": "SquaredHinge",
    "categorical_hinge": "CategoricalHinge",
    "cosine_similarity": "CosineSimilarity",
    "kl_divergence": "KLDivergence",
    "poisson": "Poisson",
    "mean_absolute_percentage_error": "MeanAbsolutePercentageError",
    "mean_squared_logarithmic_error": "MeanSquaredLogarithmicError",
    "binary_focal_crossentropy": "BinaryFocalCrossentropy",
    "categorical_focal_crossentropy": "CategoricalFocalCrossentropy",
    "bce": "BinaryCrossentropy",
    "kld": "KLDivergence",
    "mape": "MeanAbsolutePercentageError",
    "msle": "MeanSquaredLogarithmicError",
    "ctc": "CTC",
}
OF_CLASSES = {"cross_entropy", "sparse_categorical_crossentropy", "SparseCategoricalCrossentropy"}
KERAS_LOSSES |= {kind: kind for kind in KERAS_LOSSES.values()}
WEIGHTINGS = ("examples", "sum_of_weights")
SCALING_RULES = ("none", "linear", "sqrt")
STRATEGIES = (
    *("auto", "one_device", "mirrored", "central_storage", "tpu", "default", "multi_worker"),
    "parameter_server",
)
COMMUNICATIONS = ("auto", "ring", "nccl")
CROSS_DEVICE_OPS = ("auto", "nccl", "ring", "hierarchical_copy", "reduction_to_one_device")
PRECISIONS = ("float32", "mixed_bfloat16", "mixed_float16")
# Names and their classes in `keras.optimizers`. A test compares every class with plain Keras.
OPTIMIZERS = {
    "sgd": "SGD",
    "momentum": "SGD",
    "nesterov": "SGD",
    "adam": "Adam",
    "adamw": "AdamW",
    "rmsprop": "RMSprop",
    "adagrad": "Adagrad",
    "adadelta": "Adadelta",
    "adamax": "Adamax",
    "ftrl": "Ftrl",
    "lion": "Lion",
    "lamb": "Lamb",
    "adafactor": "Adafactor",
    "nadam": "Nadam",
    "muon": "Muon",
    "schedulefreeadamw": "ScheduleFreeAdamW",
}

# Flags of the optimizer and its rate, which an option of a step with such a name would not set.
OPTIMIZER_FLAGS = (
    *("optimizer", "momentum", "weight_decay", "label_smoothing", "precision"),
    *("schedule", "learning_rate", "boundaries", "rates", "warmup", "end_learning_rate"),
    *("decay_rate", "decay_steps", "plateau_metric", "plateau_patience", "power"),
    *("lr_scaling", "base_batch_size"),
)

# Optimizers of Keras that ctl refuses, with the reason; see
# `ctl.optimizers.check_optimizer`.
_REFUSED = {
    "lossscaleoptimizer": "use --precision=mixed_float16",
    "multioptimizer": "in Python, give parameter groups",
}

# Ends of files, see `ctl.data.sources`.
IMAGES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp")

_MOST_CHOICES = 16  # that an error lists

_FUNCTION = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")


def check_name(what: str, name: str, known: Iterable[str], otherwise: str = "") -> None:
    """Raises `UsageError`, with the closest known name, unless ``name`` is one of ``known``.

    ``what`` describes the name in the message. ``otherwise`` is appended to the list of choices.
    """
    known = tuple(known)
    if name in known:
        return
    close = difflib.get_close_matches(name, known, n=1)
    close = close or difflib.get_close_matches(name.lower(), known, n=1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    choices = known if len(known) <= _MOST_CHOICES else [*known[:_MOST_CHOICES], "…"]
    raise UsageError(
        f"unknown {what} {name!r}: {hint}the choices are {', '.join(choices)}{otherwise}"
    )


def check_optimizer_name(name: str) -> None:
    """Raises `UsageError` unless ``name`` is one of `OPTIMIZERS`."""
    reason = _REFUSED.get(name.lower().replace("_", ""))
    if reason:
        raise UsageError(
            f"optimizer {name} is not supported: {reason}; use {', '.join(OPTIMIZERS)}"
        )
    check_name("optimizer", name, OPTIMIZERS)


def check_loss_name(name: str) -> None:
    """Raises `UsageError` unless ``name`` is one of `LOSSES` or `KERAS_LOSSES`, or a
    ``package.module:function``, which need not exist."""
    check_code_name("loss", name, (*LOSSES, *KERAS_LOSSES))


def is_function_name(name: str) -> bool:
    """Whether ``name`` has the form ``package.module:function``."""
    return _FUNCTION.fullmatch(name) is not None


def check_model_name(name: str) -> None:
    """Raises `UsageError` unless ``name`` is one of `MODELS` or a ``package.module:function``.

    Does not import the function, so it may not exist.
    """
    check_code_name("model", name, MODELS)


def check_code_name(what: str, name: str, known: Iterable[str]) -> None:
    """As `check_name`, but ``name`` may also be a ``package.module:function``."""
    if not is_function_name(name):
        check_name(what, name, known, ", or package.module:function for your own")
