"""The binary: one job from an empty directory, its traces, what it does again, under other devices
and with each option. Interruptions are in test_train_interrupted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from runs import config, latest, records

import ctl
from ctl.base.names import OPTIMIZERS
from ctl.checkpoint import CheckpointManager
from ctl.jobs.build import make_optimizer

pytestmark = pytest.mark.slow  # starts processes

TRAIN = "ctl.train"


def events(directory) -> dict[str, dict[int, float]]:
    """The scalars in TensorBoard's files: by name, by step."""
    scalars: dict[str, dict[int, float]] = {}
    for file in sorted(Path(directory).glob("events.*")):
        for event in tf.compat.v1.train.summary_iterator(str(file)):
            for value in event.summary.value:
                by_step = scalars.setdefault(value.tag, {})
                by_step[event.step] = float(tf.make_ndarray(value.tensor))
    return scalars


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """The job of the README in a process of its own: output and directory."""
    model_dir = tmp_path_factory.mktemp("job") / "a run's directory"
    ended = subprocess.run(
        [sys.executable, "-m", TRAIN, f"--model_dir={model_dir}", "--epochs=2"],
        cwd=model_dir.parent,
        env={**os.environ, "PYTHONPATH": str(Path(ctl.__file__).parents[1])},
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert ended.returncode == 0, ended.stderr
    return ended, model_dir


def test_job_log(job):
    _, model_dir = job
    train, evaluated = records(model_dir, "train"), records(model_dir, "eval")
    assert len(train) + len(evaluated) == len(records(model_dir))
    assert [r["step"] for r in train] == [100, 157, 200, 300, 313]  # 2 * 10,000 / 64 = 312.5
    assert [r["step"] for r in evaluated] == [157, 313]
    common = {"schema", "phase", "step", "epoch", "time", "loss", "accuracy"}
    speed = {"steps_per_second", "examples_per_second"}
    for record in train:
        assert set(record) == common | speed | {"until", "learning_rate", "goodput"}
        assert record["until"] == 313
        assert record["examples_per_second"] == pytest.approx(64 * record["steps_per_second"])
        cosine = 1e-3 * 0.5 * (1 + np.cos(np.pi * (record["step"] - 1) / 313))
        assert record["learning_rate"] == pytest.approx(cosine, abs=1e-9)
    for record in evaluated:
        assert set(record) == common
    for record in records(model_dir):
        assert record["schema"] == 1
        assert record["epoch"] == pytest.approx(record["step"] * 64 / 10_000)
        assert 0 < record["loss"] < 1.5
    assert evaluated[-1]["accuracy"] >= 0.80


def test_job_output(job):
    ended, model_dir = job
    assert "Traceback" not in ended.stderr and "arning" not in ended.stderr
    assert "compiling the first step" in ended.stderr
    done = next(line for line in ended.stdout.splitlines() if line.startswith("done: "))
    last = records(model_dir, "eval")[-1]
    assert done.startswith("done: 313 steps, 313 of them now in ")
    summary = ended.stdout[ended.stdout.index(done) :]
    scores = f"test         loss {last['loss']:.4f}  accuracy {last['accuracy']:.4f}"
    assert summary.splitlines()[1] == f"  {scores}"
    for path in (
        *("checkpoints", "metrics.jsonl", "export/model.keras", "export/saved_model"),
        *("train", "eval", "config.json"),
    ):
        assert (model_dir / path).exists()
        assert path in ("train", "eval", "config.json") or f" {model_dir / path}\n" in summary
    # The directory has a blank and an apostrophe: what is to be typed is quoted.
    command = next(line for line in summary.splitlines() if "ctl.evaluate" in line)
    words = subprocess.run(
        ["sh", "-c", f'set -- {command}; echo "$4"'], capture_output=True, text=True
    )
    assert words.stdout == f"--model_dir={model_dir}\n"


def test_job_tensorboard(job):
    _, model_dir = job
    for phase in ("train", "eval"):
        scalars = events(model_dir / phase)
        for record in records(model_dir, phase):
            for name in set(record) - {"schema", "phase", "step", "until", "epoch", "time"}:
                assert scalars[name][record["step"]] == pytest.approx(record[name], rel=1e-6)


def test_job_config(job):
    _, model_dir = job
    found = config(model_dir)
    assert found["schema"] == 1
    assert found["command"][1:] == [f"--model_dir={model_dir}", "--epochs=2"]
    assert found["flags"]["epochs"] == 2.0
    assert found["flags"]["schedule"] == "cosine"
    assert found["flags"]["global_batch_size"] == 64
    assert found["versions"]["tensorflow"] == tf.__version__


def test_job_exports_the_model_of_the_checkpoint(job):
    _, model_dir = job
    model = keras.models.load_model(model_dir / "export" / "model.keras")
    saved = latest(model_dir)
    assert (saved.step, saved.metrics["accuracy"]) == (
        313,
        records(model_dir, "eval")[-1]["accuracy"],
    )
    reader = tf.train.load_checkpoint(saved.prefix)
    for i, variable in enumerate(model.variables):
        value = reader.get_tensor(f"model/{i}/.ATTRIBUTES/VARIABLE_VALUE")
        np.testing.assert_array_equal(variable.numpy(), value, err_msg=variable.path)
    images = np.random.default_rng(0).random((5, 28, 28, 1), np.float32)
    loaded = tf.saved_model.load(str(model_dir / "export" / "saved_model"))
    served = loaded.serve(images)
    np.testing.assert_allclose(served, model(images), rtol=1e-5, atol=1e-5)
    assert served.shape == (5, 10)


def test_the_same_command_again_does_nothing(zygote, job):
    _, model_dir = job
    log, saved = (model_dir / "metrics.jsonl").read_text(), latest(model_dir)
    command = zygote.run(TRAIN, f"--model_dir={model_dir}", "--epochs=2")
    assert f"resuming at step 313 from {saved.path}\n" in command.stderr
    assert "arning" not in command.stderr
    assert command.stdout.startswith("\ndone: 313 steps, 0 of them now in ")
    assert (model_dir / "metrics.jsonl").read_text() == log
    assert latest(model_dir) == saved


# Devices.

FEW = ["--model=dense", "--train_steps=12", "--log_every=3", "--evaluate_every=6", "--noexport"]
FEW += ["--schedule=constant", "--learning_rate=0.001"]  # a cosine would depend on the length


@pytest.fixture(scope="module")
def one_replica(zygote, tmp_path_factory):
    model_dir = tmp_path_factory.mktemp("one")
    zygote.run(TRAIN, f"--model_dir={model_dir}", *FEW, "--strategy=one_device")
    return model_dir


def same_numbers(ours, theirs, tolerance=1e-3) -> None:
    ours, theirs = records(ours), records(theirs)
    assert len(ours) == len(theirs) == 6
    for a, b in zip(ours, theirs, strict=True):
        assert (a["phase"], a["step"]) == (b["phase"], b["step"])
        assert a["loss"] == pytest.approx(b["loss"], abs=tolerance)
        assert a["accuracy"] == pytest.approx(b["accuracy"], abs=tolerance)


@pytest.mark.parametrize(
    "devices",
    [
        ["--replicas=2", "--strategy=central_storage", "--steps_per_loop=1"],
        ["--replicas=2", "--cross_device_ops=ring", "--bytes_per_pack=100000"],
    ],
    ids=" ".join,
)
def test_replicas_train_alike(zygote, tmp_path, one_replica, devices):
    """tests/distributed/test_strategy.py has the others."""
    command = zygote.run(TRAIN, f"--model_dir={tmp_path}", *FEW, *devices)
    same_numbers(tmp_path, one_replica)
    assert "arning" not in command.stderr


def test_a_checkpoint_of_two_replicas_resumes_on_one(zygote, tmp_path, one_replica):
    few = [*FEW, "--bytes_per_pack=auto", "--jit_compile=auto"]
    command = zygote.run(TRAIN, f"--model_dir={tmp_path}", *few, "--train_steps=6", "--replicas=2")
    for name, first in (("bytes_per_pack", "0"), ("jit_compile", "False")):
        assert f"{name}: {first}, the training is too short for a trial" in command.stderr
    splits = {"train_split": "train", "eval_split": "test"}
    assert config(tmp_path)["chosen"] == {"bytes_per_pack": 0, "jit_compile": False} | splits
    command = zygote.run(TRAIN, f"--model_dir={tmp_path}", *few)
    assert "resuming at step 6 " in command.stderr
    assert "bytes_per_pack: 0, chosen when the run began" in command.stderr
    assert "jit_compile: False, chosen when the run began" in command.stderr
    same_numbers(tmp_path, one_replica)
    # Fewer steps than there are: nothing is trained, and the summary says where the run is.
    command = zygote.run(TRAIN, f"--model_dir={tmp_path}", *few, "--train_steps=6")
    assert command.stdout.startswith("\ndone: 12 steps, 0 of them now")


# Options.


def run_few(zygote, model_dir, *options, steps=30, model="dense", **kwargs):
    return zygote.run(
        *(TRAIN, f"--model_dir={model_dir}", f"--model={model}", f"--train_steps={steps}"),
        *("--log_every=10", "--noexport", "--notensorboard", *options),
        **kwargs,
    )


@pytest.mark.parametrize(
    "options",
    [
        [
            *("--precision=mixed_bfloat16", "--replicas=2", "--check_replicas_every=5"),
            *("--schedule=piecewise", "--rates=1e-3,1e-4", "--boundaries=15"),
        ],
        [
            *("--precision=mixed_float16", "--clip_norm=1"),
            *("--schedule=polynomial", "--end_learning_rate=1e-4", "--power=2", "--warmup=5"),
        ],
        [
            *("--jit_compile=on", "--accumulate_steps=4", "--label_smoothing=0.1"),
            *("--weight_decay=1e-3", "--noasync_checkpoints"),
            *("--schedule=exponential", "--decay_rate=0.5", "--decay_steps=10"),
        ],
        [
            *("--resident_limit_mib=0", "--shuffle_block=4", "--optimizer=adamw"),
            *("--schedule=inverse_sqrt", "--warmup=0.01ep", "--lr_scaling=linear"),
            *("--image_shape=14,14,1", "--train_split=train[:50%]", "--on_nan=skip"),
        ],
        [
            *("--dataset=synthetic", "--image_shape=8,8,3", "--num_classes=3"),
            *("--num_examples=500", "--profile_steps=20:25"),
        ],
    ],
    ids=" ".join,
)
def test_options(zygote, tmp_path, options):
    command = run_few(zygote, tmp_path, *options)
    assert "arning" not in command.stderr
    train = records(tmp_path, "train")
    assert [r["step"] for r in train] == [10, 20, 30]
    assert all(r["epoch"] for r in records(tmp_path))
    if "--dataset=synthetic" not in options:  # noise
        assert train[-1]["loss"] < train[0]["loss"]
    assert not (tmp_path / "export").exists()
    if "--profile_steps=20:25" in options:
        assert "profile of steps 20 to 24: " in command.stderr
        assert f" -m tensorboard.main --logdir={tmp_path}/train, tab Profile\n" in command.stderr
        assert list(tmp_path.glob("train/plugins/profile/*/*.xplane.pb"))
    else:
        assert not list(tmp_path.glob("*/events.*"))
    rates = [r["learning_rate"] for r in train]
    if "--schedule=exponential" in options:
        assert rates == pytest.approx([1e-3 * 0.5 ** ((step - 1) / 10) for step in (10, 20, 30)])
    if "--schedule=piecewise" in options:
        assert rates == pytest.approx([1e-3, 1e-4, 1e-4])


def test_the_best_checkpoint_is_not_selected_on_the_test_data(zygote, tmp_path):
    options = ["--keep_best=1", "--keep=1", "--evaluate_every=10"]
    # The rate jumps, so the best is not the last.
    options += ["--schedule=piecewise", "--rates=1e-3,1", "--boundaries=20"]
    command = run_few(zygote, tmp_path, *options)
    assert "train[:90%], 9000 examples" in command.stderr
    assert "best checkpoints are those with the best accuracy on train[90%:]" in command.stderr
    splits = {"train_split": "train[:90%]", "eval_split": "train[90%:]"}
    assert config(tmp_path)["chosen"] == {"jit_compile": True} | splits
    evaluated, (tested,) = records(tmp_path, "eval"), records(tmp_path, "test")
    best = max(evaluated, key=lambda record: record["accuracy"])
    assert tested["step"] == 30 and best["step"] < 30
    kept = CheckpointManager(tmp_path / "checkpoints", read_only=True)
    assert [saved.step for saved in kept.all()] == [best["step"], 30]
    for split, record in (("train[90%:]", evaluated[-1]), ("test", tested)):
        scores = f"loss {record['loss']:.4f}  accuracy {record['accuracy']:.4f}"
        assert f"\n  {split:<11}  {scores}\n" in command.stdout
    said = f"\n  best         step {best['step']}; evaluated and exported is step 30\n"
    assert said in command.stdout
    command = run_few(zygote, tmp_path, *options, "--restore_best_weights")  # the run is resumed
    assert f"evaluated and exported is step {best['step']}\n" in command.stdout
    assert "done: 30 steps, 0 of them now" in command.stdout
    tested = records(tmp_path, "test")[-1]
    command = zygote.run("ctl.evaluate", f"--model_dir={tmp_path}", "--json", "--checkpoint=best")
    assert json.loads(command.stdout)["loss"] == pytest.approx(tested["loss"], rel=1e-6)
    assert tested["step"] == best["step"]
    assert [saved.step for saved in kept.all()] == [best["step"], 30]
    # Without the flag, the run would train on the examples that selected its best checkpoint.
    command = run_few(zygote, tmp_path, *options, "--keep_best=0", exit_code=2)
    assert "was evaluated on train[90%:], not on test: use the same --keep_best" in command.stderr


def test_a_part_of_train_leaves_the_choice_of_the_other_part(zygote, tmp_path):
    part = ["--keep_best=1", "--train_split=train[:500]"]
    command = run_few(zygote, tmp_path, *part, exit_code=2)
    assert command.stderr.splitlines()[-1].endswith("name this part with --eval_split")
    run_few(zygote, tmp_path, *part, "--eval_split=train[500:600]", steps=10)
    assert len(records(tmp_path, "eval")) == 2 and not records(tmp_path, "test")


def test_a_run_that_stops_early(zygote, tmp_path):
    """Nothing improves with a learning rate of 0: the third evaluation ends the training."""
    options = ["--schedule=plateau", "--learning_rate=0", "--plateau_patience=1"]
    options += ["--evaluate_every=5", "--early_stop=loss:2"]
    command = run_few(zygote, tmp_path, *options)
    assert "EarlyStopping ended the training at step 15" in command.stderr
    assert "learning rate: 0 from step 10 on" in command.stderr
    assert "done: 15 steps, 15 of them now" in command.stdout
    assert latest(tmp_path).stopped
    again = run_few(zygote, tmp_path, *options)
    assert "an action or a callback ended the training" in " ".join(again.stderr.split())
    assert "done: 15 steps, 0 of them now" in again.stdout
    other = [*options[:-1], "--early_stop=loss:3"]
    refused = run_few(zygote, tmp_path, *other, exit_code=2)
    assert "--early_stop was" in refused.stderr


def test_a_model_of_ones_own(zygote, tmp_path):
    (tmp_path / "mine.py").write_text(
        "import keras\n"
        "def make(image_shape, num_classes):\n"
        "    layers = [keras.Input(image_shape), keras.layers.Flatten(),\n"
        "              keras.layers.Dense(num_classes, name='mine')]\n"
        "    return keras.Sequential(layers)\n"
        "def wrong(image_shape, num_classes):\n"
        "    return make(image_shape, num_classes + 1)\n"
    )
    run, path = tmp_path / "run", [tmp_path]
    # An attempt that fails before the first step leaves nothing that the next must agree with.
    command = run_few(zygote, run, model="mine:wrong", path=path, exit_code=2)
    assert command.stderr.splitlines()[-1] == (
        "the model 'mine:wrong' must return logits of shape (batch, 10), got (None, 11)"
    )
    run_few(zygote, run, model="mine:make", path=path)
    names = [spec["name"] for spec in latest(run).variables["model"]]
    assert names and all("mine" in name for name in names)
    command = run_few(zygote, run, model="mine:wrong", path=path, exit_code=2)
    assert '--model was "mine:make", is "mine:wrong"' in command.stderr


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_each_name_makes_its_optimizer(name):
    class_name = OPTIMIZERS[name]
    assert class_name.lower() == name or (class_name, name) in (
        ("SGD", "momentum"),
        ("SGD", "nesterov"),
    )
    optimizer = make_optimizer(name, 0.8, None)
    assert type(optimizer) is getattr(keras.optimizers, class_name)
    for decay in (0.01, 0.0):
        decayed = make_optimizer(name, 0.8, decay)
        assert {decayed.weight_decay, getattr(decayed, "adam_weight_decay", decay)} == {decay}
    if class_name == "SGD":
        assert (optimizer.momentum, optimizer.nesterov) == (
            0.0 if name == "sgd" else 0.8,
            name == "nesterov",
        )
    assert optimizer.weight_decay == (0.004 if name in ("adamw", "muon") else None)
