"""The binary when it does not end well: killed, stopped, diverged, out of space, without data."""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter

import numpy as np
import pytest
import tensorflow as tf
from runs import evaluations, latest, records
from zygote import last_line

from ctl.base import durable
from ctl.checkpoint import CheckpointManager

pytestmark = pytest.mark.slow  # starts processes

TRAIN = "ctl.train"
STEPS = 800
ENDLESS = ["--train_steps=1000000", "--evaluate_every=1000000"]
SHORT = ["--model=dense", "--train_steps=20", "--evaluate_every=10"]
# Training, saving and evaluating take about the same time, so that an end falls in each.
MANY = [
    *("--model=dense", f"--train_steps={STEPS}", "--evaluate_every=100", "--checkpoint_every=25"),
    *("--log_every=10", "--steps_per_loop=5", "--optimizer=momentum", "--ema_decay=0.99"),
]


def tensors(model_dir) -> dict[str, np.ndarray]:
    """Everything in the latest checkpoint."""
    reader = tf.train.load_checkpoint(latest(model_dir).prefix)
    return {name: reader.get_tensor(name) for name in reader.get_variable_to_shape_map()}


def assert_same_end(model_dir, reference) -> None:
    ours, theirs = tensors(model_dir), tensors(reference)
    assert set(ours) == set(theirs)
    for name, value in theirs.items():
        if name != "_CHECKPOINTABLE_OBJECT_GRAPH":
            np.testing.assert_array_equal(ours[name], value, err_msg=name)


def assert_same_evaluations(model_dir, reference) -> None:
    ours, theirs = evaluations(model_dir), evaluations(reference)
    assert sorted(ours) == sorted(theirs)
    for step, record in theirs.items():
        assert ours[step]["accuracy"] == record["accuracy"]
        assert ours[step]["loss"] == pytest.approx(record["loss"], rel=1e-5)


@pytest.fixture(scope="module")
def uninterrupted(zygote, tmp_path_factory):
    model_dir = tmp_path_factory.mktemp("uninterrupted")
    zygote.run(TRAIN, f"--model_dir={model_dir}", *MANY)
    assert list(evaluations(model_dir)) == list(range(100, STEPS + 1, 100))
    return model_dir


# kill -9.


def intact_steps(model_dir) -> list[int]:
    """The steps of the checkpoints; fails for one whose bytes are not those of its manifest."""
    if not (model_dir / "checkpoints").exists():
        return []
    saved = CheckpointManager(model_dir / "checkpoints", read_only=True).all()
    for each in saved:
        durable.verify(each.path, each.files)
    return [each.step for each in saved]


def until_lines(command, count: int, seconds: float = 60) -> None:
    """Waits for so many lines of the log, for its end, or for some seconds."""
    deadline = time.monotonic() + seconds
    while command.stdout.count("step ") < count and time.monotonic() < deadline:
        if "\ndone: " in command.stdout:
            return
        time.sleep(0.005)


def warnings(command) -> list[str]:
    """But the one that is right: a kill may leave a checkpoint that is whole but not committed."""
    passed = "are deleted as the run passes them"
    return [t for t in command.stderr.splitlines() if "arning" in t and passed not in t]


