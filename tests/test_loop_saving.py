"""A loop that was given a directory saves by itself in `train`: at the end, once in a while, and at
Ctrl-C."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from helpers import examples, make_loop
from paths import SUPPORT
from worker_jobs import run_job

from ctl.base.actions import Every
from ctl.checkpoint import CheckpointManager
from ctl.data.global_batches import GlobalBatches
from ctl.errors import UsageError
from ctl.loop import Loop

UNTIL = 12
OFTEN = 1e-9  # seconds: whenever it may


def saving(directory, *, manager=None, **options) -> tuple[Loop, list[int]]:
    """A loop, and the steps at which it saves."""
    checkpoints = CheckpointManager(directory, **manager) if manager else str(directory)
    loop = make_loop(checkpoints=checkpoints, seed=0, steps_per_loop=2, **options)
    save, saved = loop.save, []

    def noted(*args, **kwargs):
        saved.append(loop.global_step)
        save(*args, **kwargs)

    loop.save = noted
    return loop, saved


def state_of(loop) -> list[np.ndarray]:
    return [v.numpy() for group in loop.step.state().values() for v in group]


def on_disk(directory) -> list[int]:
    return [one.step for one in CheckpointManager(directory, read_only=True).all()]


def test_train_saves_at_its_end_and_restore_goes_on_with_equal_bits(tmp_path):
    straight, _ = saving(tmp_path / "straight")
    straight.train(UNTIL)
    loop, saved = saving(tmp_path / "run")
    loop.train(5)
    assert saved == [5] and on_disk(tmp_path / "run") == [5]  # when `train` returns
    loop.train(5)  # no step is run
    assert saved == [5]
    loop.checkpoints.close()
    with pytest.raises(UsageError, match="holds a run up to step 5: call restore"):
        saving(tmp_path / "run")[0].train(UNTIL)
    again, saved = saving(tmp_path / "run")
    assert again.restore().step == 5
    again.train(UNTIL)
    assert saved == [UNTIL]
    np.testing.assert_equal(state_of(again), state_of(straight))


def test_once_in_a_while_and_at_the_end_of_the_whole_training(tmp_path):
    loop, saved = saving(tmp_path, manager={"save_every_seconds": OFTEN})
    loop.train(7)
    # The first call is traced, which says nothing about the time of a step.
    assert saved == [4, 6, 7]
    loop.train(9, total=UNTIL)
    assert saved == [4, 6, 7, 9]
    loop.train(UNTIL)
    assert saved == [4, 6, 7, 9, 11, 12]
    rarely, saved = saving(tmp_path / "rarely")
    rarely.train(9, total=UNTIL)  # a part of the training
    assert saved == []
    rarely._pace.elapsed += 61  # of steps
    rarely.train(11, total=UNTIL)
    rarely.train(UNTIL)
    assert saved == [11, UNTIL]


def test_what_was_saved_by_hand_is_not_saved_again(tmp_path):
    loop, saved = saving(tmp_path)
    loop.actions.append(Every(lambda status: loop.save(), steps=6))
    loop.train(UNTIL)
    assert saved == [6, UNTIL] and on_disk(tmp_path) == [6, UNTIL]  # it waits for it


def test_a_save_by_hand_after_train_counts(tmp_path):
    """Its metrics, and values that were changed meanwhile."""
    loop, _ = saving(tmp_path)
    loop.train(4)
    written = (tmp_path / "step-0000000004" / "variables.index").stat().st_ino
    loop.save({"accuracy": 0.5}, wait=True)
    [saved] = loop.checkpoints.all()
    assert saved.metrics == {"accuracy": 0.5}
    assert (saved.path / "variables.index").stat().st_ino == written  # as it was
    kernel = loop.step.model.weights[0]
    kernel.assign(0 * kernel)
    loop.save(wait=True)
    loop.checkpoints.close()
    again, _ = saving(tmp_path)
    again.restore()
    assert again.global_step == 4 and not again.step.model.get_weights()[0].any()


def test_who_saves_by_hand_sees_no_change(tmp_path):
    loop, saved = saving(tmp_path / "manager", manager={"keep": 2})
    loop.train(UNTIL)
    assert saved == []
    loop, saved = saving(tmp_path / "directory", evaluate=40)
    loop._pace.elapsed = 1e9
    loop.train_and_evaluate(UNTIL, evaluate_every=5)
    assert saved == [5, 10, 12]
    loop.train(UNTIL + 2)  # and then it is `train` that says
    assert saved == [5, 10, 12, 14]


def test_a_loop_whose_directory_another_has_taken_over_trains_on(tmp_path, caplog):
    loop, saved = saving(tmp_path)
    loop.train(2)
    again, saved_too = saving(tmp_path)
    again.restore()
    loop.train(4)
    again.train(6)
    assert (saved, saved_too) == ([2], [6]) and on_disk(tmp_path) == [2, 6]
    assert caplog.text.count("train() saves nothing: the manager of the checkpoints is closed") == 1


def test_a_training_that_an_action_has_ended_has_ended_after_a_resume(tmp_path):
    loop, saved = saving(tmp_path)
    loop.actions.append(lambda status: status.stop() if status.step == 6 else None)
    loop.train(UNTIL)
    assert saved == [6]
    loop.checkpoints.close()
    again, _ = saving(tmp_path)
    assert again.restore().stopped and again.stopped


def test_data_that_end_are_an_end(tmp_path):
    data = tf.data.Dataset.from_tensor_slices(examples(40)).batch(10)
    loop, saved = saving(tmp_path, data=GlobalBatches(data, training=False))
    loop.train(UNTIL)
    assert saved == [4]


def test_ctrl_c_saves_a_whole_step(tmp_path):
    loop, saved = saving(tmp_path)
    loop.actions.append(Every(lambda status: signal.raise_signal(signal.SIGINT), steps=6))
    with pytest.raises(KeyboardInterrupt, match="step 6 is saved: after restore.., train goes"):
        loop.train(UNTIL)
    assert on_disk(tmp_path) == [6]
    by_hand, saved = saving(tmp_path / "by_hand", manager={"keep": 2})
    by_hand.actions.append(Every(lambda status: signal.raise_signal(signal.SIGINT), steps=6))
    with pytest.raises(KeyboardInterrupt, match="^$"):  # as Python does
        by_hand.train(UNTIL)
    assert saved == []


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_script_that_is_told_to_stop_ends_with_42(zygote, tmp_path, number):
    """Without `exit_codes`, which the commands have."""
    path = Path(__file__).parent, SUPPORT
    process = zygote.start(Path(__file__).stem, str(tmp_path / "run"), path=path)
    process.until("training\n", "stdout")
    process.signal(number)
    assert process.wait() == 42, process.stderr
    [step] = on_disk(tmp_path / "run")
    [line] = [one for one in process.stderr.splitlines() if "saved step" in one]
    assert line.startswith(f"{number.name}: saved step {step} in ")
    assert "Traceback" not in process.stderr


@pytest.mark.slow
def test_several_workers_save_at_the_same_steps(job, tmp_path):
    run_job(job, tmp_path, program=SUPPORT / "saving_worker.py")
    one, other = (json.loads((tmp_path / f"saved-{i}.json").read_text()) for i in range(2))
    assert one == other and one[-1] == 60 and len(one) > 1
    assert CheckpointManager(tmp_path / "checkpoints", read_only=True).latest().step == 60


def run() -> None:
    """The script of a user's that a test tells to stop."""
    signal.alarm(120)  # whatever becomes of the test
    loop = make_loop(checkpoints=sys.argv[1], steps_per_loop=2)
    loop.actions.append(Every(lambda status: print("training", flush=True), steps=10))
    with loop.stop_on_signals():
        loop.train(10**9)
