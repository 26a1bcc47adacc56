"""The command that evaluates: which checkpoint, under which strategy, while a run goes on."""

from __future__ import annotations

import json
import shutil

import keras
import numpy as np
import pytest
from runs import evaluations
from zygote import one_line

from ctl.checkpoint import CheckpointManager, Reader

TRAIN, EVALUATE = "ctl.train", "ctl.evaluate"


@pytest.fixture(scope="module")
def run(zygote, tmp_path_factory):
    """A run with averaged weights whose best checkpoint, by the loss, is not its latest."""
    model_dir = tmp_path_factory.mktemp("evaluated")
    options = ["--model=dense", "--ema_decay=0.9", "--best_metric=loss", "--keep=5", "--seed=3"]
    options += ["--train_split=train[:2000]", "--eval_split=test[:500]", "--global_batch_size=48"]
    options += ["--schedule=piecewise", "--rates=0.1,20", "--boundaries=40", "--optimizer=sgd"]
    options += ["--train_steps=60", "--evaluate_every=20", "--label_smoothing=0.1"]
    zygote.run(TRAIN, f"--model_dir={model_dir}", *options)
    return model_dir


def evaluate(zygote, *flags, **kwargs):
    """The objects that ``--json`` prints, and the command."""
    command = zygote.run(EVALUATE, "--json", *flags, **kwargs)
    return [json.loads(line) for line in command.stdout.splitlines()], command


def assert_equal(found, expected) -> None:
    assert found["loss"] == pytest.approx(expected["loss"], rel=1e-6)
    assert found["accuracy"] == expected["accuracy"]


@pytest.mark.parametrize(
    "flags",
    [
        [],
        ["--checkpoint=60", "--strategy=default"],
        ["--strategy=one_device"],
        # 500 examples are 33 batches of 15 and one of 5, whose second replica has less than the
        # first.
        ["--replicas=2", "--global_batch_size=15"],
        ["--replicas=3", "--resident_limit_mib=0"],
    ],
    ids=" ".join,
)
def test_the_latest_under_any_strategy(zygote, run, flags):
    (found,), command = evaluate(zygote, f"--model_dir={run}", *flags)
    assert (found.pop("step"), found.pop("path")) == (60, f"{run}/checkpoints/step-0000000060")
    assert set(found) == {"loss", "accuracy"}
    assert_equal(found, evaluations(run)[60])
    assert "arning" not in command.stderr


def test_the_best_and_a_step(zygote, run, tmp_path):
    """Best by the metric of the run: the rate jumps, so the loss is lowest before that."""
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    with CheckpointManager(copy / "checkpoints", keep=5) as manager:
        manager.annotate(60, {"accuracy": 1.0})  # best by what the run does not go by
    for checkpoint, step in (("best", 40), ("20", 20)):
        (found,), command = evaluate(zygote, f"--model_dir={copy}", f"--checkpoint={checkpoint}")
        assert found["step"] == step
        on_the_same = "the best checkpoint was selected on these data, test[:500]"
        assert (on_the_same in command.stderr) == (checkpoint == "best")
        assert_equal(found, evaluations(run)[step])
    command = zygote.run(EVALUATE, f"--model_dir={run}", "--checkpoint=30", exit_code=4)
    assert command.stderr.splitlines()[-1] == (
        f"No checkpoint of step 30 in {run}/checkpoints; choose one of 20, 40, 60"
    )
    command = zygote.run(EVALUATE, f"--model_dir={run}", "--model=convnet", exit_code=4)
    refused = command.stderr.splitlines()[-1]
    assert "step-0000000060 does not fit: " in refused
    assert refused.endswith("use the flags it was written with or choose another --model_dir")


@pytest.mark.parametrize("strategy", [["--strategy=default"], ["--replicas=2"]], ids=" ".join)
def test_the_exported_model_is_the_averaged_one(zygote, run, strategy):
    exported = run / "export" / "model.keras"
    data = ["--eval_split=test[:500]", "--global_batch_size=48"]
    (found,), _ = evaluate(zygote, f"--model={exported}", *data, *strategy)
    assert found.pop("path") == str(exported)
    reader, model = Reader(run), keras.models.load_model(exported)
    for variable in model.trainable_variables:
        averaged, trained = (reader[f"{key}/{variable.path}"] for key in ("ema", "model"))
        np.testing.assert_array_equal(variable.numpy(), averaged)
        assert np.abs(averaged - trained).max() > 1e-3
    assert_equal(found, evaluations(run)[60])


