"""All flags of `ctl.train`. `ctl.inspect` defines them too, to inspect the run they describe."""

from __future__ import annotations

import functools
import importlib.util
import math
import os
from pathlib import Path
from typing import Any

from absl import flags

from ctl.base import names, stores
from ctl.base.actions import parse_window
from ctl.base.best import Mode, known_mode, usual_mode
from ctl.errors import UsageError
from ctl.flags import augmentation, devices, durations, early, groups
from ctl.flags.defaults import LOG_EVERY, early_stop_parts
from ctl.flags.durations import steps_from
from ctl.flags.parsing import (
    AUTO,
    check_flags,
    define_path,
    fit_default,
    group,
    grouped_flags,
)

FLAGS = flags.FLAGS
flags.disclaim_key_flags()


def define_flags(model_dir_required: bool = True) -> None:
    """Defines all groups of flags."""
    _define_run_flags(model_dir_required)
    groups.define_data_flags()
    augmentation.define_augment_flag()
    groups.define_model_flags()
    groups.define_code_flags()
    groups.define_step_flags()
    groups.define_schedule_flags()
    devices.define_device_flags()
    _define_checkpoint_flags()
    _define_output_flags()
    devices.check_asynchronous_flags()
    if model_dir_required:
        check_flags(["dry_run", "strategy"], _check_dry_run)
        check_flags(["precompile", "xla_cache", "strategy"], _check_precompile)
        check_flags(["eager", "strategy", *_NOT_EAGER], _check_eager)


def _define_run_flags(training: bool = True) -> None:
    """Defines the directory, the length and the seed of a run; with ``training``, how it goes on.
    A ``training`` needs the directory."""
    with group("Run"):
        define_path(
            "model_dir",
            None,
            "Directory of the run: checkpoints, logs, TensorBoard, exported model. The same "
            "command with the same directory resumes the run. Also the URL of an object store, "
            "such as s3://bucket/run." + (" Required." if training else ""),
        )
        flags.DEFINE_float("epochs", None, "Passes over the training data (default: 12).")
        flags.DEFINE_integer(
            "train_steps",
            None,
            "Number of global batches to train on, instead of --epochs.",
            lower_bound=1,
        )
        flags.DEFINE_integer(
            "seed",
            0,
            "Seed of the initial weights, the order of the data and dropout.",
            lower_bound=0,
            upper_bound=2**32 - 1,
        )
        if training:
            _define_resume_flags()
    check_flags(["model_dir"], functools.partial(_check_model_dir, required=training))
    check_flags(["epochs", "train_steps"], _check_length)


def _define_resume_flags() -> None:
    flags.DEFINE_boolean(
        "extend",
        False,
        "Continue a run for more --epochs or --train_steps if its schedule depends on the length. "
        "From the current step on, the rates are those of the longer training. Embedding tables "
        "may have more rows than before; the new ones begin as the model makes them.",
    )
    flags.DEFINE_list(
        "change",
        [],
        "Names of flags that may differ from the run when it resumes, e.g. "
        "learning_rate,clip_norm. They change from the current step on.",
    )
    flags.DEFINE_boolean(
        "dry_run",
        False,
        "Print what the run would do and exit: data, model, all-reduce, memory, and the time of "
        "an epoch, measured over ten steps. Writes no file and downloads nothing.",
    )
    flags.DEFINE_boolean(
        "precompile",
        False,
        "Compile with XLA, fill the cache, and exit. Writes no other file and downloads nothing.",
    )
    flags.DEFINE_boolean(
        "eager",
        False,
        "Run the steps and evaluations without graphs, one step per call and without XLA, so that "
        "print, breakpoint() and NumPy work in them, and name the operation and the line that make "
        "a NaN. Slow, for debugging. Exports nothing.",
    )
    check_flags(["change"], _check_change)


def _check_change(change: list[str]) -> None:
    for name in change:
        names.check_name("flag in --change", name.lstrip("-"), grouped_flags())


