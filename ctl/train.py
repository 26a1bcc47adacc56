"""The training command: builds objects from flags and runs `ctl.Loop.train_and_evaluate`."""

from __future__ import annotations

from ctl.base import signals

if __name__ == "__main__":
    signals.begin()  # before the other imports

import contextlib
import shlex
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from absl import flags, logging

from ctl.base import cache, console
from ctl.base.names import NAMING, is_function_name, paths_by_name
from ctl.base.stores import is_url, join
from ctl.base.streams import native_stderr_held
from ctl.checkpoint import manifest
from ctl.checkpoint.mirror import mirror_of
from ctl.distributed import cluster
from ctl.distributed.cluster import handshake
from ctl.errors import UsageError
from ctl.flags import config, training
from ctl.flags.parsing import AUTO, grouped_flags, run_command
from ctl.jobs import dry_run, outputs
from ctl.jobs.build import make_loop, prepare
from ctl.jobs.xla_cache import open_cache

if TYPE_CHECKING:
    from ctl.base.actions import Log
    from ctl.checkpoint import CheckpointManager, Saved
    from ctl.control.evaluator import OnProgress
    from ctl.jobs.build import Prepared
    from ctl.jobs.xla_cache import XlaCache
    from ctl.loop import Loop

FLAGS = flags.FLAGS
flags.disclaim_key_flags()

_USAGE = """
Trains an image classifier with an explicit loop that owns its all-reduce.

  python -m ctl.train --model_dir=/tmp/run                        # embedded data, any machine
  python -m ctl.train --model_dir=/tmp/run --dataset=mnist --replicas=2 --global_batch_size=128
  python -m ctl.train --model_dir=/tmp/run --dataset=./photos     # or wine.csv
  python -m ctl.train --model_dir=/tmp/run --model=mymodel.py:make_model --optimizer=adamw
  python -m ctl.train --model_dir=/tmp/run --step=my.module:MyStep --dataset=my.module:load \\
      --model=my.module:make_model --loss=mean_squared_error --train_steps=1000

The same command again resumes, bit for bit. SIGTERM and Ctrl-C save and exit with 42.
Exit codes: 0 done, 1 a bug, 2 wrong flags or missing data, 3 NaN, Inf or replicas that differ,
4 checkpoints or disk, 5 a lost worker or an all-reduce that timed out, 42 stopped by a signal and
saved.
"""


def run() -> None:
    """The command line, also installed as ``ctl-train``."""
    signals.begin()
    training.define_flags()
    run_command(main, _USAGE, output_is_log=True)


def main() -> None:
    """Trains, evaluates, saves, exports and prints which commands to run next.

    With parameter servers, the coordinator does this; the other processes serve it.
    """
    if FLAGS.strategy == "parameter_server" and not cluster.resolve_tasks().is_coordinator:
        _serve()
    if FLAGS["momentum"].present and FLAGS.optimizer not in ("momentum", "nesterov"):
        raise UsageError(
            f"--momentum has no effect with --optimizer={FLAGS.optimizer}: use momentum or nesterov"
        )
    with outputs.run_directory(FLAGS, not (FLAGS.dry_run or FLAGS.precompile)) as model_dir:
        _main(model_dir)


def _main(model_dir: Path) -> None:
    stored = config.read(model_dir)
    # Without a checkpoint, flags may change: the earlier attempt trained nothing that was saved.
    if manifest.paths(model_dir / "checkpoints"):
        if stored is None:
            raise UsageError(
                f"{model_dir} holds checkpoints, but not {config.FILE} with their flags: restore "
                "that file or choose another --model_dir"
            )
        if FLAGS.precompile:
            raise UsageError(f"--precompile is for a first start, and {model_dir} holds a run")
        config.check_resumable(stored)
        config.check_tokenizer(model_dir)
    elif FLAGS.init_from:
        for path in paths_by_name(FLAGS.init_from).values():
            if not is_url(path) and not any(Path(path + end).exists() for end in ("", ".index")):
                raise UsageError(f"--init_from={path}: no such file or directory")
    if FLAGS.dry_run or FLAGS.precompile:
        FLAGS["download"].value = False
    if FLAGS.dry_run:
        return dry_run.main(FLAGS)
    if FLAGS.precompile:
        FLAGS["mlflow"].value = FLAGS["wandb"].value = None
        # The name of a program depends on all that was traced before, so this is a training, too.
        console.log_to_terminal()
        with tempfile.TemporaryDirectory() as directory:
            return _train(Path(directory))
    try:
        model_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--model_dir={model_dir}: {error.strerror}") from error
    console.log_to_terminal()
    if FLAGS.strategy != "multi_worker":
        with outputs.ledger_file(model_dir) as ledger:
            return _train(model_dir, ledger)
    me = cluster.resolve(FLAGS.workers, FLAGS.worker_index)
    handshake.check_free(me.workers[me.index], f"worker {me.index}")
    with (
        console.log_to_file(model_dir / f"worker-{me.index}.log"),
        outputs.ledger_file(model_dir, me.index, len(me.workers)) as ledger,
    ):
        _train(model_dir, ledger)


