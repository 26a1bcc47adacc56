"""A task of the jobs: `run` trains as `ctl.train` does, and marks how far it is.

User code is in every place where a training runs some. In each, a fault of the schedule may make it
slow, hang or raise, once.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import socket
import stat
import struct
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import ctl
from ctl.base import console, signals
from ctl.checkpoint.export import export_model
from ctl.distributed import workers
from ctl.distributed.cluster import Cluster
from ctl.distributed.cluster.members import Tasks
from ctl.distributed.strategy import (
    Placement,
    make_multi_worker,
    make_parameter_server,
    make_strategy,
)
from ctl.distributed.watch import watchdog
from ctl.errors import CtlError, PeerError
from ctl.jobs.parameter_server import CopyEvaluator, ParameterServerLoop, serve

from .draw import (
    COLLECTIVE_TIMEOUT,
    COMPILING_TIMEOUT,
    EVALUATE_EVERY,
    SAVE_EVERY,
    STARTUP_TIMEOUT,
    STEPS,
    TRACING,
    Fault,
)

_BATCH, _FEATURES, _CLASSES = 12, 6, 3
_SO_ATTACH_FILTER = 26
_STEP_SECONDS = 0.02  # so that faults meet a training that goes on


class Marks:
    """How far a task is: a line of time and name for each mark, in a file."""

    def __init__(self, path: Path):
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def __call__(self, name: str) -> None:
        os.write(self._file, f"{time.time()} {name}\n".encode())


class Users:
    """The code of a user. Call it with the name of the place, and the step where there is one."""

    def __init__(self, faults: Sequence[Fault], mark: Marks):
        self._faults = [fault for fault in faults if fault.kind in ("slow", "hang", "raise")]
        self._mark = mark

    def in_graph(self, place: str) -> bool:
        """Whether a graph must call Python at ``place``."""
        return any(fault.place == place for fault in self._faults)

    def __call__(self, place: str, step: int = 0) -> None:
        for fault in self._faults:
            if fault.place == place and step >= fault.step:
                self._faults.remove(fault)
                self._mark(f"hit {fault.number}")
                if fault.kind == "raise":
                    raise RuntimeError(f"a bug in the {place} of a user")
                time.sleep(fault.seconds if fault.kind == "slow" else 100_000)
                return


def run(task: str, addresses: dict[str, list[str]], out: Path, run_dir: Path, faults: list) -> None:
    """Runs ``task`` ("worker 1") of the job to its end; ends the process as a command does.

    Args:
        task: kind and index.
        addresses: as in ``TF_CONFIG``.
        out: directory of the marks.
        run_dir: directory of checkpoints, records and export.
        faults: those of this task.
    """
    atexit._clear()  # what the parent wanted to do at its own end
    signals.begin()
    mark = Marks(out / f"{task}.marks")
    mark("start")
    for kind in {"cut", "drop"} & {fault.kind for fault in faults}:
        arguments = out / f"{task}.{kind}", kind == "drop"
        threading.Thread(target=_cut_when_told, args=arguments, daemon=True).start()
    console.log_to_terminal()
    watchdog.FIRST_CALL_SECONDS = COMPILING_TIMEOUT  # not ten minutes
    users, kind, index = Users(faults, mark), *task.split()
    try:
        if "chief" in addresses:
            tasks = Tasks(
                addresses["chief"][0],
                tuple(addresses["worker"]),
                tuple(addresses["ps"]),
                kind,
                int(index),
            )
            if not tasks.is_coordinator:
                serve(tasks, STARTUP_TIMEOUT)
            placement = make_parameter_server(
                tasks, startup_timeout=STARTUP_TIMEOUT, worker_timeout=5.0
            )
            with placement.heartbeats:
                _train(placement, run_dir, users, mark)
        elif len(addresses["worker"]) == 1:
            _train(make_strategy("default"), run_dir, users, mark)
        else:
            placement = make_multi_worker(
                Cluster(tuple(addresses["worker"]), int(index), "tests.chaos"),
                collective_timeout=COLLECTIVE_TIMEOUT,
                startup_timeout=STARTUP_TIMEOUT,
                record_dir=run_dir / "inspect",
            )
            _train(placement, run_dir, users, mark)
        code = 0
    except (CtlError, signals.Interrupted) as error:
        print(" ".join(str(error).split()), file=sys.stderr)
        if isinstance(error, PeerError):
            watchdog.leave(error.exit_code)
        code = error.exit_code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        code = 130
    except BaseException:
        traceback.print_exc()
        code = 1
    signals.decided(code)
    mark("exiting")
    sys.stderr.flush()
    atexit._run_exitfuncs()
    os._exit(code)


def _cut_when_told(path: Path, drop: bool) -> None:
    """Shuts down all connections of this process once there is a file at ``path``; with ``drop``,
    lets the kernel drop all that comes to any socket, as where a network hangs."""
    while not path.exists():
        time.sleep(0.02)
    # A filter of one instruction, "return 0 bytes" (linux/filter.h).
    instruction = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 0))
    program = struct.pack("HP", 1, ctypes.addressof(instruction))
    while True:
        for entry in os.listdir("/proc/self/fd"):
            # Not a socket, one that listens, or one that is closed meanwhile.
            with contextlib.suppress(OSError):
                if not stat.S_ISSOCK(os.fstat(int(entry)).st_mode):
                    continue
                with socket.socket(fileno=os.dup(int(entry))) as connection:
                    if drop:
                        connection.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)
                    else:
                        connection.getpeername()
                        connection.shutdown(socket.SHUT_RDWR)
        if not drop:
            return
        time.sleep(0.02)  # for those that are opened later


class Exported(keras.layers.Layer):
    """A layer of a user, which runs code of theirs when the model is exported."""

    users: Users | None = None
    exporting = False  # Keras and ctl read the settings at other times, too

    def call(self, inputs: Any) -> Any:
        if self.users:
            self.users("layer")
        return inputs

    def get_config(self) -> dict[str, Any]:
        if self.users and self.exporting:
            self.users("export")
        return super().get_config()


class Accuracy(keras.metrics.SparseCategoricalAccuracy):
    """A metric of a user."""

    def __init__(self, users: Users):
        super().__init__("accuracy")
        self._users = users

    def result(self) -> Any:
        if float(self.count):  # ctl asks for the result of zeros once, to see its shape
            self._users("metric")
        return super().result()


class Disk(ctl.CheckpointManager):
    """Checkpoints on a disk that may hang."""

    users: Users

    def save(self, step: int, *arguments: Any, **options: Any) -> Path:
        self.users("saving", step)
        return super().save(step, *arguments, **options)


class Step(ctl.TrainStep):
    """A step of a user, whose forward pass may call Python."""

    users: Users
    mark: Marks

    def preprocess(self, features: tf.Tensor) -> tf.Tensor:
        self.mark(TRACING)
        if not self.users.in_graph("forward"):
            return features

        def code(step: np.int64) -> np.int64:
            self.users("forward", int(step))
            return step

        called = tf.numpy_function(code, [self.global_step], tf.int64)
        with tf.control_dependencies([called]):
            return tf.identity(features)


def _model(users: Users) -> keras.Model:
    """With all that a resume must bring back: moving statistics, seeds of Dropout."""
    exported = Exported()
    exported.users = users
    return keras.Sequential(
        [
            keras.layers.Input([_FEATURES]),
            keras.layers.Dense(8, activation="tanh"),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.25),
            exported,
            keras.layers.Dense(_CLASSES),
        ]
    )


def _batches(users: Users) -> tf.data.Dataset:
    """Batches that depend on their number only."""

    def code(number: np.int64) -> np.int64:
        users("data", int(number))
        return number

    numbers = tf.data.Dataset.range(10**9)
    if users.in_graph("data"):
        numbers = numbers.map(lambda n: tf.ensure_shape(tf.numpy_function(code, [n], tf.int64), []))
    return numbers.map(
        lambda n: (
            tf.random.stateless_normal([_BATCH, _FEATURES], [0, n]),
            tf.random.stateless_uniform([_BATCH], [1, n], 0, _CLASSES, tf.int64),
        )
    )


def _train(placement: Placement, run_dir: Path, users: Users, mark: Marks) -> None:
    """The order of `ctl.train`: build, resume, train and evaluate, leave together, export."""
    strategy, asynchronous = placement.strategy, placement.heartbeats is not None
    chief = workers.is_chief(strategy)
    mark("placed")
    keras.utils.set_random_seed(0)
    users("model")
    with strategy.scope():
        model = _model(users)
        step = Step(model, keras.optimizers.AdamW(0.01), clip_norm=0.3, options=placement.options)
        if asynchronous:
            step.jit_update = False
        copy = None if asynchronous else ctl.EvalStep(model, metrics=[Accuracy(users)])
    step.users, step.mark = users, mark
    test = _batches(Users((), mark)).take(5)
    if asynchronous:
        copy = ctl.EvalStep(_model(Users((), mark)), metrics=[Accuracy(users)])
        evaluator = CopyEvaluator(model, copy, test)
    else:
        evaluator = ctl.Evaluator(copy, test, strategy=strategy)

    def schedule(number: Any) -> Any:
        users("schedule")
        return ctl.schedule.Cosine(0.01, STEPS, warmup_steps=10)(number)

    def paced(status: ctl.actions.Status) -> None:
        mark(f"step {status.step}")
        users("action", status.step)
        time.sleep(_STEP_SECONDS)

    mark("built")
    checkpoints = Disk(run_dir / "checkpoints", read_only=not chief)
    checkpoints.users = users
    parts = {
        "strategy": strategy,
        "schedule": schedule,
        "evaluator": evaluator,
        "checkpoints": checkpoints,
        "actions": [ctl.Every(paced, steps=1), ctl.Every(lambda _: loop.save(), steps=SAVE_EVERY)],
        "eval_actions": [lambda number, results: users("evaluated")],
        "steps_per_loop": 1,
    }
    if asynchronous:
        loop = ParameterServerLoop(
            step,
            _batches(users),
            heartbeats=placement.heartbeats,
            timeout=COLLECTIVE_TIMEOUT,
            **parts,
        )
    else:
        loop = ctl.Loop(step, _batches(users), **parts)
    with checkpoints:
        saved = loop.restore()
        mark(f"resumed {saved.step if saved else 0}")
        with loop.signals.noted():
            mark("training")
            loop.train_and_evaluate(STEPS, evaluate_every=EVALUATE_EVERY)
            mark("trained")
        if chief:
            signals.unwind("all steps are saved; the same command exports")
        else:
            signals.decided()
        mark("leaving")
        workers.leave_together(strategy)
        checkpoints.wait()
        if chief:
            mark("exporting")
            Exported.exporting = True
            with loop.step.updater.averaged():
                export_model(model, run_dir / "export")
        signals.decided()
    mark("done")
