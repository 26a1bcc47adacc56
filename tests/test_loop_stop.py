"""An action ends the training: what is run then, what is saved, what a resume does."""

from __future__ import annotations

import functools
import re

import numpy as np
import pytest
import tensorflow as tf
from helpers import make_loop
from worker_jobs import finished, run_job

from ctl.base.actions import STOP, Every
from ctl.checkpoint import CheckpointManager
from ctl.distributed import workers
from ctl.errors import UsageError
from ctl.schedule.patience import EarlyStopping


def stopping(at):
    """An action that ends the training at a step."""
    return Every(lambda status: status.step == at and status.stop(), steps=at)


def test_an_action_cannot_restore(tmp_path):
    loop = make_loop(directory=tmp_path)
    loop.train(2)
    loop.save(wait=True)
    loop.actions.append(lambda status: loop.restore())
    with pytest.raises(
        UsageError, match=r"^an action cannot call restore\(\): end the training with"
    ):
        loop.train(4)
    assert loop.restore().step == 2
    loop.checkpoints.close()


def test_an_action_ends_the_training_with_a_last_wake():
    wakes, log = [], []
    loop = make_loop(
        actions=[
            lambda status: wakes.append((status.step, status.until, status.final)),
            Every(lambda status: log.append(status.step), steps=100),
            stopping(at=5),
        ],
        steps_per_loop=3,
    )
    scalars = loop.train(200)
    assert (loop.global_step, loop.stopped) == (5, True)
    assert wakes == [(3, 200, False), (5, 200, False), (5, 5, True)]
    assert log == [5]
    assert scalars["loss"] > 0


def test_the_scalars_of_the_last_window_are_returned_also_if_an_action_has_reset_them():
    """As at the end of a training: the log line of the last step starts a new window."""
    rows = []

    def log(status):
        rows.append(status.scalars())
        status.reset()

    loop = make_loop(actions=[Every(log, steps=5), stopping(at=5)])
    assert loop.train(200) == rows[0]
    assert len(rows) == 1


def test_no_step_is_run_after_the_end_unless_the_user_says_so(caplog):
    loop = make_loop(actions=[stopping(at=5)])
    loop.train(200)
    assert loop.train(200) == {}
    assert loop.global_step == 5
    who = r"a lambda \(test_loop_stop\.py, line \d+\)"
    said = rf"no step is run: {who} ended the training at step 5; to go on, set loop"
    assert re.search(said, caplog.text)
    loop.stopped = False
    loop.train(8)
    assert loop.global_step == 8


class Enough:
    def __call__(self, status):
        status.stop()

    def after(self, step, results):
        return STOP


def enough(status):
    status.stop()


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"actions": [Enough()]}, "Enough"),
        ({"actions": [Every(functools.partial(enough), steps=2)]}, "enough"),
        ({"actions": [lambda status: None, Every(Every(Enough(), steps=1), steps=1)]}, "Enough"),
        ({"eval_actions": [lambda step, results: None, Enough().after]}, "Enough.after"),
        ({"eval_actions": [EarlyStopping("loss", patience=1, min_delta=9.0)]}, "EarlyStopping"),
    ],
)
def test_who_has_ended_the_training_is_named(capsys, caplog, options, name):
    """To who looks at the bar, and by the next call."""
    loop = make_loop(evaluate=20, steps_per_loop=2, **options)
    loop.train_and_evaluate(200, evaluate_every=2, progress=True)
    shown = capsys.readouterr().out
    assert f"{name} ended the training at step {loop.global_step}\n" in shown
    loop.train(200)
    assert f"no step is run: {name} ended the training at step" in caplog.text


def test_nothing_is_left_to_train_and_evaluate(caplog):
    """As when a cell of a notebook is run again."""
    loop = make_loop(evaluate=20)
    results = loop.train_and_evaluate(4, evaluate_every=4)
    assert "no step is run" not in caplog.text
    assert loop.train_and_evaluate(4, evaluate_every=4) == results
    assert caplog.text.count("no step is run: the loop is at step 4, not before 4") == 1


