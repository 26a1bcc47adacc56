"""Makes a `tf.distribute` strategy from a name, and chooses devices and communication."""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import threading
import time
import urllib.parse
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import tensorflow as tf

from ctl.base import signals
from ctl.base.ledger import LEDGER
from ctl.distributed import workers
from ctl.distributed.cluster import elastic, external_watchdog
from ctl.distributed.cluster.addresses import split
from ctl.distributed.cluster.external_watchdog import ask_grpc
from ctl.distributed.cluster.members import Cluster, Tasks
from ctl.distributed.cluster.rendezvous import Frozen, meet
from ctl.distributed.heartbeats import Heartbeats
from ctl.errors import PeerError, UsageError

_TPU_PROBE_SECONDS = 5.0
_TPU_START_SECONDS = 120.0

# Turns off gRPC's event engine. It wakes more threads per message than its predecessor, so a small
# step takes 1.4 times as long (benchmarks/README.md has the command).
_GRPC = "-event_engine_client"

_FIRST = (
    "before TensorFlow runs its first operation: make models and tensors in functions, not at the "
    "top of a module, and in Python the strategy first"
)

_Implementation = tf.distribute.experimental.CommunicationImplementation


# Keeps open the scope that `make_multi_worker` enters. Without a reference, it would close at once.
_never_left = contextlib.ExitStack()


class Placement(NamedTuple):
    """A strategy and how to use it.

    Attributes:
        strategy: the strategy.
        options: options of its collectives, for `ctl.TrainStep`.
        description: one line for the log.
        heartbeats: which tasks are alive, with parameter servers; else None.
    """

    strategy: tf.distribute.Strategy
    options: tf.distribute.experimental.CommunicationOptions
    description: str
    heartbeats: Heartbeats | None = None


def make_multi_worker(
    cluster: Cluster,
    *,
    communication: str = "auto",
    collective_timeout: float = 300.0,
    startup_timeout: float = 300.0,
    record_dir: Path | None = None,
) -> Placement:
    """Makes a MultiWorkerMirroredStrategy over ``cluster``, with one process per worker.

    All workers run the same command. Call it before TensorFlow runs its first operation.

    Args:
        cluster: the workers, see `ctl.cluster.resolve`.
        communication: ``auto``, ``ring`` (gRPC) or ``nccl``.
        collective_timeout: seconds without progress after which `ctl.distributed.watch.watchdog`
            ends the process.
        startup_timeout: seconds to wait for the other workers to start (see `ctl.cluster.meet`),
            and again for each variable, while they load data or build a model.
        record_dir: directory for the flight record of the watchdog; None writes none.

    Raises:
        PeerError: the other workers did not start in time, one was lost meanwhile, or this worker's
            port is taken.
        UsageError: ``nccl`` has no GPUs, or a worker has another list of workers.
    """
    if communication == "nccl" and not tf.config.list_physical_devices("GPU"):
        raise UsageError("--communication=nccl needs GPUs, but TensorFlow sees none: use auto")
    with LEDGER.spend("waiting"):
        meet(cluster, startup_timeout)
        if not cluster.is_chief:
            _wait_for_chief(cluster, startup_timeout)
    os.environ["TF_CONFIG"] = cluster.tf_config()
    os.environ.setdefault("GRPC_EXPERIMENTS", _GRPC)
    options = _options(communication)
    peers = {f"worker {i}": a for i, a in enumerate(cluster.workers) if i != cluster.index}
    connecting = _connecting(f"worker {cluster.index}", peers, startup_timeout)
    with LEDGER.spend("waiting"), connecting:
        try:
            strategy = tf.distribute.MultiWorkerMirroredStrategy(communication_options=options)
        except RuntimeError as error:
            raise UsageError(f"workers are connected {_FIRST} ({error})") from error
    workers.watch(
        strategy,
        timeout=collective_timeout,
        startup_timeout=startup_timeout,
        record_dir=record_dir,
    )
    # Watches all later variables, of models, optimizers and metrics.
    _never_left.enter_context(workers.watching_variables(strategy))
    return Placement(
        strategy,
        options,
        f"multi_worker: worker {cluster.index} of {len(cluster.workers)} (from {cluster.source}), "
        f"{strategy.num_replicas_in_sync} replicas in all; all-reduce: {communication}",
    )