def test_text(zygote, run):
    command = zygote.run(EVALUATE, f"--model_dir={run}")
    record = evaluations(run)[60]
    assert command.stdout == (
        f"step 60 ({run}/checkpoints/step-0000000060):\n    loss {record['loss']:.6f}  accuracy "
        f"{record['accuracy']:.6f}\n"
    )


def test_files_that_are_no_model(zygote, tmp_path):
    def last_line(path, *flags):
        command = zygote.run(EVALUATE, f"--model={path}", *flags, exit_code=2)
        assert "Traceback" not in command.stderr and command.stdout == ""
        return command.stderr.splitlines()[-1]

    text = tmp_path / "text.keras"
    text.write_text("no model")
    assert last_line(text).startswith(f"--model={text} is not a Keras model that can be loaded: ")
    inputs = keras.Input([8, 8, 1])
    other = tmp_path / "other.keras"
    keras.Model(inputs, keras.layers.Dense(10)(keras.layers.Flatten()(inputs))).save(other)
    assert f"{other}' does not take images of shape (28, 28, 1)" in last_line(other)
    cut = tmp_path / "cut.keras"
    cut.write_bytes(other.read_bytes()[:-200])
    assert last_line(cut).startswith(f"--model={cut} is not a Keras model that can be loaded: ")
    # A model file may hold code; Keras refuses to run it.
    code = tmp_path / "code.keras"
    function = keras.layers.Lambda(lambda x: x)
    keras.Sequential([keras.Input([28, 28, 1]), function, keras.layers.Flatten()]).save(code)
    assert "ambda" in last_line(code)


def test_a_damaged_newest_checkpoint(zygote, run, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    next((copy / "checkpoints" / "step-0000000060").glob("*.data-*")).write_bytes(b"short")
    (found,), command = evaluate(zygote, f"--model_dir={copy}")
    assert found["step"] == 40
    assert_equal(found, evaluations(run)[40])
    assert command.stderr.count("warning: Skipping the damaged checkpoint") == 1
    # --watch evaluates it once, and not again and again for the damaged one.
    results, command = evaluate(zygote, f"--model_dir={copy}", "--watch", "--watch_timeout=2")
    assert [r["step"] for r in results] == [40]
    assert command.stderr.count("warning: Skipping") <= 2
    assert command.stderr.splitlines()[-1] == "no new checkpoint in 2 s"
    shutil.rmtree(copy / "checkpoints")
    command = zygote.run(EVALUATE, f"--model_dir={copy}", exit_code=4)
    assert command.stderr.splitlines()[-1] == f"{copy}/checkpoints holds no checkpoint"


def test_watch_a_run_from_before_its_start(zygote, tmp_path):
    """The evaluator is there first, and sees what the run sees."""
    model_dir = tmp_path / "run"
    watch = zygote.start(
        *(EVALUATE, f"--model_dir={model_dir}", "--json", "--watch", "--watch_timeout=30"),
        "--replicas=2",
    )
    watch.until("waiting for a run of ctl.train")
    options = ["--model=dense", "--train_steps=300", "--evaluate_every=100", "--keep=10"]
    zygote.run(TRAIN, f"--model_dir={model_dir}", *options, "--noexport")
    watch.until('"step": 300', "stdout", timeout=120)
    assert not zygote.ended(watch)
    found = [json.loads(line) for line in watch.stdout.splitlines()]
    steps = [record["step"] for record in found]
    assert steps == sorted(set(steps)) and set(steps) <= {100, 200, 300}
    for record in found:
        assert_equal(record, evaluations(model_dir)[record["step"]])
    assert "arning" not in watch.stderr
    watch.signal(2)
    assert watch.wait() == 130
    assert watch.stderr.splitlines()[-1] == "interrupted"


@pytest.mark.parametrize(
    ("stored", "given"),
    [
        ({"dataset": "mnist"}, ["--data_dir=/data"]),
        ({"dataset": "synthetic"}, ["--num_examples=9"]),
        ({"dataset": "mnist", "num_examples": 9}, ["--eval_split=test"]),
        ({"dataset": "fashion_mnist_mini", "data_dir": "/data"}, []),
    ],
    ids=str,
)
def test_what_has_an_effect_on_the_evaluation_of_a_run(
    zygote_without_tensorflow, tmp_path, stored, given
):
    """It depends on the data of the run. What an earlier version stored without an effect does no
    harm. The last flag never has an effect, which is said last."""
    config = {"schema": 1, "flags": {"best_metric": "loss", **stored}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    run = [EVALUATE, f"--model_dir={tmp_path}", *given, "--shuffle_block=4"]
    line = one_line(zygote_without_tensorflow.run(*run, exit_code=2))
    assert line == "--shuffle_block has no effect on an evaluation: leave it out"
