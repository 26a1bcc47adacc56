"""The names that flags accept and builders know, and the errors for other names.

Imports no TensorFlow, because flags are checked before TensorFlow is loaded.
"""

from __future__ import annotations

import collections
import contextlib
import difflib
import os
import re
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from ctl.base.remote import is_folder, located, opened, scandir
from ctl.base.stores import is_url
from ctl.errors import UsageError

MODELS = ("convnet", "dense", "dlrm", "resnet20", "tiny_transformer")
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
KERAS_LOSSES |= {kind: kind for kind in KERAS_LOSSES.values()}
WEIGHTINGS = ("examples", "sum_of_weights")
SPARSE_ROWS = ("auto", "on", "lazy", "off")
EMBEDDING_PLANS = ("replicated", "sharded", "auto")
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

# Ends of files, see `ctl.data.sources` and `ctl.data.tables`.
IMAGES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp")
RECORDS = ".tfrecord"
TABLES = (".csv", ".tsv", ".npz", ".jsonl", ".parquet", RECORDS)

TARS = ".tar"  # of images, as WebDataset writes them
CLICKS = ".txt"  # lines of click data, see `ctl.data.clicks`
CLICK_NUMBERS, CLICK_CATEGORIES = 13, 26  # in an example of them

# Ends of the files of tokenizers, and the packages that read them, see `ctl.data.tokenizer`.
TOKENIZERS = {".model": "sentencepiece", ".json": "tokenizers"}

# What the labels are that a loss takes.
CLASSES, BINARY, NUMBERS = "classes", "binary", "numbers"
UNKNOWN = "unknown"  # of a loss of the user's own: see `ctl.data.tables.choose`

# What becomes of the values that a table lacks.
MEAN, DROP = "mean", "drop"

# How code of the user's is named.
# Trains a language model on the text in {path}.
LANGUAGE_MODEL = (
    "--dataset=ctl.recipes.gpt:datasets --data_dir={path} --model=ctl.recipes.gpt:make_model "
    "--step=ctl.recipes.gpt:LanguageModel"
)

YOURS = "package.module:function or file.py:function"

_MOST_CHOICES = 16  # that an error lists

# The flags whose value may name code.
NAMING = ("step", "model", "dataset", "loss", "metrics")

_NAME = r"[^\W\d]\w*"
_CODE = re.compile(rf"({_NAME}(?:\.{_NAME})*|.*\.py):({_NAME})")

# What splits a part of the data, to train on most of it and to evaluate on the rest.
HOLD_OUT = "--train_split='train[:80%]' --eval_split='train[80%:]'"


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
    """Whether ``name`` has the form ``package.module:function`` or ``file.py:function``."""
    return _CODE.fullmatch(name) is not None


class CodeName(NamedTuple):
    """The parts of a name of code: its module, its name there, and its file if that is given."""

    module: str
    attribute: str
    file: Path | None


def code_name(name: str) -> CodeName:
    """The parts of a ``name`` that `is_function_name`. A file is the module of its name."""
    found = _CODE.fullmatch(name)
    assert found, name
    module, attribute = found.groups()
    if not module.endswith(".py"):
        return CodeName(module, attribute, None)
    file = Path(module).expanduser().absolute()
    return CodeName(file.stem, attribute, file)


def numbered(names: Iterable[str]) -> list[str]:
    """``names``, of which a second one of a name has ``#2`` after it, and so on."""
    counts: collections.Counter[str] = collections.Counter()
    result = []
    for name in names:
        counts[name] += 1
        result.append(f"{name}#{counts[name]}" if counts[name] > 1 else name)
    return result


def paths_by_name(text: str) -> dict[str, str]:
    """The paths of ``g=PATH,d=PATH`` by the name of their model; any other path by ``""``."""
    parts = [part.partition("=") for part in text.split(",")]
    if all(name.isidentifier() and path for name, _, path in parts):
        return {name: os.path.expanduser(path) for name, _, path in parts}
    return {"": text}


def is_path(dataset: str) -> bool:
    """Whether ``--dataset`` is a file or a folder of the user's, by its form: it begins with ``.``,
    ``/`` or ``~``, is a URL, or ends as `TABLES`, `TARS`, lines of clicks or another file do."""
    if is_function_name(dataset):
        return False
    known = suffix(dataset) in (*TABLES, TARS) or is_click_text(dataset)
    is_file = re.search(r"\.[a-z]\w+$", dataset, re.IGNORECASE)  # no name of TFDS ends so
    return dataset.startswith((".", "/", "~")) or is_url(dataset) or known or bool(is_file)


_SHARD = re.compile(r"-\d+-of-\d+$")