def make_parameter_server(
    tasks: Tasks, *, startup_timeout: float = 300.0, worker_timeout: float = 60.0
) -> Placement:
    """Makes a ParameterServerStrategy on the coordinator of a job.

    See `ctl.jobs.parameter_server`. Call it before TensorFlow runs its first operation.

    Args:
        tasks: the tasks of the job, see `ctl.cluster.resolve_tasks`.
        startup_timeout: seconds to wait for the other tasks to start.
        worker_timeout: seconds, see `ctl.distributed.heartbeats.Heartbeats`.

    Raises:
        PeerError: the other tasks did not start in time, or the coordinator's port is taken.
        UsageError: a worker has several GPUs.
    """
    heartbeats = Heartbeats(tasks, worker_timeout)
    with LEDGER.spend("waiting"):
        heartbeats.wait_for_all(startup_timeout)
    with socket.socket() as free:  # heartbeats use the port of TF_CONFIG
        free.bind(("", 0))
        port = free.getsockname()[1]
    host = tasks.coordinator.rpartition(":")[0]
    jobs = {"chief": [f"{host}:{port}"], "worker": tasks.workers, "ps": tasks.ps}
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec(jobs), task_type="chief", task_id=0, rpc_layer="grpc"
    )
    with _connecting(tasks.name, tasks.servers, startup_timeout):
        strategy = tf.distribute.ParameterServerStrategy(resolver)
    if strategy.num_replicas_in_sync > 1:
        raise UsageError(
            "parameter_server uses one GPU per worker: hide others by CUDA_VISIBLE_DEVICES"
        )
    return Placement(
        strategy,
        _options("auto"),
        f"parameter_server: {len(tasks.workers)} workers, {len(tasks.ps)} parameter servers; no "
        "all-reduce, updates are asynchronous",
        heartbeats,
    )


@contextlib.contextmanager
def _connecting(me: str, peers: Mapping[str, str], timeout: float) -> Iterator[None]:
    """Limits the time in which TensorFlow connects the tasks of a job, see
    `ctl.distributed.cluster.external_watchdog`.

    Raises:
        PeerError: TensorFlow lost a task, or its port, which was free a moment ago.
    """
    doing = f"{me}: TensorFlow has been connecting to the job"
    frozen = elastic.FROZEN_SECONDS if elastic.is_elastic() else None
    flag, ending = "--startup_timeout", signals.ending()
    limits = external_watchdog.Keeper(doing, peers, timeout, flag, signals=ending, frozen=frozen)
    with limits as keeper:
        try:
            yield
        except tf.errors.OpError as error:
            whom = ""
            if isinstance(error, workers.LOST):
                whom = f"; waiting for {keeper.silent() or 'other tasks, which all still answer'}"
                time.sleep(external_watchdog.LINGER_SECONDS)
            raise PeerError(
                f"{me}: TensorFlow cannot connect to the job: {workers.reason(error)}{whom}"
            ) from error
        finally:
            signals.install()


def make_strategy(
    name: str = "auto",
    *,
    replicas: int | None = None,
    cross_device_ops: str = "auto",
    tpu: str = "",
) -> Placement:
    """Makes a strategy on this machine, or on a TPU.

    Call it before anything else initialises TensorFlow's devices.

    Args:
        name: ``one_device``, ``mirrored``, ``central_storage``, ``tpu``, ``default`` (TensorFlow
            without a strategy) or ``auto``. ``auto`` is mirrored for several replicas, else
            one_device on a GPU and default on a CPU.
        replicas: number of replicas; by default the number of visible GPUs, or 1 without GPUs.
            Without GPUs, the CPU is cut into this many logical devices.
        cross_device_ops: all-reduce of ``mirrored``: ``nccl``, ``ring``, ``hierarchical_copy``,
            ``reduction_to_one_device``, or ``auto``. On CPUs, ``auto`` is the fastest measured; on
            GPUs, it is NCCL.
        tpu: for ``tpu``: name of the TPU, ``local``, or ``grpc://host:port``.

    Raises:
        UsageError: the strategy cannot work on this machine.
    """
    if name == "tpu":
        strategy = _tpu_strategy(tpu)
        signals.install()
        count = strategy.num_replicas_in_sync
        return Placement(strategy, _options("auto"), f"tpu: {count} replicas")
    devices = _devices(replicas)
    on_gpu = "GPU" in devices[0]
    if name == "auto":
        # one_device moves batches to a GPU ahead of time. On a CPU, that costs 0.1 ms per step and
        # gains nothing; `default` iterates over the dataset directly.
        name = "mirrored" if len(devices) > 1 else "one_device" if on_gpu else "default"
    if name in ("one_device", "default") and len(devices) > 1 and replicas:
        raise UsageError(f"--strategy={name} has one replica, not {replicas}: use mirrored")
    if cross_device_ops == "nccl" and not on_gpu:
        raise UsageError("--cross_device_ops=nccl needs GPUs, but TensorFlow sees none: use auto")
    options = _options(cross_device_ops)
    if name == "mirrored":
        operation, why = _cross_device_operation(cross_device_ops, on_gpu)
        strategy = tf.distribute.MirroredStrategy(devices, cross_device_ops=operation)
        return Placement(strategy, options, f"mirrored over {_names(devices)}; all-reduce: {why}")
    if name == "central_storage":
        strategy = tf.distribute.experimental.CentralStorageStrategy(devices, "/cpu:0")
        return Placement(
            strategy, options, f"central_storage: {_names(devices)}, variables on cpu:0"
        )
    if name == "one_device":
        return Placement(
            tf.distribute.OneDeviceStrategy(devices[0]), options, f"one_device: {devices[0][1:]}"
        )
    if name == "default":
        return Placement(tf.distribute.get_strategy(), options, "default: no distribution")
    raise UsageError(
        f"unknown strategy {name!r}; choose one_device, mirrored, central_storage, tpu or default"
    )