def test_killed_again_and_again(zygote, tmp_path, uninterrupted):
    chance = random.Random(6)
    run, kills, reached, wheres = tmp_path / "run", 0, 0, Counter()
    while kills < 8:
        command = zygote.start(TRAIN, f"--model_dir={run}", *MANY)
        # A third of the kills fall into the start, the others into what follows one of the first
        # lines of the log. A run at its end only exports: 0.3 s, in which the last kills fall.
        at_end = reached == STEPS
        if at_end:
            command.until("resuming at step")
            time.sleep(chance.uniform(0, 0.6))
        elif chance.random() < 1 / 3:
            until_lines(command, 1, seconds=chance.uniform(0.1, 2))
        else:
            until_lines(command, chance.randint(1, 8))
            time.sleep(chance.uniform(0, 0.1))
        if not zygote.ended(command):
            command.signal(signal.SIGKILL)
        if command.wait() == 0:  # too late
            reached = STEPS
            continue
        assert command.wait() == -signal.SIGKILL
        kills += 1
        assert warnings(command) == []
        steps = intact_steps(run)
        now = max(steps, default=0)
        assert now >= reached, "a checkpoint is lost"
        wheres["export" if at_end else "start" if now == reached else "training"] += 1
        reached = now
        if kills == 6 and reached < STEPS:  # the last two are for the export
            zygote.run(TRAIN, f"--model_dir={run}", *MANY)
            reached = STEPS
    assert min(wheres[where] for where in ("export", "start", "training")) >= 1, wheres
    command = zygote.run(TRAIN, f"--model_dir={run}", *MANY)
    assert warnings(command) == []
    assert intact_steps(run)[-1] == STEPS
    assert_same_end(run, uninterrupted)
    assert_same_evaluations(run, uninterrupted)
    exported = sorted(p.name for p in (run / "export").iterdir())
    assert exported == ["model.keras", "saved_model"]
    left = [p for p in [*run.iterdir(), *(run / "checkpoints").iterdir()] if "tmp-" in p.name]
    assert left == []


# Signals.


def test_stopped_by_signals(zygote, tmp_path, uninterrupted):
    """By Ctrl-C, then by a scheduler that repeats SIGTERM until the process has ended, also after
    the state was saved. Meanwhile no other run may write there."""
    step = 0
    for number, repeats in ((signal.SIGINT, False), (signal.SIGTERM, True)):
        command = zygote.start(TRAIN, f"--model_dir={tmp_path}/run", *MANY)
        command.until("step ", "stdout")
        if not step:
            second = zygote.run(TRAIN, f"--model_dir={tmp_path}/run", *MANY, exit_code=4)
            assert f"is being written by process {command.pid} on " in last_line(second)
        assert f"resuming at step {step} " in command.stderr or not step
        command.signal(number)
        while repeats and not zygote.ended(command):
            command.signal(number)
            time.sleep(0.002)
        assert command.wait() == 42
        line, before = last_line(command), step
        step = intact_steps(tmp_path / "run")[-1]
        path = tmp_path / "run" / "checkpoints" / f"step-{step:010}"
        assert line == f"{number.name}: saved step {step} in {path}; the same command resumes"
        assert before < step < STEPS
        assert not (tmp_path / "run" / "export").exists()
    command = zygote.run(TRAIN, f"--model_dir={tmp_path}/run", *MANY)
    assert f"resuming at step {step} " in command.stderr
    assert_same_end(tmp_path / "run", uninterrupted)


def test_stopped_while_it_evaluates(zygote, tmp_path):
    # 2,000 batches: a second or more.
    options = ["--dataset=synthetic", "--num_examples=20000", "--global_batch_size=10"]
    options += ["--image_shape=4,4,1", "--model=dense", "--evaluate_every=5", "--train_steps=10"]
    command = zygote.start(TRAIN, f"--model_dir={tmp_path}", *options)
    while not intact_steps(tmp_path):
        assert not zygote.ended(command)
        time.sleep(0.01)
    command.signal(signal.SIGTERM)
    assert command.wait() == 42
    assert "SIGTERM: saved step 5 in " in last_line(command)
    assert not evaluations(tmp_path)
    command = zygote.run(TRAIN, f"--model_dir={tmp_path}", *options)
    assert list(evaluations(tmp_path)) == [5, 10]  # the one that was broken off, too


def test_a_second_interrupt_saves_nothing(zygote, tmp_path):
    # The disk is so slow that the first interrupt still saves when the second comes.
    (tmp_path / "slow.py").write_text(
        "import time\n"
        "from ctl import models\n"
        "from ctl.checkpoint import bundle\n"
        "def write(prefix, tensors):\n"
        "    print('writing', flush=True)\n"
        "    time.sleep(3)\n"
        "    raise OSError('the end of the test')\n"
        "bundle.write, make = write, models.dense\n"
    )
    options = ["--model=slow:make", "--steps_per_loop=5", *ENDLESS]
    command = zygote.start(TRAIN, f"--model_dir={tmp_path}/run", *options, path=[tmp_path])
    command.until("step ", "stdout")
    command.signal(signal.SIGINT)
    command.until("writing", "stdout")
    command.signal(signal.SIGINT)
    assert command.wait() == 130
    assert last_line(command) == "interrupted"