def _check_model_dir(model_dir: str | None, *, required: bool) -> None:
    if not model_dir:
        if not required:
            return
        raise UsageError("--model_dir is required: the directory of the run, e.g. /tmp/ctl-run")
    if stores.is_url(model_dir):  # asked when it is opened
        return
    if "://" in model_dir:
        raise UsageError(f"--model_dir={model_dir}: give a directory, or the URL of a store")
    path = Path(model_dir)
    try:
        if path.is_symlink() and not path.exists():
            raise UsageError(f"--model_dir={model_dir}: a link to a path that is missing")
        while not path.exists():
            path = path.parent
    except OSError as error:
        raise UsageError(f"--model_dir={model_dir}: {error.strerror}") from error
    if not path.is_dir():
        raise UsageError(f"--model_dir={model_dir}: {path} is a file, not a directory")
    if not os.access(path, os.W_OK | os.X_OK):
        raise UsageError(f"--model_dir={model_dir}: no permission to write in {path}")


def _check_length(epochs: float | None, train_steps: int | None) -> None:
    if epochs is not None and train_steps is not None:
        raise UsageError("--epochs and --train_steps say the same thing: give one of them")
    if epochs is not None and not (math.isfinite(epochs) and epochs > 0):
        raise UsageError(f"--epochs={epochs} must be a number above 0")


def _check_precompile(precompile: bool, xla_cache: bool, strategy: str) -> None:
    if precompile and not (xla_cache and strategy not in ("multi_worker", "parameter_server")):
        raise UsageError("--precompile needs --xla_cache, which works in one process only")


# What would be refused without a strategy of several processes.
_WORKERS = ", --workers, --worker_index and TF_CONFIG"

# Flags that need the graph of the step, or of which a value does.
_NOT_EAGER = ("dry_run", "precompile", "inspect_every", "jit_compile", "bytes_per_pack")


def _check_eager(eager: bool, strategy: str, **values: Any) -> None:
    if not eager:
        return
    if strategy in ("multi_worker", "parameter_server", "tpu"):
        raise UsageError(
            f"--eager works in one process: debug with --replicas, without --strategy={strategy}"
            f"{_WORKERS}"
        )
    for name in ("dry_run", "precompile", "inspect_every"):
        if values[name]:
            raise UsageError(f"--{name} needs the graph of the step: leave out --eager")
    for name in ("jit_compile", "bytes_per_pack"):
        if values[name] == AUTO:
            raise UsageError(f"--{name}=auto tries graphs: leave out --eager")


def _check_dry_run(dry_run: bool, strategy: str) -> None:
    if dry_run and strategy in ("multi_worker", "parameter_server"):
        raise UsageError(
            f"--dry_run works in one process: leave out --strategy={strategy}{_WORKERS}; "
            "ctl.inspect plan shows the all-reduces of several workers"
        )


def _define_checkpoint_flags() -> None:
    """Defines when a run evaluates and saves, see `ctl.checkpoint.CheckpointManager`."""
    with group("Evaluation and checkpoints"):
        flags.DEFINE_string(
            "evaluate_every",
            "1ep",
            "Steps (500) or epochs (1ep) between evaluations. If the length of an epoch is "
            "unknown, the default is one evaluation, at the end.",
        )
        flags.DEFINE_list(
            "also_evaluate",
            [],
            "More data for every evaluation: SPLIT, or DATASET@SPLIT for another dataset, e.g. "
            "train[:500],mnist@test. Results are named like train[:500]/accuracy; --best_metric "
            "and --early_stop accept these names (default: none).",
        )
        flags.DEFINE_string(
            "checkpoint_every",
            None,
            "Steps (500) or epochs (0.5ep) between checkpoints, in addition to one at every "
            "evaluation.",
        )
        flags.DEFINE_string(
            "early_stop",
            None,
            "METRIC:PATIENCE, e.g. loss:5: end the training after PATIENCE consecutive "
            "evaluations without improvement. METRIC:PATIENCE:max or :min says what is best of a "
            "metric whose name does not (default: never).",
        )
        flags.DEFINE_integer("keep", 3, "Number of most recent checkpoints to keep.", lower_bound=1)
        flags.DEFINE_float(
            "keep_trying",
            600.0,
            "Seconds for which training goes on though the store of --model_dir=s3://... fails or "
            "is full. It tries again all the time. After that, exit code 4.",
            lower_bound=0,
        )
        flags.DEFINE_integer(
            "keep_best",
            0,
            "Number of best checkpoints to keep in addition. Unless --eval_split is given, they "
            "are selected on validation, or else on the last tenth of train, which is then not "
            "trained on; test is evaluated only at the end.",
            lower_bound=0,
        )
        flags.DEFINE_string(
            "best_metric",
            "accuracy",
            "Metric that selects the best checkpoint: loss, or another result of an evaluation. "
            "Without an accuracy, the default is loss.",
        )
        flags.DEFINE_enum(
            "best_mode",
            None,
            ["max", "min"],
            "Whether the highest or the lowest --best_metric is best (default: min for losses and "
            "errors, max for accuracy, auc, precision, recall, f1 and r2). Required for others.",
        )
        flags.DEFINE_boolean(
            "restore_best_weights",
            False,
            "Test and export the best checkpoint instead of the last step. The run still resumes "
            "from its last step. Requires --keep_best.",
        )
        flags.DEFINE_float(
            "keep_every_hours", None, "Also keep one checkpoint per this many hours."
        )
        flags.DEFINE_boolean("async_checkpoints", True, "Write checkpoints in the background.")
    check_flags(["early_stop", "best_mode", "best_metric"], _check_modes)
    check_flags(["evaluate_every", "checkpoint_every"], _check_intervals)
    check_flags(["keep_every_hours"], _check_hours)
    check_flags(["loss", "metrics", "best_metric"], _choose_best_metric)
    check_flags(["best_metric", "best_mode"], best_mode)
    check_flags(["restore_best_weights", "keep_best"], _check_best)
    check_flags(["dataset", "also_evaluate"], _check_also_evaluate)