def _names(devices: list[str]) -> str:
    return f"{len(devices)} replicas ({', '.join(d[1:].lower() for d in devices)})"


def _devices(replicas: int | None) -> list[str]:
    """Returns one device per replica; cuts the CPU into logical devices if necessary."""
    gpus = tf.config.list_physical_devices("GPU")
    if gpus:
        count = replicas or len(gpus)
        if count > len(gpus):
            seen = "1 GPU" if len(gpus) == 1 else f"{len(gpus)} GPUs"
            raise UsageError(f"--replicas={count}, but TensorFlow sees {seen}")
        return [f"/GPU:{i}" for i in range(count)]
    count = replicas or 1
    if count > 1:
        _cut_cpu(count)
    return [f"/CPU:{i}" for i in range(count)]


def _cut_cpu(count: int) -> None:
    cpu = tf.config.list_physical_devices("CPU")[0]
    try:
        if len(tf.config.get_logical_device_configuration(cpu) or []) < count:
            tf.config.set_logical_device_configuration(
                cpu, [tf.config.LogicalDeviceConfiguration()] * count
            )
    except RuntimeError as error:  # TensorFlow's devices are initialised already
        if len(tf.config.list_logical_devices("CPU")) < count:
            raise UsageError(
                f"{count} replicas on the CPU need {count} logical devices, which must be made "
                f"{_FIRST}"
            ) from error


def _cross_device_operation(
    name: str, on_gpu: bool
) -> tuple[tf.distribute.CrossDeviceOps | None, str]:
    """Returns the operation and a description. None: TensorFlow's collectives, see `_options`."""
    if name == "hierarchical_copy":
        return tf.distribute.HierarchicalCopyAllReduce(num_packs=1), name
    if name == "reduction_to_one_device":
        return tf.distribute.ReductionToOneDevice(), name
    if name == "auto" and not on_gpu:
        # A ring takes 2-3 times as long.
        why = "auto: logical CPUs share memory, so it copies nothing"
        return tf.distribute.ReductionToOneDevice(), f"reduction_to_one_device ({why})"
    if name == "auto":
        return None, "nccl (auto: TensorFlow's choice for GPUs; ctl has not measured GPUs)"
    return None, name


def _options(cross_device_ops: str) -> tf.distribute.experimental.CommunicationOptions:
    """Returns options without TensorFlow's time limit; `ctl.distributed.watch.watchdog` limits the
    time instead."""
    implementation = {"nccl": _Implementation.NCCL, "ring": _Implementation.RING}
    return tf.distribute.experimental.CommunicationOptions(
        implementation=implementation.get(cross_device_ops, _Implementation.AUTO),
    )


def _tpu_strategy(address: str) -> tf.distribute.Strategy:
    """Connects to a TPU, or raises `UsageError` in bounded time."""
    if not address:
        raise UsageError("--strategy=tpu needs --tpu=NAME, --tpu=local or --tpu=grpc://host:port")
    if address.startswith("grpc://"):
        _require_grpc(address)

    outcome: queue.Queue = queue.Queue()

    def attempt() -> None:
        try:
            resolver = tf.distribute.cluster_resolver.TPUClusterResolver.connect(address)
            outcome.put(tf.distribute.TPUStrategy(resolver))
        except Exception as error:
            outcome.put(error)

    # A daemon thread, because a hanging connection cannot be ended and must not block the exit.
    threading.Thread(target=attempt, name="connect_tpu", daemon=True).start()
    try:
        result = outcome.get(timeout=_TPU_START_SECONDS)
    except queue.Empty:
        raise UsageError(f"TPU {address} did not start in {_TPU_START_SECONDS:.0f} s") from None
    if isinstance(result, Exception):
        raise UsageError(f"cannot use TPU {address}: {str(result).splitlines()[0][:200]}")
    return result


def _require_grpc(address: str) -> None:
    """Raises `UsageError` unless a gRPC server answers. TensorFlow would wait forever and hold
    Python's lock, so that no thread could give up."""
    parts = urllib.parse.urlsplit(address)
    try:
        ask_grpc(parts.hostname, parts.port, _TPU_PROBE_SECONDS)
    except (OSError, ValueError) as error:
        raise UsageError(f"no TPU answers at {address}: {error}") from error


def _wait_for_chief(cluster: Cluster, timeout: float) -> None:
    """Returns when TensorFlow listens on the chief. A gRPC client that connects earlier may wait
    for 20 s before it tries again."""
    host, port = split(cluster.workers[0])
    frozen, chief = Frozen(f"worker {cluster.index}"), f"worker 0 at {cluster.workers[0]}"
    deadline = time.monotonic() + timeout
    while True:
        try:
            with frozen.patient_with(chief):
                return ask_grpc(host, port, 1.0)
        except OSError as error:
            if time.monotonic() > deadline:
                raise PeerError(
                    f"{chief} has not started TensorFlow after "
                    f"{timeout:.0f} s (--startup_timeout): {error}"
                ) from error
        time.sleep(0.02)
