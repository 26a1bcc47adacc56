"""Several workers, in real processes on loopback: equal to one device, also after a resume.

`test_multi_worker_limits.py` has those that wait for one that is lost."""

from __future__ import annotations

import functools
import re
import shutil
import signal
import socket
from collections import Counter
from pathlib import Path

import keras
import numpy as np
import pytest
from helpers import BATCH, CLASSES, FEATURES, batches_of_files, examples, largest_difference
from worker_jobs import codes, finished, last_line, run_job, said, weights

from ctl import launch
from ctl.data import InMemory, Streaming
from ctl.data.order import Shuffle
from ctl.loop import Evaluator, Loop
from ctl.phases.base_step import EvalStep
from ctl.step import TrainStep

pytestmark = pytest.mark.slow  # starts processes


@functools.cache
def one_device(mirrored, synchronized: bool = False, data=None):
    """The same training on one replica."""
    strategy = mirrored(1)
    keras.utils.set_random_seed(0)
    with strategy.scope():
        layers = [
            keras.layers.Input([FEATURES]),
            keras.layers.Dense(8, activation="tanh"),
            *([keras.layers.BatchNormalization()] if synchronized else []),
            keras.layers.Dense(CLASSES),
        ]
        model = keras.Sequential(layers)
        metrics = [keras.metrics.SparseCategoricalAccuracy("accuracy")]
        step = TrainStep(model, keras.optimizers.AdamW(0.01), metrics=metrics, clip_norm=0.3)
        metric = keras.metrics.SparseCategoricalAccuracy("accuracy")
        evaluation = EvalStep(model, metrics=[metric])
    data = data or InMemory(examples(), global_batch_size=BATCH * 3)
    test = InMemory(examples(101, seed=1), global_batch_size=BATCH, training=False)
    loop = Loop(
        step, data, strategy=strategy, evaluator=Evaluator(evaluation, test, strategy=strategy)
    )
    results = loop.train_and_evaluate(20, evaluate_every=10)
    epochs = [loop.history.epochs[name] for name in ("loss", "accuracy", "val_loss")]
    return model.get_weights(), results, epochs


def assert_equal(out: Path, workers: int, reference) -> None:
    """The workers have the weights and the results of ``reference``, see `one_device`."""
    trained, results, _ = reference
    for saved in finished(out, workers):
        assert largest_difference(weights(saved), trained) <= 1e-6
        np.testing.assert_allclose(saved["results"], [results["loss"], results["accuracy"]], 1e-6)


@pytest.fixture(scope="module")
def reference(mirrored):
    return one_device(mirrored)


@pytest.mark.sample
def test_equals_one_device(job, tmp_path, reference):
    """AdamW and clipping; 101 test examples in batches of 16; initial weights come from the chief,
    although every worker has a seed of its own. An action begins a window every 5 steps."""
    run_job(job, tmp_path, "seeds=1", "epochs=1", "compiled=1")
    assert_equal(tmp_path, 2, reference)
    for saved in finished(tmp_path, 2):
        np.testing.assert_allclose(saved["epochs"], reference[2], 1e-5)
        # TensorFlow's own time limit would be a thread for every step, which outlives it; some are
        # left of how the strategy began.
        assert (saved["threads"] == "collective_ops").sum() < 10 < len(saved["threads"])


def test_files_and_a_strategy_of_ones_own_equal_one_device(job, tmp_path, mirrored):
    """With one file for each worker, the global batches would be others. All is made inside of the
    scope of the strategy, the loop too."""
    data = batches_of_files(tmp_path, BATCH * 3)
    run_job(job, tmp_path, "files=1", "own=1")
    assert_equal(tmp_path, 2, one_device(mirrored, data=data))


