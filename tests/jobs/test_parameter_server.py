"""Parameter servers, in real processes on loopback: what is exact, and who may be killed."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import BATCH, examples, largest_difference, mlp, words_and_features
from paths import SUPPORT

from ctl import launch
from ctl.checkpoint import CheckpointManager
from ctl.data import InMemory
from ctl.jobs.parameter_server import CopyEvaluator, _can_be_stacked, _share
from ctl.loop import Evaluator, Loop
from ctl.phases.base_step import EvalStep
from ctl.schedule import Cosine
from ctl.step import TrainStep

pytestmark = pytest.mark.slow  # starts processes

JOB = SUPPORT / "parameter_server_job.py"
BOUND = 300  # seconds to wait for anything, many times what it takes


class Process:
    """A task whose output is read as it comes."""

    def __init__(self, command: list, **environ: str):
        self.popen = subprocess.Popen(
            list(map(str, command)),
            env={**os.environ, "CUDA_VISIBLE_DEVICES": "-1", "PYTHONUNBUFFERED": "1", **environ},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        for line in self.popen.stdout:
            self.lines.append(line.rstrip("\n"))

    @property
    def output(self) -> str:
        return "\n".join(self.lines)

    def until(self, pattern: str) -> re.Match:
        deadline = time.monotonic() + BOUND
        while not (match := re.search(pattern, self.output)):
            ended = self.popen.poll() is not None and not self._reader.is_alive()
            assert not ended and time.monotonic() < deadline, f"no {pattern}: {self.output[-2000:]}"
            time.sleep(0.01)
        return match

    def order(self, order: str) -> None:
        print(order, file=self.popen.stdin, flush=True)

    def kill(self) -> None:
        self.popen.kill()
        self.popen.wait()

    def wait(self) -> int:
        code = self.popen.wait(BOUND)
        self._reader.join(BOUND)
        return code


class Job(dict):
    """A coordinator, two workers and two parameter servers by name, without the launcher."""

    def __init__(self, out: Path):
        self._out = out
        self._addresses = launch.cluster(2, ps=2)
        for name in ("chief 0", "worker 0", "worker 1", "ps 0", "ps 1"):
            self.start(name)

    def start(self, name: str) -> None:
        kind, index = name.split()
        config = {"cluster": self._addresses, "task": {"type": kind, "index": int(index)}}
        self[name] = Process([sys.executable, JOB, self._out], TF_CONFIG=json.dumps(config))

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_) -> None:
        for process in self.values():
            process.kill()


def one_device(mirrored) -> tuple[Loop, keras.Model]:
    """The same training on one replica."""
    strategy = mirrored(1)
    with strategy.scope():
        model = words_and_features()
        options = {"clip_norm": 0.3, "jit_update": False, "class_weight": {0: 0.5, 1: 5.0}}
        options["sparse_rows"] = "lazy"
        step = TrainStep(model, keras.optimizers.AdamW(0.01), **options)
        metric = keras.metrics.SparseCategoricalAccuracy("accuracy")
        eval_step = EvalStep(model, metrics=[metric])
    test = InMemory(examples(101, seed=1), global_batch_size=BATCH, training=False)
    loop = Loop(
        step,
        InMemory(examples(), global_batch_size=BATCH),
        strategy=strategy,
        schedule=Cosine(0.01, 200, warmup_steps=10),
        evaluator=Evaluator(eval_step, test, strategy=strategy),
    )
    return loop, model


def weights(out: Path, step: int) -> list[np.ndarray]:
    with np.load(out / f"step-{step}.npz") as saved:
        return [saved[f"arr_{i}"] for i in range(len(saved.files))]


@pytest.mark.sample
def test_workers_come_and_go(tmp_path, mirrored):
    """Worker 1 is killed and comes back, then worker 0 is killed, then worker 1 again. With one
    worker nothing is asynchronous, and the weights must be those of one device, which has the whole
    table, each server half of it."""
    with Job(tmp_path) as job:
        chief = job["chief 0"]
        chief.until("at 0:")
        table, *slots = json.loads(chief.until("parts (.*)")[1])
        assert [rows for _, rows in table] == [51, 52]
        assert {device.split("/")[3] for device, _ in table} == {"task:0", "task:1"}
        assert slots == [table] * 2
        job["worker 1"].kill()
        chief.until("worker 1 was lost")
        chief.order("train")
        chief.until(f"at 20: 20 updates, {20 * BATCH} examples")

        job.start("worker 1")
        chief.until("worker 1 is back")
        step, deadline = 20, time.monotonic() + BOUND
        while "task:1 has been recovered" not in chief.output:
            assert time.monotonic() < deadline
            step += 20
            chief.order("train")
            chief.until(f"at {step}: {step} updates, {20 * BATCH} examples")
        for _ in range(2):  # with both
            step += 20
            chief.order("train")
            chief.until(f"at {step}: {step} updates, {20 * BATCH} examples")

        job["worker 0"].kill()
        chief.until("worker 0 was lost")
        chief.order("train")
        step += 20
        chief.until(f"at {step}: {step} updates, {20 * BATCH} examples")
        chief.order("evaluate")
        results = json.loads(chief.until("results (.*)")[1])
        chief.order("save")
        chief.until(rf"results .*\n(?s:.*at {step}:.*){{2}}")

        job["worker 1"].kill()
        chief.until("(?s:worker 1 was lost.*){2}")
        chief.order("train")
        lost = time.monotonic()
        assert [job[name].wait() for name in ("chief 0", "ps 0", "ps 1")] == [5, 5, 5]
        assert time.monotonic() - lost < 20
    assert "no worker has been connected for 3 s (--worker_timeout): worker 0 at" in chief.lines[-1]

    loop, model = one_device(mirrored)
    loop.train(20)
    assert largest_difference(model.get_weights(), weights(tmp_path, 20)) <= 1e-6
    CheckpointManager(tmp_path / "checkpoints", read_only=True).restore(loop.step.state())
    assert loop.global_step == int(loop.step.optimizer.iterations.value.numpy()) == step
    assert largest_difference(model.get_weights(), weights(tmp_path, step)) == 0
    expected = loop.evaluate()
    np.testing.assert_allclose(results["loss"], expected["loss"], 1e-6)
    assert results["accuracy"] == expected["accuracy"]


def test_a_lost_parameter_server_restarts_the_job(tmp_path, zygote):
    """The main command under the launcher, killed once there is a checkpoint; 2 workers learn what
    one replica does, within 2 points: 2 epochs and 2,000 test images leave that much to chance. On
    a busy machine, another program may take a port before a task listens there: that is one more
    restart."""
    run = tmp_path / "run"
    flags = ["--model=dense", "--epochs=2", "--noexport", "--notensorboard"]
    reference = zygote.start("ctl.train", f"--model_dir={tmp_path / 'one'}", *flags)
    launched = Process(
        [
            *(sys.executable, "-m", "ctl.launch", "--workers=2", "--ps=1", "--max_restarts=4"),
            *("--backoff=0", "--grace=10", "--", sys.executable, "-m", "ctl.train"),
            *("--strategy=parameter_server", f"--model_dir={run}", "--checkpoint_every=50", *flags),
        ]
    )
    try:
        launched.until("step 100/313")
        server = max(children(launched.popen.pid), key=began)  # it was started last
        os.kill(server, signal.SIGKILL)
        assert launched.wait() == 0, launched.output[-3000:]
    finally:
        launched.popen.terminate()
        launched.wait()
    assert reference.wait() == 0
    assert "[launch] ps 0 died of SIGKILL; ending the others" in launched.lines
    restarts, taken = (launched.output.count(text) for text in ("] restart ", "cannot listen on"))
    assert 1 <= restarts <= 1 + taken, launched.output[-3000:]
    resumed = int(re.search(r"resuming at step (\d+)", launched.output)[1])
    assert resumed >= 50 and "Traceback" not in launched.output
    assert f"done: 313 steps, {313 - resumed} of them now" in launched.output
    saved = CheckpointManager(run / "checkpoints", read_only=True).latest()
    assert saved.step == 313
    alone = CheckpointManager(tmp_path / "one" / "checkpoints", read_only=True).latest()
    assert saved.metrics["accuracy"] > alone.metrics["accuracy"] - 0.02


def began(pid: int) -> tuple[int, int]:
    """Orders processes by their start."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]), pid


