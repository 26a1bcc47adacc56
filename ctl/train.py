"""The binary: flags to objects to `ctl.Loop.train_and_evaluate`. See `main`."""

from __future__ import annotations

import contextlib
import math
import re
import shlex
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from absl import flags, logging

from ctl import (
    cluster,
    config,
    console,
    device_flags,
    flag_groups,
    manifest,
    rates,
    watchdog,
)
from ctl.actions import parse_window
from ctl.errors import UsageError
from ctl.flags import AUTO, check_flags, group, grouped_flags
from ctl.flags import run as run_command
from ctl.rates import steps_from

if TYPE_CHECKING:
    import keras
    import tensorflow as tf

    from ctl.loop import Loop
    from ctl.strategy import Placement

FLAGS = flags.FLAGS
flags.disclaim_key_flags()

_USAGE = """
Trains an image classifier with an explicit loop that owns its all-reduce.

  python -m ctl.train --model_dir=/tmp/run                        # embedded data, any machine
  python -m ctl.train --model_dir=/tmp/run --dataset=mnist --replicas=2 --global_batch_size=128
  python -m ctl.train --model_dir=/tmp/run --model=my.module:make_model --optimizer=adamw

The same command again resumes, bit for bit. SIGTERM and Ctrl-C save and exit with 42.
Exit codes: 0 done, 1 a bug, 2 wrong flags or missing data, 3 NaN or Inf, 4 checkpoints or disk,
5 an all-reduce that timed out, 42 stopped by a signal and saved.
"""

_DEFAULT_EPOCHS = 12.0


def run() -> None:
    """The command line, also installed as ``ctl-train``."""
    define_flags()
    run_command(main, _USAGE)


def define_flags(model_dir_required: bool = True) -> None:
    """All groups of flags; `ctl.evaluate` has the same, to read them from ``config.json``, and
    `ctl.inspect`, to look at the run that they describe."""
    flag_groups.define_run_flags(model_dir_required)
    flag_groups.define_data_flags()
    flag_groups.define_model_flags()
    flag_groups.define_step_flags()
    flag_groups.define_schedule_flags()
    FLAGS.set_default("schedule", "cosine")
    device_flags.define_device_flags()
    flag_groups.define_checkpoint_flags()
    _define_output_flags()
    device_flags.check_asynchronous_flags()


def _define_output_flags() -> None:
    """What the run shows and leaves behind."""
    with group("Output"):
        flags.DEFINE_string("log_every", "100", "Steps (100) or epochs (0.1ep) between log lines.")
        flags.DEFINE_boolean("tensorboard", True, "Write scalars for TensorBoard.")
        flags.DEFINE_string(
            "profile_steps",
            None,
            "START:STOP, e.g. 20:30: writes a profile of these steps for TensorBoard.",
        )
        flags.DEFINE_string(
            "inspect_every",
            None,
            "Steps (1000) or epochs (1ep) between windows of 20 steps in which the all-reduce is "
            "timed: allreduce/exposed_ms, busbw and late_ms in metrics.jsonl and TensorBoard "
            "(default: never).",
        )
        flags.DEFINE_boolean("export", True, "Export model.keras and a SavedModel at the end.")
    check_flags(["log_every", "inspect_every", "profile_steps"], _check_output)


def _check_output(log_every: str, inspect_every: str | None, profile_steps: str | None) -> None:
    for flag, value in (("--log_every", log_every), ("--inspect_every", inspect_every)):
        if value is not None:
            rates.check_positive(flag, steps_from(flag, value, flag_groups.LONG_EPOCH))
    if profile_steps is not None:
        parse_window(profile_steps)


