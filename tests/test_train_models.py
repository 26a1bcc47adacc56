"""The commands with a step of several models: training, export, evaluation, a start from others."""

from __future__ import annotations

import json

import pytest
from runs import evaluations
from zygote import last_line

from ctl.checkpoint import Reader

TRAIN, EVALUATE = "ctl.train", "ctl.evaluate"

MINE = """
import keras
import numpy as np
import tensorflow as tf

import ctl


def losses_of(step, batch):
    noise, real = batch
    g, d = step.model["g"], step.model["d"]
    on_fake, on_real = (d(x, training=step.training)[:, 0] for x in (g(noise), real))
    return {"g": tf.nn.softplus(-on_fake), "d": tf.nn.softplus(on_fake) + tf.nn.softplus(-on_real)}


class Evaluation(ctl.EvalStep):
    def loss(self, batch):
        return losses_of(self, batch)


class Mine(ctl.TrainStep):
    eval_step = Evaluation

    def __init__(self, model, optimizer, *args, **options):
        super().__init__(model, {"g": optimizer, "d": "sgd"}, *args, **options)

    def loss(self, batch):
        return losses_of(self, batch)


class Unlike(Mine):
    eval_step = ctl.EvalStep


def models():
    d = [keras.Input([4]), keras.layers.Dense(5, "tanh"), keras.layers.Dense(1)]
    return {
        "g": keras.Sequential([keras.Input([3]), keras.layers.Dense(4, name="made")], name="makes"),
        "d": keras.Sequential(d, name="judges"),
    }


def load(global_batch_size):
    random = np.random.default_rng(0)
    parts = (random.normal(size=(200, n)).astype("float32") for n in (3, 4))
    pairs = tf.data.Dataset.from_tensor_slices(tuple(parts))
    return pairs.batch(global_batch_size, drop_remainder=True).repeat(), pairs.batch(30)
"""

OWN = ["--step=mine:Mine", "--dataset=mine:load", "--model=mine:models"]
FLAGS = ["--schedule=constant", "--learning_rate=0.05", "--notensorboard", "--global_batch_size=20"]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    directory = tmp_path_factory.mktemp("own")
    (directory / "mine.py").write_text(MINE)
    return [directory]


@pytest.fixture(scope="module")
def run(zygote, path, tmp_path_factory):
    model_dir = tmp_path_factory.mktemp("run")
    options = ["--train_steps=6", "--ema_decay=0.5", "--replicas=2"]
    command = zygote.run(TRAIN, f"--model_dir={model_dir}", *OWN, *FLAGS, *options, path=path)
    assert f"exported     {model_dir}/export/g/model.keras" in command.stdout
    return model_dir


def test_checkpoint_and_export_are_evaluated_with_the_averages(zygote, path, run):
    wanted = evaluations(run)[6]["loss"]
    for flags in ([f"--model_dir={run}", *OWN], [f"--model={run}/export", *OWN[:2]]):
        command = zygote.run(EVALUATE, "--json", *flags, path=path)
        assert json.loads(command.stdout)["loss"] == pytest.approx(wanted, rel=1e-6)


def test_a_dry_run_and_the_plan_know_both(zygote, path, run, tmp_path):
    flags = [f"--model_dir={tmp_path}/new", *OWN, *FLAGS, "--train_steps=6", "--replicas=2"]
    assert "d_g: 47 parameters; 6 of 6 weights train" in zygote.run(
        TRAIN, *flags, "--dry_run", path=path
    ).stdout.replace("\n              ", " ")
    command = zygote.run("ctl.inspect.commands.plan", *flags[1:], path=path)
    assert "makes" in command.stdout and "judges" in command.stdout


def test_a_run_starts_from_others_by_name(zygote, path, run, tmp_path):
    flags = [*OWN, *FLAGS, "--noexport", "--train_steps=1", "--learning_rate=1e-9"]
    given = f"--init_from=g={run}/export/g/model.keras"
    command = zygote.run(TRAIN, f"--model_dir={tmp_path}/a", *flags, given, path=path)
    assert "2 weights are those of g=" in command.stderr + command.stdout
    found, wanted = Reader(tmp_path / "a"), Reader(run)
    assert found["model_g/makes/made/kernel"] == pytest.approx(
        wanted["ema_g/makes/made/kernel"], abs=1e-6
    )
    command = zygote.run(
        *(TRAIN, f"--model_dir={tmp_path}/b", *flags, f"--init_from={run}/export/g/model.keras"),
        path=path,
        exit_code=2,
    )
    assert "holds one model, and there are d, g: say which" in last_line(command)
    command = zygote.run(
        *(TRAIN, f"--model_dir={tmp_path}/b", *flags, "--init_from=g=/nowhere"),
        path=path,
        exit_code=2,
    )
    assert "--init_from=/nowhere: no such file" in last_line(command)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--step=mine:Unlike"], "EvalStep has the models d, g, and no loss() that says which"),
        (["--step=ctl.step:TrainStep"], "TrainStep has the models d, g, and no loss()"),
    ],
)
def test_mistakes_are_one_line(zygote, path, tmp_path, flags, message):
    command = [TRAIN, f"--model_dir={tmp_path}", *OWN, *FLAGS, "--train_steps=1", *flags]
    assert message in last_line(zygote.run(*command, path=path, exit_code=2))
