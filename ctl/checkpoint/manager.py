"""Saving and restoring the state of a run: when it is written, which copy is good, what stays.

A checkpoint is written beside the others under a scratch name, flushed to disk, renamed, and only
then pointed to by ``latest.json``; only after that are older ones deleted. So at every moment, a
kill or a power cut included, every ``step-*`` directory is whole. Below this module,
`ctl.checkpoint.bundle` moves variables, `ctl.checkpoint.manifest` knows the directory,
`ctl.checkpoint.durable` the file system.

The files need no ctl to be read::

    reader = tf.train.load_checkpoint("checkpoints/step-0000000200/variables")
    reader.get_tensor("model/0/.ATTRIBUTES/VARIABLE_VALUE")
"""

from __future__ import annotations

import json
import operator
import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import keras
import tensorflow as tf
from absl import logging

from ctl.checkpoint import bundle, durable, manifest
from ctl.checkpoint.bundle import State
from ctl.checkpoint.manifest import Saved
from ctl.checkpoint.refusals import failure, require_fingerprint, require_fit
from ctl.errors import CheckpointError, CtlError, UsageError


class CheckpointManager:
    """The checkpoints of one run in one directory: one writer, any number of readers.

    The state is ``{"model": [...], "optimizer": [...], "counters": [...], ...}``, lists of
    ``tf.Variable`` (mirrored ones too) or Keras variables. A variable is known by its place in
    these lists, so a checkpoint restores under any strategy and any number of replicas.

    To be used from one thread, as a context manager or with `close` at the end, which surfaces the
    failure of the last write.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        keep: int = 3,
        keep_best: int = 0,
        best_metric: str = "accuracy",
        best_mode: Literal["max", "min"] = "max",
        keep_every_hours: float | None = None,
        asynchronous: bool = True,
        fingerprint: Mapping[str, Any] | None = None,
        soft_keys: Sequence[str] = (),
        read_only: bool = False,
        clock: Callable[[], float] = time.time,
    ):
        """Opens ``directory``; a writer creates it and deletes what dead writers left unfinished.

        Args:
          directory: on a POSIX file system.
          keep: how many of the last checkpoints stay, at least 1.
          keep_best: how many of the best by ``best_metric`` stay besides; of equals the earlier.
          best_metric: a name among the metrics given to `save` or `annotate`.
          best_mode: whether "max" or "min" is best.
          keep_every_hours: one for every so many hours stays besides.
          asynchronous: a thread writes the files; `save` returns once it has a snapshot.
          fingerprint: JSON scalars that identify the run (data, model, optimizer). Stored with each
            checkpoint; `restore` refuses one that has another. ``None``: not stored, not checked.
          soft_keys: keys of the fingerprint that may differ with no more than a warning.
          read_only: for evaluators and exporters. Creates, locks and deletes nothing.
          clock: seconds since the epoch.

        Raises:
          UsageError: an argument is out of range.
          CheckpointError: the directory cannot be written, or another writer has it.
        """
        if "://" in os.fspath(directory):
            raise UsageError(
                f"Checkpoints need a POSIX file system, not {directory}; mount it or choose "
                "another --model_dir"
            )
        if keep < 1 or keep_best < 0 or (keep_every_hours is not None and keep_every_hours <= 0):
            raise UsageError(
                "A checkpoint manager needs keep >= 1, keep_best >= 0 and keep_every_hours > 0, "
                f"not {keep}, {keep_best} and {keep_every_hours}"
            )
        if best_mode not in ("max", "min"):
            raise UsageError(f"best_mode must be 'max' or 'min', not {best_mode!r}")
        self.directory = Path(directory)
        self._best = (best_metric, best_mode)
        self._retention = {
            "keep": keep,
            "keep_best": keep_best,
            "best_metric": best_metric,
            "best_mode": best_mode,
            "keep_every_hours": keep_every_hours,
        }
        # Through JSON, so that a tuple equals the list that comes back.
        self._fingerprint = None if fingerprint is None else json.loads(json.dumps(fingerprint))
        self._soft_keys = frozenset(soft_keys)
        self._asynchronous = asynchronous
        self._clock = clock
        self._pending: Future[None] | None = None
        self._lock = None if read_only else self._open_for_writing()
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="ctl-checkpoint")
        latest = self.latest()
        # The last step that belongs to this run. Checkpoints beyond it are not of its past: the run
        # went back to an earlier step, or they are damaged. `save` deletes those that it passes.
        self._committed = latest.step if latest else -1

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(self, kind, value, traceback) -> None:
        try:
            self.close()
        except CtlError as error:
            if kind is None:
                raise
            logging.error("%s", error)  # The exception on its way out is the one to report.

    def close(self) -> None:
        """Waits for the write in flight, raises what it met, lets another writer in."""
        try:
            self.wait()
        finally:
            self._executor.shutdown()
            if self._lock:
                self._lock.release()
                self._lock = None

    # Writing.

    def save(
        self,
        step: int,
        state: State,
        metrics: Mapping[str, float] | None = None,
        *,
        wait: bool = False,
    ) -> Path:
        """Saves ``state`` as the checkpoint of ``step``; returns the directory it will be in.

        The caller stands still until the write before this one has ended, and for the snapshot: a
        reference to the buffer of every variable (TensorFlow updates a variable in place only while
        nobody else holds its buffer) and one pass over them that looks for NaN and Inf. Until the
        write has ended, the state may occupy memory twice.

        An intact checkpoint of ``step`` in the past of this run is left as it is.

        Raises:
          DivergedError: the state is not finite; nothing is written.
          CheckpointError: the write before this one failed or, when waiting, this one.
        """
        self._require_writer()
        self.wait()
        step = operator.index(step)
        if step < 0:
            raise UsageError(f"The step of a checkpoint cannot be negative: {step}")
        variables = bundle.unwrap(state)
        tensors = bundle.snapshot(variables)
        saved = Saved(
            step=step,
            path=manifest.path_of(self.directory, step),
            time=self._clock(),
            metrics=_floats(metrics or {}),
            fingerprint=self._fingerprint,
            variables=bundle.specs(variables),
            files={},
            versions={"tensorflow": tf.__version__, "keras": keras.__version__},
        )
        self._pending = self._executor.submit(self._write, saved, tensors)
        if wait or not self._asynchronous:
            self.wait()
        return saved.path

    def annotate(self, step: int, metrics: Mapping[str, float]) -> Saved:
        """Adds metrics that came after the save of ``step``, and applies retention anew.

        Waits for the write in flight. Raises CheckpointError: no such checkpoint, cannot write.
        """
        self._require_writer()
        self.wait()
        try:
            saved = manifest.load(manifest.path_of(self.directory, operator.index(step)))
        except durable.Damaged as damage:
            raise CheckpointError(
                f"No checkpoint of step {step} in {self.directory} to add metrics to ({damage}); "
                "evaluate before retention deletes it, or raise keep"
            ) from damage
        saved = replace(saved, metrics={**saved.metrics, **_floats(metrics)})
        try:
            manifest.dump(saved, saved.path, via=self.directory)
            self._apply_retention()
        except OSError as error:
            doing = f"add metrics to the checkpoint of step {step}"
            raise failure(self.directory, doing, error) from error
        return saved

    def check(self) -> None:
        """Raises what the last write met if it has ended; does not wait."""
        if self._pending is not None and self._pending.done():
            self.wait()

    def wait(self) -> None:
        """Waits for the write in flight; raises CheckpointError if it failed."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def _open_for_writing(self) -> durable.Lock:
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            # Of all scratch, that of dead writers: there is no other writer while we hold the lock.
            lock = durable.Lock(self.directory / ".lock")
            durable.sweep(self.directory)
            return lock
        except OSError as error:
            doing = "open the checkpoints for writing"
            raise failure(self.directory, doing, error) from error

    def _require_writer(self) -> None:
        if self._lock is None:
            raise CheckpointError(
                f"{self.directory} is closed or read-only; open it without read_only to write"
            )

    def _write(self, saved: Saved, tensors: dict[str, list[tf.Tensor]]) -> None:
        """Runs in the thread of the executor."""
        needed = bundle.size(tensors)
        unfinished = durable.scratch(self.directory, saved.path.name)
        try:
            if saved.step <= self._committed and _is_intact(saved.path):
                return
            os.mkdir(unfinished)
            bundle.write(str(unfinished / "variables"), tensors)
            saved = replace(saved, files=durable.seal(unfinished))
            manifest.dump(saved, unfinished, via=self.directory)
            durable.publish(unfinished, saved.path)
            manifest.commit(self.directory, saved.step)
            for step, path in manifest.paths(self.directory).items():
                if self._committed < step < saved.step:
                    durable.discard(path)
            self._committed = saved.step
            self._apply_retention()
        except (OSError, tf.errors.OpError) as error:
            shutil.rmtree(unfinished, ignore_errors=True)
            doing = f"save the checkpoint of step {saved.step}"
            raise failure(self.directory, doing, error, needed) from error

    def _apply_retention(self) -> None:
        past = [s for s in self.all() if s.step <= self._committed]
        kept = manifest.retained(past, **self._retention)
        for saved in past:
            if saved.step not in kept:
                durable.discard(saved.path)

    # Reading.

    def all(self) -> list[Saved]:
        """Every checkpoint with a valid manifest, in ascending order of steps."""
        return manifest.load_all(self.directory)

    def latest(self) -> Saved | None:
        """The last one committed; where ``latest.json`` fails, the one of the highest step."""
        try:
            return manifest.load(
                manifest.path_of(self.directory, manifest.committed(self.directory))
            )
        except durable.Damaged:
            return next(reversed(self.all()), None)

    def best(self) -> Saved | None:
        """The one with the best ``best_metric`` among those that have it."""
        return next(iter(manifest.ranked(self.all(), *self._best)), None)

    def restore(
        self, state: State, step: int | Literal["latest", "best"] | None = None
    ) -> Saved | None:
        """Assigns the values of a checkpoint to the variables of ``state``: to all or to none.

        Checksums are verified first. In place of a damaged checkpoint the one before it (the next
        best) is restored, with a warning. Keys of the checkpoint that ``state`` does not have are
        left alone: ``{"model": [...]}`` is enough to evaluate. The host holds the values once.

        The run continues from the restored step: `save` deletes checkpoints of later steps as it
        passes them. To keep them, continue in another directory.

        Args:
          state: the variables; see the class.
          step: "latest" (as ``None``), "best", or a step: that one and no other.

        Returns:
          The checkpoint, or ``None`` where there is none at all.

        Raises:
          CheckpointError: none is intact, the variables or the fingerprint differ, no such step.
        """
        self.wait()
        variables = bundle.unwrap(state)
        damaged: dict[int, durable.Damaged] = {}
        # Looks at the directory anew after each failure: a writer may be at work in it.
        while (candidate := self._next(step, damaged)) is not None:
            path = manifest.path_of(self.directory, candidate)
            try:
                saved = manifest.load(path)
                durable.verify(path, saved.files)
                require_fingerprint(saved, self._fingerprint, self._soft_keys)
                require_fit(saved, variables)
                values = bundle.read(saved.prefix, variables)
            except durable.Damaged as damage:
                logging.warning("Passing over the damaged checkpoint %s: %s", path, damage)
                damaged[candidate] = damage
                continue
            for key, group in variables.items():
                for variable in group:
                    variable.assign(values[key].pop(0))
            self._committed = saved.step
            later = [step for step in manifest.paths(self.directory) if step > saved.step]
            if self._lock and later:
                logging.warning(
                    "Continuing %s from step %d: its checkpoints of later steps (%s) are deleted "
                    "as the run passes them",
                    self.directory,
                    saved.step,
                    ", ".join(map(str, later)),
                )
            return saved
        if damaged:
            first, damage = next(iter(damaged.items()))
            raise CheckpointError(
                f"No intact checkpoint in {self.directory}: step {first}: {damage}; restore a copy "
                "of it or choose another --model_dir"
            )
        return None

    def wait_for_new(
        self, after_step: int, timeout: float, *, poll_seconds: float = 1.0
    ) -> Saved | None:
        """The latest checkpoint once it is beyond ``after_step``; ``None`` after ``timeout`` s."""
        deadline = time.monotonic() + timeout
        while True:
            saved = self.latest()
            if saved is not None and saved.step > after_step:
                return saved
            left = deadline - time.monotonic()
            if left <= 0:
                return None
            time.sleep(min(poll_seconds, left))

    def _next(self, wanted: int | str | None, damaged: Mapping[int, Any]) -> int | None:
        """The step to try next, best candidates first."""
        steps = list(manifest.paths(self.directory))
        if wanted is None or wanted == "latest":
            try:
                last = manifest.committed(self.directory)
            except durable.Damaged:
                last = max(steps, default=0)
            # From the committed one downwards, and only then what lies beyond it.
            steps.sort(key=lambda step: (step <= last, step), reverse=True)
        elif wanted == "best":
            with_metric = [s.step for s in manifest.ranked(self.all(), *self._best)]
            if steps and not with_metric and not damaged:
                raise CheckpointError(
                    f"No checkpoint in {self.directory} has the metric {self._best[0]!r}; evaluate "
                    "first or restore the latest"
                )
            steps = with_metric
        else:
            if wanted not in steps and not damaged:
                raise CheckpointError(
                    f"No checkpoint of step {wanted} in {self.directory}; choose one of "
                    f"{', '.join(map(str, steps)) or '(none)'}"
                )
            steps = [operator.index(wanted)]
        return next((step for step in steps if step not in damaged), None)


def _floats(metrics: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in metrics.items()}


def _is_intact(path: Path) -> bool:
    try:
        durable.verify(path, manifest.load(path).files)
    except durable.Damaged:
        return False
    return True