def main() -> None:
    """Trains, evaluates, saves, exports, and says what to try next. With parameter servers the
    coordinator does, and every other process serves it."""
    if FLAGS.strategy == "parameter_server" and not cluster.resolve_tasks().is_coordinator:
        _serve()
    model_dir = Path(FLAGS.model_dir)
    stored = config.read(model_dir)
    # Without a checkpoint there is nothing to contradict: an attempt failed before its first step.
    if stored is not None and manifest.paths(model_dir / "checkpoints"):
        config.check_resumable(stored)
    console.log_to_terminal()
    if FLAGS.strategy != "multi_worker":
        return _train(model_dir)
    me = cluster.resolve(FLAGS.workers, FLAGS.worker_index)
    with console.log_to_file(model_dir / f"worker-{me.index}.log"):
        _train(model_dir)


def _train(model_dir: Path) -> None:
    logging.info("loading TensorFlow")
    console.load_tensorflow(errors=FLAGS.strategy != "parameter_server")

    from ctl.checkpoint import CheckpointManager
    from ctl.workers import is_chief, leave_together

    placement, train, evaluation, total_steps = prepare()
    chief = is_chief(placement.strategy)
    steps_per_epoch = train.num_examples / train.global_batch_size
    with contextlib.ExitStack() as stack:
        if placement.roll_call:
            stack.enter_context(placement.roll_call)
        checkpoints = stack.enter_context(
            CheckpointManager(
                model_dir / "checkpoints",
                keep=FLAGS.keep,
                keep_best=FLAGS.keep_best,
                best_metric=FLAGS.best_metric,
                best_mode=best_mode(FLAGS.best_metric),
                keep_every_hours=FLAGS.keep_every_hours,
                asynchronous=FLAGS.async_checkpoints,
                fingerprint=train.fingerprint(),
                soft_keys=("tensorflow",),
                read_only=not chief,
            )
        )
        loop = make_loop(placement, train, evaluation, total_steps, checkpoints)
        saved = loop.restore()
        if saved:
            logging.info("resuming at step %d from %s", saved.step, saved.path)
        chosen = _choose(loop, model_dir if saved else None)
        if chief:
            config.write(model_dir, grouped_flags(), chosen=chosen)
        on_wake = _add_actions(loop, stack, model_dir, steps_per_epoch, chief)
        started, first = time.monotonic(), loop.global_step
        with loop.stop_on_signals(), explained(train):
            if first < total_steps:
                logging.info("compiling the first step: this takes some seconds")
            every = steps_from("--evaluate_every", FLAGS.evaluate_every, steps_per_epoch)
            results = loop.train_and_evaluate(
                total_steps, evaluate_every=max(1, every), on_wake=on_wake
            )
        seconds = time.monotonic() - started
        checkpoints.wait()
        exported = _export(loop, model_dir) if FLAGS.export and chief else []
        leave_together(placement.strategy, FLAGS.startup_timeout)
        steps = loop.global_step
    if chief:
        _summarize(model_dir, results, steps, steps - first, seconds, exported)
    else:
        logging.info("done: %d steps; the chief has the results", steps)


class Prepared(NamedTuple):
    """What a loop is made of, see `make_loop`; the datasets are those of `ctl.data`."""

    placement: Placement
    train: Any
    evaluation: Any
    total_steps: int


def prepare() -> Prepared:
    """Strategy, seed, precision and data as the flags say; TensorFlow has run nothing before."""
    import keras

    from ctl import data

    placement = _place()
    keras.utils.set_random_seed(FLAGS.seed)
    keras.mixed_precision.set_dtype_policy(FLAGS.precision)
    logging.info("strategy: %s", placement.description)
    with watchdog.host("loading the data"):
        train, evaluation = load_data(data, training=True), load_data(data, training=False)
    logging.info("training data: %s", train.description)
    logging.info("evaluation data: %s", evaluation.description)
    steps_per_epoch = train.num_examples / train.global_batch_size
    epochs = FLAGS.epochs or _DEFAULT_EPOCHS
    total_steps = FLAGS.train_steps or max(1, math.ceil(epochs * steps_per_epoch - 1e-6))
    return Prepared(placement, train, evaluation, total_steps)


def _serve() -> None:
    """A worker or parameter server; ends the process."""
    console.log_to_terminal()
    console.load_tensorflow(errors=False)
    from ctl.parameter_server import serve

    serve(cluster.resolve_tasks(), FLAGS.startup_timeout)