def _train(model_dir: Path, ledger: outputs.LedgerFile | None = None) -> None:
    programs = _load_tensorflow()

    prepared = prepare(FLAGS)
    from ctl.checkpoint.export import check_exportable
    from ctl.distributed.workers import is_chief, leave_together
    from ctl.inspect.session import inspect_every

    placement = prepared.placement
    if manifest.paths(model_dir / "checkpoints"):
        _check_evaluation(model_dir, prepared.evaluation.info.split)
        config.check_found(model_dir, prepared.found)
    chief = is_chief(placement.strategy)
    with contextlib.ExitStack() as stack:
        if placement.heartbeats:
            stack.enter_context(placement.heartbeats)
        checkpoints = stack.enter_context(_open_checkpoints(model_dir, prepared))
        loop = make_loop(prepared, checkpoints)
        exports = FLAGS.export and chief and not (FLAGS.precompile or FLAGS.eager)
        if exports:
            check_exportable(loop.step.model)
        if FLAGS.keep_best or FLAGS["best_metric"].present:
            assert loop.evaluator is not None
            loop.evaluator.check_result("--best_metric", FLAGS.best_metric)
        saved = _restore(loop, model_dir)
        chosen = _choose(
            loop, model_dir if saved else None, prepared.total_steps - loop.global_step
        )
        if chief:
            _write_config(model_dir, prepared, chosen, loop, saved)
        outputs.add_scalars(loop, FLAGS.log_also, ledger)
        log, on_progress, sinks = outputs.add_actions(
            loop, prepared, stack, model_dir, chief, saved
        )
        if FLAGS.inspect_every:
            loop.actions += inspect_every(loop, prepared.every("inspect_every"), sinks)
        if programs:
            loop.actions.append(lambda status: programs.publish())
        if FLAGS.precompile:
            loop.actions.append(lambda status: status.stop())
        started, first = time.monotonic(), loop.global_step
        results, steps = _run(loop, prepared, log, on_progress)
        seconds = time.monotonic() - started
        if exports:
            signals.unwind("all steps are saved; the same command exports")
        else:
            signals.decided()
        if FLAGS.export:
            loop.step.tables.gather(keep=chief, slots=False)
        # The others need not wait for what only the chief does, however long it takes.
        leave_together(placement.strategy)
        exported = _export(loop, model_dir, prepared.found) if exports else []
        checkpoints.flush()
        signals.decided()
        best = checkpoints.best() if FLAGS.keep_best else None
    if FLAGS.precompile and programs:
        print(f"{programs.published} new programs of XLA in {programs.shared}")
    elif chief:
        _summarize(model_dir, ledger, results, steps, steps - first, seconds, exported, best)
    else:
        logging.info("done: %d steps; the chief has the results", steps)


def _load_tensorflow() -> XlaCache | None:
    """Loads TensorFlow. Returns the programs of earlier runs, if they are kept."""
    logging.info("loading TensorFlow")
    one_process = FLAGS.strategy not in ("multi_worker", "parameter_server")
    if one_process:
        signals.skip_teardown()
    programs = open_cache() if FLAGS.xla_cache and one_process else None
    if FLAGS.precompile and not programs:
        raise UsageError(
            "--precompile: cannot save programs: see the warning, or unset TF_XLA_FLAGS"
        )
    # TensorFlow writes errors when it finds an entry of its cache, which are none.
    console.load_tensorflow(errors=FLAGS.strategy != "parameter_server" and not programs)
    return programs


