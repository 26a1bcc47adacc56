"""The command that evaluates a checkpoint of a run, or an exported model. See `main`."""

from __future__ import annotations

import contextlib
import functools
import math
import shlex
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from absl import flags, logging

from ctl.base import console, durable, names, stores
from ctl.errors import CheckpointError, UsageError
from ctl.flags import config, devices, groups, training
from ctl.flags.parsing import (
    check_flags,
    check_without_effect,
    define_path,
    group,
    grouped_flags,
    imported_flags,
    run_command,
)
from ctl.jobs.build import check_classes, freeze, load_evaluation_data, make_eval_step, model_of
from ctl.logs.runs import to_json

if TYPE_CHECKING:
    import keras
    import tensorflow as tf

    from ctl.checkpoint.manager import Saved
    from ctl.control.evaluator import Evaluator
    from ctl.data import Files

FLAGS = flags.FLAGS
flags.disclaim_key_flags()

_USAGE = """
Evaluates a checkpoint of a run, or an exported model, on every example of the test data.

  python -m ctl.evaluate --model_dir=/tmp/run                      # the latest checkpoint
  python -m ctl.evaluate --model_dir=/tmp/run --checkpoint=best --replicas=2
  python -m ctl.evaluate --model_dir=/tmp/run --watch              # each new one as it appears
  python -m ctl.evaluate --model=/tmp/run/export/model.keras
  python -m ctl.evaluate --model_dir=/tmp/run --dataset=new.csv --predictions=out.csv

Data, model, step, loss, metrics and precision are taken from the run (config.json) unless given.
Code of your own must be named again: --model=my.module:make_model
"""


_POLL_SECONDS = 1.0


def run() -> None:
    """The command line, also installed as ``ctl-evaluate``."""
    with group("What to evaluate"):
        define_path("model_dir", None, "Directory of a run of ctl.train.")
        flags.DEFINE_string(
            "model",
            None,
            "A .keras file, or the directory of an export of several models, instead of "
            "--model_dir; or, with --model_dir, the "
            "package.module:function or file.py:function that the run was trained with.",
        )
        flags.DEFINE_string(
            "checkpoint", "latest", "Checkpoint to evaluate: latest, best, or a step."
        )
        flags.DEFINE_boolean("watch", False, "Evaluate each new checkpoint as it appears.")
        flags.DEFINE_float(
            "watch_timeout", 600, "Seconds without a new checkpoint after which --watch ends.", 0
        )
        flags.DEFINE_boolean("json", False, "Print one JSON object per evaluation.")
        define_path(
            "report",
            None,
            "Directory for report.html and report.json of a classifier: accuracy of each class, "
            "confusion matrix, and the examples with the highest loss.",
        )
        define_path(
            "predictions",
            None,
            "CSV file for what the model predicts for each example of --dataset, which then needs "
            "no labels: the class and its probability, or numbers.",
        )
    groups.define_data_flags(of_a_run=True)
    groups.define_dlrm_flags()
    groups.define_code_flags()
    devices.define_device_flags(training=False)
    with group("Computation"):
        flags.DEFINE_enum(
            "precision",
            "float32",
            names.PRECISIONS,
            "Data type of the computation, with --model_dir.",
        )
        flags.DEFINE_integer(
            "seed", 0, "Seed of synthetic data and of your own dataset.", lower_bound=0
        )
    check_flags(["report", "watch", "loss"], _check_report)
    check_flags(["predictions", "watch"], _check_predictions)
    check_flags(["model_dir", "model", "checkpoint", "watch", "watch_timeout"], _check)
    run_command(main, _USAGE)


def _check_report(report: str | None, watch: bool, loss: str) -> None:
    if report and watch:
        raise UsageError("--report covers one checkpoint: leave out --watch")
    if report and names.loss_of(loss) == names.NUMBERS:
        raise UsageError(
            f"--report needs a classifier, and --loss={loss} is not for one: leave out --report"
        )


def _check_predictions(predictions: str | None, watch: bool) -> None:
    if predictions and watch:
        raise UsageError("--predictions are of one checkpoint: leave out --watch")
    if predictions and not predictions.endswith(".csv"):
        raise UsageError(f"--predictions={predictions} writes CSV: give a file that ends in .csv")


