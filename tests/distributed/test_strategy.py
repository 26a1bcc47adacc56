"""Strategies by name: that they train alike, and what is said of those that cannot work."""

from __future__ import annotations

import socket

import keras
import pytest
import tensorflow as tf
from helpers import CLASSES, FEATURES, examples, largest_difference, make_loop, mlp

from ctl import launch
from ctl.data import InMemory
from ctl.distributed import strategy as strategy_module
from ctl.distributed.cluster import Cluster, external_watchdog
from ctl.distributed.strategy import make_multi_worker, make_strategy
from ctl.errors import PeerError, UsageError


def train(strategy, options=None, model=mlp):
    """Weights after 10 steps and an evaluation of them."""
    loop = make_loop(strategy, model=model, clip_norm=0.5, options=options, evaluate=40, seed=1)
    loop.train(10)
    return loop.step.model.get_weights(), loop.evaluate()


one_process = pytest.mark.xdist_group("test_strategy.py")  # one reference


@pytest.fixture(scope="module")
def on_one_device():
    return train(tf.distribute.OneDeviceStrategy("/cpu:0"))


@one_process
@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "replicas", "words"),
    [
        ({"name": "one_device"}, 1, "one_device: CPU:0"),
        ({"name": "default"}, 1, "no distribution"),
        ({"name": "mirrored"}, 1, "mirrored over 1 replicas"),
        ({"name": "mirrored", "replicas": 4}, 4, "reduction_to_one_device (auto"),
        (
            {"name": "mirrored", "replicas": 2, "cross_device_ops": "hierarchical_copy"},
            2,
            "all-reduce: hierarchical_copy",
        ),
        ({"name": "central_storage", "replicas": 2}, 2, "variables on cpu:0"),
    ],
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else "",
)
def test_every_strategy_trains_alike(options, replicas, words, on_one_device):
    placement = make_strategy(**options)
    assert placement.strategy.num_replicas_in_sync == replicas
    assert placement.options.timeout_seconds is None  # it would be a thread for every step
    assert words in placement.description and "\n" not in placement.description
    weights, results = train(placement.strategy, placement.options)
    assert largest_difference(weights, on_one_device[0]) <= 1e-6
    assert results == pytest.approx(on_one_device[1], rel=1e-5)


@pytest.mark.parametrize(
    ("replicas", "words"),
    [
        (None, "default: no distribution"),
        (1, "default: no distribution"),
        (2, "mirrored over 2 replicas (cpu:0, cpu:1); all-reduce: reduction_to_one_device (auto"),
    ],
)
def test_auto_is_one_of_them(replicas, words):
    placement = make_strategy("auto", replicas=replicas)
    assert placement.strategy.num_replicas_in_sync == (replicas or 1)
    assert placement.description.startswith(words)


def test_what_auto_chooses_has_a_name():
    """`test_every_strategy_trains_alike` trains it."""
    options = {"replicas": 2, "cross_device_ops": "reduction_to_one_device"}
    placement = make_strategy("mirrored", **options)
    operation = placement.strategy.extended._cross_device_ops
    assert type(operation) is tf.distribute.ReductionToOneDevice
    assert placement.description.endswith("all-reduce: reduction_to_one_device")


@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize("operation", ["HierarchicalCopyAllReduce", "ReductionToOneDevice"])
def test_replicas_are_summed_or_refused(operation, count):
    """A hierarchical copy of TensorFlow counts the middle one of three twice, or never."""
    devices = [f"CPU:{i}" for i in range(count)]
    operation = getattr(tf.distribute, operation)()
    strategy = tf.distribute.MirroredStrategy(devices, cross_device_ops=operation)

    @tf.function
    def total():
        def of_replica():
            context = tf.distribute.get_replica_context()
            mine = 2.0 ** tf.cast(context.replica_id_in_sync_group, tf.float32)
            return context.all_reduce("SUM", [mine, 2 * mine, 3 * mine])

        return strategy.run(of_replica)

    wanted = [(2**count - 1) * factor for factor in (1, 2, 3)]
    right = all(
        [float(one) for one in strategy.experimental_local_results(each)] == [value] * count
        for each, value in zip(total(), wanted, strict=True)
    )
    data = InMemory(examples(24), global_batch_size=12)
    if right:
        make_loop(strategy, data=data)
    else:
        with pytest.raises(UsageError, match=f"hierarchical_copy sums {count} replicas wrongly"):
            make_loop(strategy, data=data)


@one_process
def test_a_ring_trains_alike(ring2, on_one_device):
    """The strategy of the fixture: two rings in one process would take each other's messages."""
    assert type(ring2.extended._cross_device_ops).__name__ == "CollectiveAllReduce"
    options = strategy_module._options("ring")
    assert options.implementation == tf.distribute.experimental.CommunicationImplementation.RING
    weights, results = train(ring2, options)
    assert largest_difference(weights, on_one_device[0]) <= 1e-6
    assert results == pytest.approx(on_one_device[1], rel=1e-5)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"name": "best"}, ["unknown strategy 'best'", "one_device, mirrored"]),
        ({"name": "one_device", "replicas": 3}, ["one_device has one replica, not 3", "mirrored"]),
        ({"name": "default", "replicas": 2}, ["default has one replica, not 2"]),
        (
            {"name": "mirrored", "replicas": 2, "cross_device_ops": "nccl"},
            ["nccl needs GPUs", "use auto"],
        ),
        ({"name": "tpu"}, ["--tpu=NAME", "grpc://host:port"]),
        # TensorFlow has run already, with 4 devices.
        ({"name": "mirrored", "replicas": 5}, ["5 logical devices", "the strategy first"]),
    ],
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else "",
)
def test_what_cannot_work_is_said_in_a_line(options, words):
    tf.constant(0)
    with pytest.raises(UsageError) as error:
        make_strategy(**options)
    assert all(word in str(error.value) for word in words), str(error.value)
    assert "\n" not in str(error.value)


