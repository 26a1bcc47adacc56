"""The flags that commands share, in groups, with the checks made before TensorFlow is loaded."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Sequence
from typing import Any

from absl import flags

from ctl.base import names
from ctl.base.block_cache import parsed
from ctl.base.bounds import BOUNDS, checked
from ctl.base.remote import is_folder, located, without_slash
from ctl.base.stores import is_url
from ctl.errors import UsageError
from ctl.flags import defaults, durations, early
from ctl.flags.parsing import (
    AUTO,
    check_flags,
    check_without_effect,
    define,
    define_path,
    fit_default,
    group,
)
from ctl.flags.record_schema import parse_record_schema

flags.disclaim_key_flags()  # They belong to the command that calls a group.


def define_data_flags(of_a_run: bool = False) -> None:
    """Defines the flags of the data, see `ctl.data.load` and `ctl.data.synthetic`.

    With ``of_a_run``, what is not given is taken from a run: call `check_data_flags` after that.
    """
    with group("Data"):
        define(
            "dataset",
            "fashion_mnist_mini",
            "A TFDS dataset of images with integer labels; your own files; synthetic; or "
            f"{names.YOURS}. The default is part of ctl: 10,000 + 2,000 images of "
            "Fashion-MNIST. Files: a folder such as ./photos, with a folder of images for each "
            "class, or with train and test of such folders; or a table, "
            f"{', '.join(names.TABLES)}; or click data of Criteo's form, such as train.txt; or a "
            "URL of these, such as s3://bucket/photos. Of "
            "files without a test part, a tenth is held out. Your function is called with those "
            "keywords of global_batch_size, seed, data_dir and tokenizer that it declares. It "
            "returns two datasets, for training and evaluation: datasets of ctl.data, or a "
            "tf.data.Dataset of global batches, which requires --train_steps.",
            _absolute,
        )
        define_path(
            "data_dir",
            None,
            "Directory of TFDS datasets (default: TFDS's own), also in a store, such as "
            "s3://bucket/tfds. Also passed to a function given as --dataset.",
        )
        define_path(
            "data_cache",
            None,
            "DIRECTORY:SIZE, e.g. /tmp/cache:20GiB: keeps what is read from a store on the disk of "
            "this machine, in at most this size. Other processes may share it (default: all is "
            "read from the store in every epoch).",
        )
        define_path(
            "tokenizer",
            None,
            "Makes the tokens of text: a .model of SentencePiece, or a tokenizer.json. Passed to a "
            "function given as --dataset, as a ctl.data.Tokenizer. The run keeps a copy (default: "
            "none; text is bytes).",
        )
        flags.DEFINE_boolean("download", True, "Download and prepare a missing dataset.")
        flags.DEFINE_string("train_split", None, "TFDS split to train on (default: train).")
        flags.DEFINE_string(
            "eval_split",
            None,
            "TFDS split to evaluate on (default: test, or else validation; for a training with "
            "--keep_best, see that flag).",
        )
        flags.DEFINE_integer(
            "global_batch_size", 64, "Examples per update, over all replicas.", lower_bound=1
        )
        flags.DEFINE_string(
            "image_shape",
            None,
            "HEIGHT,WIDTH,CHANNELS: the size to which images of a folder or a TFDS dataset are "
            "resized (default for a folder: their own, or 64,64 if they differ), or the shape of "
            "synthetic images (default: 28,28,1).",
        )
        flags.DEFINE_list(
            "features",
            None,
            "Columns of a table to train on, e.g. age,fare,sex (default: all of numbers but the "
            "labels). They form one vector, in which text has a number for each word. Or features "
            "of a TFDS dataset: a/b is part b of feature a, and several form a dict (default: an "
            "image).",
        )
        flags.DEFINE_list(
            "labels",
            None,
            "Columns to predict (default: label, labels, class, target or y of a table, or else "
            "its last column; of a TFDS dataset, required with --features).",
        )
        flags.DEFINE_enum(
            "missing",
            None,
            [names.MEAN, names.DROP],
            "What becomes of values that a table lacks: the mean of the training examples, and of "
            "text no word; or drop, which leaves their rows out (default: they are refused).",
        )
        flags.DEFINE_string(
            "record_schema",
            None,
            "NAME:TYPE[SIZE,…],…: the features of your own TFRecord files that are read, e.g. "
            "image:uint8[28,28],label:int64. Types: image (PNG or JPEG), string, and numbers as "
            "TensorFlow calls them, which may be stored as raw bytes (default: all features, by "
            "what they hold).",
        )
        flags.DEFINE_integer(
            "num_classes", 10, "Number of classes, for --dataset=synthetic.", lower_bound=2
        )
        flags.DEFINE_integer(
            "num_examples", 10_000, "Number of examples, for --dataset=synthetic.", lower_bound=1
        )
        flags.DEFINE_float(
            "resident_limit_mib",
            1024,
            "Datasets of at most this many MiB, decoded, are kept on every device. Larger ones "
            "are streamed from their files.",
            lower_bound=0,
        )
        flags.DEFINE_integer(
            "shuffle_block",
            1,
            "Consecutive records that a stream reads and shuffles as one unit.",
            1,
        )
        flags.DEFINE_boolean(
            "oversample",
            False,
            "Repeat training examples of your own files until all classes have as many.",
        )
        about = "On a damaged example: stop and name it, or replace it with the next one."
        flags.DEFINE_enum("on_bad_record", "stop", ["stop", "skip"], about)
    check_flags(["features", "labels", "dataset", "image_shape"], _check_columns)
    check_flags(["image_shape"], lambda image_shape: image_shape_from(image_shape))
    check_flags(["dataset", "data_dir"], _check_dataset)
    check_flags(["data_cache"], _check_data_cache)
    check_flags(["tokenizer"], _check_tokenizer)
    check_flags(["record_schema"], _check_record_schema)
    if not of_a_run:
        names_of_data = ["dataset", "data_dir", "data_cache", "image_shape", "oversample"]
        names_of_data += ["tokenizer", "record_schema", "missing", *_OF_FILES, *_OF_SYNTHETIC]
        check_flags(names_of_data, lambda **_: check_data_flags())


def _check_columns(
    features: list[str] | None, labels: list[str] | None, dataset: str, image_shape: str | None
) -> None:
    if not features and not labels:
        return
    if names.is_path(dataset):
        if not names.has_table(dataset):
            what = "click data" if names.click_files(dataset) else "images"
            raise UsageError(f"--features and --labels have no effect on {what}, as in {dataset}")
    elif not features or not labels:
        raise UsageError("--features and --labels belong together: give both")
    if dataset == "synthetic" or names.is_function_name(dataset):
        raise UsageError(f"--features has no effect with --dataset={dataset}")
    if image_shape is not None:
        raise UsageError("--image_shape has no effect with --features: they are taken as they are")


# Flags of one kind of dataset.
_OF_FILES = (
    *("train_split", "eval_split", "download"),
    *("resident_limit_mib", "shuffle_block", "on_bad_record"),
)
_OF_SYNTHETIC = ("num_classes", "num_examples")
_OF_OWN_FILES = ("oversample",)


def _absolute(dataset: str) -> str:
    """A path of another folder, as another command would not find it; names as they are."""
    if is_url(dataset):
        return without_slash(dataset)
    if not names.is_path(dataset):
        return dataset
    return os.path.abspath(os.path.expanduser(dataset))


def _check_dataset(dataset: str, data_dir: str | None) -> None:
    if names.is_path(dataset):
        return early.check_path(dataset)
    if dataset != "synthetic" and not names.is_function_name(dataset):
        early.check_dataset(dataset, data_dir)


def _check_data_cache(data_cache: str | None) -> None:
    if data_cache is not None:
        parsed(data_cache)


def _check_tokenizer(tokenizer: str | None) -> None:
    if tokenizer:
        early.check_tokenizer(tokenizer)


def _check_record_schema(record_schema: str | None) -> None:
    if record_schema is not None:
        parse_record_schema(record_schema)


def check_data_flags() -> None:
    """Raises `UsageError` if a flag is given that has no effect on the data of ``--dataset``."""
    dataset, data_dir = flags.FLAGS.dataset, flags.FLAGS.data_dir
    more = flags.FLAGS.also_evaluate if "also_evaluate" in flags.FLAGS else []
    unused: tuple[str, ...] = (*_OF_SYNTHETIC, *_OF_OWN_FILES)
    remedy = "leave it out"
    if names.is_function_name(dataset):
        unused = (*_OF_FILES, *_OF_OWN_FILES, *_OF_SYNTHETIC, "image_shape")
        remedy = "decide it there"
    elif dataset == "synthetic":
        unused = (*_OF_FILES, *_OF_OWN_FILES, "data_dir")
    elif names.is_path(dataset):
        unused = (*_OF_SYNTHETIC, "data_dir", "download")
        if clicks := names.click_files(dataset):
            unused += ("image_shape", "oversample", "record_schema")
            if any(file.endswith(".gz") for file in clicks):
                unused += ("on_bad_record",)
        elif names.has_table(dataset):
            unused += ("image_shape", "on_bad_record")
    elif data_dir and flags.FLAGS["data_dir"].present and not any("@" in one for one in more):
        early.check_data_dir(dataset, data_dir)
    check_without_effect(unused, f"with --dataset={dataset}: {remedy}")
    if not names.has_table(dataset):
        check_without_effect(["missing"], f"with --dataset={dataset}: it is for your own tables")
    if not any(map(is_url, (dataset, data_dir or "", *more))):
        why = "without a URL as --dataset or --data_dir: it keeps what is read from a store"
        check_without_effect(["data_cache"], why)
    if names.suffix(dataset) != names.RECORDS and not (
        names.has_table(dataset) and is_folder(located(dataset))
    ):
        remedy = f"it is for your own files {names.RECORDS}"
        check_without_effect(["record_schema"], f"with --dataset={dataset}: {remedy}")
    if not names.is_function_name(dataset):
        remedy = "give the text to a function, such as --dataset=ctl.recipes.gpt:datasets"
        check_without_effect(["tokenizer"], f"with --dataset={dataset}: {remedy}")


def image_shape_from(text: str | None) -> tuple[int, int, int] | None:
    """Parses ``"28,28,1"`` as (28, 28, 1); None stays None. `UsageError` for any other text."""
    if text is None:
        return None
    parts = text.split(",")
    if len(parts) != 3 or not all(p.strip().isdecimal() and int(p) for p in parts):
        raise UsageError(f"--image_shape={text} is not HEIGHT,WIDTH,CHANNELS, e.g. 28,28,1")
    height, width, channels = map(int, parts)
    return height, width, channels


def define_model_flags() -> None:
    """Defines the flags of the model, see `ctl.models.make_model`; of the weights that it starts
    from (`ctl.checkpoint.load_weights`), and of what does not train (`ctl.freezing.freeze`)."""
    with group("Model"):
        flags.DEFINE_string(
            "model",
            "convnet",  # see `_choose_model`
            f"{', '.join(names.MODELS)}, or {names.YOURS} for your own: called with "
            "(image_shape, num_classes), returns a Keras model that outputs logits. A function "
            "without parameters may return any Keras model, for any data; or a dict of models by "
            "name, for a --step that trains several. Instead of a function, "
            "the name may be that of a Keras model, which is copied with its weights; for one "
            "replica. For tables, the default is dense; for click data, dlrm.",
        )
        define_path(
            "init_from",
            None,
            "Initial weights: a checkpoint, of ctl or of tf.train.Checkpoint; a run (its last "
            "checkpoint); a .keras or .weights.h5 file; a SavedModel. For several models, a run "
            "or an export of several, or NAME=PATH,NAME=PATH for some of them. The optimizer and "
            "the step count start anew. A run that resumes ignores this flag.",
        )
        flags.DEFINE_list(
            "reinit",
            None,
            "Names of layers or models for which --init_from is ignored, such as a new head.",
        )
        flags.DEFINE_list(
            "freeze",
            None,
            "Layers that are not trained, by patterns of their names: conv*,block1_*. They have "
            "no gradient and no optimizer slots.",
        )
    check_flags(["model"], lambda model: names.check_model_name(model))
    check_flags(["dataset", "model"], _choose_model)
    check_flags(["init_from", "reinit"], _check_start)
    define_dlrm_flags()


def _choose_model(dataset: str, model: str) -> None:
    """Sets the default model to one that fits the data.

    Raises:
        UsageError: the data are clicks and ``model`` is not for them, or the other way round.
    """
    clicks = bool(names.click_files(dataset))
    fits = "dlrm" if clicks else "dense" if names.has_table(dataset) else "convnet"
    if fit_default("model", fits):
        return
    if clicks and model in {*names.MODELS} - {"dlrm"}:
        raise UsageError(f"--model={model} takes no click data, as in {dataset}: leave it out")
    if model == "dlrm" and not clicks and not names.is_function_name(dataset):
        raise UsageError(
            f"--model=dlrm takes click data, such as --dataset=./train.txt, not {dataset}"
        )


# The flags of the sizes of dlrm.
OF_DLRM = ("table_rows", "embedding_dim", "bottom_units", "top_units")


def define_dlrm_flags() -> None:
    """Defines the sizes of the model dlrm, see `ctl.models.dlrm`."""
    with group("Model dlrm"):
        flags.DEFINE_list(
            "table_rows",
            [str(defaults.TABLE_ROWS)],
            "Rows of each of the 26 embedding tables: one number for all, or 26. A hash finds its "
            "row modulo this number, so values share rows where there are fewer rows than values.",
        )
        flags.DEFINE_integer(
            "embedding_dim", defaults.EMBEDDING_DIM, "Numbers in a row of a table.", lower_bound=1
        )
        flags.DEFINE_list(
            "bottom_units",
            [*map(str, defaults.BOTTOM_UNITS)],
            "Units of the layers below the interaction; a last one has embedding_dim units.",
        )
        flags.DEFINE_list(
            "top_units",
            [*map(str, defaults.TOP_UNITS)],
            "Units of the layers above the interaction; a last one gives the logit.",
        )
    check_flags(OF_DLRM, lambda **sizes: dlrm_sizes(**sizes))
    check_flags(["model", *OF_DLRM], _check_dlrm)


def dlrm_sizes(
    table_rows: list[str], embedding_dim: int, bottom_units: list[str], top_units: list[str]
) -> dict[str, Any]:
    """The arguments of `ctl.models.dlrm` from the flags.

    Raises:
        UsageError: a size is not a whole number from 1, or there are neither 1 nor 26 tables.
    """
    sizes: dict[str, Any] = {"embedding_dim": embedding_dim}
    lists = {"table_rows": table_rows, "bottom_units": bottom_units, "top_units": top_units}
    for name, texts in lists.items():
        if not all(text.strip().isdecimal() and int(text) for text in texts):
            raise UsageError(f"--{name}={','.join(texts)}: give whole numbers from 1, as 512,256")
        sizes[name] = tuple(map(int, texts))
    if len(sizes["table_rows"]) not in (1, names.CLICK_CATEGORIES):
        raise UsageError(
            f"--table_rows has {len(table_rows)} numbers: give one for all tables, or one for each "
            f"of the {names.CLICK_CATEGORIES}"
        )
    return sizes


def _check_dlrm(model: str | None, **sizes: object) -> None:
    if model != "dlrm":
        check_without_effect(OF_DLRM, f"with --model={model}: leave it out")


def _check_start(init_from: str | None, reinit: list[str] | None) -> None:
    if reinit and not init_from:
        raise UsageError("--reinit has no effect without --init_from: every layer starts anew")


def define_code_flags() -> None:
    """Defines the flags of step, loss and metrics, see `ctl.jobs.named`."""
    with group("Step, loss and metrics"):
        flags.DEFINE_string(
            "step",
            None,
            "package.module:MyStep or file.py:MyStep, a subclass of ctl.TrainStep with the same "
            "arguments. Evaluation uses its attribute eval_step, a subclass of ctl.EvalStep. The "
            "module, and those of the other flags, may define flags of their own "
            "(absl.flags.DEFINE_float, …): give them on the same command line.",
        )
        flags.DEFINE_string(
            "loss",
            "cross_entropy",
            f"{', '.join(names.LOSSES)}; a loss by Keras's name, such as "
            f"sparse_categorical_crossentropy or mae; or {names.YOURS} for your own: "
            "called with (labels, outputs) in one rank, returns the loss of each example, [n]. The "
            "first two take logits; of those of Keras, the last layer of the model decides. A step "
            "with its own loss() need not use it. For click data, the default is "
            "binary_cross_entropy: the log loss.",
        )
        flags.DEFINE_string(
            "metrics",
            None,
            "Names of Keras metrics, e.g. accuracy,f1,sparse_top_k_categorical_accuracy; or "
            f"{names.YOURS} for your own: called without arguments, returns a list of "
            "Keras metrics. They are updated with (labels, outputs) (default: accuracy with the "
            "cross entropies, unless the step has its own loss(); auc for click data; otherwise "
            "none).",
        )
        flags.DEFINE_enum(
            "weighting",
            "examples",
            names.WEIGHTINGS,
            "What divides a loss if the examples have weights. examples: the number of examples "
            "whose weight is not 0, as in Keras for class weights and masks. sum_of_weights: the "
            "sum of the weights.",
        )
    check_flags(["step", "loss", "metrics"], _check_code)
    check_flags(["dataset", "loss", "metrics"], _choose_loss)


def _choose_loss(dataset: str, loss: str, metrics: str | None) -> None:
    """Sets the default loss and metrics to those that fit the data."""
    clicks = bool(names.click_files(dataset))
    fits = {"loss": "binary_cross_entropy", "metrics": "auc"} if clicks else {}
    for name, usual in {"loss": "cross_entropy", "metrics": None}.items():
        fit_default(name, fits.get(name, usual))


def _check_code(step: str | None, loss: str, metrics: str | None) -> None:
    if step is not None and not names.is_function_name(step):
        raise UsageError(
            f"--step={step} is neither package.module:MyStep nor file.py:MyStep, a subclass of "
            "ctl.TrainStep"
        )
    names.check_loss_name(loss)
    if metrics and ":" in metrics and not names.is_function_name(metrics):
        raise UsageError(f"--metrics={metrics} is not NAME,NAME,… or {names.YOURS}")


def define_step_flags() -> None:
    """Defines the flags of optimizer and step, see `ctl.step.TrainStep`."""
    with group("Optimizer and step"):
        # Capitals, as in the class names of Keras, mean the same.
        define("optimizer", "adam", f"One of {', '.join(names.OPTIMIZERS)}.", str.lower)
        flags.DEFINE_float(
            "momentum", 0.9, "Momentum, for momentum and nesterov.", lower_bound=0, upper_bound=1
        )
        flags.DEFINE_float(
            "weight_decay",
            None,
            "Decoupled weight decay, multiplied by the learning rate (default: 0.004 for adamw and "
            "muon, otherwise none).",
            lower_bound=0,
        )
        flags.DEFINE_float(
            "label_smoothing",
            0.0,
            "Label smoothing: weight of the uniform distribution in the target.",
            lower_bound=0,
            upper_bound=1,
        )
        flags.DEFINE_list(
            "class_weight",
            None,
            "Weights of classes in the training, by name or number, e.g. yes:5 or 0:1,1:5. Other "
            "classes have the weight 1. "
            "balanced: such that all classes have the same sum. For labels that are integers, "
            "or 0 and 1 (default: none).",
        )
        flags.DEFINE_float("clip_norm", None, "Maximum global norm of the reduced gradient.")
        flags.DEFINE_integer(
            "accumulate_steps",
            1,
            "Number of micro-batches into which a replica's batch is split to save memory. Their "
            "gradients are reduced once.",
            lower_bound=int(BOUNDS["accumulate_steps"].low),
        )
        flags.DEFINE_float(
            "ema_decay",
            None,
            "Decay per step of a moving average of the weights, e.g. 0.999. The averaged weights "
            "are evaluated and exported.",
        )
        flags.DEFINE_enum(
            "precision",
            "float32",
            names.PRECISIONS,
            "Data type of the computation. Weights stay float32. float16 has a dynamic loss "
            "scale, which is adjusted by the reduced gradient.",
        )
        flags.DEFINE_enum(
            "on_nan",
            "stop",
            ["stop", "skip"],
            "stop: end the run when the loss is NaN or Inf. skip: leave out the update when the "
            "reduced gradient is NaN or Inf.",
        )
        flags.DEFINE_enum(
            "jit_compile",
            "rule",
            ["rule", "on", "off", AUTO],
            "Compile the forward and backward pass with XLA; with one replica, the whole step. "
            "The all-reduce is not compiled. The update on a CPU is, whatever you give here, but "
            "not with parameter servers. rule: on for small models on one device, whose operations "
            "are known to gain; otherwise off. auto: try both before the first step and keep the "
            "faster.",
        )
        flags.DEFINE_enum(
            "sparse_rows",
            "auto",
            names.SPARSE_ROWS,
            "Which embedding tables are trained by rows: a step then reads, reduces and writes "
            "only the rows that its batch looks up, with the numbers of a dense gradient. auto: "
            "those of 4 MiB or more, if the optimizer moves no other row; the log says why not. "
            "on: all of them, whose other rows are brought up to date when they are read; or an "
            "error. lazy: all, and other rows do not move, as with LazyAdam and SparseAdam, which "
            "are other algorithms than Adam.",
        )
        flags.DEFINE_enum(
            "embedding_plan",
            "replicated",
            names.EMBEDDING_PLANS,
            "Where the tables that are trained by rows are. replicated: whole on every replica. "
            "sharded: split over all replicas, so that each holds a part of the rows and of their "
            "optimizer's variables; lookups take two more gathers. auto: split, the "
            "largest first, if they do not fit in memory; else by rows, or dense if that is less "
            "to send. It reads a batch, and the log has the plan. Parameter servers are what "
            "tables are split over; with auto, all that can be.",
        )
        define(
            "bytes_per_pack",
            0,
            "Maximum number of bytes per all-reduce. 0: all gradients of a type in one. auto: try "
            "several sizes before the first step and keep the fastest; a resumed run keeps it, "
            "too.",
            _size_or_auto,
        )
        flags.DEFINE_integer(
            "steps_per_loop",
            0,
            "Maximum number of steps per call from Python. 0: as many as fit in half a second.",
            lower_bound=0,
        )
    check_flags(["optimizer"], lambda optimizer: names.check_optimizer_name(optimizer))
    check_flags(["class_weight", "oversample"], _check_balance)
    check_flags(["loss", "label_smoothing"], _check_smoothing)
    check_flags(
        ["clip_norm", "ema_decay", "momentum", "weight_decay", "label_smoothing"], _check_step
    )


def _size_or_auto(text: str | int) -> str | int:
    if text == AUTO:
        return AUTO
    if str(text).isdecimal():
        return int(text)
    raise ValueError("must be a number of bytes, 0 or more, or auto")


BALANCED = ["balanced"]  # of --class_weight


def _check_balance(class_weight: list[str] | None, oversample: bool) -> None:
    if class_weight != BALANCED:
        _weights_of_labels(class_weight)
    elif oversample:
        raise UsageError(
            "--oversample and --class_weight=balanced both make classes count alike: give one"
        )


def class_weight_from(
    class_weight: list[str] | None, class_names: Sequence[str] = ()
) -> dict[int, float] | None:
    """Parses ``["0:1", "yes:5"]`` as the argument of `ctl.TrainStep`; None without weights.
    ``class_names`` are in the order of their numbers. What is a name is no number: grades 3 to 7
    have the numbers 0 to 4, and 3 is the first.

    Raises:
        UsageError: for other text, a class that there is not or that is named twice, and a weight
            that is not above 0.
    """
    weights: dict[int, float] = {}
    for label, weight in _weights_of_labels(class_weight).items():
        is_number = label.isdecimal() and label not in class_names
        if not is_number and not class_names:
            raise UsageError(
                f"--class_weight={label}:{weight:g}: the classes of the data have no names: write "
                "their numbers, e.g. 0:1,1:5"
            )
        if not is_number:
            names.check_name(
                "class of --class_weight", label, class_names, " (or their numbers, from 0)"
            )
        number = int(label) if is_number else [*class_names].index(label)
        if number in weights:
            raise UsageError(f"--class_weight names class {number} twice, also as {label}: once")
        weights[number] = weight
    return weights or None


def _weights_of_labels(class_weight: list[str] | None) -> dict[str, float]:
    """The weights by what stands for their classes, see `class_weight_from`."""
    weights: dict[str, float] = {}
    for text in class_weight or ():
        label, _, weight = (part.strip() for part in text.rpartition(":"))
        if not label or label in weights:
            raise UsageError(
                f"--class_weight={','.join(class_weight or ())}: {text} is not CLASS:WEIGHT, or "
                "repeats a class: write e.g. 0:1,1:5, or balanced"
            )
        try:
            value = float(weight)
        except ValueError:
            value = math.nan
        shown = f"--class_weight of class {label}"
        weights[label] = checked("class_weight", value, shown=shown)
    return weights


def _check_smoothing(loss: str, label_smoothing: float) -> None:
    if label_smoothing and loss != "cross_entropy":
        raise UsageError(f"--label_smoothing is for --loss=cross_entropy, not for {loss}")


def _check_step(clip_norm: float | None, ema_decay: float | None, **shares: float | None) -> None:
    for name, value in shares.items():
        if value is not None:
            durations.check_rate(f"--{name}", value)
    checked("clip_norm", clip_norm, shown="--clip_norm")
    checked("ema_decay", ema_decay, shown="--ema_decay")


def define_schedule_flags(values: flags.FlagValues = flags.FLAGS) -> None:
    """Defines the flags of the learning rate, see `ctl.schedule.make_schedule`."""
    with group("Learning rate", values):
        _define_schedule_flags(values)
    check_flags([*_SCHEDULE_FLAGS], _check_schedule, values)


def _define_schedule_flags(values: flags.FlagValues) -> None:
    define_enum, define_float, define_list, define_string, define_integer = (
        functools.partial(getattr(flags, f"DEFINE_{kind}"), flag_values=values)
        for kind in ("enum", "float", "list", "string", "integer")
    )
    define_enum("schedule", "cosine", [*durations.SCHEDULES], "Learning rate schedule.")
    define_float(
        "learning_rate", None, "Peak learning rate (default: 1e-3). Not for --schedule=piecewise."
    )
    define_list(
        "boundaries",
        None,
        "Piecewise: where the next of --rates begins, in steps (500) or epochs counted from 0 "
        "(3ep,7ep: at the start of epochs 3 and 7) (default: none).",
    )
    define_list(
        "rates", None, "Piecewise: learning rates, one more than --boundaries (1e-3,1e-4,1e-5)."
    )
    define_string(
        "warmup", "0", "Linear warm-up, for any schedule, in steps (500) or epochs (0.5ep)."
    )
    define_float(
        "end_learning_rate",
        None,
        "Cosine, polynomial: final learning rate; plateau: lowest learning rate (default: 0).",
    )
    define_float(
        "decay_rate",
        None,
        "Exponential: factor by which the rate changes every --decay_steps (default: 0.95); "
        "plateau: factor at each plateau (default: 0.1).",
    )
    define_string(
        "decay_steps",
        None,
        "Exponential: steps (500) or epochs (2ep) in which the rate changes by --decay_rate "
        "(default: 1ep).",
    )
    define_enum(
        "plateau_metric",
        None,
        ["loss", "accuracy"],
        "Plateau: evaluation result that must improve (default: loss).",
    )
    define_integer(
        "plateau_patience",
        None,
        "Plateau: number of consecutive evaluations without improvement after which the rate "
        "changes (default: 10).",
        lower_bound=1,
    )
    define_float("power", None, "Polynomial: exponent (default: 1, linear).")
    define_enum(
        "lr_scaling",
        "none",
        names.SCALING_RULES,
        "Multiply every rate by k = global batch size / --base_batch_size (linear), by the square "
        "root of k (sqrt), or not at all (none).",
    )
    define_integer(
        "base_batch_size",
        None,
        "Examples per update for which the rates were chosen (default: 256). For --lr_scaling.",
    )


# The flags of the learning rate, and which arguments of `ctl.schedule.make_schedule` they are.
_SCHEDULE_FLAGS = {
    "schedule": "name",
    "learning_rate": "learning_rate",
    "boundaries": "boundaries",
    "rates": "values",
    "warmup": "warmup_steps",
    "end_learning_rate": "end_learning_rate",
    "decay_rate": "decay_rate",
    "decay_steps": "decay_steps",
    "plateau_metric": "metric",
    "plateau_patience": "patience",
    "power": "power",
    "lr_scaling": "scaling",
    "base_batch_size": "base_batch_size",
}


def _check_schedule(
    schedule: str, warmup: str, lr_scaling: str, base_batch_size: int | None, **options: Any
) -> None:
    """Checks what does not depend on the data; `ctl.schedule` checks the rest."""
    durations.check_unused(schedule, **options)
    durations.steps_from("--warmup", warmup, 1.0)
    for name in ("learning_rate", "end_learning_rate"):
        if options[name] is not None:
            durations.check_rate(f"--{name}", options[name])
    for name in ("decay_rate", "power"):
        if options[name] is not None:
            durations.check_positive(f"--{name}", options[name])
    rate = options["learning_rate"] or defaults.LEARNING_RATE
    if schedule == "plateau" and (options["end_learning_rate"] or 0.0) > rate:
        end = options["end_learning_rate"]
        raise UsageError(f"--end_learning_rate={end:g} is above --learning_rate={rate:g}")
    if schedule == "plateau" and not 0 < (options["decay_rate"] or defaults.PLATEAU_FACTOR) < 1:
        raise UsageError(f"--decay_rate={options['decay_rate']:g} of a plateau must be below 1")
    if options["decay_steps"] is not None:
        durations.check_positive(
            "--decay_steps",
            durations.steps_from("--decay_steps", options["decay_steps"], LONG_EPOCH),
        )
    if schedule == "piecewise":
        _check_pieces(options["boundaries"] or (), options["rates"])
    if base_batch_size is not None:
        durations.check_positive("--base_batch_size", base_batch_size)
        if lr_scaling == "none":
            raise UsageError("--base_batch_size has no effect without --lr_scaling=linear|sqrt")


LONG_EPOCH = 1e6  # In steps, for checks that do not depend on the length of an epoch.


def _check_pieces(boundaries: Sequence[str], values: Sequence[str] | None) -> None:
    if values is None:
        raise UsageError("--schedule=piecewise needs --rates, e.g. --rates=1e-3,1e-4,1e-5")
    durations.rates_from("--rates", values)
    durations.check_pieces(boundaries, values)
    steps = [durations.steps_from("--boundaries", b, LONG_EPOCH) for b in boundaries]
    if len({b.endswith("ep") for b in boundaries}) == 1:  # a mix needs the length of an epoch
        durations.check_increasing(steps, boundaries)


def schedule_arguments(values: flags.FlagValues = flags.FLAGS) -> dict[str, Any]:
    """The flags as arguments of `ctl.schedule.make_schedule`. The caller adds ``total_steps``,
    ``steps_per_epoch`` and ``global_batch_size``."""
    return {argument: values[flag].value for flag, argument in _SCHEDULE_FLAGS.items()}