def test_streams_are_read_in_parts_and_resumed_by_others_at_ipv6_addresses(job, tmp_path, mirrored):
    """In mid-epoch, by 3 workers instead of 1: each reads its own examples, and no others. They
    hear the beats of each other; without IPv6, at IPv4 addresses."""
    for workers, start, until in ((1, 0, 8), (3, 8, 20)):
        addresses = launch.cluster(workers)["worker"]
        if socket.has_dualstack_ipv6():
            addresses = [f"[::1]:{address.rpartition(':')[2]}" for address in addresses]
        options = "stream=1", f"until={until}"
        run_job(job, tmp_path, *options, workers=workers, addresses=addresses)
        for worker, saved in enumerate(finished(tmp_path, workers)):
            rows = Shuffle(320, 0)(np.arange(start * BATCH * 3, (until + 60) * BATCH * 3))
            rows = rows.reshape(-1, workers, BATCH * 3 // workers)[:, worker]
            needed, ahead = (
                Counter(part.ravel().tolist()) for part in (rows[: until - start], rows)
            )
            assert needed <= Counter(saved["rows"].tolist()) <= ahead
    assert "cannot use the UDP port" not in said(tmp_path, 0)
    assert "resumed at 8" in said(tmp_path, 2)
    data = Streaming(examples(), global_batch_size=BATCH * 3)
    assert_equal(tmp_path, 3, one_device(mirrored, data=data))


def test_workers_that_shuffle_differently_are_refused(job, tmp_path):
    batches_of_files(tmp_path, 1)
    run_job(job, tmp_path, "shuffle=1", "seeds=1", code=2)
    for worker in range(2):
        said_last = last_line(tmp_path, worker)
        assert 'the workers do not agree: data: shuffle is [["shuffle", 99, ' in said_last


def test_several_devices_per_worker_equal_one(job, tmp_path, mirrored):
    """2 workers of 2 devices, which first try which packs are fast. BatchNorm over all replicas, so
    its moving averages are compared too; 101 test examples in batches of 16, which 4 replicas
    cannot share alike."""
    run_job(job, tmp_path, "seeds=1", "devices=2", "synchronized=1", "masks=1", "tune=1")
    assert_equal(tmp_path, 2, one_device(mirrored, synchronized=True))
    masks = np.concatenate([saved["masks"] for saved in finished(tmp_path, 2)])
    assert len(np.unique(masks, axis=0)) == len(masks) == 4


def test_state_of_each_replica_is_resumed(job, tmp_path):
    """2 workers of 2 devices, with parameter groups, noise and logged scalars besides. The job of
    ``resumed`` finds what that of ``straight`` had saved in the middle of a window of its log."""
    checkpoint = Path("checkpoints", "step-0000000012")
    saved = []
    for directory in (tmp_path / "straight", tmp_path / "resumed"):
        if saved:
            shutil.copytree(tmp_path / "straight" / checkpoint, directory / checkpoint)
        run_job(job, directory, "devices=2", "state=1")
        saved.append(finished(directory, 2))
    assert "resumed at 12" in said(tmp_path / "resumed", 0)
    for straight, resumed in zip(*saved, strict=True):
        assert largest_difference(weights(straight), weights(resumed)) == 0
        assert largest_difference([straight["left"]], [resumed["left"]]) == 0
        np.testing.assert_array_equal(straight["logged"], resumed["logged"])
    first, second = saved[0]
    np.testing.assert_array_equal(first["logged"], second["logged"])
    parts = np.concatenate([first["left"], second["left"]])
    assert parts.shape == (4, FEATURES, 8) and len(np.unique(parts, axis=0)) == 4
    noise, largest, feature, rate = first["logged"]
    assert abs(noise) < 0.1 and 3 < largest < 6 and rate == np.float32(0.01)
    assert feature == pytest.approx(first_features(15, 20), abs=1e-6)


def first_features(start: int, stop: int) -> float:
    """The mean of the first feature in the batches of these steps."""
    data = InMemory(examples(), global_batch_size=BATCH * 3)
    rows = np.concatenate([np.ravel(rows.numpy()) for rows in data.batches().take(stop)])
    return float(data.arrays[0][rows[start * BATCH * 3 : stop * BATCH * 3], 0].mean())


@pytest.fixture(scope="module")
def straight(job, tmp_path_factory):
    """An uninterrupted job of 2 workers with BatchNorm and Dropout."""
    out = tmp_path_factory.mktemp("straight")
    run_job(job, out, "norm=1", "fit=1", "masks=1")
    return finished(out, 2)


def test_batch_norm_and_dropout(straight):
    first, second = straight
    assert largest_difference(weights(first), weights(second)) == 0  # moving statistics included
    assert (first["masks"] != second["masks"]).any()


def test_fit_fails_where_this_loop_trains(straight):
    """When this fails, what README.md says of Keras must change."""
    for saved in straight:
        assert re.match(r"ValueError: Attempt to convert a value \(PerReplica", str(saved["fit"]))


def test_preempted_at_the_same_step_and_resumed_bit_for_bit(job, tmp_path, straight):
    run_job(job, tmp_path, "norm=1", "fault=term", "step=7", code=42)
    step = int(re.search(r"SIGTERM: saved step (\d+)", last_line(tmp_path, 1))[1])
    assert f"another worker's signal: saved step {step} " in last_line(tmp_path, 0)
    run_job(job, tmp_path, "norm=1")
    assert all(f"resumed at {step}" in said(tmp_path, i) for i in range(2))
    for saved, whole in zip(finished(tmp_path, 2), straight, strict=True):
        assert largest_difference(weights(saved), weights(whole)) == 0


def test_a_nan_on_one_worker_stops_all(job, tmp_path):
    run_job(job, tmp_path, "fault=nan", "step=6", code=3)
    for index in range(2):
        assert "the loss is nan at step 7" in last_line(tmp_path, index)


def test_workers_that_differ_do_not_start(job, tmp_path):
    """Each of these would be reason enough. What their steps reduce does not tell them apart."""
    run_job(job, tmp_path, "differ=1", code=2)
    step = '"multi_worker:Step" on worker 0, "multi_worker:Other"'
    said_last = (
        "the workers do not agree: clip_norm is 0.3 on worker 0, 0.4 on worker 1; "
        "data: global_batch_size is 48 on worker 0, 96 on worker 1; "
        f"the class of the step is {step} on worker 1; "
        'the code of the step is "[0-9a-f]{12}" on worker 0, "[0-9a-f]{12}" on worker 1; '
        "the optimizer: beta_1 is 0.9 on worker 0, 0.8 on worker 1; "
        "start all with the same code, flags and data"
    )
    for index in range(2):
        assert re.fullmatch(said_last, last_line(tmp_path, index))


def test_killed_and_restarted_gives_the_same_weights(job, tmp_path, straight):
    """kill -9 of the chief, which may be writing a checkpoint. The job stops before its last step
    until that is done: how fast a machine is does not matter."""
    options = "norm=1", "loop=1", "slow=1"
    with job(tmp_path, *options) as processes:
        processes[0].until("step 5\n", "stdout")
        processes[0].signal(signal.SIGKILL)
        assert codes(processes) == [-signal.SIGKILL, 5]
    (tmp_path / "go").touch()
    run_job(job, tmp_path, *options)
    assert "damaged" not in said(tmp_path, 0) + said(tmp_path, 1)
    for saved, whole in zip(finished(tmp_path, 2), straight, strict=True):
        assert largest_difference(weights(saved), weights(whole)) == 0