def _check(
    model_dir: str | None, model: str | None, checkpoint: str, watch: bool, watch_timeout: float
) -> None:
    if not model_dir and not model:
        raise UsageError("give --model_dir=DIR of a run, or --model=FILE.keras")
    several = model and any(Path(model).glob("*/model.keras"))  # of an export
    is_there = several or stores.is_url(model or "") or Path(model or "").is_file()
    if model and not model_dir and not is_there:
        raise UsageError(f"--model={model}: no such file")
    if not math.isfinite(watch_timeout):
        raise UsageError(f"--watch_timeout={watch_timeout} must be finite")
    if model and model_dir:
        names.check_model_name(model)
    if checkpoint not in ("latest", "best") and not checkpoint.isdecimal():
        raise UsageError(f"--checkpoint={checkpoint} is not latest, best or a step")
    if checkpoint != "latest" and not model_dir:
        raise UsageError("--checkpoint has no effect without --model_dir: leave it out")
    if watch and (not model_dir or checkpoint != "latest"):
        raise UsageError("--watch needs --model_dir and --checkpoint=latest")


def main() -> None:
    """Evaluates once; with ``--watch``, evaluates each new checkpoint until none appears for
    ``--watch_timeout`` seconds.

    Raises:
        UsageError: the directory holds no run, or the flags, the model or the data are not usable.
        CheckpointError: there is no intact checkpoint.
    """
    console.log_to_terminal()
    averaged, frozen, best = _adopt_run() if FLAGS.model_dir else (False, [], {})
    _check_given()
    console.load_tensorflow()

    import keras

    from ctl.distributed.strategy import make_strategy
    from ctl.jobs import named

    keras.mixed_precision.set_dtype_policy(FLAGS.precision)
    placement = make_strategy(
        FLAGS.strategy,
        replicas=FLAGS.replicas,
        cross_device_ops=FLAGS.cross_device_ops,
        tpu=FLAGS.tpu,
    )
    console.run_first_operation()
    logging.info("strategy: %s", placement.description)
    named.step_class(FLAGS.step)  # what is wrong is said before data are loaded
    named.check_metrics(FLAGS.metrics)
    found = _found()
    _check_columns(found)
    dataset, files = load_evaluation_data(FLAGS, found, needs_labels=not FLAGS.predictions)
    logging.info("evaluation data: %s", dataset.description)
    check_classes(FLAGS, dataset)
    evaluator = _make_evaluator(dataset, placement.strategy, frozen)
    show = functools.partial(_show, evaluator, files, found.get("labels") or ())
    if FLAGS.model_dir:
        _evaluate_checkpoints(evaluator, show, averaged, best)
    else:
        show(None)


def _found() -> dict[str, Any]:
    """What the training data of the model hold, if they were files."""
    from ctl.checkpoint.export import found_beside

    return (
        config.found(stores.local(FLAGS.model_dir))
        if FLAGS.model_dir
        else found_beside(FLAGS.model)
    )


def _check_columns(found: dict[str, Any]) -> None:
    """Raises `UsageError` if flags name other columns than those that the model was trained on."""
    for name in ("features", "labels"):
        given = FLAGS[name].value or []
        if found.get(name) and FLAGS[name].present and [*given] != [*found[name]]:
            raise UsageError(
                f"--{name}={','.join(given)} has no effect: the model was trained with the {name} "
                f"{', '.join(map(str, found[name]))[:200]}: leave it out"
            )


def _make_evaluator(dataset: Any, strategy: tf.distribute.Strategy, frozen: list[str]) -> Evaluator:
    from ctl.checkpoint.export import load_model
    from ctl.control.evaluator import Evaluator
    from ctl.jobs.models import check_model

    info: Any = dataset.info
    with strategy.scope():
        if FLAGS.model_dir:
            model = model_of(FLAGS, info)
            freeze(model, frozen)  # what is frozen has no average
        else:
            model = load_model(FLAGS.model, "model")
            if info.image_shape and info.num_classes:
                check_model(FLAGS.model, model, info.image_shape, info.num_classes)
        step = make_eval_step(FLAGS, model)
    return Evaluator(step, dataset, strategy=strategy)


def _show(
    evaluator: Evaluator, files: Files | None, labels: Sequence[str], saved: Saved | None
) -> None:
    """Evaluates the model on ``files``, whose columns of ``labels`` may be unknown, as far as they
    have labels; writes reports and predictions."""
    from ctl.data.errors import translate_data_errors

    info = evaluator.dataset.info
    has_labels = files is None or files.has_labels(info.split)
    if FLAGS.report and not has_labels:
        raise UsageError(f"--report needs labels, and {FLAGS.dataset} has none: leave it out")
    with translate_data_errors(evaluator.dataset):
        results = evaluator.run() if has_labels else {}
        _print(results, saved)
        if FLAGS.report:
            write_report(evaluator, results, saved)
        if FLAGS.predictions:
            write_predictions(evaluator, files, labels)