@pytest.mark.parametrize(
    ("first", "stops", "until", "said"),
    [
        (4, False, 4, ""),  # a script that is run again
        (4, False, 2, "no step is run: the loop is at step 4, not before 2"),
        (8, True, 8, "no step is run: an action or a callback ended the training at step 2; to go"),
    ],
)
def test_nothing_is_left_after_a_restore(tmp_path, caplog, first, stops, until, said):
    actions = [stopping(at=2)] if stops else []
    loop = make_loop(evaluate=20, checkpoints=tmp_path, actions=actions)
    results = loop.train_and_evaluate(first, evaluate_every=4)
    loop.checkpoints.close()
    again = make_loop(evaluate=20, checkpoints=tmp_path)
    again.restore()
    assert again.train_and_evaluate(until, evaluate_every=4) == results
    assert caplog.text.count("no step is run") == bool(said) and said in caplog.text


def test_a_run_that_is_ended_evaluates_and_saves_there(tmp_path):
    rows = []
    loop = make_loop(
        actions=[stopping(at=5)],
        eval_actions=[lambda step, results: rows.append((step, results))],
        evaluate=20,
        directory=tmp_path,
    )
    results = loop.train_and_evaluate(200, evaluate_every=100)
    assert rows == [(5, results)]
    saved = loop.checkpoints.latest()
    assert (saved.step, saved.stopped, saved.metrics) == (5, True, results)
    loop.checkpoints.close()


@pytest.mark.slow
@pytest.mark.parametrize("by", ["action", "evaluation action"])
def test_a_resume_does_not_train_on(tmp_path, by):
    def options():
        if by == "action":
            return {"actions": [stopping(at=4)]}
        return {"eval_actions": [lambda step, results: STOP if step == 4 else None]}

    loop = make_loop(evaluate=20, directory=tmp_path, **options())
    results = loop.train_and_evaluate(200, evaluate_every=2)
    assert loop.global_step == 4
    loop.checkpoints.close()
    resumed = make_loop(evaluate=20, directory=tmp_path)
    resumed.restore()
    assert resumed.stopped
    assert resumed.train_and_evaluate(200, evaluate_every=2) == results
    assert resumed.global_step == 4
    resumed.stopped = False
    resumed.train_and_evaluate(6, evaluate_every=2)
    assert resumed.global_step == 6
    assert not resumed.checkpoints.latest().stopped
    resumed.checkpoints.close()


def test_a_checkpoint_of_before_says_that_its_training_was_not_ended(tmp_path):
    """Its manifest has no such entry."""
    loop = make_loop(directory=tmp_path)
    loop.train(1)
    loop.save(wait=True)
    manifest = loop.checkpoints.latest().path / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"stopped"', '"unknown"'))
    assert loop.restore().stopped is False
    loop.checkpoints.close()


def test_an_evaluation_action_ends_the_training_on_all_workers(monkeypatch):
    """Each is asked after each evaluation; here, another one than this says yes."""
    asked = []
    loop = make_loop(evaluate=20)
    monkeypatch.setattr(workers, "any_of", lambda strategy, mine: asked.append(mine) or True)
    loop.train_and_evaluate(200, evaluate_every=2)
    assert (asked, loop.global_step, loop.stopped) == ([False], 2, True)


def test_workers_learn_from_the_next_call_that_one_of_them_has_asked(monkeypatch):
    """None may end before the others know: its next all-reduce would wait for ever."""
    wakes, reports = [], []
    loop = make_loop(
        actions=[
            lambda status: wakes.append((status.step, status.final)),
            lambda status: status.step == 3 and status.stop(),
        ],
        steps_per_loop=3,
    )
    loop._several_workers = True
    monkeypatch.setattr("ctl.loop.agree", lambda *_: None)
    call = loop.steps.call

    def noted(feed, steps, report, key):
        reports.append(report.numpy()[:2].tolist())
        return call(feed, steps, report, key)

    loop.steps.call = noted
    loop.train(200)
    assert reports == [[0, 0], [0, 1]]
    assert wakes == [(3, False), (6, True)]


def test_one_worker_may_ask(tmp_path, job):
    run_job(job, tmp_path, "ends=3", "loop=2", "until=40")
    first, second = finished(tmp_path, 2)
    np.testing.assert_array_equal(first["arr_0"], second["arr_0"])
    with CheckpointManager(tmp_path / "checkpoints", read_only=True) as checkpoints:
        saved = checkpoints.latest()
    # Calls end at 1, as the first one with collectives does, and at 3: asked there, between two.
    assert (saved.step, saved.stopped) == (4, True)


def test_any_of_one_worker_is_its_own_answer():
    strategy = tf.distribute.get_strategy()
    assert workers.any_of(strategy, True)
    assert not workers.any_of(strategy, False)