# Code of a user that sends signals to its own process at one point of the training.
SIGNALS = """
import atexit, ctypes, os, pathlib, signal
import keras
from ctl import models

numbers = [int(number) for number in os.environ["NUMBERS"].split()]

def at(point):
    if point == os.environ["POINT"]:
        while numbers:
            os.kill(os.getpid(), numbers.pop(0))
        if point in ("import", "build"):  # waits in C, as TensorFlow does for other workers
            library, lock = ctypes.CDLL(None), ctypes.create_string_buffer(64)
            library.pthread_mutex_lock(lock)
            library.pthread_mutex_lock(lock)

class Exported(keras.layers.Layer):
    def call(self, inputs):
        return inputs

    def get_config(self):
        if any(pathlib.Path(os.environ["RUN"]).glob("checkpoints/step-*")):
            at("export")
        return super().get_config()

def make(input_shape, classes):
    at("build")
    model = models.make_model("dense", input_shape, classes)
    return keras.Sequential([keras.Input(input_shape), Exported(), model])

at("import")
atexit.register(at, "exit")
"""
TWICE = [signal.SIGINT, signal.SIGINT]
BEFORE = "SIGTERM: stopped before the training; run the same command again"
AFTER = "SIGINT: all steps are saved; the same command exports"


@pytest.mark.parametrize(
    ("point", "numbers", "code", "line"),
    [
        ("import", [signal.SIGTERM], 42, BEFORE),
        pytest.param("build", [signal.SIGTERM] * 2, 42, BEFORE, marks=pytest.mark.sample),
        pytest.param("export", TWICE[:1], 42, AFTER, marks=pytest.mark.sample),
        ("exit", [signal.SIGTERM, *TWICE], 0, None),
    ],
)
def test_signals_from_the_first_line_to_the_exit(zygote, tmp_path, point, numbers, code, line):
    (tmp_path / "signals_of_a_user.py").write_text(SIGNALS)
    run, sent = tmp_path / "run", " ".join(str(int(number)) for number in numbers)
    options = [f"--model_dir={run}", "--model=signals_of_a_user:make", *SHORT[1:], "--log_every=20"]
    start = {"path": [tmp_path], "RUN": str(run), "NUMBERS": sent}
    command = zygote.run(TRAIN, *options, **start, POINT=point, exit_code=code)
    said = last_line(command)
    assert said == line or (line is None and "SIG" not in said), said
    assert (run / "export").exists() == (code == 0)
    if point == "export":
        assert intact_steps(run) == [10, 20] and not list(run.glob("tmp-*"))
        command = zygote.run(TRAIN, *options, **start, POINT="none")
        assert "resuming at step 20 " in command.stderr and (run / "export").exists()


def test_what_comes_after_a_save_does_not_change_the_code(zygote, tmp_path):
    """Signals while the process of a stopped training ends."""
    (tmp_path / "signals_of_a_user.py").write_text(SIGNALS)
    options = ["--model=signals_of_a_user:make", "--steps_per_loop=5", *ENDLESS]
    start = {"path": [tmp_path], "RUN": str(tmp_path), "NUMBERS": "2 15 2", "POINT": "exit"}
    command = zygote.start(TRAIN, f"--model_dir={tmp_path}/run", *options, **start)
    command.until("step ", "stdout")
    command.signal(signal.SIGINT)
    assert command.wait() == 42
    assert last_line(command).startswith("SIGINT: saved step ")