def _open_checkpoints(model_dir: Path, prepared: Prepared) -> CheckpointManager:
    from ctl.checkpoint.manager import CheckpointManager
    from ctl.distributed.cluster import elastic

    return CheckpointManager(
        model_dir / "checkpoints",
        keep=FLAGS.keep,
        keep_best=FLAGS.keep_best,
        best_metric=FLAGS.best_metric,
        best_mode=training.best_mode(FLAGS.best_metric, FLAGS.best_mode),
        keep_every_hours=FLAGS.keep_every_hours,
        asynchronous=FLAGS.async_checkpoints,
        fingerprint=prepared.train.fingerprint(),
        lock_timeout=elastic.lock_timeout(),
    )


def _restore(loop: Loop, model_dir: Path) -> Saved | None:
    """Restores the last checkpoint, and logs what changes there."""
    saved = loop.restore(grow=FLAGS.extend)
    if saved:
        logging.info("resuming at step %d from %s", saved.step, saved.path)
        _show_changes(model_dir, loop)
        loop.stopped &= not FLAGS.extend
    return saved


def _write_config(
    model_dir: Path, prepared: Prepared, chosen: dict[str, Any], loop: Loop, saved: Saved | None
) -> None:
    from ctl.distributed.workers import number_of

    assert loop.checkpoints
    train, evaluation = prepared.train.info, prepared.evaluation.info
    config.write(
        model_dir,
        grouped_flags(),
        chosen=chosen | {"train_split": train.split, "eval_split": evaluation.split},
        code=loop.checkpoints.code,
        step=saved.step if saved else None,
        found=prepared.found,
        workers=number_of(loop.strategy),
    )
    if mirror := mirror_of(model_dir):  # without it, no other worker goes on if this one is lost
        mirror.changed()


def _run(
    loop: Loop, prepared: Prepared, log: Log, on_progress: OnProgress | None
) -> tuple[dict[str, dict[str, float]], int]:
    """Trains, evaluates and tests. Returns the last results, by the name of the data, and the
    number of steps."""
    from ctl.data.errors import translate_data_errors

    evaluation, test, others = prepared.evaluation, prepared.test, prepared.others
    total = prepared.total_steps
    assert loop.evaluator is not None
    tester = loop.evaluator.on(test) if test else None
    with (
        loop.signals.noted(),
        translate_data_errors(prepared.train, evaluation, test, *others.values()),
    ):
        if loop.global_step < total and not FLAGS.eager:
            logging.info("compiling the first step: this takes some seconds")
        last = loop.train_and_evaluate(
            total,
            evaluate_every=prepared.evaluate_every,
            on_progress=on_progress,
            eager=FLAGS.eager,
        )
        steps = loop.global_step
        if FLAGS.restore_best_weights and (best := loop.restore_best_weights()):
            logging.info("tested and exported are the weights of step %d, the best", best.step)
            last = {name: best.metrics[name] for name in best.evaluated}
        results: dict[str, dict[str, float]] = {evaluation.info.split or "test": {}}
        results |= {which: {} for which in others}
        for name, value in last.items():
            which = next((one for one in others if name.startswith(f"{one}/")), None)
            results[which or next(iter(results))][name.removeprefix(f"{which}/")] = value
        if tester:
            loop.evaluator, loop.eval_actions = tester, [log.tested]
            results[test.info.split] = loop.evaluate(on_progress, eager=FLAGS.eager)
    return results, steps


def _show_changes(model_dir: Path, loop: Loop) -> None:
    """Logs which flags change where the run resumes, and the learning rate there."""
    changed = config.changes(config.read(model_dir) or {})
    for name, (before, after) in changed.items():
        values = config.shown(after), config.shown(before)
        logging.info("from step %d on, --%s is %s (was %s)", loop.global_step, name, *values)
    if changed:
        rates = ", ".join(f"{float(rate):.3g}" for rate in loop.step.updater.learning_rates())
        logging.info("learning rate of the next step: %s", rates)


def _check_evaluation(model_dir: Path, split: str) -> None:
    """Raises `UsageError` if the run in ``model_dir`` was evaluated on another split."""
    before = config.chosen(model_dir, "eval_split", str)
    if before not in (None, split):
        raise UsageError(
            f"{model_dir} holds a run that was evaluated on {before}, not on {split}: use the "
            "same --keep_best and --eval_split, or another --model_dir"
        )