def write_predictions(evaluator: Evaluator, files: Files | None, labels: Sequence[str]) -> None:
    """Writes what ``--predictions`` asks for."""
    from ctl.inspect import predictions

    step, dataset, info = evaluator.step, evaluator.dataset, evaluator.dataset.info
    if info.split.startswith("train[") and not FLAGS.eval_split:
        logging.info(
            "the predictions are of %s alone, which the training held out: for all rows, give "
            "--eval_split=train",
            info.split,
        )
    outputs = predictions.collect(step, dataset, evaluator.strategy)
    of_data = "row", [*map(str, range(len(outputs)))]
    named = files.names(info.split) if files else of_data
    text = predictions.table(step, outputs, info.class_names, labels, named)
    console.write_file("predictions", FLAGS.predictions, text)


def _evaluate_checkpoints(
    evaluator: Evaluator,
    show_saved: Callable[[Saved], None],
    averaged: bool,
    best: dict[str, Any],
) -> None:
    """Shows the wanted checkpoint with ``show_saved`` and, with ``--watch``, those that follow.
    ``averaged``: with the averages of their weights."""
    import keras

    from ctl.base.models import split
    from ctl.checkpoint.manager import CheckpointManager

    _warn_of_selection(evaluator.dataset.info)
    model = evaluator.step.model
    averages = _averages(model) if averaged else []
    state = {"model": model.variables}
    if averaged:
        # Restored last, over the weights in "model".
        state["ema"] = [average for _, average in averages]
    of = {"model": model.variables, "ema": [variable for variable, _ in averages]}
    state = split(model, state, of)

    def show(saved: Saved) -> None:
        for variable, average in averages:
            if average is not variable:
                variable.assign(keras.ops.cast(average, variable.dtype))
        show_saved(saved)

    with CheckpointManager(
        stores.join(FLAGS.model_dir, "checkpoints"), **best, read_only=True
    ) as checkpoints:
        wanted = FLAGS.checkpoint
        saved = checkpoints.restore(state, int(wanted) if wanted.isdecimal() else wanted)
        if saved:
            show(saved)
        elif not FLAGS.watch:
            raise CheckpointError(f"{checkpoints.directory} holds no checkpoint")
        seen = shown = saved.step if saved else -1
        while FLAGS.watch:
            new = checkpoints.wait_for_new(seen, FLAGS.watch_timeout)
            if new is None:
                logging.info("no new checkpoint in %g s", FLAGS.watch_timeout)
                return
            seen = new.step
            saved = checkpoints.restore(state)
            if saved and saved.step != shown:  # it is the old one if the new one is damaged
                show(saved)
                seen, shown = max(seen, saved.step), saved.step


def _averages(model: keras.Model) -> list[tuple[keras.Variable, Any]]:
    """Each averaged variable, and what its average is restored to: itself, or a wider one."""
    from ctl.distributed import local_batch
    from ctl.distributed.replicas import average_like, statistics_of, training_norms

    averages = []
    for variable in [*model.trainable_variables, *statistics_of(training_norms(model))]:
        narrow = local_batch.wide(variable.value.dtype) != variable.value.dtype
        averages.append((variable, average_like(variable) if narrow else variable))
    return averages


def _warn_of_selection(info: Any) -> None:
    if FLAGS.checkpoint != "best":
        return
    if config.chosen(stores.local(FLAGS.model_dir), "eval_split", str) == info.split:
        logging.warning(
            "the best checkpoint was selected on these data, %s, so its result is too good: give "
            "others, with --eval_split or --dataset",
            info.split or info.name,
        )


def _check_given() -> None:
    """Raises `UsageError` if a flag is given that has no effect on this evaluation."""
    check_without_effect(
        ("train_split", "shuffle_block", "oversample"), "on an evaluation: leave it out"
    )
    groups.check_data_flags()
    if FLAGS.predictions:
        check_without_effect(["on_bad_record"], "with --predictions, which name each example")
        FLAGS["on_bad_record"].value = "stop"
    if FLAGS.dataset != "synthetic" and not names.is_function_name(FLAGS.dataset):
        check_without_effect(["seed"], f"with --dataset={FLAGS.dataset}: leave it out")
    if not FLAGS.model_dir:
        check_without_effect(["precision"], "without --model_dir: the file sets it")
        if not FLAGS["dataset"].present:
            logging.info("no --dataset is given: evaluating on the default, %s", FLAGS.dataset)
    if not FLAGS.watch:
        check_without_effect(["watch_timeout"], "without --watch: add --watch, or leave this out")