def _check_also_evaluate(dataset: str, also_evaluate: list[str]) -> None:
    if not also_evaluate:
        return
    if names.is_function_name(dataset) or dataset == "synthetic":
        raise UsageError(f"--also_evaluate names splits, which --dataset={dataset} does not have")
    for which in also_evaluate:
        name, at, split = which.rpartition("@")
        if not split or (at and not name) or which.count("@") > 1:
            raise UsageError(f"--also_evaluate={which} is neither SPLIT nor DATASET@SPLIT")
        if names.is_path(name):
            if not names.is_path(dataset):
                raise UsageError(
                    f"--also_evaluate={which} names files beside --dataset={dataset}, which are "
                    "none: evaluate them with ctl.evaluate --dataset"
                )
            early.check_path(name)
        if also_evaluate.count(which) > 1:
            raise UsageError(f"--also_evaluate names {which} twice")


def _choose_best_metric(loss: str, metrics: str | None, best_metric: str) -> None:
    """Sets the default metric of the best checkpoint to one that there will be."""
    if metrics is None:
        accuracy = names.loss_of(loss) in (names.CLASSES, names.BINARY)
    else:
        accuracy = names.is_function_name(metrics) or "accuracy" in metrics.split(",")
    fit_default("best_metric", "accuracy" if accuracy else "loss")


def best_mode(best_metric: str, best_mode: str | None) -> Mode:
    """Whether the highest or the lowest value of ``best_metric`` is the best.

    Raises:
        UsageError: ``best_mode`` is None, and the name of the metric does not say it.
    """
    mode = known_mode(best_metric) or best_mode or usual_mode(best_metric)
    if mode is None:
        raise UsageError(f"--best_metric={best_metric}: add --best_mode=max or --best_mode=min")
    return "max" if mode == "max" else "min"


def parse_early_stop(text: str, best_mode: str | None, best_metric: str) -> tuple[str, int, Mode]:
    """Parses ``"loss:5"`` or ``"f1:5:max"`` as the arguments of `ctl.EarlyStopping`.

    Raises:
        UsageError: for other text; or the mode is not known, or the other one of a loss or an
            accuracy.
    """
    metric, patience, mode = early_stop_parts(text)
    if not metric or not patience.isdecimal() or not int(patience):
        raise UsageError(
            f"--early_stop={text} is not METRIC:PATIENCE: write the name of a metric and a number "
            "of evaluations from 1 (loss:5)"
        )
    if metric.startswith("val_"):
        raise UsageError(
            f"--early_stop={text}: it takes results of evaluations, by their names: write "
            f"--early_stop={text.removeprefix('val_')}"
        )
    known = known_mode(metric)
    if known and mode not in (None, known):
        raise UsageError(f"--early_stop={text}: the best {metric} is the {_EXTREME[known]}")
    if metric == best_metric or known_mode(best_metric):  # else --best_mode is of that one
        mode = mode or best_mode
    mode = known or mode or usual_mode(metric)
    if mode is None:
        raise UsageError(f"--early_stop={text}: write {text}:max or {text}:min, as is best")
    return metric, int(patience), "max" if mode == "max" else "min"


_EXTREME = {"max": "highest", "min": "lowest"}