def _serve() -> None:
    """Runs a worker or parameter server; ends the process."""
    console.log_to_terminal()
    console.load_tensorflow(errors=False)
    from ctl.jobs.parameter_server import serve

    serve(cluster.resolve_tasks(), FLAGS.startup_timeout)


def _choose(loop: Loop, resumed: Path | None, steps: int) -> dict[str, Any]:
    """Sets the flags that are "auto": to the choice of the ``resumed`` run, else by a trial before
    so many ``steps``."""
    from ctl.data.errors import translate_data_errors
    from ctl.jobs.trials import tune_jit_compile, tune_packs

    choices: dict[str, Any] = {}
    for name, kind, choose in (
        ("jit_compile", bool, tune_jit_compile),
        ("bytes_per_pack", int, tune_packs),
    ):
        if FLAGS[name].value != AUTO:
            continue
        if name == "jit_compile":
            loop.step.jit_by_rule = None
        chosen = config.chosen(resumed, name, kind) if resumed else None
        if chosen is None:
            logging.info("choosing %s: a trial takes some seconds", name)
            directory = cache.directory()
            with translate_data_errors(loop.dataset):
                choices[name] = choose(loop, steps, directory and directory / "trials.json")
        else:
            logging.info("%s: %s, chosen when the run began", name, chosen)
            setattr(loop.step, name, chosen)
            choices[name] = chosen
    return {"jit_compile": loop.step.jit_compile, **choices}


def _export(loop: Loop, model_dir: Path, found: dict[str, Any]) -> list[Path]:
    from ctl.checkpoint.export import export_model
    from ctl.distributed.workers import is_multi_worker
    from ctl.phases.base_step import BaseStep

    # TensorFlow reports workers that left 10 s ago as crashed.
    several = is_multi_worker(loop.strategy)
    quiet = native_stderr_held() if several else contextlib.nullcontext()
    step, kind = loop.step, type(loop.step)
    if kind.preprocess is not BaseStep.preprocess:
        logging.info("the exported model takes what %s.preprocess returns", kind.__name__)
    with quiet, step.updater.averaged():
        kept = config.kept_tokenizer(model_dir)
        assets = [kept] if kept else []
        return export_model(step.model, model_dir / "export", step.input_specs, found, assets)


def _summarize(
    model_dir: Path,
    ledger: outputs.LedgerFile | None,
    results: dict[str, dict[str, float]],
    total_steps: int,
    steps: int,
    seconds: float,
    exported: list[Path],
    best: Saved | None,
) -> None:
    scores = [
        console.filled(
            [f"{name} {value:.4f}" for name, value in scalars.items()], f"  {split:<11}  "
        )
        for split, scalars in results.items()
    ]
    named = {name: FLAGS[name].value or "" for name in NAMING}
    again = [f" --{n}={shlex.quote(code)}" for n, code in named.items() if is_function_name(code)]
    places = [path.relative_to(model_dir).as_posix() for path in exported]
    earlier = []
    if best and best.step < total_steps:
        used = best.step if FLAGS.restore_best_weights else total_steps
        earlier = [f"  best         step {best.step}; evaluated and exported is step {used}"]
    lines = [
        *outputs.summarize(model_dir),
        "",
        f"done: {total_steps} steps, {steps} of them now in {seconds:.1f} s",
        *scores,
        f"  checkpoints  {join(FLAGS.model_dir, 'checkpoints')}",
        f"  log          {join(FLAGS.model_dir, 'metrics.jsonl')}",
        *([console.filled(ledger.pieces(), "  time         ")] if ledger else []),
        *(f"  exported     {join(FLAGS.model_dir, path)}" for path in places),
        *earlier,
        "next:",
        f"  {console.python()} -m ctl.evaluate --model_dir={shlex.quote(FLAGS.model_dir)}"
        f"{''.join(again)}{' --checkpoint=best' if FLAGS.keep_best else ''}",
    ]
    if FLAGS.tensorboard:
        logdir = shlex.quote(FLAGS.model_dir)
        lines.append(f"  {console.python()} -m tensorboard.main --logdir={logdir}")
    print("\n".join(lines))


if __name__ == "__main__":
    run()