def children(parent: int) -> list[int]:
    return [int(pid) for pid in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()]


def test_a_copy_is_evaluated_on_other_data_too():
    trained, copy = mlp(), mlp()
    data = [InMemory(examples(count), global_batch_size=BATCH, training=False) for count in (8, 20)]
    other = CopyEvaluator(trained, EvalStep(copy), data[0]).on(data[1])
    assert other.dataset is data[1]
    assert other.run() == Evaluator(EvalStep(trained), data[1]).run()


@pytest.mark.parametrize(("count", "workers"), [(1, 2), (7, 1), (60, 2), (61, 3), (500, 2)])
def test_workers_get_each_batch_once_and_end_together(count, workers):
    left, shares = count, []
    while left:
        shares.append(_share(left, workers, most=8))
        left -= shares[-1]
    assert sum(shares) == count and shares == sorted(shares, reverse=True)
    assert set(shares) <= {1, 2, 4, 8}
    assert shares[-1] == 1 and (count < 8 * 2 * workers or shares[0] == 8)


def test_batches_of_varying_shapes_are_sent_one_by_one():
    images = tf.TensorSpec([8, 4])
    assert _can_be_stacked((images, {"label": tf.TensorSpec([8])}))
    assert not _can_be_stacked((images, tf.TensorSpec([None])))
    assert not _can_be_stacked(tf.RaggedTensorSpec([8, None]))
