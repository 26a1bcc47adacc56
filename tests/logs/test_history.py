"""What a loop remembers of a training, and draws."""

from __future__ import annotations

import math
import sys
from xml.etree import ElementTree

import numpy as np
import pytest
from helpers import examples, make_loop
from records import Clock

from ctl.base.actions import Every, Log, Status
from ctl.errors import UsageError
from ctl.logs.history import History


class Records(list):
    def write(self, record):
        self.append(dict(record))

    def close(self):
        pass


def test_steps_scalars_and_evaluations(tmp_path):
    """A log reads the scalars every 4 steps; calls take 2."""
    records = Records()
    log = Log(records)
    loop = make_loop(
        evaluate=20,
        directory=tmp_path,
        steps_per_loop=2,
        actions=[Every(log, steps=4)],
        eval_actions=[log.evaluated],
    )
    with pytest.raises(UsageError, match=r"call train\(\) first"):
        loop.history.plot()
    assert loop.history._repr_svg_() is None
    results = loop.train_and_evaluate(8, evaluate_every=4)
    history = loop.history
    assert history.steps == [2, 4, 6, 8]
    assert history.evaluations.keys() == {4, 8} and history.evaluations[8] == results
    losses = np.reshape(history.scalars["loss"], [2, 2]).mean(1)
    train = [record for record in records if record["phase"] == "train"]
    np.testing.assert_allclose(losses, [record["loss"] for record in train], rtol=1e-6)
    accuracy = history.scalars["accuracy"]
    assert accuracy[1::2] == [record["accuracy"] for record in train]
    assert repr(history) == "<History of 8 steps and 2 evaluations>"

    picture = history.plot()
    ElementTree.fromstring(picture)
    assert picture._repr_svg_() == picture == history._repr_svg_()
    assert "<title>loss and accuracy over the steps</title>" in picture
    assert "steps_per_second" not in picture and "learning_rate" not in picture  # is constant
    assert "curve eval c0" in picture and "curve train c0" in picture

    with loop.checkpoints:
        loop.train(10)
        loop.restore()
        loop.evaluator = loop.evaluator.on(examples(8, seed=3))  # a test
        assert loop.evaluate() != results and history.evaluations[8] == results
    assert history.steps == [2, 4, 6, 8]
    again = make_loop(evaluate=20, directory=tmp_path)
    with again.checkpoints:
        again.restore()
    assert again.history.evaluations == {8: results} and not again.history.steps


def test_a_frame_of_pandas(monkeypatch):
    pandas = pytest.importorskip("pandas")
    loop = make_loop(evaluate=20, steps_per_loop=2)
    results = loop.train_and_evaluate(4, evaluate_every=4)
    frame = loop.history.to_pandas()
    assert isinstance(frame, pandas.DataFrame) and frame.index.name == "step"
    assert list(frame.index) == [2, 4]
    assert frame["eval loss"][4] == results["loss"] and math.isnan(frame["eval loss"][2])


def test_without_pandas_the_error_names_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(UsageError, match="needs pandas: pip install"):
        History(dict).to_pandas()


class Reads:
    """Scalars that are read, as a status and a window have them."""

    def __init__(self, step, clock, seconds=0.0):
        self.step, self.final, self.latest, self.count = step, False, {}, 0
        self._clock, self._seconds = clock, seconds

    def scalars(self):
        self._clock.now += self._seconds
        self.count += 1
        self.latest = {"accuracy": self.step / 10}
        return self.latest


def test_metrics_are_read_once_a_second_and_for_a_hundredth_of_the_time():
    clock, now = Clock(), Reads(0, Clock())
    history = History(lambda: now.latest, clock=clock)
    counts = []
    for step, seconds, seconds_of_a_read in [(1, 0, 0), (2, 0.5, 0), (3, 0.6, 0.5), (4, 40, 0)]:
        clock.now += seconds
        now = Reads(step, clock, seconds_of_a_read)
        history.add(2.0, 1.0)
        history(now)
        counts.append(now.count)
    assert counts == [1, 0, 1, 0]
    accuracy = history.scalars["accuracy"]
    assert (accuracy[0], accuracy[2]) == (0.1, 0.3) and math.isnan(accuracy[1])


def test_a_long_training_has_some_thousand_points_at_most():
    now = Reads(0, Clock())
    history = History(lambda: {}, reads=False)
    for step in range(1, 10_001):
        history.add(step, 1.0 + step % 2)
        now.step = step
        history(now)
    assert now.count == 0
    assert len(history.steps) < 2000 and history.steps[-1] == 10_000
    losses = np.array(history.scalars["loss"])
    np.testing.assert_array_less(np.diff(history.steps, prepend=0), 17)
    np.testing.assert_array_less(0, np.diff(losses))


def test_short_calls_are_drawn_as_a_part_of_the_next():
    """As the first two of a training, also after a resume, which run a batch each."""
    history = History(lambda: {"rate": float(len(history.steps))}, reads=False)
    for step, size, loss in ((1, 1, 9.0), (2, 1, 9.0), (40, 38, 1.0), (80, 40, 1.0)):
        history.add(loss, size)
        history(Status(step, 100, None, 0.1, False, dict, lambda: None))
    assert history.steps == [1, 2, 40, 80] and history.scalars["loss"] == [9.0, 9.0, 1.0, 1.0]
    drawn = history._drawn()
    assert [(point.step, point.total, point.scalars) for point in drawn] == [
        (40, 2 * 9.0 + 38, {"rate": 2.0}),
        (80, 40.0, {"rate": 3.0}),
    ]
    assert history.plot()
