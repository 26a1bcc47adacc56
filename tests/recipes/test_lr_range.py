"""The range test finds where the loss falls fastest, and stops where it explodes."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree

import keras
import numpy as np
import pytest
from helpers import BATCH

from ctl.base.actions import Every
from ctl.data import InMemory
from ctl.loop import Loop
from ctl.recipes.lr_range import Range, draw
from ctl.schedule import Exponential
from ctl.step import TrainStep


def test_a_loss_that_explodes_ends_it():
    """Least squares in one weight: gradient descent explodes above the rate 2 / curvature = 1."""
    labels = np.random.default_rng(0).normal(1.0, 0.5, 32 * BATCH).astype("float32")
    data = InMemory((np.ones([labels.size, 1], "float32"), labels), global_batch_size=BATCH)
    seen = Range()
    weight = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
    step = TrainStep(
        keras.Sequential([keras.Input([1]), weight]),
        keras.optimizers.SGD(),
        lambda labels, outputs: (outputs - labels)[:, 0] ** 2,
    )
    loop = Loop(
        step,
        data,
        schedule=Exponential(1e-3, 1e4, 100),
        actions=[Every(seen, steps=1)],
        steps_per_loop=1,
    )
    loop.train(100)
    rates, losses = zip(*seen.points, strict=True)
    assert loop.stopped and 1.0 < rates[-1] < 10.0
    assert 1e-2 < seen.steepest() < 1.0
    assert losses[0] > 1.0 and min(losses) < 0.5

    picture = ElementTree.fromstring(draw(seen.points, seen.steepest()))
    (curve,) = [part for part in picture.iter() if part.get("class") == "curve"]
    assert len(re.findall("[ML]", curve.get("d"))) == len(seen.points)


@pytest.mark.slow  # starts a process
def test_the_command(zygote, tmp_path):
    plot = tmp_path / "range.svg"
    arguments = ["--model=dense", "--range_steps=40", "--replicas=2", f"--plot={plot}"]
    command = zygote.run("ctl.recipes.lr_range", *arguments)
    (rate,) = re.findall(r"steepest descent at --learning_rate=(.*)", command.stdout)
    assert 1e-5 < float(rate) < 1.0
    assert f"plot: {plot}\n" in command.stderr and "</svg>" in plot.read_text()
    wrong = zygote.run("ctl.recipes.lr_range", "--lowest=2", "--highest=1", exit_code=2)
    assert "--lowest=2 must be below --highest=1" in wrong.stderr
    wrong = zygote.run("ctl.recipes.lr_range", "--schedule=cosine", exit_code=2)
    assert "--schedule is set by the range test: leave it out" in wrong.stderr