def _place() -> Placement:
    """The strategy that the flags name. Nothing of TensorFlow may have run before."""
    from ctl.strategy import make_multi_worker, make_parameter_server, make_strategy
    from ctl.workers import check_agreement

    if FLAGS.strategy == "parameter_server":
        return make_parameter_server(
            cluster.resolve_tasks(),
            startup_timeout=FLAGS.startup_timeout,
            worker_timeout=FLAGS.worker_timeout,
        )
    if FLAGS.strategy != "multi_worker":
        return make_strategy(
            FLAGS.strategy,
            replicas=FLAGS.replicas,
            cross_device_ops=FLAGS.cross_device_ops,
            tpu=FLAGS.tpu,
        )
    placement = make_multi_worker(
        cluster.resolve(FLAGS.workers, FLAGS.worker_index),
        communication=FLAGS.communication,
        collective_timeout=FLAGS.collective_timeout,
        startup_timeout=FLAGS.startup_timeout,
        record_dir=Path(FLAGS.model_dir) / "inspect" if FLAGS.model_dir else None,
    )
    check_agreement(placement.strategy, _flags_of_the_job())
    return placement


def _flags_of_the_job() -> dict[str, Any]:
    """What must be the same on every worker."""
    mine = {"worker_index", "data_dir", "download"}
    return {f"--{name}": FLAGS[name].value for name in grouped_flags() if name not in mine}


def _choose(loop: Loop, resumed: Path | None) -> dict[str, Any]:
    """What flags leave to a trial: as the run that is ``resumed`` has chosen, else by trying."""
    from ctl.tune import tune_jit_compile, tune_packs

    choices: dict[str, Any] = {}
    for name, kind, choose in (
        ("jit_compile", bool, tune_jit_compile),
        ("bytes_per_pack", int, tune_packs),
    ):
        if FLAGS[name].value != AUTO:
            continue
        chosen = config.chosen(resumed, name, kind) if resumed else None
        if chosen is None:
            logging.info("trying values of %s: this takes some seconds", name)
            with explained(loop.dataset):
                choices[name] = choose(loop)
        else:
            logging.info("%s: %s, chosen when the run began", name, chosen)
            loop.change(name, chosen)
            choices[name] = chosen
    return choices


def best_mode(metric: str) -> str:
    """Whether the best value of ``--best_metric`` is the "max" or the "min"."""
    return "max" if metric == "accuracy" else "min"


@contextlib.contextmanager
def explained(dataset: Any) -> Iterator[None]:
    """What TensorFlow raises for files that go bad while they are read, and where memory ends, as a
    `UsageError` of one line."""
    import tensorflow as tf

    unreadable = tf.errors.DataLossError, tf.errors.NotFoundError, tf.errors.PermissionDeniedError
    try:
        yield
    except unreadable as error:
        raise UsageError(
            f"{dataset.description}: its files are damaged: {_reason(error)}; prepare it again"
        ) from error
    except tf.errors.ResourceExhaustedError as error:
        raise UsageError(
            f"out of memory: {_reason(error)}; try a smaller --global_batch_size, more "
            "--accumulate_steps or, if it is the data that are too large, a --resident_limit_mib"
        ) from error


def _reason(error: tf.errors.OpError) -> str:
    """The line of its text that is neither about the graph nor about where that was made."""
    lines = re.sub(r"\{\{.*?\}\} ?", "", error.message).splitlines()
    about_graph = re.compile(r"\s|$|Graph execution error|Detected at|\(\d+\) |\d+ root error")
    return next((line for line in lines if not about_graph.match(line)), type(error).__name__)[:200]