def test_signals_while_the_command_is_imported(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(
        "import os, signal, sys, time\n"
        "class Finder:\n"
        "    @staticmethod\n"
        "    def find_spec(name, path=None, target=None):\n"
        "        if name == 'ctl.flags.parsing':\n"
        "            os.kill(os.getpid(), signal.SIGTERM)\n"
        "            time.sleep(60)  # which the signal ends\n"
        "sys.meta_path.insert(0, Finder)\n"
    )
    ended = subprocess.run(
        [sys.executable, "-m", TRAIN, f"--model_dir={tmp_path}/run"],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (ended.returncode, ended.stderr) == (42, f"{BEFORE}\n")


# What cannot go on.


def test_diverged(zygote, tmp_path):
    """All updates are skipped. `test_an_attempt_that_was_given_up_is_no_part_of_the_next` stops at
    the first NaN."""
    options = ["--learning_rate=1e30", "--optimizer=sgd", "--schedule=constant", "--warmup=0"]
    options += ["--model=dense", "--train_steps=500", "--on_nan=skip", "--log_every=1"]
    options += ["--notensorboard"]
    line = last_line(zygote.run(TRAIN, f"--model_dir={tmp_path}", *options, exit_code=3))
    assert re.match(r"the last 100 updates, up to step 10\d, were skipped", line)
    assert "try a lower learning rate" in line and "; train again with --eager" in line
    assert intact_steps(tmp_path) == []
    assert records(tmp_path)  # JSON, although the loss may be none


def test_a_nan_of_a_step_is_found(zygote, tmp_path):
    """As the message says: the same command with --eager, from the last checkpoint."""
    (tmp_path / "mine.py").write_text(
        "import ctl, tensorflow as tf\n"
        "class Mine(ctl.TrainStep):\n"
        "    def loss(self, batch):\n"
        "        losses, logits = super().loss(batch)\n"
        "        left = tf.cast(12 - self.global_step, tf.float32)\n"
        "        return losses + 0 * tf.sqrt(left), logits\n"
    )
    run = [TRAIN, f"--model_dir={tmp_path}/run", f"--step={tmp_path}/mine.py:Mine", "--noexport"]
    run += ["--model=dense", "--train_steps=500", "--checkpoint_every=10", "--replicas=2"]
    run += ["--notensorboard"]
    line = last_line(zygote.run(*run, exit_code=3))
    assert line.startswith("the loss is nan at step 14; last good checkpoint: ")
    assert "step-0000000010; try" in line and "; train from there with --eager (eager=" in line
    line = last_line(zygote.run(*run, "--eager", exit_code=3))
    found = f"the loss is nan at step 14; Sqrt made NaN in {tmp_path}/mine.py, line 6, in loss;"
    assert line.startswith(found)


def test_an_attempt_that_was_given_up_is_no_part_of_the_next(zygote, tmp_path):
    """Neither one without a checkpoint, nor what came after the checkpoint that is left."""
    options = ["--optimizer=sgd", "--schedule=constant", "--warmup=0", "--model=dense"]
    options += ["--train_steps=20", "--evaluate_every=10", "--noexport", "--log_every=1"]
    options += ["--notensorboard"]
    run = [TRAIN, f"--model_dir={tmp_path}", *options]
    line = last_line(zygote.run(*run, "--learning_rate=1e30", exit_code=3))
    assert re.match(r"the loss is (nan|inf) at step \d; last good checkpoint: none; ", line)
    assert "try a lower learning rate" in line and "; train again with --eager" in line
    assert intact_steps(tmp_path) == []
    assert records(tmp_path)
    given_up = (tmp_path / "metrics.jsonl").read_text()
    (tmp_path / "mlflow.json").write_text('{"where": "uri", "id": "1"}')
    zygote.run(*run, "--learning_rate=0.1")
    assert (tmp_path / "metrics.jsonl.old").read_text() == given_up
    assert not (tmp_path / "mlflow.json").exists()
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    steps = [record["step"] for record in records(tmp_path)]
    assert sorted(set(steps)) == list(range(1, 21)) and len(steps) == 22
    shutil.rmtree(tmp_path / "checkpoints" / "step-0000000020")
    zygote.run(*run, "--learning_rate=0.1")
    after = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert after[: steps.index(11)] == lines[: steps.index(11)]
    assert len(after) == 22 and after[-1] != lines[-1]
    old = (tmp_path / "metrics.jsonl.old").read_text()
    assert old.splitlines() == [*given_up.splitlines(), *lines[steps.index(11) :]]


@pytest.fixture(scope="module")
def short(zygote, tmp_path_factory):
    """A run that has ended well."""
    model_dir = tmp_path_factory.mktemp("short")
    zygote.run(TRAIN, f"--model_dir={model_dir}", *SHORT)
    return model_dir


def test_damaged_checkpoints(zygote, tmp_path, short):
    options, run = [*SHORT, "--noexport"], tmp_path / "run"
    shutil.copytree(short, run)
    for step, left in ((20, [10]), (10, [])):
        data = next((run / "checkpoints" / f"step-{step:010}").glob("*.data-*"))
        content = bytearray(data.read_bytes())
        content[len(content) // 2] ^= 1
        data.write_bytes(content)
        if left:
            copy = tmp_path / "copy"
            shutil.copytree(run, copy)
            command = zygote.run(TRAIN, f"--model_dir={copy}", *options)
            assert "warning: Skipping the damaged checkpoint" in command.stderr
            assert "resuming at step 10 " in command.stderr
    command = zygote.run(TRAIN, f"--model_dir={run}", *options, exit_code=4)
    assert "No intact checkpoint in" in last_line(command)


def test_a_disk_that_fills_up(zygote, tmp_path):
    """The dense model and Adam are 1.2 MiB: two checkpoints fit, the third does not."""
    options = ["--model=dense", "--train_steps=200", "--checkpoint_every=50", "--keep=9"]
    options += ["--evaluate_every=200", "--schedule=constant", "--log_every=10", "--noexport"]
    options += ["--notensorboard"]
    disk, copy, run = tmp_path / "disk", tmp_path / "copy", tmp_path / "disk" / "run"
    disk.mkdir()
    script = f"""
        mount -t tmpfs -o size=3500k tmpfs {disk} && "$@"
        code=$?
        cp -r {run} {copy}
        exit $code
    """
    wrap = ["unshare", "--mount", "sh", "-c", script, "sh"]
    if subprocess.run([*wrap[:4], "mount -t tmpfs tmpfs /mnt"], capture_output=True).returncode:
        pytest.skip("may not mount a tmpfs")
    ended = subprocess.run(
        [*wrap, sys.executable, "-m", TRAIN, f"--model_dir={run}", *options],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.returncode == 4, ended.stderr
    assert "Traceback" not in ended.stderr
    assert re.search(
        rf"No space left to save the checkpoint of step 150 \(\d.\d MiB\): {run}/checkpoints; free "
        r"\d.\d MiB or choose another --model_dir$",
        ended.stderr.strip(),
    ), ended.stderr
    assert intact_steps(copy) == [50, 100]
    command = zygote.run(TRAIN, f"--model_dir={copy}", *options)
    assert "resuming at step 100 " in command.stderr and "arning" not in command.stderr
    assert intact_steps(copy)[-1] == 200


def test_a_limit_on_the_size_of_files(zygote, tmp_path):
    options = ["--model=dense", "--train_steps=20", "--noexport"]
    command = zygote.run(
        TRAIN, f"--model_dir={tmp_path}", *options, file_limit=1 << 20, exit_code=4
    )
    assert "No space left to save the checkpoint of step 20" in last_line(command)
    assert intact_steps(tmp_path) == []


def test_an_export_that_does_not_fit(zygote, short):
    kept = (short / "export" / "model.keras").read_bytes()
    command = zygote.run(TRAIN, f"--model_dir={short}", *SHORT, file_limit=100_000, exit_code=4)
    assert f"cannot export to {short}/export: " in last_line(command)
    assert (short / "export" / "model.keras").read_bytes() == kept
    assert not list(short.glob("tmp-*"))


def test_output_on_a_full_disk_does_not_end_the_training(zygote, tmp_path):
    (tmp_path / "output").mkdir()
    (tmp_path / "output" / "stdout").symlink_to("/dev/full")
    options = ["--model=dense", "--train_steps=20", "--log_every=5", "--noexport"]
    command = zygote.run(
        TRAIN, f"--model_dir={tmp_path}/run", *options, directory=tmp_path / "output"
    )
    assert last_line(command).startswith("some of the standard output was lost: No space left")
    assert intact_steps(tmp_path / "run") == [20]
    assert list(evaluations(tmp_path / "run")) == [20]
