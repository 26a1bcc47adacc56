"""The binary goes on with other flags, and starts from the weights of another run."""

from __future__ import annotations

import json

import numpy as np
import pytest
from runs import config, records

from ctl.checkpoint import Reader

pytestmark = pytest.mark.slow  # starts processes

TRAIN = "ctl.train"
FEW = ["--model=dense", "--evaluate_every=6", "--noexport", "--notensorboard"]

# What the resumed run must equal: a program that changes the same at the same step, and never ends.
PROGRAM = """
import sys

import keras
import tensorflow as tf

import ctl


def run():
    keras.utils.set_random_seed(0)
    model = ctl.models.make_model("dense", (28, 28, 1), 10)
    step = ctl.TrainStep(model, keras.optimizers.Adam())
    short, long = (ctl.schedule.Cosine(1e-3, steps) for steps in (6, 12))
    with ctl.CheckpointManager(sys.argv[1]) as checkpoints:
        loop = ctl.Loop(
            step,
            ctl.data.load(global_batch_size=64),
            schedule=lambda number: tf.where(number < 6, short(number), long(number)),
            checkpoints=checkpoints,
        )
        loop.train(6, total=12)
        step.clip_norm = 0.1
        loop.train(12)
        loop.save()
"""


@pytest.fixture(scope="module")
def extended(zygote, tmp_path_factory):
    """A run of 6 steps, and then of 6 more with another clipping."""
    model_dir = tmp_path_factory.mktemp("extended")
    flags = [f"--model_dir={model_dir}", *FEW, "--jit_compile=off"]  # as that of the program
    zygote.run(TRAIN, *flags, "--train_steps=6")
    more = ["--train_steps=12", "--extend", "--change=clip_norm", "--clip_norm=0.1"]
    return model_dir, zygote.run(TRAIN, *flags, *more)


def test_a_longer_run_evaluates_at_the_ends_of_epochs(zygote, tmp_path):
    """Of 15.625 steps: not again a step or two after the end of the shorter one."""
    flags = [f"--model_dir={tmp_path}", "--model=dense", "--noexport", "--train_split=train[:10%]"]
    flags += ["--notensorboard"]
    zygote.run(TRAIN, *flags, "--epochs=4")
    zygote.run(TRAIN, *flags, "--epochs=6", "--extend")
    assert [r["step"] for r in records(tmp_path, "eval")] == [16, 32, 47, 63, 79, 94]


def test_a_changed_run_equals_a_program_that_changes_the_same(zygote, tmp_path, extended):
    model_dir, command = extended
    (tmp_path / "program.py").write_text(PROGRAM)
    zygote.run("program", str(tmp_path / "run"), path=[tmp_path])
    ours, theirs = Reader(model_dir), Reader(tmp_path / "run")
    assert ours.saved.step == theirs.saved.step == 12
    assert list(ours) == list(theirs) and "model/logits/kernel" in ours
    for name in ours:
        np.testing.assert_array_equal(ours[name], theirs[name], err_msg=name)
    assert "from step 6 on, --clip_norm is 0.1 (was not set)\n" in command.stderr
    assert "learning rate of the next step: 0.0005\n" in command.stderr
    found = config(model_dir)
    [change] = found["history"]
    assert change["step"] == 6
    assert change["changed"] == {"train_steps": [6, 12], "clip_norm": [None, 0.1]}
    assert not {"extend", "change"} & found["flags"].keys()


def test_a_run_starts_from_the_weights_of_another(zygote, tmp_path, extended):
    """The average of the trained layer moves away from it; the frozen one has no slots."""
    source = Reader(extended[0])
    start = [f"--init_from={extended[0]}", "--freeze=den*", "--reinit=logits", "--ema_decay=0.5"]
    start += ["--seed=1"]
    run = [TRAIN, f"--model_dir={tmp_path}", *FEW, *start]
    command = zygote.run(*run, "--train_steps=3", "--schedule=constant")
    assert f"2 weights are those of {extended[0]}; logits start anew\n" in command.stderr
    assert "frozen: 2 of 4 weights\n" in command.stderr
    zygote.run(*run, "--train_steps=6", "--schedule=constant")  # a resume does not read it again
    after = Reader(tmp_path)
    for name in ("model/dense/kernel", "model/dense/bias"):
        np.testing.assert_array_equal(after[name], source[name])
    assert np.abs(after["model/logits/kernel"] - source["model/logits/kernel"]).max() > 0.1
    slots = {name for name in after if name.startswith("optimizer/") and "iter" not in name}
    assert slots and not [name for name in slots if "dense" in name]
    assert [name for name in after if name.startswith("ema/")] == [
        "ema/logits/kernel",
        "ema/logits/bias",
    ]
    result = zygote.run("ctl.evaluate", f"--model_dir={tmp_path}", "--json")
    last = records(tmp_path)[-1]
    assert json.loads(result.stdout)["loss"] == pytest.approx(last["loss"], rel=1e-6)


def test_the_flags_of_a_run_are_given_back_as_a_file(zygote, extended):
    model_dir, _ = extended
    text = (model_dir / "flags.txt").read_text()
    assert "\n--train_steps=12\n" in text and "\n# --optimizer=adam\n" in text
    before = config(model_dir)
    again = zygote.run(TRAIN, f"--flagfile={model_dir / 'flags.txt'}")
    assert "done: 12 steps, 0 of them now" in again.stdout
    after = config(model_dir)
    assert after["flags"] == before["flags"] and after["history"] == before["history"]
    assert (model_dir / "flags.txt").read_text() == text


def test_a_dry_run_says_what_would_be_done_and_writes_nothing(zygote, extended):
    model_dir, _ = extended
    files = {path: path.stat().st_mtime_ns for path in model_dir.rglob("*")}
    more = ["--train_steps=20", "--extend", "--clip_norm=0.1", "--replicas=2", "--dry_run"]
    text = zygote.run(TRAIN, f"--model_dir={model_dir}", *FEW, *more).stdout
    assert max(map(len, text.splitlines()[2:])) <= 80
    text = text.replace("\n" + 14 * " ", " ")
    assert {path: path.stat().st_mtime_ns for path in model_dir.rglob("*")} == files
    for line in (
        f"dry run: resumes at step 12 from {model_dir}/checkpoints/step-0000000012\n",
        "  data        fashion_mnist_mini/1.0.0 train, 10000 examples,",
        "  model       dense: 101,770 parameters; 4 of 4 weights train\n",
        "  all-reduce  2 replicas, each step: pack0 float32 0.4 MiB (AddN)\n",
        "weights 0.4 MiB, gradients 0.4 MiB, optimizer and averages 0.8 MiB; this process",
        "  length      8 steps of 20 are left\n",
        "an epoch of 156.25 steps about ",
    ):
        assert line in text
