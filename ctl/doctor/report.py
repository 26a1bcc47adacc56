"""What a check finds, and what a doctor tells the doctors of the other workers.

Plain values, which travel as JSON and are read by `ctl.distributed.watch.beats.from_json`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

# Workers whose versions differ may compute other numbers, or not understand each other.
PACKAGES = ("tensorflow", "keras", "numpy")

FINE, NOT_FINE, SKIPPED = "fine", "not fine", "skipped"


@dataclasses.dataclass(frozen=True)
class Finding:
    """What one check found.

    Attributes:
        check: name of the check, one word.
        state: `FINE`, `NOT_FINE` or `SKIPPED`.
        seen: what was seen, or why it was skipped.
        remedy: what to do; "" where there is nothing to do.
        command: a line to paste into a shell for that, or "".
    """

    check: str
    state: str
    seen: str
    remedy: str
    command: str


def fine(check: str, seen: str) -> Finding:
    return Finding(check, FINE, seen, "", "")


def not_fine(check: str, seen: str, remedy: str, command: str = "") -> Finding:
    return Finding(check, NOT_FINE, seen, remedy, command)


def skipped(check: str, why: str) -> Finding:
    return Finding(check, SKIPPED, why, "", "")


@dataclasses.dataclass(frozen=True)
class Link:
    """What a worker sees of the way to another one. Numbers that were not measured are None.

    Attributes:
        address: the IP address of the other's host name; "" if it has none.
        unresolved: why it has none.
        own: the IP address of this worker on the way there.
        device: the network device that has this address.
        refused: why the other cannot be reached over TCP; "" if it can.
        stranger: whether what answers there is no doctor of this job, or that of another worker.
        came: whether the other has reached this worker.
        sent, heard: small datagrams that were sent to the other, and those that it heard.
        mtu: bytes of the largest packet that the device sends.
        large_heard: of `links.LARGE` datagrams of that size, those that the other heard.
        latency, typical: milliseconds of a round trip, the shortest and the median.
        clock: seconds between both clocks, at least.
        ahead: whether the clock of the other is ahead.
        send, receive: megabytes (1e6 bytes) per second, the best of some tries.
    """

    address: str = ""
    unresolved: str = ""
    own: str = ""
    device: str = ""
    refused: str = ""
    stranger: bool = False
    came: bool = False
    sent: int = 0
    heard: int | None = None
    mtu: int | None = None
    large_heard: int | None = None
    latency: float | None = None
    typical: float | None = None
    clock: float | None = None
    ahead: bool = False
    send: float | None = None
    receive: float | None = None


@dataclasses.dataclass(frozen=True)
class Report:
    """What the doctor of a worker found.

    Attributes:
        host: the name of its machine.
        versions: of Python and packages, by name; empty if TensorFlow cannot be loaded.
        findings: of its own machine.
        gpus: the number of GPUs that TensorFlow sees.
        copied: gigabytes (1e9 bytes) per second that are copied in memory; 0 if unknown.
        gflops: 1e9 FLOPs per second of a matrix product; 0 if unknown.
        firewall: the program that sets up its firewall, see `firewall.TOOLS`; "" if none is there.
        writes: whether it wrote a file to --model_dir for the others.
        shares: for each other worker that did, whether this one sees its file.
        reads, torn: reads of files of others there while they were replaced; those that failed.
        links: the way to each other worker.
    """

    host: str
    versions: Mapping[str, str]
    findings: tuple[Finding, ...]
    gpus: int
    copied: float
    gflops: float
    firewall: str
    writes: bool = False
    shares: Mapping[int, bool] = dataclasses.field(default_factory=dict)
    reads: int = 0
    torn: int = 0
    links: Mapping[int, Link] = dataclasses.field(default_factory=dict)