def with_layer(layer) -> keras.Model:
    inner = keras.Sequential([layer()])
    return keras.Sequential(
        [keras.layers.Input([FEATURES]), keras.layers.Dense(4), inner, keras.layers.Dense(CLASSES)]
    )


@pytest.mark.parametrize(
    ("layer", "words"),
    [
        (lambda: keras.layers.Dropout(0.5, name="drop"), "layer drop (Dropout)"),
        (lambda: keras.layers.GaussianNoise(0.5, name="noise"), "layer noise (GaussianNoise)"),
        (
            lambda: keras.layers.BatchNormalization(name="norm"),
            "layer norm (BatchNormalization)",
        ),
        (lambda: keras.layers.BatchNormalization(trainable=False), None),
        (lambda: keras.layers.LayerNormalization(), None),
    ],
    ids=["dropout", "noise", "batch norm", "frozen batch norm", "layer norm"],
)
def test_central_storage_refuses_layers_that_it_cannot_train(layer, words):
    placement = make_strategy("central_storage", replicas=2)
    if words is None:
        train(placement.strategy, placement.options, lambda: with_layer(layer))
        return
    with pytest.raises(UsageError) as error:
        train(placement.strategy, placement.options, lambda: with_layer(layer))
    assert words in str(error.value) and "use mirrored" in str(error.value)
    assert "\n" not in str(error.value)


def test_central_storage_trains_any_layer_on_one_replica():
    alone = make_strategy("central_storage", replicas=1)
    train(alone.strategy, alone.options, lambda: with_layer(keras.layers.BatchNormalization))


# In a process of its own: attempts to reach a TPU change TensorFlow's devices.
_PROCESS = """
import sys
import tensorflow as tf
from ctl.distributed import strategy
from ctl.errors import UsageError

def run():
    strategy._TPU_PROBE_SECONDS = 1.0
    placement = strategy.make_strategy("mirrored", replicas=3)  # cuts the CPU for the first time
    print(placement.strategy.num_replicas_in_sync, len(tf.config.list_logical_devices("CPU")))
    strategy._require_grpc(tf.distribute.Server.create_local_server().target)
    print("a server of gRPC is found")
    for address in sys.argv[1:]:
        try:
            print("works", strategy.make_strategy("tpu", tpu=address))
        except UsageError as error:
            print(error)
"""


def test_tpus_that_are_not_there(zygote, tmp_path):
    """Also one that accepts the connection and never says a word."""
    with socket.socket() as silent, socket.socket() as closed:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        closed.bind(("127.0.0.1", 0))  # bound, so that nobody else listens there
        quiet, nobody = (f"grpc://127.0.0.1:{s.getsockname()[1]}" for s in (silent, closed))
        addresses = ["local", nobody, "grpc://127.0.0.1:port", "grpc://", quiet, "no-such-tpu"]
        reasons = ["refused", "Port could not be cast", "", "timed out"]
        (tmp_path / "tpus.py").write_text(_PROCESS)
        done = zygote.run("tpus", *addresses, path=[tmp_path])
    first, second, *lines = done.stdout.splitlines()
    assert first == "3 3", done.stderr
    assert second == "a server of gRPC is found"
    local, *others, name = lines
    assert local.startswith("cannot use TPU local: ")
    for line, address, why in zip(others, addresses[1:-1], reasons, strict=True):
        assert line == f"no TPU answers at {address}: {line.rpartition(': ')[2]}"
        assert why in line
    assert name.startswith("cannot use TPU no-such-tpu: ")


def test_a_port_that_is_taken_after_the_workers_have_met():
    """Not a bug with a traceback: the launcher chooses another port."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        words = "worker 0: TensorFlow cannot connect to the job: Could not start gRPC server"
        connecting = strategy_module._connecting("worker 0", {}, 60.0)
        with pytest.raises(PeerError, match=words), connecting:
            tf.distribute.Server({"worker": [address]}, "worker", 0, protocol="grpc")


def test_a_chief_that_does_not_start_tensorflow():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        chief = f"127.0.0.1:{silent.getsockname()[1]}"
        one = Cluster((chief, "127.0.0.1:1"), 1, "a test")
        with pytest.raises(PeerError, match=f"worker 0 at {chief} has not started TensorFlow"):
            strategy_module._wait_for_chief(one, 0.1)


def test_a_worker_that_is_lost_while_tensorflow_connects(monkeypatch):
    """All have met, then one dies: the others name it and end with the code of a lost peer."""
    chief, gone = launch.cluster(2)["worker"]

    def connect(**options):
        raise tf.errors.UnavailableError(None, None, "Socket closed")

    monkeypatch.setattr(strategy_module, "meet", lambda cluster, timeout: None)
    monkeypatch.setattr(tf.distribute, "MultiWorkerMirroredStrategy", connect)
    monkeypatch.setattr(external_watchdog, "LINGER_SECONDS", 0.1)
    monkeypatch.setenv("TF_CONFIG", "")
    monkeypatch.setenv("GRPC_EXPERIMENTS", "")
    with pytest.raises(PeerError) as raised:
        make_multi_worker(Cluster((chief, gone), 0, "a test"))
    assert str(raised.value) == (
        "worker 0: TensorFlow cannot connect to the job: Socket closed; waiting for worker 1 "
        f"(at {gone}: Connection refused)"
    )
