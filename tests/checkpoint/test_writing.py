"""The thread that writes, and which checkpoints are kept."""

from __future__ import annotations

import gc
import math
import os
import shutil
import threading

import numpy as np
import pytest
from saved import Gate, restore_fresh, state_of, steps_in

from ctl.base import durable
from ctl.checkpoint import CheckpointManager, bundle
from ctl.errors import CheckpointError, UsageError


@pytest.fixture(autouse=True)
def nothing_waits_for_the_disk(monkeypatch):
    """That takes most of the time; `test_processes.py` tests it."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def test_one_write_in_flight(tmp_path, monkeypatch):
    gate = Gate(monkeypatch)
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, state_of(1))
        assert gate.reached.wait(60)
        manager.check()  # Does not wait.
        assert steps_in(tmp_path) == []
        threading.Timer(0.2, gate.opened.set).start()
        manager.save(2, state_of(2))
        assert 1 in steps_in(tmp_path)


@pytest.mark.parametrize("surfaces_at", ["save", "check", "wait", "close", "restore", "annotate"])
def test_a_failure_of_the_thread_fails_the_run_once(tmp_path, surfaces_at):
    manager = CheckpointManager(tmp_path / "run")
    durable.discard(tmp_path / "run")
    manager.save(1, state_of(1))
    manager._executor.submit(lambda: None).result()  # The write has ended.
    arguments = {"save": (2, state_of(2)), "restore": (state_of(0),), "annotate": (1, {})}
    with pytest.raises(CheckpointError, match="step 1: .*run: the directory is gone"):
        getattr(manager, surfaces_at)(*arguments.get(surfaces_at, ()))
    manager.close()


def test_a_directory_that_is_deleted_while_saving_is_not_made_again(tmp_path, monkeypatch):
    """``rm -r`` leaves a directory in which a file was made meanwhile: a run without its flags."""
    written = bundle.write

    def deleted_before(prefix, tensors):
        shutil.rmtree(tmp_path / "run")
        os.makedirs(os.path.dirname(prefix))
        written(prefix, tensors)

    monkeypatch.setattr(bundle, "write", deleted_before)
    with CheckpointManager(tmp_path / "run") as manager:
        with pytest.raises(CheckpointError, match="step 1: .*run: the directory was deleted mean"):
            manager.save(1, state_of(1), wait=True)
        assert manager.all() == []


def test_the_context_manager_does_not_hide_the_first_exception(tmp_path):
    with pytest.raises(KeyError), CheckpointManager(tmp_path / "run") as manager:
        durable.discard(tmp_path / "run")
        manager.save(1, state_of(1))
        raise KeyError
    with pytest.raises(CheckpointError), CheckpointManager(tmp_path / "run") as manager:
        durable.discard(tmp_path / "run")
        manager.save(1, state_of(1))


def test_synchronous(tmp_path):
    with CheckpointManager(tmp_path, asynchronous=False) as manager:
        manager.save(1, state_of(1))
        assert steps_in(tmp_path) == [1]


def test_closed_or_read_only_managers_do_not_write(tmp_path):
    manager = CheckpointManager(tmp_path)
    manager.close()
    for closed in (manager, CheckpointManager(tmp_path, read_only=True)):
        with pytest.raises(CheckpointError, match="closed or read-only"):
            closed.save(1, state_of(1))


def test_a_later_manager_of_the_process_takes_over(tmp_path, monkeypatch, warnings_of):
    """A cell of a notebook is run again."""
    gate = Gate(monkeypatch)
    earlier = CheckpointManager(tmp_path)
    earlier.save(1, state_of(1))
    assert gate.reached.wait(60)
    gate.opened.set()
    link = tmp_path.parent / f"{tmp_path.name}-link"
    link.symlink_to(tmp_path)
    later = CheckpointManager(link)
    assert any("a new CheckpointManager takes it over" in line for line in warnings_of())
    assert later.latest().step == 1  # the write of the earlier one has ended
    with pytest.raises(CheckpointError, match="a later CheckpointManager has taken it over"):
        earlier.save(2, state_of(2))
    with pytest.raises(UsageError, match=r"call restore\(\)"):
        later.save(2, state_of(2))
    later.restore(state_of(0))
    later.save(2, state_of(2), wait=True)
    earlier.close()
    later.save(3, state_of(3), wait=True)  # still has the lock
    later.close()
    warnings = len(warnings_of())
    CheckpointManager(tmp_path).close()
    assert len(warnings_of()) == warnings


def test_deleting_a_manager_frees_its_directory(tmp_path):
    manager = CheckpointManager(tmp_path)
    manager.save(1, state_of(1), wait=True)
    with pytest.raises(CheckpointError, match=f"written by process {os.getpid()} on "):
        durable.Lock(tmp_path / ".lock")
    if not (child := os.fork()):  # it ends without an effect on the lock of its parent
        manager._lock.__del__()
        os._exit(0)
    os.waitpid(child, 0)
    with pytest.raises(CheckpointError, match="is being written by process"):
        durable.Lock(tmp_path / ".lock")
    del manager
    gc.collect()
    durable.Lock(tmp_path / ".lock").release()


def test_a_lock_is_quiet_at_the_end_of_python(tmp_path, monkeypatch):
    """A script that keeps its loop in a global ended with a traceback."""
    lock = durable.Lock(tmp_path / ".lock")
    with monkeypatch.context() as patch:
        patch.setattr(durable, "os", None)  # as modules are then
        lock.__del__()
    lock.release()


# Retention.


HOUR = 3600.0


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ({"keep": 1}, [7]),
        ({"keep": 3}, [5, 6, 7]),
        ({"keep": 99}, [0, 1, 2, 3, 4, 5, 6, 7]),
        # Accuracies below: 1 and 4 are equal, and the earlier is the better; 3 is NaN; 6 has none.
        ({"keep": 1, "keep_best": 1}, [1, 7]),
        ({"keep": 1, "keep_best": 2}, [1, 4, 7]),
        ({"keep": 1, "keep_best": 9}, [0, 1, 2, 4, 5, 7]),
        ({"keep": 1, "keep_best": 1, "best_mode": "min"}, [2, 7]),
        ({"keep": 1, "keep_best": 1, "best_metric": "loss"}, [7]),
        ({"keep": 1, "keep_every_hours": 1.0}, [0, 2, 5, 7]),
        ({"keep": 1, "keep_every_hours": 1.5}, [0, 4, 7]),
        ({"keep": 2, "keep_best": 1, "keep_every_hours": 2.0}, [0, 1, 5, 6, 7]),
    ],
)
@pytest.mark.parametrize("late", [False, True], ids=["at_save", "annotated"])
def test_retention(tmp_path, rule, expected, late):
    hours = [0.0, 0.5, 1.0, 1.25, 1.75, 2.0, 2.9, 3.5]
    accuracy = [0.3, 0.9, 0.1, math.nan, 0.9, 0.2, None, 0.4]
    now = iter([h * HOUR for h in hours])
    with CheckpointManager(tmp_path, clock=lambda: next(now), **rule) as manager:
        for step, value in enumerate(accuracy):
            metrics = {} if value is None else {"accuracy": value}
            manager.save(step, state_of(step), None if late else metrics)
            if late:
                manager.annotate(step, metrics)
    assert steps_in(tmp_path) == expected
    directories = [f"step-{step:010d}" for step in expected]
    assert sorted(os.listdir(tmp_path)) == [".lock", "latest.json", *directories]
    assert restore_fresh(tmp_path)[1] == [7, 7, 7]


def test_metrics_that_come_late(tmp_path, monkeypatch):
    gate = Gate(monkeypatch)
    with CheckpointManager(tmp_path, keep=2, keep_best=1) as manager:
        manager.save(1, state_of(1), {"loss": 3.0})
        manager.annotate(1, {"accuracy": np.float32(0.5)})  # While it is being written.
        assert manager.latest() is None
        threading.Timer(0.1, gate.opened.set).start()
        manager.wait()
        [saved] = manager.all()
        assert dict(saved.metrics) == {"loss": 3.0, "accuracy": 0.5}
        assert saved.evaluated == ["accuracy"]
        manager.annotate(1, {"aaa": 1.0})
        manager.wait()
        assert manager.latest().evaluated == ["accuracy", "aaa"]
        for step in (2, 3, 4):
            manager.save(step, state_of(step))
            manager.annotate(step, {"accuracy": step / 100})
        manager.wait()
        assert [s.step for s in manager.all()] == [1, 3, 4]
        assert (manager.best().step, manager.latest().step) == (1, 4)
        manager.annotate(4, {"accuracy": 0.6})
        manager.wait()
        assert [s.step for s in manager.all()] == [3, 4]
        with pytest.raises(CheckpointError, match="No checkpoint of step 2"):
            manager.annotate(2, {"accuracy": 1.0})
            manager.wait()
    assert restore_fresh(tmp_path, "best")[1] == [4, 4, 4]


@pytest.mark.parametrize(
    "arguments",
    [
        *({"keep": 0}, {"keep_best": -1}, {"keep_every_hours": 0}, {"best_mode": "most"}),
        {"keep_best": 1, "best_metric": "bleu"},
    ],
)
def test_arguments_out_of_range(tmp_path, arguments):
    with pytest.raises(UsageError):
        CheckpointManager(tmp_path, **arguments)


def test_the_best_loss_is_the_lowest(tmp_path):
    with CheckpointManager(tmp_path, keep=1, keep_best=1, best_metric="loss") as manager:
        for step, loss in enumerate([2.0, 1.0, 3.0], start=1):
            manager.save(step, state_of(step), metrics={"loss": loss})
    assert [saved.step for saved in manager.all()] == [2, 3]


def test_a_url_is_refused():
    with pytest.raises(UsageError, match="gs://"):
        CheckpointManager("gs://bucket/run")
