"""Checks of this machine alone: TensorFlow, devices, cores, names and ports."""

from __future__ import annotations

import dataclasses
import os
import socket
import subprocess
from collections.abc import Mapping
from pathlib import Path

from ctl.base import console
from ctl.distributed.watch.beats import from_json
from ctl.doctor.program import Failed, answer_of
from ctl.doctor.report import Finding, fine, not_fine, skipped

_PROBE_SECONDS = 180.0  # TensorFlow may be on a slow file system
_NAME_SECONDS = 5.0
_ANSWER_SECONDS = 2.0


@dataclasses.dataclass(frozen=True)
class Probe:
    """What TensorFlow sees, and how fast the machine is; see `ctl.doctor.report.Report`."""

    versions: Mapping[str, str] = dataclasses.field(default_factory=dict)
    gpus: tuple[str, ...] = ()
    cuda: bool = False
    copied: float = 0.0
    gflops: float = 0.0


def check_tensorflow() -> tuple[Finding, Probe]:
    """TensorFlow can be loaded and computes."""
    try:
        answer = answer_of("ctl.doctor.probe", doing="loading TensorFlow", seconds=_PROBE_SECONDS)
    except Failed as error:
        remedy = "Repair the installation until this works:"
        command = f'{console.python()} -c "import tensorflow"'
        return not_fine("tensorflow", f"cannot be used: {error}", remedy, command), Probe()
    probe = from_json(Probe, answer, "the probe")
    return fine("tensorflow", "loads and computes"), probe


def check_devices(probe: Probe) -> Finding:
    """TensorFlow sees all GPUs that the driver has."""
    if not probe.versions:
        return skipped("devices", "TensorFlow cannot be used")
    there, seen = _gpus_of_driver(), len(probe.gpus)
    if seen >= there:
        return fine("devices", ", ".join(probe.gpus) or "a CPU, no GPU")
    what = f"the driver has {there} GPU{'s' if there > 1 else ''}, TensorFlow sees {seen or 'none'}"
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    if hidden is not None:
        return not_fine(
            "devices",
            f"{what}, with CUDA_VISIBLE_DEVICES={hidden}",
            "Unless others use these GPUs:",
            "unset CUDA_VISIBLE_DEVICES",
        )
    if not probe.cuda:
        what += ", since it was built without CUDA"
    return not_fine(
        "devices", what, "Install TensorFlow with CUDA:", "pip install 'tensorflow[and-cuda]'"
    )


def _gpus_of_driver() -> int:
    """The GPUs that ``nvidia-smi`` lists; 0 without it."""
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return sum(line.startswith("GPU ") for line in listed.stdout.splitlines())


def check_cores() -> Finding:
    """The kernel lets this process use all cores for which TensorFlow starts threads."""
    cores, limit = len(os.sched_getaffinity(0)), _cpu_limit()
    if limit is None or limit > cores - 0.5:
        return fine("cores", f"{cores} of {os.cpu_count()}")
    return not_fine(
        "cores",
        f"the limit of the container is {limit:g} cores, TensorFlow starts threads for {cores}",
        "Raise the limit, or start as many threads as it allows:",
        f"export TF_NUM_INTRAOP_THREADS={max(1, int(limit))}",
    )


def _cpu_limit() -> float | None:
    """The cores whose time the control groups of this process allow; None without a limit."""
    limits = []
    for line in Path("/proc/self/cgroup").read_text("utf-8").splitlines():
        _, kinds, path = line.split(":", 2)
        root = Path("/sys/fs/cgroup", *(["cpu"] if "cpu" in kinds.split(",") else []))
        folder = root / path.lstrip("/")
        for place in (folder, *folder.parents):
            if root in (place, *place.parents):
                limits += _quota(place)
    return min(limits, default=None)


def _quota(group: Path) -> list[float]:
    """The cores that one control group allows, of version 2 or 1."""
    try:
        if (group / "cpu.max").exists():
            quota, period = (group / "cpu.max").read_text("utf-8").split()
        else:
            names = ("cpu.cfs_quota_us", "cpu.cfs_period_us")
            quota, period = ((group / name).read_text("utf-8").strip() for name in names)
    except OSError:
        return []
    return [int(quota) / int(period)] if quota.isdecimal() else []  # "max", "-1": none


def check_names() -> Finding:
    """The names of this machine have addresses."""
    host = socket.gethostname()
    for name in ("localhost", host):
        addresses, why = resolve(name)
        if not addresses:
            return not_fine(
                "names",
                f"{name}, a name of this machine, has no address: {why}",
                "Add it to /etc/hosts, as root:",
                f"echo '127.0.0.1 {name}' >>/etc/hosts",
            )
    return fine("names", "localhost and the machine's own name have addresses")


def resolve(name: str) -> tuple[list[str], str]:
    """The IPv4 addresses of a host, or why there are none. A name server has 5 s to answer."""
    found: list[str] = []
    why = [f"no answer after {_NAME_SECONDS:.0f} s"]

    def ask() -> None:
        try:
            answer = socket.getaddrinfo(name, None, socket.AF_INET, socket.SOCK_STREAM)
            found.extend(dict.fromkeys(str(address[0]) for *_, address in answer))
        except (OSError, UnicodeError) as error:
            why[0] = getattr(error, "strerror", None) or str(error)

    console.within(_NAME_SECONDS, ask)
    return list(found), "" if found else why[0]


def check_loopback() -> Finding:
    """Processes of this machine reach each other over TCP and UDP, as those of ctl.launch do."""
    for kind, number in (("TCP", socket.SOCK_STREAM), ("UDP", socket.SOCK_DGRAM)):
        try:
            with (
                socket.socket(socket.AF_INET, number) as server,
                socket.socket(socket.AF_INET, number) as client,
            ):
                for one in (server, client):
                    one.settimeout(_ANSWER_SECONDS)
                server.bind(("127.0.0.1", 0))
                if kind == "TCP":
                    server.listen()
                client.connect(server.getsockname())
                client.send(b"ctl")
                (server.accept()[0] if kind == "TCP" else server).recv(3)
        except OSError as error:
            return not_fine(
                "loopback",
                f"{kind} over 127.0.0.1: {error.strerror or error}",
                "Start the device, and let the firewall accept what it carries:",
                "ip link set lo up",
            )
    return fine("loopback", "TCP and UDP over 127.0.0.1")
