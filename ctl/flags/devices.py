"""The flags of devices, workers and parameter servers."""

from __future__ import annotations

import os
from typing import Any

from absl import flags

from ctl.base import names
from ctl.distributed import cluster
from ctl.errors import UsageError
from ctl.flags.parsing import check_flags, group

flags.disclaim_key_flags()  # They belong to the command that calls a group.


def define_device_flags(training: bool = True) -> None:
    """Defines the flags of `ctl.distributed.strategy`: devices and, if ``training``, several
    workers."""
    with group("Devices"):
        flags.DEFINE_enum(
            "strategy",
            "auto",
            names.STRATEGIES,
            "Distribution strategy. auto: mirrored for several replicas, otherwise one_device on "
            "a GPU and default on a CPU.",
        )
        flags.DEFINE_integer(
            "replicas",
            None,
            "Replicas on this machine (default: all visible GPUs, or 1). Without GPUs, the CPU is "
            "split into this many logical devices.",
            lower_bound=1,
        )
        flags.DEFINE_enum(
            "cross_device_ops",
            "auto",
            names.CROSS_DEVICE_OPS,
            "How mirrored replicas all-reduce. auto: the method measured to be fastest on the "
            "kind of device.",
        )
        flags.DEFINE_string(
            "tpu", "", "TPU, for --strategy=tpu: a name, local, or grpc://host:port."
        )
    check_flags(["strategy", "replicas", "tpu", "cross_device_ops"], _check_devices)
    if training:
        _define_worker_flags()
        check_flags(["global_batch_size", "replicas", "accumulate_steps"], _check_batch)


def define_address_flags() -> None:
    """Defines the flags that say who the workers of a job are; call it in a `group`."""
    flags.DEFINE_list(
        "workers",
        None,
        "HOST:PORT of every worker, the same list on each (default: from TF_CONFIG, as set by "
        "ctl.launch, or from Slurm).",
    )
    flags.DEFINE_integer("worker_index", None, "Index of this process in --workers.", lower_bound=0)


def _define_worker_flags() -> None:
    with group("Several workers (--strategy=multi_worker or parameter_server)"):
        define_address_flags()
        flags.DEFINE_enum(
            "communication", "auto", names.COMMUNICATIONS, "How workers all-reduce; ring uses gRPC."
        )
        flags.DEFINE_float(
            "startup_timeout",
            300.0,
            "Seconds to wait for the other workers to start, load their data and build their "
            "model.",
            lower_bound=1,
        )
        flags.DEFINE_float(
            "collective_timeout",
            300.0,
            "Seconds without progress after which an all-reduce counts as failed. With parameter "
            "servers: seconds without a finished step.",
            lower_bound=1,
        )
        flags.DEFINE_float(
            "worker_timeout",
            60.0,
            "With parameter servers: seconds to wait for a worker when none is connected.",
            lower_bound=1,
        )
    check_flags(
        ["strategy", "replicas", "workers", "worker_index", "communication"], _check_workers
    )
    check_flags(["strategy", *_LIMITS], _check_limits)


# Time limits, and the strategies that have them.
_LIMITS = {
    "startup_timeout": ("multi_worker", "parameter_server"),
    "collective_timeout": ("multi_worker", "parameter_server"),
    "worker_timeout": ("parameter_server",),
}


def _check_limits(strategy: str, **limits: float) -> None:
    for name, value in limits.items():
        if strategy not in _LIMITS[name] and value != flags.FLAGS[name].default:
            needed = " or ".join(_LIMITS[name])
            raise UsageError(f"--{name} has no effect without --strategy={needed}: leave it out")


def _check_workers(
    strategy: str,
    replicas: int | None,
    workers: list[str] | None,
    worker_index: int | None,
    communication: str,
) -> None:
    if strategy == "multi_worker":
        if replicas is not None:
            raise UsageError("--replicas is for one machine; multi_worker uses every visible GPU")
        cluster.resolve(workers, worker_index)
    elif workers or worker_index is not None:
        raise UsageError("--workers and --worker_index need --strategy=multi_worker")
    elif strategy != "parameter_server" and communication != "auto":
        raise UsageError("--communication has no effect without --strategy=multi_worker")
    elif strategy == "parameter_server":
        if replicas is not None:
            raise UsageError("--replicas is for one machine; a parameter_server job has N workers")
        cluster.resolve_tasks()
    elif fitting := cluster.strategy_for(os.environ):
        raise UsageError(
            "this process is one of several that ctl.launch has started or TF_CONFIG names: add "
            f"--strategy={fitting}"
        )


def _check_devices(strategy: str, replicas: int | None, tpu: str, cross_device_ops: str) -> None:
    if strategy in ("one_device", "default") and (replicas or 1) > 1:
        raise UsageError(f"--strategy={strategy} has one replica, not {replicas}: use mirrored")
    if strategy == "tpu" and not tpu:
        raise UsageError("--strategy=tpu needs --tpu=NAME, --tpu=local or --tpu=grpc://host:port")
    if tpu and strategy != "tpu":
        raise UsageError("--tpu has no effect without --strategy=tpu")
    if cross_device_ops != "auto" and strategy in ("multi_worker", "one_device", "default", "tpu"):
        raise UsageError(f"--cross_device_ops has no effect with --strategy={strategy}")
    if cross_device_ops == "hierarchical_copy" and replicas not in (None, 1) and replicas % 2:
        raise UsageError(
            f"--cross_device_ops=hierarchical_copy sums an odd number of replicas wrongly, as "
            f"--replicas={replicas}: use reduction_to_one_device, or an even number"
        )


def _check_batch(global_batch_size: int, replicas: int | None, accumulate_steps: int) -> None:
    if replicas and global_batch_size % replicas:
        more = -(-global_batch_size // replicas) * replicas
        raise UsageError(
            f"--global_batch_size={global_batch_size} is not divisible by --replicas={replicas}; "
            f"{more} is"
        )
    examples = global_batch_size // (replicas or 1)
    if accumulate_steps > examples:
        raise UsageError(
            f"--accumulate_steps={accumulate_steps}, but a replica has {examples} examples: use "
            f"{examples} or less"
        )


# Flags that need an all-reduce or local variables, with their defaults.
_NOT_ASYNCHRONOUS = {
    "cross_device_ops": ("auto", "there is no all-reduce"),
    "communication": ("auto", "there is no all-reduce"),
    "bytes_per_pack": (0, "there is no all-reduce"),
    "jit_compile": ("rule", "XLA cannot read variables of another process"),
    "inspect_every": (None, "there is no all-reduce"),
    "check_replicas_every": (None, "there is one copy of the weights"),
    "profile_steps": (None, "no step runs in the coordinator, whose profile that would be"),
}


def check_asynchronous_flags() -> None:
    """Checks that no flag is set that parameter servers do not support.

    Call it once all groups are defined.
    """
    check_flags(["strategy", *_NOT_ASYNCHRONOUS], _check_asynchronous)


def _check_asynchronous(strategy: str, **values: Any) -> None:
    for name, (default, why) in _NOT_ASYNCHRONOUS.items():
        if strategy == "parameter_server" and values[name] != default:
            raise UsageError(f"--{name} does not work with --strategy=parameter_server: {why}")
