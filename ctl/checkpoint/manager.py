"""Saves, verifies, restores and deletes the checkpoints of a run.

A checkpoint is written under a scratch name, flushed to disk, renamed, and then named by
``latest.json``. Older ones are deleted after that. So a kill or a power cut leaves whole ``step-*``
directories. `ctl.checkpoint.bundle` reads and writes variables, `ctl.checkpoint.manifest` knows the
layout of the directory, and `ctl.base.durable` handles the file system.

TensorFlow reads the files without ctl::

    reader = tf.train.load_checkpoint("checkpoints/step-0000000200/variables")
    reader.get_tensor("model/0/.ATTRIBUTES/VARIABLE_VALUE")
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import itertools
import json
import operator
import os
import shutil
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import keras
import numpy as np
import tensorflow as tf
from absl import logging

from ctl.base import durable, stores
from ctl.base.best import Mode, mode_of
from ctl.base.differences import ABSENT, differences, first_three
from ctl.base.interactive import another_directory, in_command
from ctl.base.ledger import LEDGER
from ctl.checkpoint import bundle, manifest
from ctl.checkpoint.bundle import State
from ctl.checkpoint.manifest import Saved
from ctl.checkpoint.mirror import KEEP_TRYING, Mirror, is_later_worker, mirror_of
from ctl.errors import CheckpointError, CtlError, UsageError

_VERSIONS = {"tensorflow": tf.__version__, "keras": keras.__version__, "numpy": np.__version__}

# A quota and a limit on file sizes have the same remedy as a full disk.
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

# Seconds that a worker waits for the end of one that was lost. The launcher kills a frozen one.
_SUCCESSION_SECONDS = 25.0

_WHAT = {"step": "the variables of the step's own", "memory": "what evaluations have left"}
_RESIZED = (
    ", one value for each replica: resume on as many, or make the variable with on_resize='sum' or "
    "'zero'"
)
_GROWN = " (an embedding table may grow with --extend, in Python restore(grow=True))"


# The managers that write, by process (a forked one has others) and directory.
_writers: weakref.WeakValueDictionary[tuple[int, str], CheckpointManager]
_writers = weakref.WeakValueDictionary()


class CheckpointManager:
    """The checkpoints of one run in one directory, with one writer and any number of readers.

    A later manager of the same process takes the directory over from the earlier one, which is
    closed: a cell of a notebook can be run again.

    The state is ``{"model": [...], "optimizer": [...], "counters": [...], ...}``, lists of
    ``tf.Variable`` (mirrored ones too) or Keras variables. A variable is identified by its place in
    these lists, so a checkpoint restores under any strategy and any number of replicas.

    Use it from one thread, as a context manager or with a final `close`, which raises the error of
    the last write.

    Attributes:
      code: the step that writes, see `ctl.control.source_hash.identity`; the loop sets it.
        `restore` refuses a checkpoint of another class, and warns of other differences. ``None``:
        no check.
      unrestored: the latest checkpoint when the directory was opened, until one is restored.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        keep: int = 3,
        keep_best: int = 0,
        best_metric: str = "accuracy",
        best_mode: Mode | None = None,
        keep_every_hours: float | None = None,
        save_every_seconds: float | None = None,
        asynchronous: bool = True,
        fingerprint: Mapping[str, Any] | None = None,
        soft_keys: Sequence[str] = ("tensorflow",),
        read_only: bool = False,
        lock_timeout: float = 0.0,
        keep_trying: float = KEEP_TRYING,
        clock: Callable[[], float] = time.time,
    ):
        """Opens ``directory``. A writer creates it and deletes unfinished files of dead writers.

        All workers of a job may open one directory. The loop of the chief writes, so the others
        take nothing at first: with a ``TF_CONFIG`` of a worker after 0, a manager becomes the
        writer when it is asked to `save`.

        Args:
          directory: on a POSIX file system, or the URL of one in a store, see
            `ctl.checkpoint.mirror`. The attribute is its directory on this machine.
          keep: number of latest checkpoints to keep, at least 1.
          keep_best: number of best ones by ``best_metric`` to keep too; of equals, the earlier.
          best_metric: name of a metric given to `save` or `annotate`.
          best_mode: whether "max" or "min" is best; needed unless it is a "loss" or an "accuracy".
          keep_every_hours: also keep one checkpoint per this many hours.
          save_every_seconds: `ctl.Loop.train` saves whenever its steps have taken this many seconds
            since the last save, and at its end. By default, only the program saves.
          asynchronous: a thread writes the files, and `save` returns after the snapshot.
          fingerprint: JSON values that identify the run (data, model, optimizer), stored with each
            checkpoint. `restore` refuses a checkpoint with other ones. By default, the loop gives
            those of its data.
          soft_keys: keys of the fingerprint that may differ; `restore` then logs a warning.
          read_only: for evaluators and exporters. Creates, locks and deletes nothing.
          lock_timeout: seconds to wait for another process that writes the directory to end.
          keep_trying: seconds for which training goes on though the store fails.
          clock: returns seconds since the epoch.

        Raises:
          UsageError: an argument is out of range.
          CheckpointError: the directory cannot be written, or another process writes it.
        """
        self.code: Mapping[str, Any] | None = None
        self.save_every_seconds = save_every_seconds
        if save_every_seconds is not None and save_every_seconds <= 0:
            raise UsageError(f"save_every_seconds must be above 0, not {save_every_seconds}")
        if keep < 1 or keep_best < 0 or (keep_every_hours is not None and keep_every_hours <= 0):
            raise UsageError(
                "A checkpoint manager needs keep >= 1, keep_best >= 0 and keep_every_hours > 0, "
                f"not {keep}, {keep_best} and {keep_every_hours}"
            )
        self._own_mirror: Mirror | None = None
        if stores.is_url(directory):
            url = os.fspath(directory).rstrip("/")
            if not (read_only or is_later_worker()):
                self._take_over(url)
            self._own_mirror = Mirror(url, keep_trying=keep_trying, writes=not read_only)
            directory = self._own_mirror.directory
        self.directory = Path(directory)
        self._mirror = mirror_of(self.directory)
        self._best = (best_metric, mode_of(best_metric, best_mode))
        self._retention: dict[str, Any] = {"best_metric": best_metric, "best_mode": self._best[1]}
        self._retention |= {"keep": keep, "keep_best": keep_best}
        self._retention |= {"keep_every_hours": keep_every_hours}
        self._fingerprint: Mapping[str, Any] | Callable[[], Mapping[str, Any]] | None = fingerprint
        self._has_fingerprint, self._has_loop = fingerprint is not None, False
        self._soft_keys = tuple(soft_keys)
        self._asynchronous = asynchronous
        self._clock = clock
        self._pending: list[Future[None]] = []  # in one thread, one after the other
        self._constants: dict[tuple[str, int], tf.Tensor] = {}
        self._writes = not read_only  # until it is closed
        self._lock: durable.Lock | None = None
        self._why_not = "its manager is closed or read-only; make another, with read_only=False"
        # The last step in the history of this run. A later checkpoint is damaged, or was written
        # before the run went back to an earlier step. `save` deletes it when it passes its step.
        self._committed = -1
        if self._writes and not is_later_worker():
            if not self._own_mirror:
                self._take_over(os.path.realpath(self.directory))
            self._wait_for_lock(lock_timeout)
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="ctl-checkpoint")
        self.unrestored = self.latest()
        self._committed = self.unrestored.step if self.unrestored else -1

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: object, traceback: object) -> None:
        try:
            self.close()
        except CtlError as error:
            if kind is None:
                raise
            logging.error("%s", error)  # The pending exception is the one to report.

    @property
    def is_closed(self) -> bool:
        """Whether it writes no more, as when a later one has taken the directory over."""
        return not self._writes

    def close(self) -> None:
        """Waits for the write in progress, raises its error, and frees the lock."""
        try:
            self.flush()
        finally:
            self._executor.shutdown()
            self._writes = False
            if self._lock:
                self._lock.release()
                self._lock = None
            if self._own_mirror:
                self._own_mirror.close()

    # Writing.

    def save(
        self,
        step: int,
        state: State,
        metrics: Mapping[str, float] | None = None,
        *,
        changed: Mapping[str, Any] | None = None,
        wait: bool = False,
        replace: bool = False,
    ) -> Path:
        """Saves ``state`` as the checkpoint of ``step``, with the Python values that were
        ``changed`` (see `Saved.changed`); returns the directory it will be in.

        The call waits for the previous write, and takes a snapshot: a reference to the buffer of
        each variable, and one pass over the values that looks for NaN and Inf. An update of a
        variable then uses a new buffer, so the state may occupy memory twice until the write ends.
        Variables that were not finite before training (see `note_constants`) may stay as they are.

        An intact checkpoint of ``step`` in the history of this run stays as it is. With
        ``replace``, it gets the ``metrics`` too, and is written anew if it has other values.

        Raises:
          UsageError: ``step`` is negative, a key of ``state`` cannot be stored, or the directory
            had checkpoints and none was restored.
          DivergedError: the state is not finite; nothing is written.
          CheckpointError: the previous write failed, or this one if the call waits for it.
        """
        self._require_writer()
        self.require_restored()
        self.wait()
        step = operator.index(step)
        if step < 0:
            raise UsageError(f"The step of a checkpoint cannot be negative: {step}")
        variables = bundle.unwrap(state)
        tensors = bundle.snapshot(variables)
        bundle.require_finite(tensors, self._constants, variables)
        saved = Saved(
            step=step,
            path=manifest.path_of(self.directory, step),
            time=self._clock(),
            metrics=_numbers(metrics or {}),
            evaluated=(),
            fingerprint=None,  # as `_write` finds it
            variables=bundle.specs(variables, tensors),
            files={},
            versions=_VERSIONS,
            code=self.code,
            changed=changed,
        )
        self._submit(self._write, saved, tensors, replace, wait=wait)
        return saved.path

    def require_restored(self) -> None:
        """Raises `UsageError` if the run would write among the checkpoints of another."""
        if self.unrestored:
            raise UsageError(
                f"{self.directory} holds a run up to step {self.unrestored.step}: call restore() "
                "to continue it, or choose another directory"
            )

    def succeed(self) -> None:
        """Becomes the writer of this run in place of a worker that was lost: what that has written
        is of its history. Waits until the worker has ended, which frees its lock.

        Raises:
          CheckpointError: it has not ended in time, or the directory cannot be written.
        """
        if self._lock is None:
            self._wait_for_lock(_SUCCESSION_SECONDS)
            latest = self.latest()
            self._committed, self.unrestored = latest.step if latest else -1, None

    def _wait_for_lock(self, seconds: float) -> None:
        deadline, said = time.monotonic() + seconds, False
        while self._lock is None:
            try:
                self._require_writer()
            except durable.Locked as error:
                if time.monotonic() >= deadline:
                    raise
                if not said:
                    logging.warning("waiting for up to %.0f s: %s", seconds, error)
                said = True
                time.sleep(0.1)

    def begin_run(
        self, state: State, code: Mapping[str, Any], fingerprint: Callable[[], Mapping[str, Any]]
    ) -> None:
        """A loop begins with ``state``, and will save here. If an earlier loop did, its run has to
        be restored first.

        Args:
          state: see `note_constants`.
          code: see the class.
          fingerprint: gives the fingerprint, unless the manager was made with one. It is called
            when a checkpoint is written or restored, not at the start.
        """
        if self._has_loop:
            self.wait()
            self.unrestored = self.latest()
        self._has_loop, self.code = True, code
        self.note_constants(state)
        if not self._has_fingerprint:
            self._fingerprint = fingerprint

    def note_constants(self, state: State) -> None:
        """Notes which variables have a NaN or Inf before training, such as the Inf of a mask."""
        self._constants = bundle.not_finite(bundle.snapshot(bundle.unwrap(state)))

    def annotate(self, step: int, metrics: Mapping[str, float], *, stopped: bool = False) -> None:
        """Adds to the checkpoint of ``step`` the results of an evaluation, and whether an action
        ended the training there; applies retention again. The thread that writes does so.

        Raises CheckpointError as `save` does, or if there is no such checkpoint.
        """
        self._require_writer()
        self.check()
        self._submit(self._annotate, operator.index(step), _numbers(metrics), stopped)

    def check(self) -> None:
        """Raises the error of a write that has ended, or of a store; does not wait."""
        if self._mirror:
            self._mirror.check()
        if any(write.done() and write.exception() for write in self._pending):
            self.wait()

    def wait(self) -> None:
        """Waits for the writes in progress; raises the CheckpointError of the first that failed."""
        pending, self._pending = self._pending, []
        with LEDGER.spend("saving"):
            for write in pending:
                write.result()

    def flush(self) -> None:
        """As `wait`, and until the store has what was written, if the directory is of one."""
        self.wait()
        if self._mirror and self._lock:
            with LEDGER.spend("saving"):
                self._mirror.flush()

    def shown(self, path: Path) -> str:
        """``path`` as the user knows it: in a store, its URL."""
        return self._mirror.url_of(path) if self._mirror else str(path)

    def _submit(self, write: Callable[..., None], *args: Any, wait: bool = False) -> None:
        self._pending.append(self._executor.submit(write, *args))
        if wait or not self._asynchronous:
            self.flush()

    def _take_over(self, directory: str) -> None:
        """Closes an earlier manager of this process that writes the directory, or the URL."""
        place = os.getpid(), directory
        if (earlier := _writers.pop(place, None)) and earlier._lock:
            logging.warning(
                "%s was open in this process: a new CheckpointManager takes it over, and the "
                "earlier one is closed",
                directory,
            )
            earlier._why_not = "a later CheckpointManager has taken it over; use that, and its loop"
            try:
                earlier.close()
            except CtlError as error:
                logging.error("%s", error)
        _writers[place] = self

    def _failure(self, doing: str, error: Exception, needed: int = 0) -> CheckpointError:
        """The error for an operation that failed with one of Python or TensorFlow. ``doing``
        continues "Cannot"; ``needed`` are the bytes that it writes."""
        reason = durable.reason_of(error)
        if reason in map(os.strerror, _FULL):
            needed = max(needed, 2**20)  # The manifest and the file system need a little too.
            there = next(p for p in (self.directory, *self.directory.parents) if p.exists())
            if os.statvfs(there).f_files and not os.statvfs(there).f_favail:
                return CheckpointError(
                    f"No inode left to {doing}: {self.directory}; delete some files, or choose "
                    f"{another_directory()}"
                )
            free = shutil.disk_usage(there).free
            missing = needed - free if needed > free else needed
            return CheckpointError(
                f"No space left to {doing} ({needed / 2**20:.1f} MiB): {self.directory}; "
                f"free {missing / 2**20:.1f} MiB or choose {another_directory()}"
            )
        if reason == os.strerror(errno.ENOENT) and not self.directory.exists():
            reason = "the directory is gone"
        return CheckpointError(
            f"Cannot {doing}: {self.directory}: {reason}; make it writable or choose "
            f"{another_directory()}"
        )

    def _require_writer(self) -> None:
        if self._lock is None and self._writes:
            try:
                self.directory.mkdir(parents=True, exist_ok=True)
                # While this process holds the lock, all scratch files are those of dead writers.
                lock = durable.Lock(self.directory / ".lock")
                durable.sweep(self.directory)
            except OSError as error:
                raise self._failure("open the checkpoints for writing", error) from error
            if self._mirror:
                try:
                    self._mirror.own()
                except BaseException:
                    lock.release()
                    raise
            self._lock = lock
            if self._committed < 0:  # meanwhile, another may have written
                self.unrestored = self.latest()
        if self._lock is None:
            raise CheckpointError(f"cannot write {self.directory}: {self._why_not}")

    def _write(self, saved: Saved, tensors: dict[str, list[tf.Tensor]], anew: bool) -> None:
        """Writes a checkpoint, in the thread of the executor."""
        needed = bundle.size(tensors)
        unfinished = durable.scratch(self.directory, saved.path.name)
        try:
            if saved.step <= self._committed:
                with contextlib.suppress(durable.Damaged):
                    there = manifest.verified(saved.path)
                    if not anew:
                        return
                    if bundle.holds(there.prefix, there.variables, tensors):
                        metrics = {**there.metrics, **saved.metrics}
                        there = dataclasses.replace(there, metrics=metrics, changed=saved.changed)
                        self._rewrite(there)
                        return
                    saved = dataclasses.replace(saved, stopped=there.stopped)
            os.mkdir(unfinished)
            bundle.write(str(unfinished / "variables"), tensors)
            if self._lock:
                self._lock.check()
            files = durable.seal(unfinished)
            saved = dataclasses.replace(saved, files=files, fingerprint=self._identity())
            manifest.dump(saved, unfinished, via=self.directory)
            durable.publish(unfinished, saved.path)
            manifest.commit(self.directory, saved.step)
            for step, path in manifest.paths(self.directory).items():
                if self._committed < step < saved.step:
                    durable.discard(path)
            self._committed = saved.step
            self._apply_retention()
            self._copy_to_store()
        except (OSError, tf.errors.OpError) as error:
            shutil.rmtree(unfinished, ignore_errors=True)
            doing = f"save the checkpoint of step {saved.step}"
            raise self._failure(doing, error, needed) from error

    def _annotate(self, step: int, metrics: dict[str, float], stopped: bool) -> None:
        """Adds to a checkpoint, in the thread of the executor."""
        try:
            saved = manifest.load(manifest.path_of(self.directory, step))
        except durable.Damaged as damage:
            raise CheckpointError(
                f"No checkpoint of step {step} in {self.directory} to add metrics to ({damage}); "
                "evaluate before retention deletes it, or raise keep"
            ) from damage
        try:
            names = list(dict.fromkeys([*saved.evaluated, *metrics]))
            metrics = {**saved.metrics, **metrics}
            self._rewrite(
                dataclasses.replace(saved, metrics=metrics, evaluated=names, stopped=stopped)
            )
        except OSError as error:
            doing = f"add metrics to the checkpoint of step {step}"
            raise self._failure(doing, error) from error

    def _rewrite(self, saved: Saved) -> None:
        """Writes the manifest of a checkpoint again."""
        manifest.dump(saved, saved.path, via=self.directory)
        self._apply_retention()
        self._copy_to_store()

    def _copy_to_store(self) -> None:
        if self._mirror:
            self._mirror.changed()

    def _apply_retention(self) -> None:
        past = [s for s in self.all() if s.step <= self._committed]
        kept = manifest.retained(past, **self._retention)
        for saved in past:
            if saved.step not in kept:
                durable.discard(saved.path)

    # Reading.

    def all(self) -> list[Saved]:
        """Every checkpoint with a valid manifest, in ascending order of steps."""
        self._refresh()
        return manifest.load_all(self.directory)

    def latest(self) -> Saved | None:
        """The last one with a valid manifest, see `manifest.newest_first`; ``None`` without one.
        Reads no other file, so `restore` may pass over it."""
        self._refresh()
        steps = functools.partial(manifest.newest_first, self.directory)
        return manifest.first_intact(self.directory, steps, manifest.load, quiet=True)

    @property
    def selects_by(self) -> str | None:
        """``best_metric`` if the manager keeps the best checkpoints (``keep_best``), else None."""
        return self._best[0] if self._retention["keep_best"] else None

    @property
    def ranks_by(self) -> tuple[str, Mode]:
        """The metric by which a checkpoint is the best, and ``"max"`` or ``"min"``."""
        return self._best

    def best(self) -> Saved | None:
        """The one with the best ``best_metric``, see `manifest.best_first`; ``None`` if none has
        it."""
        self._refresh()
        return next(iter(manifest.best_first(self.directory, *self._best)), None)

    def restore(
        self, state: State, step: int | Literal["latest", "best"] | None = None
    ) -> Saved | None:
        """Assigns the values of a checkpoint to ``state``, see `read`, and continues the run from
        there: `save` deletes checkpoints of later steps as it passes them. To keep them, continue
        in another directory."""
        saved = self.read(state, step)
        if saved is None:
            return None
        self.note_constants(state)
        self._committed, self.unrestored = saved.step, None
        later = [step for step in manifest.paths(self.directory) if step > saved.step]
        if self._lock and later:
            logging.warning(
                "Continuing %s from step %d: its checkpoints of later steps (%s) are deleted as "
                "the run passes them",
                self.directory,
                saved.step,
                ", ".join(map(str, later)),
            )
        return saved

    def read(
        self, state: State, step: int | Literal["latest", "best"] | None = None
    ) -> Saved | None:
        """Assigns the values of a checkpoint to the variables of ``state``, to all or to none.

        Checksums are verified before. A damaged checkpoint is passed over with a warning, and the
        next one of `manifest.newest_first` (or the next best) is tried. Keys that ``state`` lacks
        are ignored, so ``{"model": [...]}`` is enough to evaluate. The host holds one copy of the
        values.

        Args:
          state: the variables; see the class.
          step: "latest" (same as ``None``), "best", or the number of one step.

        Returns:
          The checkpoint, or ``None`` if there is no checkpoint.

        Raises:
          CheckpointError: none is intact, the variables, the fingerprint or the class of the step
            differ, no such step.
        """
        self.wait()
        variables = bundle.unwrap(state)

        def read(path: Path) -> tuple[Saved, dict[str, list[tf.Tensor]]]:
            if self._mirror:
                self._mirror.fetch(path)
            saved = manifest.load(path)
            with durable.verifying(path, saved.files):
                self._require_fingerprint(saved)
                changed = self._code_changes(saved)
                _require_fit(saved, variables, changed)
                if changed:
                    logging.warning(
                        "%s was written by other code: %s; the run continues with the present code",
                        *(saved.path, first_three(changed)),
                    )
                return saved, bundle.read(saved.prefix, variables)

        found = manifest.first_intact(self.directory, lambda: self._steps(step), read)
        if found is None:
            return None
        saved, values = found
        for key, group in variables.items():
            for variable in group:
                variable.assign(values[key].pop(0))
        return saved

    def wait_for_new(
        self, seen_step: int, timeout: float, *, poll_seconds: float = 1.0
    ) -> Saved | None:
        """Waits until `latest` is not that of ``seen_step``: a later one, or an earlier one of a
        run that went back. ``None`` after ``timeout`` seconds."""
        deadline = time.monotonic() + timeout
        while True:
            if (saved := self.latest()) and saved.step != seen_step:
                return saved
            if (left := deadline - time.monotonic()) <= 0:
                return None
            time.sleep(min(poll_seconds, left))

    def _steps(self, wanted: int | Literal["latest", "best"] | None) -> list[int]:
        """The steps to try, in their order."""
        self._refresh()
        if wanted is None or wanted == "latest":
            return manifest.newest_first(self.directory)
        steps = list(manifest.paths(self.directory))
        if wanted == "best":
            best = manifest.best_first(self.directory, *self._best)
            if steps and not best:
                known = sorted(
                    {n for saved in manifest.load_all(self.directory) for n in saved.metrics}
                )
                remedy = (
                    f"those that there are, {', '.join(known)}, can be its best_metric"
                    if known
                    else "evaluate first or restore the latest"
                )
                raise CheckpointError(
                    f"No checkpoint in {self.directory} has the metric {self._best[0]!r}; {remedy}"
                )
            return [saved.step for saved in best]
        if wanted not in steps:
            raise CheckpointError(
                f"No checkpoint of step {wanted} in {self.directory}; choose one of "
                f"{', '.join(map(str, steps)) or '(none)'}"
            )
        return [operator.index(wanted)]

    def _refresh(self) -> None:
        """A reader of a store sees what is there now."""
        if self._mirror and not self._writes:
            self._mirror.refresh()

    def _identity(self) -> Mapping[str, Any] | None:
        """The fingerprint, as it is read back: JSON turns tuples into lists."""
        if callable(self._fingerprint):
            self._fingerprint = self._fingerprint()
        return json.loads(json.dumps(self._fingerprint))

    def _require_fingerprint(self, saved: Saved) -> None:
        """Logs a warning where soft keys differ. Raises `CheckpointError` if others do: ``saved``
        is from another run."""
        if saved.fingerprint is None or (ours := self._identity()) is None:
            return
        then, ours = _comparable(saved.fingerprint, ours)
        data = ours.get("name") or "the data"
        differing = {}
        for key, (was, now) in differences([then, ours]).items():
            differing[key] = f"{key} was {was!r}, is {now!r}"
            if (what := key.rpartition(": ")[2]) in _HASHED and ABSENT not in (was, now):
                verb = "have" if what.endswith("s") else "has"
                differing[key] = f"the {what} of {data} {verb} changed since then"
        soft = [text for key, text in differing.items() if key in self._soft_keys]
        hard = {key: text for key, text in differing.items() if key not in self._soft_keys}
        if hard:
            remedy = (
                f"use the same flags and data, or choose {another_directory()}, where --init_from "
                "begins with these weights"
                if in_command()
                else "use the same arguments and data, or another directory (or allow it: "
                f"CheckpointManager(..., soft_keys={[*self._soft_keys, *hard]}))"
            )
            raise CheckpointError(
                f"{saved.path} is from another run: {'; '.join(hard.values())}; {remedy}"
            )
        if soft:
            logging.warning("%s: %s", saved.path, "; ".join(soft))

    def _code_changes(self, saved: Saved) -> list[str]:
        """Compares the step, its sources, the settings of its layers, the modules that both runs
        have imported, and versions of packages. Returns what else than the class differs: it may
        have been mended, or moved to another machine. Raises `CheckpointError` if ``saved`` is of
        another class, unless that was only moved."""
        code = self.code
        if code is None or saved.code is None:
            return []
        old, new = saved.code["step"], code["step"]
        same_source = saved.code["source"] == code["source"]
        if old != new and not same_source:
            raise CheckpointError(
                f"{saved.path} was written by the step {old}, not by {new}: use that class, or "
                f"choose {another_directory()}"
            )
        now = {"modules": {}, "model": {}, "settings": {}, **code}
        then = {**now, **saved.code}  # which lacks these in the first versions
        changed = [
            f"{name} was {json.dumps(was)}, is {json.dumps(is_)}"
            for what in ("model", "settings")
            for name, (was, is_) in differences([then[what], now[what]]).items()
        ]
        if not same_source:
            changed.append(f"the source of the step {new}, of its layers or of its loss")
        changed += [
            f"the source of the module {name}"
            for name, source in now["modules"].items()
            if source != then["modules"].get(name, source)
        ]
        known = saved.fingerprint or {}  # what it has was compared with it
        changed += [
            f"the version of {package} was {saved.versions[package]}, is {version}"
            for package, version in _VERSIONS.items()
            if package not in known and saved.versions.get(package, version) != version
        ]
        return changed