def load_data(data: Any, *, training: bool) -> Any:
    """The dataset that the flags name; ``data`` is `ctl.data`, which takes TensorFlow to load."""
    shape = flag_groups.image_shape_from(FLAGS.image_shape)
    if FLAGS.dataset == "synthetic":
        return data.synthetic(
            shape or (28, 28, 1),
            FLAGS.num_classes,
            FLAGS.num_examples,
            global_batch_size=FLAGS.global_batch_size,
            seed=FLAGS.seed,
            training=training,
        )
    return data.load(
        FLAGS.dataset,
        global_batch_size=FLAGS.global_batch_size,
        training=training,
        split=FLAGS.train_split if training else FLAGS.eval_split,
        seed=FLAGS.seed,
        data_dir=FLAGS.data_dir,
        download=FLAGS.download,
        image_shape=shape,
        resident_limit_mib=FLAGS.resident_limit_mib,
        shuffle_buffer=FLAGS.shuffle_buffer,
    )


def make_loop(
    placement: Placement, train: Any, evaluation: Any, total_steps: int, checkpoints: Any = None
) -> Loop:
    """Model, optimizer, step and loop, in the strategy's scope."""
    import keras

    from ctl.evaluator import Evaluator
    from ctl.loop import Loop
    from ctl.models import make_model
    from ctl.schedule import make_schedule
    from ctl.step import EvalStep, TrainStep, cross_entropy

    schedule = make_schedule(
        total_steps=total_steps,
        steps_per_epoch=train.num_examples / train.global_batch_size,
        global_batch_size=train.global_batch_size,
        **flag_groups.schedule_arguments(),
    )

    if train.info.num_classes is None:
        raise UsageError(
            f"{train.description}: it does not say how many classes it has, and its labels are "
            "counted only where it fits into memory: raise --resident_limit_mib"
        )

    def smoothed(labels: Any, logits: Any) -> Any:
        return cross_entropy(labels, logits, FLAGS.label_smoothing)

    with placement.strategy.scope(), watchdog.host("building the model"):
        model = make_model(FLAGS.model, train.info.image_shape, train.info.num_classes)
        step = TrainStep(
            model,
            make_optimizer(FLAGS.optimizer, FLAGS.momentum, FLAGS.weight_decay),
            smoothed if FLAGS.label_smoothing else cross_entropy,
            metrics=[keras.metrics.SparseCategoricalAccuracy("accuracy")],
            clip_norm=FLAGS.clip_norm,
            accumulate_steps=FLAGS.accumulate_steps,
            ema_decay=FLAGS.ema_decay,
            loss_scale=FLAGS.precision == "mixed_float16",
            on_nan=FLAGS.on_nan,
            bytes_per_pack=0 if FLAGS.bytes_per_pack == AUTO else FLAGS.bytes_per_pack,
            options=placement.options,
            jit_compile=FLAGS.jit_compile == "on",
            jit_update=False if placement.roll_call else None,  # XLA stays within one process
        )
        accuracy = keras.metrics.SparseCategoricalAccuracy("accuracy")
        eval_step = EvalStep(model, metrics=[accuracy])
    options = {
        "strategy": placement.strategy,
        "schedule": schedule,
        "checkpoints": checkpoints,
        "steps_per_loop": FLAGS.steps_per_loop or None,
    }
    if placement.roll_call:
        from ctl.parameter_server import CopyEvaluator, ParameterServerLoop

        copy = make_model(FLAGS.model, train.info.image_shape, train.info.num_classes)
        accuracy = keras.metrics.SparseCategoricalAccuracy("accuracy")
        evaluator = CopyEvaluator(model, EvalStep(copy, metrics=[accuracy]), evaluation)
        return ParameterServerLoop(
            step,
            train,
            roll_call=placement.roll_call,
            timeout=FLAGS.collective_timeout,
            evaluator=evaluator,
            **options,
        )
    evaluator = Evaluator(eval_step, evaluation, strategy=placement.strategy)
    return Loop(step, train, evaluator=evaluator, **options)


