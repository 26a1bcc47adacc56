"""What a training shows and writes, by its flags: log, progress bar, checkpoints, profile."""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from absl import logging

from ctl.base import stores
from ctl.base.actions import parse_window
from ctl.base.ledger import process_age
from ctl.checkpoint.mirror import Mirror
from ctl.errors import UsageError
from ctl.flags.defaults import LOG_EVERY
from ctl.flags.parsing import grouped_flags
from ctl.logs.ledger import LedgerFile as LedgerFile
from ctl.logs.summary import summarize as summarize

if TYPE_CHECKING:
    from absl.flags import FlagValues

    from ctl.base.actions import Action, Log, Sink, Status
    from ctl.checkpoint.manifest import Saved
    from ctl.control.evaluator import OnProgress
    from ctl.jobs.build import Prepared
    from ctl.loop import Loop


@contextlib.contextmanager
def run_directory(flags: FlagValues, writes: bool = True) -> Iterator[Path]:
    """The directory of the run on this machine: ``--model_dir``, or the mirror of that URL, from
    which what a command ``writes`` is copied to the store.

    Raises:
        UsageError: ``--keep_trying`` has no effect.
        CheckpointError: the store cannot be used.
    """
    url = flags.model_dir
    if not stores.is_url(url):
        if flags["keep_trying"].present:
            raise UsageError("--keep_trying is for a --model_dir in a store: leave it out")
        yield Path(url)
        return
    with Mirror(url, keep_trying=flags.keep_trying, writes=writes) as mirror:
        stores.use(url, mirror.directory)
        try:
            mirror.bring_last()
            yield mirror.directory
        finally:
            stores.use(url, None)


def ledger_file(model_dir: Path, worker: int = 0, workers: int = 1) -> LedgerFile:
    """The ledger of a command, whose time begins with its process."""
    return LedgerFile(model_dir, worker, workers, age=process_age())


def add_scalars(loop: Loop, log_also: Sequence[str], ledger: LedgerFile | None) -> None:
    """Adds the goodput and what ``--log_also`` asks for, and a line about the model after the first
    step."""
    from ctl.logs import machine

    def describe(status: Status) -> None:
        loop.actions = [action for action in loop.actions if action is not describe]
        model, flops = loop.step.model, loop.step.flops
        trained = sum(math.prod(v.shape) for v in model.trainable_variables)
        logging.info(
            "model: %s, %s parameters, %s train; %s per example",
            model.name,
            f"{model.count_params():,}",
            "all" if trained == model.count_params() else f"{trained:,}",
            "unknown FLOPs" if flops is None else f"{flops / 1e6:.4g} MFLOPs",
        )

    loop.actions.append(describe)
    if ledger:
        loop.scalars.extras.append(ledger.goodput)
    if "memory" in log_also:
        loop.scalars.extras.append(machine.peak_memory)
    if "mfu" in log_also:
        loop.scalars.extras.append(machine.utilization(loop.strategy, lambda: loop.step.flops))


def add_actions(
    loop: Loop, prepared: Prepared, stack: Any, model_dir: Path, chief: bool, saved: Saved | None
) -> tuple[Log, OnProgress | None, Sequence[Sink]]:
    """Adds logs, progress, checkpoints and profile. ``saved`` is what the run resumes from. Returns
    the log, the ``on_progress`` of evaluations, and the sinks of files.

    Raises:
        UsageError: a flag has no effect on the number of replicas that the machine has.
    """
    from ctl.base.actions import Every, Log
    from ctl.control.copies import CompareReplicas
    from ctl.distributed.workers import cluster_of, is_multi_worker
    from ctl.logs.profiler import Profile
    from ctl.logs.progress import Lines, Progress

    flags = prepared.flags
    if flags.check_replicas_every and loop.strategy.num_replicas_in_sync == 1:
        raise UsageError("--check_replicas_every has no effect with one replica: leave it out")
    # Reading metrics is a collective: all workers read them, at the same steps.
    multi_worker = is_multi_worker(loop.strategy)
    bar = None
    if chief and sys.stdout.isatty() and not flags.eager:  # it would hide the prompt of pdb
        bar = stack.enter_context(Progress(peek=not multi_worker))
    files = make_sinks(flags, model_dir, saved) if chief else []
    log = Log(
        *files, *([bar or Lines()] if chief else []), steps_per_epoch=prepared.steps_per_epoch
    )
    stack.callback(log.close)
    loop.eval_actions.append(log.evaluated)
    if flags.log_every is not None:
        loop.actions.append(Every(log, steps=prepared.every("log_every")))
    else:
        loop.actions += [Every(log, steps=LOG_EVERY), _before_evaluations(log, loop, prepared)]
    if flags.check_replicas_every:  # before the checkpoints
        compare = CompareReplicas(loop.step)
        loop.actions.append(Every(compare, steps=prepared.every("check_replicas_every")))
    if flags.checkpoint_every:
        steps = prepared.every("checkpoint_every")
        loop.actions.append(Every(lambda status: loop.save(), steps=steps))
    if flags.profile_steps:
        # On every worker, because all calls must end at the same steps.
        where = "train" if chief else f"worker-{cluster_of(loop.strategy).index}"
        profile = Profile(*parse_window(flags.profile_steps), model_dir / where)
        stack.callback(profile.close)
        loop.actions.append(profile)
    if bar:
        loop.actions.append(bar)
    return log, bar.evaluating if bar else None, files


def _before_evaluations(log: Log, loop: Loop, prepared: Prepared) -> Action:
    """What logs the training at the step of each evaluation, unless ``log`` has done so there."""
    from ctl.data.epochs import completed, evaluation_interval

    every = evaluation_interval(prepared.evaluate_every, loop.dataset)

    def log_before_evaluation(status: Status) -> None:
        is_evaluated = completed(status.step, every) > completed(status.step - 1, every)
        if is_evaluated and log.step != status.step:
            log(status)

    return log_before_evaluation


def make_sinks(flags: FlagValues, model_dir: Path, saved: Saved | None) -> list[Sink]:
    """The sinks that ``flags`` ask for: ``metrics.jsonl``, TensorBoard, MLflow, W&B. What earlier
    attempts logged after the checkpoint ``saved`` is no part of this run; None if it begins."""
    from ctl.logs.hparams import HParams
    from ctl.logs.runs import NOT_COMPARED, best_so_far
    from ctl.logs.sinks import JsonLines, TensorBoard
    from ctl.logs.trackers import MLflow, Tracker, WandB, forget

    given = {name: flags[name].value for name in grouped_flags() if name not in NOT_COMPARED}
    given = {name: value for name, value in given.items() if value is not None}
    after, evaluates = (saved.step, not saved.evaluated) if saved else (-1, False)
    sinks: list[Sink] = [JsonLines(model_dir / "metrics.jsonl", after, evaluates=evaluates)]
    best = best_so_far(model_dir)
    if not saved:
        forget(model_dir)
    if flags.tensorboard:
        sinks += [TensorBoard(model_dir), HParams(model_dir, given, best)]
    if flags.mlflow:
        sinks.append(Tracker("MLflow", lambda: MLflow(flags.mlflow, model_dir, given)))
    if flags.wandb:
        sinks.append(Tracker("Weights & Biases", lambda: WandB(flags.wandb, model_dir, given)))
    return sinks