def _check_modes(early_stop: str | None, best_mode: str | None, best_metric: str) -> None:
    metrics = [best_metric]
    if early_stop:
        metrics.append(parse_early_stop(early_stop, best_mode, best_metric)[0])
    known = {known_mode(metric) for metric in metrics}
    mode = known_mode(best_metric)
    if mode and best_mode and None not in known and best_mode not in known:
        raise UsageError(
            f"--best_mode={best_mode}: the best {best_metric} is the {_EXTREME[mode]}: name "
            "another result with --best_metric"
        )


def _check_best(restore_best_weights: bool, keep_best: int) -> None:
    if restore_best_weights and not keep_best:
        raise UsageError(
            "--restore_best_weights needs the best checkpoint, which may be deleted: add "
            "--keep_best=1"
        )


def _check_intervals(**intervals: str | None) -> None:
    for name, value in intervals.items():
        if value is not None:
            steps = steps_from(f"--{name}", value, groups.LONG_EPOCH)
            durations.check_positive(f"--{name}", steps)


def _check_hours(keep_every_hours: float | None) -> None:
    if keep_every_hours is not None:
        durations.check_positive("--keep_every_hours", keep_every_hours)


def _define_output_flags() -> None:
    """Defines what the run logs and exports."""
    with group("Output"):
        flags.DEFINE_string(
            "log_every",
            None,
            "Steps (100) or epochs (0.1ep) between log lines of the training, which have the means "
            f"since the line before (default: {LOG_EVERY}, and at each evaluation).",
        )
        flags.DEFINE_list(
            "log_also",
            [],
            "More scalars to log. norms: of the gradient before clipping, the weights and the "
            "update; mfu: the fraction of the machine's peak, which is measured at the start; "
            "memory: peak memory so far. E.g. norms,mfu (default: none).",
        )
        flags.DEFINE_boolean("tensorboard", True, "Write scalars for TensorBoard.")
        flags.DEFINE_string(
            "mlflow",
            None,
            "Also send flags and scalars to MLflow at this URI, e.g. sqlite:////tmp/mlflow.db or "
            "http://host:5000.",
        )
        flags.DEFINE_string(
            "wandb",
            None,
            "Also send flags and scalars to this project of Weights & Biases. With "
            "WANDB_MODE=offline in the environment, they stay in --model_dir.",
        )
        flags.DEFINE_string(
            "profile_steps",
            None,
            "START:STOP, e.g. 20:30: write a profile of these steps for TensorBoard, whose tab "
            "Profile needs a package: pip install 'ctl[profile]'.",
        )
        flags.DEFINE_string(
            "inspect_every",
            None,
            "Steps (1000) or epochs (1ep) between windows of 20 steps in which the all-reduce is "
            "timed. Logs allreduce/exposed_ms, busbw, late_ms, late_p95_ms and late_worst_ms to "
            "metrics.jsonl and TensorBoard (default: never).",
        )
        flags.DEFINE_string(
            "check_replicas_every",
            None,
            "Steps (100) or epochs (1ep) between bitwise comparisons of the weights of all "
            "replicas. If one differs, the run names the replica and ends with exit code 3 "
            "(default: never).",
        )
        flags.DEFINE_boolean(
            "xla_cache", True, "Cache compiled XLA programs in ~/.cache/ctl for later runs."
        )
        flags.DEFINE_boolean("export", True, "Export model.keras and a SavedModel at the end.")
    check_flags(["log_also", "strategy"], _check_log_also)
    check_flags(["log_every", "inspect_every", "check_replicas_every"], _check_intervals)
    check_flags(["profile_steps"], _check_window)
    check_flags(["mlflow", "wandb"], _check_trackers)


def _check_trackers(**values: str | None) -> None:
    for name, value in values.items():
        if value is None:
            continue
        if not value.strip():
            raise UsageError(f"--{name} is empty: leave it out, or name where to send the scalars")
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:  # a folder of this name is no package
            raise UsageError(f"--{name} needs a package: pip install 'ctl[{name}]'")


def _check_window(profile_steps: str | None) -> None:
    if profile_steps is not None:
        parse_window(profile_steps)


def _check_log_also(log_also: list[str], strategy: str) -> None:
    for name in log_also:
        names.check_name("scalar in --log_also", name, ("norms", "mfu", "memory"))
    if "norms" in log_also and strategy in ("central_storage", "parameter_server"):
        raise UsageError(f"--log_also=norms needs a copy of the weights: not --strategy={strategy}")
