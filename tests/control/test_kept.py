"""The state that a survivor saves is that between two calls, whatever a call has done since."""

from __future__ import annotations

import threading
import time

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import CLASSES, FEATURES, make_loop

from ctl.base.durable import Lock
from ctl.checkpoint import CheckpointManager
from ctl.distributed import replicas, workers
from ctl.distributed.cluster import elastic
from ctl.distributed.cluster.members import Cluster
from ctl.errors import CheckpointError, PeerError
from ctl.loop import Loop


def network() -> keras.Model:
    layers = [keras.layers.Dense(8), keras.layers.BatchNormalization(), keras.layers.Dropout(0.5)]
    return keras.Sequential([keras.Input([FEATURES]), *layers, keras.layers.Dense(CLASSES)])


def loop_of(directory, **options) -> Loop:
    """A loop that keeps its state, as in an elastic job."""
    loop = make_loop(model=network, seed=1, directory=directory, steps_per_loop=5, **options)
    loop._kept._keeps = True
    return loop


@pytest.fixture
def told(monkeypatch) -> list[bytes]:
    """What is told the launcher. This process takes itself for worker 0 of 2."""
    monkeypatch.setattr(workers, "cluster_of", lambda strategy: Cluster(("a:1", "b:2"), 0, ""))
    told: list[bytes] = []
    monkeypatch.setattr(elastic, "tell", told.append)
    return told


def go_on(loop: Loop, steps: int) -> None:
    """Makes steps of a call that will never end."""
    loop.begin(loop.global_step)
    report = loop._pace.worker_report(False, False)
    loop.steps.run(loop.feed, tf.constant(steps), report, loop.step.trace_key)


def lose_peer(loop: Loop) -> None:
    with pytest.raises(PeerError), loop.translate_failures("training"):
        raise PeerError("worker 0 was lost")


def values(directory, step: int) -> dict[str, np.ndarray]:
    reader = tf.train.load_checkpoint(str(directory / f"step-{step:010d}" / "variables"))
    names = [name for name in reader.get_variable_to_shape_map() if name[0] != "_"]
    return {name: reader.get_tensor(name) for name in names}


@pytest.mark.slow
def test_it_is_that_of_the_last_call_that_ended(tmp_path, told):
    """A call that breaks off has drawn masks, moved statistics and made updates since."""
    loop = loop_of(tmp_path / "broken")
    loop.train(10)
    go_on(loop, 2)
    assert loop.global_step == 12
    lose_peer(loop)
    assert told == [elastic.TRAINED]
    whole = loop_of(tmp_path / "whole")
    whole.train(10)
    whole.save(wait=True)
    ours, theirs = (values(tmp_path / name, 10) for name in ("broken", "whole"))
    assert ours.keys() == theirs.keys() and len(ours) > 10
    assert [name for name in ours if not np.array_equal(ours[name], theirs[name])] == []
    assert loop.checkpoints.latest().step == 10


def test_it_is_saved_though_the_store_does_not_answer(tmp_path, told, monkeypatch):
    """Whatever cuts this worker from the others may cut it from the store, too."""
    loop = loop_of(tmp_path)
    loop.train(5)

    def does_not_answer() -> None:
        loop.checkpoints.wait()
        raise CheckpointError("no answer")

    monkeypatch.setattr(loop.checkpoints, "flush", does_not_answer)
    with pytest.raises(CheckpointError):
        loop._finish_saving()
    assert loop.checkpoints.latest().step == 5
    monkeypatch.undo()


def test_the_seeds_are_those_of_the_first_replica(tmp_path, monkeypatch):
    """A later worker has others."""
    loop = loop_of(tmp_path)
    (seed,) = replicas.dropout_seeds(loop.step.tracked.layer)
    first = seed.numpy()
    seed.assign_add(replicas.seed_offset(1, seed.dtype))
    assert not np.array_equal(seed.numpy(), first)
    monkeypatch.setattr(workers, "cluster_of", lambda strategy: Cluster(("a:1", "b:2"), 1, ""))
    monkeypatch.setattr(type(loop.strategy), "num_replicas_in_sync", 2)
    assert np.array_equal(loop._kept._of_first(seed.value()).numpy(), first)


def test_what_changes_between_calls_is_kept(tmp_path, told):
    """An action at step 5 that has changed a weight has run, and does not run again."""

    def change(status) -> None:
        if status.step == 5:
            loop.step.model.layers[0].bias.assign(tf.fill([8], 7.0))
            learning = loop.step.optimizer.learning_rate
            loop.step.optimizer.learning_rate = learning / 2

    loop = loop_of(tmp_path, actions=[change])
    loop.train(5)
    go_on(loop, 1)
    lose_peer(loop)
    saved = values(tmp_path, 5)
    assert any(np.array_equal(value, np.full(8, 7.0)) for value in saved.values())


def test_nothing_is_kept_in_another_job(tmp_path, told):
    loop = make_loop(directory=tmp_path, steps_per_loop=5)
    loop.train(5)
    lose_peer(loop)
    assert told == [] and loop.checkpoints.latest() is None


def test_a_run_that_went_back_saves_nothing_of_what_it_left(tmp_path, told):
    loop = loop_of(tmp_path)
    loop.train(5)
    loop.save(wait=True)
    loop.train(10)
    loop.restore()
    lose_peer(loop)
    assert [saved.step for saved in loop.checkpoints.all()] == [5]


def test_a_checkpoint_of_that_step_stays(tmp_path, told):
    loop = loop_of(tmp_path)
    loop.train(5)
    loop.save({"accuracy": 0.5}, wait=True)
    lose_peer(loop)
    (saved,) = loop.checkpoints.all()
    assert saved.metrics == {"accuracy": 0.5}


@pytest.mark.slow
def test_the_next_waits_for_the_end_of_the_one_before(tmp_path, told, monkeypatch):
    """The manager of a worker after the first holds no lock. The first has saved step 3, which is
    of the history of this run although this worker has not restored it."""
    monkeypatch.setenv("TF_CONFIG", '{"task": {"type": "worker", "index": 1}}')
    loop = loop_of(tmp_path)
    monkeypatch.delenv("TF_CONFIG")
    with CheckpointManager(tmp_path, asynchronous=False) as first:
        other = make_loop(model=network, seed=1, checkpoints=first, steps_per_loop=3)
        other.train(3)
        other.save()
    held = Lock(tmp_path / ".lock")
    loop.train(5)
    thread = threading.Timer(1.0, held.release)
    thread.start()
    began = time.monotonic()
    lose_peer(loop)
    thread.join()
    assert time.monotonic() - began > 0.9
    assert [saved.step for saved in loop.checkpoints.all()] == [3, 5]


def test_what_cannot_be_saved_does_not_replace_the_error(tmp_path, told, monkeypatch):
    """The first has not ended in time; the exit code stays that of a lost worker."""
    monkeypatch.setattr("ctl.checkpoint.manager._SUCCESSION_SECONDS", 0.3)
    monkeypatch.setenv("TF_CONFIG", '{"task": {"type": "worker", "index": 1}}')
    loop = loop_of(tmp_path)
    loop.train(5)
    held = Lock(tmp_path / ".lock")
    lose_peer(loop)
    assert loop.checkpoints.latest() is None
    held.release()
