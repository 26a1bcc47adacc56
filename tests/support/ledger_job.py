"""What tests/logs/test_time_of_jobs.py runs: a training with planted losses, which it notes.

python ledger_job.py OUT [kill=yes]     # one worker
python ledger_job.py OUT late=yes       # two: the second comes late, again and again

Each loss is a line of OUT/planted.jsonl: its name, and seconds since the epoch of both ends.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

from ctl.base import console

console.log_to_terminal()
console.load_tensorflow()

import keras  # noqa: E402
import tensorflow as tf  # noqa: E402
from helpers import examples, mlp  # noqa: E402
from worker_end import run_to_end  # noqa: E402

import ctl  # noqa: E402
from ctl.base import durable  # noqa: E402

OUT = Path(sys.argv[1])
OPTIONS = dict(argument.split("=") for argument in sys.argv[2:])
KILLS, LATE = "kill" in OPTIONS, "late" in OPTIONS
SECONDS, SAVED, KILLED, END = 2.5, 24, 40, 44
SLOW_STEP = 10
SLOW_BATCH = 20
WANTED = threading.Event()  # the step before that of the slow batch has begun


def plant(name: str, seconds: float = SECONDS) -> None:
    begin = time.time()
    time.sleep(seconds)
    with open(OUT / "planted.jsonl", "a") as file:
        file.write(json.dumps([name, begin, time.time()]) + "\n")


def planted(tensor: tf.Tensor, call) -> tf.Tensor:
    """``tensor``, after a ``call`` in Python with the number of this call from 0."""
    count = iter(range(10**9))

    def run(value):
        call(next(count))
        return value

    return tf.ensure_shape(tf.numpy_function(run, [tensor], tensor.dtype), tensor.shape)


def slow_batch(number: int) -> None:
    if KILLS and number == SLOW_BATCH:
        assert WANTED.wait(60)  # batches are made ahead, on a busy machine 16 of them
        plant("input")


class Step(ctl.TrainStep):
    def loss(self, batch):
        features, labels = batch
        return super().loss((planted(features, self.slow), labels))

    @staticmethod
    def slow(number: int) -> None:
        if KILLS and number == SLOW_STEP:
            plant("steps")
        if number == SLOW_BATCH - 1:
            WANTED.set()
        if KILLS and number >= SAVED:
            plant("lost", 0.5)


class Evaluation(ctl.EvalStep):
    def loss(self, batch):
        features, labels = batch
        return super().loss((planted(features, self.slow), labels))

    @staticmethod
    def slow(number: int) -> None:
        if KILLS and number == 1:
            plant("evaluation")


def kill(status: ctl.actions.Status) -> None:
    if KILLS and status.step == KILLED:
        with open(OUT / "killed", "w") as file:
            file.write(str(time.time()))
        os.kill(os.getpid(), signal.SIGKILL)


def train() -> None:
    slow_disk = durable.seal

    def seal(directory):
        if KILLS:
            plant("saving")
        return slow_disk(directory)

    durable.seal = seal
    keras.utils.set_random_seed(0)
    batches = tf.data.Dataset.from_tensor_slices(examples()).batch(16, drop_remainder=True)
    step = Step(mlp(), keras.optimizers.SGD(0.1))
    with ctl.logs.LedgerFile(OUT):
        loop = ctl.Loop(
            step,
            batches.map(lambda x, y: (planted(x, slow_batch), y), deterministic=True),
            evaluator=ctl.Evaluator(Evaluation(step.model), batches),
            checkpoints=ctl.CheckpointManager(OUT / "checkpoints", asynchronous=False),
            actions=[kill],
            steps_per_loop=1,
        )
        loop.restore()
        loop.train_and_evaluate(END, evaluate_every=SAVED)


def come_late() -> None:
    me = ctl.cluster.resolve()
    with ctl.logs.LedgerFile(OUT, me.index, len(me.workers)):
        if not me.is_chief:
            plant("before the start")
        strategy = ctl.strategy.make_multi_worker(me).strategy
        for _ in range(2):  # the first compiles
            ctl.workers.barrier(strategy)
        if not me.is_chief:
            plant("before a barrier")
        ctl.workers.barrier(strategy)
        ctl.workers.leave_together(strategy)


def run() -> None:
    run_to_end(come_late) if LATE else train()


if __name__ == "__main__":
    run()