# What a fingerprint has as a hash, which says nothing to a reader.
_HASHED = "content", "first examples"


def _numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """``metrics``, of which each is one number, of any rank."""
    return {name: float(np.asarray(value).item()) for name, value in metrics.items()}


def _comparable(
    then: Mapping[str, Any], ours: Mapping[str, Any]
) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Both fingerprints, without what only one of them can have: what the first versions did not
    compare if ``then`` is theirs, and first examples if Python makes them in one of the runs."""
    if '"samples":' not in json.dumps(then):  # of a stream
        ours = json.loads(json.dumps(ours), object_hook=_without_samples)
    first = "first examples"
    then = {first if key == "first batch" else key: value for key, value in then.items()}
    if first in then and "elements" not in then and not ours.get("shuffle"):  # of tf.data
        ours = {key: value for key, value in ours.items() if key not in ("elements", "shuffle")}
    if first not in then or first not in ours:
        then, ours = ({k: v for k, v in side.items() if k != first} for side in (then, ours))
    return then, ours


def _without_samples(value: dict[str, Any]) -> dict[str, Any]:
    return {key: one for key, one in value.items() if key != "samples"}


def _require_fit(
    saved: Saved, variables: Mapping[str, list[tf.Variable]], code_changes: list[str]
) -> None:
    """Compares ``variables`` with those of ``saved`` by their place in the list of each key, and
    logs a warning where only names differ. Raises `CheckpointError`, which begins with the
    ``code_changes``, if their number, shapes or dtypes differ."""
    old = saved.variables
    differing, renamed = [], []
    for key, ours in bundle.specs(variables).items():
        theirs = old.get(key)
        if theirs is None:
            why = f", {_WHAT[key]}" if key in _WHAT else ""
            differing.append(f"it has no {key!r}{why}, only {', '.join(old) or 'nothing'}")
            continue
        if len(theirs) != len(ours):
            differing.append(f"it has {len(theirs)} variables in {key!r} instead of {len(ours)}")
        for i, (a, b) in enumerate(itertools.zip_longest(theirs, ours)):
            if a is None:
                differing.append(f"{key}[{i}] {_describe(b)} is missing")
            elif b is None:
                differing.append(f"{key}[{i}] {_describe(a)} is extra")
            elif a["dtype"] != b["dtype"] or not _fits(a["shape"], b["shape"]):
                text = f"{key}[{i}] is {_describe(a)} instead of {_describe(b)}"
                hint = _GROWN if _has_more_rows(a, b) else ""
                differing.append(text + (_RESIZED if key == "replicas" else hint))
            elif manifest.unnumbered(a["name"]) != manifest.unnumbered(b["name"]):
                renamed.append(f"{key}[{i}] is {a['name']} instead of {b['name']}")
    if differing:
        what = first_three([*code_changes[:2], *differing])
        use = "use the flags" if in_command() else "make the model and the step with the arguments"
        raise CheckpointError(
            f"{saved.path} does not fit: {what}; {use} it was written with or "
            f"choose {another_directory()}"
        )
    if renamed:
        logging.warning(
            "%s: the names of %d variables differ, e.g. %s; their values are restored by position",
            *(saved.path, len(renamed), renamed[0]),
        )


def _has_more_rows(old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    was, now = old["shape"], new["shape"]
    alike = old["dtype"] == new["dtype"] and len(was) == len(now) == 2 and was[1] == now[1]
    return alike and now[0] is not None and was[0] < now[0]


def _fits(shape: Sequence[int], wanted: Sequence[int | None]) -> bool:
    return len(shape) == len(wanted) and all(
        w in (None, s) for s, w in zip(shape, wanted, strict=True)
    )


def _describe(variable: Mapping[str, Any]) -> str:
    return f"{variable['name']} {variable['dtype']}{variable['shape']}"