def _stored_flags() -> dict[str, Any] | None:
    """The flags of the run, as they are now; None if there is none."""
    with contextlib.suppress(stores.NothingThere):
        return config.read(stores.local(FLAGS.model_dir, again=True))
    return None


def _adopt_run() -> tuple[bool, list[str], dict[str, Any]]:
    """Adopts the flags of the run; returns whether it averages weights, what it froze, and its
    ``best_metric`` and ``best_mode``."""
    stored = _stored_flags()
    if stored is None and FLAGS.watch:
        logging.info("waiting for a run of ctl.train in %s", FLAGS.model_dir)
        deadline = time.monotonic() + FLAGS.watch_timeout
        while stored is None and time.monotonic() < deadline:
            time.sleep(min(_POLL_SECONDS, FLAGS.watch_timeout))
            stored = _stored_flags()
    if stored is None:
        raise UsageError(
            f"--model_dir={FLAGS.model_dir} holds no run of ctl.train: no {config.FILE}"
        )
    model_dir = stores.local(FLAGS.model_dir)
    # Importing a module runs it, so a name in a file is not enough to import one.
    again = [
        f"--{name}={shlex.quote(str(stored.get(name)))}"
        for name in names.NAMING
        if not FLAGS[name].present and names.is_function_name(str(stored.get(name)))
    ]
    if again:
        those = "that flag" if len(again) == 1 else "those flags"
        raise UsageError(f"the run was trained with {' '.join(again)}: give {those} again")
    titles = "Data", "Model dlrm", "Step, loss and metrics", "Computation"
    groups_of_the_run = grouped_flags(*titles)
    stored = config.BEFORE_FLAGS | stored
    if kept := config.kept_tokenizer(model_dir):
        stored["tokenizer"] = str(kept)
    config.adopt(stored, ["model", *groups_of_the_run, *imported_flags()])
    config.check_tokenizer(model_dir)
    metric, mode = str(stored.get("best_metric")), stored.get("best_mode")
    best = {"best_metric": metric, "best_mode": training.best_mode(metric, mode)}
    frozen = stored.get("freeze") or []
    if not isinstance(frozen, list) or not all(isinstance(one, str) for one in frozen):
        raise UsageError(f"{config.FILE}: --freeze cannot be {str(frozen)[:80]}")
    return stored.get("ema_decay") is not None, frozen, best


def write_report(evaluator: Evaluator, results: dict[str, float], saved: Saved | None) -> None:
    """Prints and writes what ``--report`` asks for."""
    from ctl.inspect import mistakes

    directory = Path(FLAGS.report)
    with durable.writing(f"--report={directory}"):
        directory.mkdir(parents=True, exist_ok=True)
    found = mistakes.collect(evaluator.step, evaluator.dataset, evaluator.strategy)
    if not FLAGS.json:
        print("\n".join(["", *mistakes.table(found), ""]), flush=True)
    info = evaluator.dataset.info
    where = f"step {saved.step} of {FLAGS.model_dir}" if saved else FLAGS.model
    scores = [f"{name} {value:.4f}" for name, value in results.items()]
    page = mistakes.make_page(found, f"{where} on {info.name} {info.split}".strip(), scores)
    console.write_file("report", str(directory / "report.html"), page)
    console.write_file("report", str(directory / "report.json"), to_json(found.to_json()))


def _print(results: dict[str, float], saved: Saved | None) -> None:
    if FLAGS.json:
        head = {"step": saved.step, "path": _where(saved)} if saved else {"path": FLAGS.model}
        print(to_json({**head, **results}), flush=True)
        return
    scores = [f"{name} {value:.6f}" for name, value in results.items()]
    scores = scores or ["no labels, so no metrics"]
    where = f"step {saved.step} ({_where(saved)})" if saved else FLAGS.model
    print(console.filled(scores, f"{where}: "), flush=True)


def _where(saved: Saved) -> str:
    """Where the user knows the checkpoint."""
    return stores.join(FLAGS.model_dir, f"checkpoints/{saved.path.name}")


if __name__ == "__main__":
    run()