def make_optimizer(
    name: str, momentum: float, weight_decay: float | None
) -> keras.optimizers.Optimizer:
    """The Keras optimizer of one of `ctl.names.OPTIMIZERS`; its rate comes from the schedule."""
    import keras

    from ctl.apply import PROVEN

    if name in ("momentum", "nesterov"):
        return keras.optimizers.SGD(
            momentum=momentum, nesterov=name == "nesterov", weight_decay=weight_decay
        )
    by_name = {kind.__name__.lower(): kind for kind in PROVEN}
    options = {} if weight_decay is None else {"weight_decay": weight_decay}
    return by_name[name](**options)


def _add_actions(
    loop: Loop, stack: Any, model_dir: Path, steps_per_epoch: float, chief: bool
) -> Any:
    """Logs, progress, checkpoints and profile; returns what shows the progress of evaluation."""
    from ctl.actions import Every, Log
    from ctl.profiler import Profile
    from ctl.progress import Lines, Progress
    from ctl.sinks import JsonLines, TensorBoard
    from ctl.workers import cluster_of, is_multi_worker

    # Reading metrics is a collective: with several workers all do, at the same steps.
    multi_worker = is_multi_worker(loop.strategy)
    bar = None
    if chief and sys.stdout.isatty():
        bar = stack.enter_context(Progress(peek=not multi_worker))
    sinks = [JsonLines(model_dir / "metrics.jsonl"), bar or Lines()] if chief else []
    if FLAGS.tensorboard and chief:
        sinks.append(TensorBoard(model_dir))
    log = Log(*sinks, steps_per_epoch=steps_per_epoch)
    stack.callback(log.close)
    loop.eval_actions.append(log.evaluated)
    loop.actions.append(
        Every(log, steps=max(1, steps_from("--log_every", FLAGS.log_every, steps_per_epoch)))
    )
    if FLAGS.checkpoint_every:
        steps = steps_from("--checkpoint_every", FLAGS.checkpoint_every, steps_per_epoch)
        loop.actions.append(Every(lambda status: loop.save(), steps=max(1, steps)))
    if FLAGS.inspect_every:
        from ctl.inspect.periodic import inspect_every

        every = steps_from("--inspect_every", FLAGS.inspect_every, steps_per_epoch)
        files = [sink for sink in sinks if isinstance(sink, JsonLines | TensorBoard)]
        loop.actions += inspect_every(loop.step, max(1, every), files)
    if FLAGS.profile_steps:
        # On every worker, because all must stop at the same steps.
        where = "train" if chief else f"worker-{cluster_of(loop.strategy).index}"
        profile = Profile(*parse_window(FLAGS.profile_steps), model_dir / where)
        stack.callback(profile.close)
        loop.actions.append(profile)
    if bar:
        loop.actions.append(bar)
    return bar.evaluating if bar else None


def _export(loop: Loop, model_dir: Path) -> list[Path]:
    from ctl.export import export_model

    with loop.step.applier.averaged():
        return export_model(loop.step.model, model_dir / "export")


def _summarize(
    model_dir: Path,
    results: dict[str, float],
    total_steps: int,
    steps: int,
    seconds: float,
    exported: list[Path],
) -> None:
    scores = "  ".join(f"{name} {value:.4f}" for name, value in results.items())
    lines = [
        "",
        f"done: {total_steps} steps, {steps} of them now in {seconds:.1f} s  |  test: {scores}",
        f"  checkpoints  {model_dir / 'checkpoints'}",
        f"  log          {model_dir / 'metrics.jsonl'}",
        *(f"  exported     {path}" for path in exported),
        "next:",
        f"  {_python()} -m ctl.evaluate --model_dir={shlex.quote(str(model_dir))}",
    ]
    if FLAGS.tensorboard:
        logdir = shlex.quote(str(model_dir))
        lines.append(f"  {_python()} -m tensorboard.main --logdir={logdir}")
    print("\n".join(lines))


def _python() -> str:
    """What to type here for this interpreter, whose virtual environment need not be active."""
    python = Path(sys.executable)
    active = shutil.which("python")
    if active and Path(active).parent == python.parent:
        return "python"
    here = Path.cwd()
    return str(python.relative_to(here) if python.is_relative_to(here) else python)


if __name__ == "__main__":
    run()
