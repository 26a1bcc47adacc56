"""Several workers, in real processes on loopback: equal to one device, and every way to fail."""

from __future__ import annotations

import functools
import random
import re
import shutil
import signal
import socket
import time
from collections import Counter
from pathlib import Path

import keras
import numpy as np
import pytest
from helpers import BATCH, CLASSES, FEATURES, batches_of_files, examples, largest_difference
from waiting import wait_until
from worker_jobs import assert_codes, codes, finished, last_line, run_job, said, weights

from ctl import launch
from ctl.data import InMemory, Streaming
from ctl.data.order import Shuffle
from ctl.distributed.watch import hang
from ctl.inspect.commands import hang as hang_command
from ctl.loop import Evaluator, Loop
from ctl.phases.base_step import EvalStep
from ctl.step import TrainStep

pytestmark = pytest.mark.slow  # starts processes

KILLS = 2


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


def test_streams_are_read_in_parts_and_resumed_by_another(job, tmp_path, mirrored):
    """In mid-epoch, by 2 workers instead of 1: each reads its own examples, and no others."""
    for workers, start, until in ((1, 0, 8), (2, 8, 20)):
        run_job(job, tmp_path, "stream=1", f"until={until}", workers=workers)
        for worker, saved in enumerate(finished(tmp_path, workers)):
            rows = Shuffle(320, 0)(np.arange(start * BATCH * 3, (until + 60) * BATCH * 3))
            rows = rows.reshape(-1, workers, BATCH * 3 // workers)[:, worker]
            needed, ahead = (
                Counter(part.ravel().tolist()) for part in (rows[: until - start], rows)
            )
            assert needed <= Counter(saved["rows"].tolist()) <= ahead
    data = Streaming(examples(), global_batch_size=BATCH * 3)
    assert_equal(tmp_path, 2, one_device(mirrored, data=data))


def test_workers_that_shuffle_differently_are_refused(job, tmp_path):
    batches_of_files(tmp_path, 1)
    run_job(job, tmp_path, "shuffle=1", "seeds=1", code=2)
    for worker in range(2):
        said_last = last_line(tmp_path, worker)
        assert 'the workers do not agree: data: shuffle is [["shuffle", 99, ' in said_last


def test_several_devices_per_worker_equal_one(job, tmp_path, mirrored):
    """2 workers of 2 devices. BatchNorm over all replicas, so its moving averages are compared too;
    101 test examples in batches of 16, which 4 replicas cannot share alike."""
    run_job(job, tmp_path, "seeds=1", "devices=2", "synchronized=1", "masks=1")
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


def test_resumed_by_another_number_of_workers_at_ipv6_addresses(job, tmp_path, reference):
    """The two first try which packs are fast. The three hear the beats of each other; without IPv6,
    at IPv4 addresses."""
    run_job(job, tmp_path, "tune=1", "until=8")
    addresses = launch.cluster(3)["worker"]
    if socket.has_dualstack_ipv6():
        addresses = [f"[::1]:{address.rpartition(':')[2]}" for address in addresses]
    run_job(job, tmp_path, workers=3, addresses=addresses)
    assert "cannot use the UDP port" not in said(tmp_path, 0)
    assert "resumed at 8" in said(tmp_path, 2)
    assert_equal(tmp_path, 3, reference)


def end_of(job, tmp_path, fault: str, culprit: int, *options: str) -> tuple[list[int], float]:
    """The two workers of three that outlive the fault of one, which must end with 5; and the
    seconds from the fault to their end."""
    survivors = [i for i in range(3) if i != culprit]
    with job(tmp_path, f"fault={fault}", f"worker={culprit}", *options, workers=3) as processes:
        ended = [codes([processes[i]])[0] for i in survivors]
        over = time.time()
        at = float(re.search(r"fault \w+ at (\S+)", said(tmp_path, culprit))[1])
    assert ended == [5, 5], [said(tmp_path, i)[-1500:] for i in survivors]
    return survivors, over - at


@pytest.mark.parametrize(
    ("fault", "culprit", "bound", "what", "blamed"),
    [
        ("kill", 0, 12, "broke off", "gone: "),
        ("raise", 1, 15, "broke off", "gone: "),
        ("freeze", 1, 25, "(timed out|broke off)", "frozen or dead: silent for "),
        ("freeze", 0, 25, "(timed out|broke off)", "frozen or dead: silent for "),
        ("absent", 1, 25, "timed out", "in the action Faulty after step 5 "),
    ],
)
def test_survivors_end_in_time_and_say_why(job, tmp_path, fault, culprit, bound, what, blamed):
    survivors, seconds = end_of(job, tmp_path, fault, culprit, "timeout=10", "loop=1")
    assert seconds < bound
    first = rf"worker {survivors[0]} of 3: a collective in training after step \d+ {what}: "
    blamed = rf"worker {culprit} \({blamed}"
    assert re.search(f"{first}.*; waiting for {blamed}", said(tmp_path, survivors[0]))
    records, notes = hang_command.load(tmp_path)
    assert {record.worker for record in records} >= set(survivors) and not notes
    verdict = hang.summary(records)
    waiting = rf"workers {survivors[0]}, {survivors[1]} have waited \d+ s in (pack0 of )?training"
    assert re.search(rf"^step \d+: {waiting} for {blamed}[^)]*\)$", verdict), verdict


def test_the_disk_of_the_chief_hangs_before_an_evaluation(job, tmp_path):
    options = "timeout=10", "place=saving", "step=20"
    survivors, seconds = end_of(job, tmp_path, "absent", 0, *options)
    assert seconds < 25
    for index in survivors:
        doing = "comparing the replicas after step 20"
        line = rf"worker {index} of 3: a collective in {doing} timed out: "
        blamed = r"waiting for worker 0 \(in saving after step 20 "
        assert re.search(f"{line}.*; {blamed}", said(tmp_path, index))


@pytest.mark.parametrize(
    ("fault", "culprit", "bound", "what", "blamed"),
    [
        ("kill", 1, 25, "broke off", "gone: "),
        ("raise", 0, 25, "broke off", "gone: "),
        ("absent", 0, 30, "timed out", "in host code "),
        ("absent", 1, 30, "timed out", "in host code "),
    ],
)
def test_while_the_model_is_built(job, tmp_path, fault, culprit, bound, what, blamed):
    """The others wait for its variables: in code of users, before there is a loop."""
    survivors, seconds = end_of(job, tmp_path, fault, culprit, "place=building", "startup=14")
    assert seconds < bound
    blamed = rf"worker {culprit} \({blamed}"
    for index in survivors:
        building = rf"worker {index} of 3: a collective in making variables {what}: "
        assert re.search(rf"{building}.*; waiting for {blamed}", said(tmp_path, index))
        if fault == "absent":
            early = rf"worker {index} has waited 10 s in making variables for {blamed}"
            assert re.search(early, said(tmp_path, index))


def test_data_that_end_on_one_worker(job, tmp_path):
    """Its peer is in the next all-reduce, far from the timeout of that."""
    with job(tmp_path, "fault=end", "timeout=100") as processes:
        assert_codes(tmp_path, processes, [5, 2])
    at = float(re.search(r"fault end at (\S+)", said(tmp_path, 1))[1])
    assert (tmp_path / "process-0" / "stderr").stat().st_mtime - at < 25
    assert "worker 1: its data ended after step 5, but other workers have more" in last_line(
        tmp_path, 1
    )
    assert re.search(r"worker 0 of 2: .* waiting for worker 1 \(gone: ", last_line(tmp_path, 0))


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


def test_a_peer_that_never_comes(job, tmp_path):
    addresses = launch.cluster(2)["worker"]
    run_job(job, tmp_path, "startup=12", workers=1, addresses=addresses, code=5)
    absent = f"worker 1 at {addresses[1]} (Connection refused)"
    assert f"worker 0 has waited 10 s for {absent}" in said(tmp_path, 0)
    assert f"gave up after 12 s (--startup_timeout) waiting for {absent}" in last_line(tmp_path, 0)


def test_killed_and_restarted_gives_the_same_weights(job, tmp_path, straight):
    """kill -9 of a random worker at a random moment, in each of two tries. The job stops before its
    last step until that is done: how fast a machine is does not matter."""
    randoms, options = random.Random(0), ("norm=1", "loop=1", "slow=1")

    def has_trained(steps: int) -> bool:
        told = said(tmp_path, 0)
        return told.count("\nstep ") >= steps or "step 19\n" in told

    for _ in range(KILLS):
        with job(tmp_path, *options) as processes:
            processes[0].until("training\n", "stdout")
            wait_until(functools.partial(has_trained, randoms.randrange(6)))
            time.sleep(randoms.uniform(0, 0.1))
            randoms.choice(processes).signal(signal.SIGKILL)
            assert sorted(codes(processes)) == [-signal.SIGKILL, 5]
        assert "damaged" not in said(tmp_path, 0) + said(tmp_path, 1)
    (tmp_path / "go").touch()
    run_job(job, tmp_path, *options)
    assert "damaged" not in said(tmp_path, 0) + said(tmp_path, 1)
    for saved, whole in zip(finished(tmp_path, 2), straight, strict=True):
        assert largest_difference(weights(saved), weights(whole)) == 0