def suffix(path: str) -> str:
    """The end of a file's name that says what is in it: ``.csv``, also of ``data.CSV.gz``, and of
    ``data.csv-00000-of-00002``."""
    name = _SHARD.sub("", path.lower()).removesuffix(".gz")
    dot = name.rfind(".", name.rfind("/") + 2)
    return name[dot:] if dot > 0 else ""


def is_click_text(path: str) -> bool:
    """Whether a file is one of lines of click data, by its name: ``train.txt``, ``day_0``, also
    ``.gz``."""
    return suffix(path) == CLICKS or click_day(path) is not None


def click_day(path: str) -> int | None:
    """The number of a file ``day_0`` of click data, also of ``day_0.gz``; None for other names."""
    found = re.fullmatch(r"day_(\d+)(\.gz)?", os.path.basename(path))
    return int(found[1]) if found else None


def click_files(dataset: str) -> list[str]:
    """The files of click data that ``--dataset`` names, see `ctl.data.clicks`; none if it names
    other data. Those of a folder are its days; else, unless there are folders or tables, its texts
    if one is that of the training; else its TFRecord files, if the first record has clicks."""
    if not is_path(dataset):
        return []
    try:
        entries = _entries(dataset)
        files = sorted(entry.path for entry in entries if entry.is_file()) or [dataset]
        if days := [file for file in files if click_day(file) is not None]:
            return sorted(days, key=click_day)  # type: ignore[arg-type]
        if any(entry.is_dir() and not entry.name.startswith(".") for entry in entries):
            return []
        by_end = {end: [file for file in files if suffix(file) == end] for end in (CLICKS, *TABLES)}
        texts, records = by_end[CLICKS], by_end[".tfrecord"]
        kinds = [end for end, found in by_end.items() if found]
        names = [os.path.basename(text).lower() for text in texts]
        if kinds == [CLICKS] and (not entries or any(n.startswith("train") for n in names)):
            return texts
        return records if records and _has_clicks(records[0]) else []
    except OSError:  # reading it will say why
        return []


def _entries(dataset: str) -> list[Any]:
    """What is in a folder, or what a pattern names; nothing of a file."""
    path = located(dataset)
    return [*scandir(path)] if is_folder(path) else []


# A number and a category of a `tf.train.Example` of click data: the length of the key and the key.
_CLICK_KEYS = rb"\n[\x02\x03]I\d\d?\x12", rb"\n[\x02\x03]C\d\d?\x12"
_OTHER_CLICK_KEYS = rb"\n[\r\x0e]int-feature-\d\d?\x12", rb"\n\x16categorical-feature-\d\d\x12"


def _has_clicks(path: str) -> bool:
    """Whether the first record of a TFRecord file is one of click data."""
    begin = opened(located(path)).pread(1 << 12, 0)
    if begin.startswith(b"\x1f\x8b"):
        with contextlib.suppress(zlib.error):
            begin = zlib.decompressobj(wbits=31).decompress(begin, 1 << 12)
    return any(all(re.search(k, begin) for k in keys) for keys in (_CLICK_KEYS, _OTHER_CLICK_KEYS))


def has_table(dataset: str) -> bool:
    """Whether ``--dataset`` is the path of a table or of a folder of tables. Beside other folders,
    a table is data only if it is that of the training: others describe the images, for instance."""
    if not is_path(dataset) or click_files(dataset):
        return False
    try:
        entries = _entries(dataset)
    except OSError:  # reading it will say why
        return False
    tables = [entry.name for entry in entries if suffix(entry.name) in TABLES and entry.is_file()]
    if any(entry.is_dir() and not entry.name.startswith(".") for entry in entries):
        tables = [name for name in tables if name.lower().startswith("train")]
    return bool(tables) or (not entries and suffix(dataset) in TABLES)


def loss_of(loss: str) -> str:
    """`CLASSES`, `BINARY` or `NUMBERS`: what the labels are that ``loss`` takes, by its name.
    `UNKNOWN` if it is the user's own."""
    if is_function_name(loss):
        return UNKNOWN
    if loss == "cross_entropy" or "categorical" in loss.lower():
        return CLASSES
    return BINARY if "binary" in loss.lower() or loss.lower() == "bce" else NUMBERS


def check_model_name(name: str) -> None:
    """Raises `UsageError` unless ``name`` is one of `MODELS` or a name of code.

    Does not import the function, so it may not exist.
    """
    check_code_name("model", name, MODELS)


def check_code_name(what: str, name: str, known: Iterable[str]) -> None:
    """As `check_name`, but ``name`` may also be a name of code, see `is_function_name`."""
    if name.endswith(".py"):
        raise UsageError(f"--{what}={name} names no function of that file: give {name}:FUNCTION")
    if not is_function_name(name):
        check_name(what, name, known, f", or {YOURS} for your own")
