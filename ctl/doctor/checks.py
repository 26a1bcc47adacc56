"""Checks of a job: what the reports of its workers say of them, and of the ways between them.

Each takes the job, and returns what is not fine, or else one finding.
"""

from __future__ import annotations

import dataclasses
import ipaddress
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from ctl.base.differences import differences
from ctl.doctor import firewall
from ctl.doctor.report import PACKAGES, Finding, Link, Report, fine, not_fine, skipped

SLOW = 0.5  # of the fastest, or of the median: a part that slower workers or links must reach
MOST_CLOCK_SECONDS = 1.0
MOST_LATENCY_MS = 5.0
LEAST_MEGABYTES = 50.0  # per second; Ethernet of 1 Gbit/s carries 117


@dataclasses.dataclass(frozen=True)
class Job:
    """The workers of a job, each ``host:port``, and the reports of those that were heard."""

    workers: Sequence[str]
    reports: Mapping[int, Report]

    def links(self) -> Iterator[tuple[int, int, Link]]:
        """Worker, other worker, and the way to it that the first one sees."""
        for i, report in sorted(self.reports.items()):
            for j, link in sorted(report.links.items()):
                yield i, j, link

    def between_machines(self, i: int, j: int) -> bool:
        """Whether two workers are on two machines, as far as is known."""
        return j not in self.reports or self.reports[i].host != self.reports[j].host

    def host(self, i: int) -> str:
        """The name of a worker's machine in the list of workers."""
        return self.workers[i].rpartition(":")[0]

    def port(self, i: int) -> str:
        """The port of a worker."""
        return self.workers[i].rpartition(":")[2]

    def way(self, i: int, j: int, link: Link) -> str:
        """A way in words."""
        return f"{_who(i)} to {_who(j)} ({link.address}:{self.port(j)})"

    def opening(self, j: int, link: Link, protocol: str) -> str:
        """The command that opens the port of ``j`` to the other end of ``link``."""
        tool = self.reports[j].firewall if j in self.reports else ""
        return firewall.opening(tool, link.own, self.port(j), protocol)

    def ways(self) -> str:
        """How many ways the reports describe."""
        count = sum(1 for _ in self.links())
        return "both ways" if count == 2 else f"all {count} ways"


def check_versions(job: Job) -> list[Finding]:
    """All workers have the same versions."""
    known = {i: report.versions for i, report in job.reports.items() if report.versions}
    if not known:
        return [skipped("versions", "TensorFlow cannot be used")]
    differ = differences([*known.values()])
    found = []
    for name, values in differ.items():
        places = {
            value: [i for i, v in zip(known, values, strict=True) if v == value] for value in values
        }
        seen = ", ".join(f"{value} on {_who(*who)}" for value, who in places.items())
        same = f"pip install '{name}=={max(values, key=values.count)}'"
        command = same if name in PACKAGES else ""
        remedy = f"Install the same on all workers{':' if command else '.'}"
        found.append(not_fine("versions", f"{name} is {seen}", remedy, command))
    one = next(iter(known.values()))
    return found or [fine("versions", ", ".join(f"{n} {v}" for n, v in one.items()))]


def check_memory(job: Job) -> list[Finding]:
    """No machine copies memory much more slowly than another one."""
    return _rates("memory", job, lambda report: report.copied, "GB/s copied by a thread")


def check_matmul(job: Job) -> list[Finding]:
    """No machine multiplies matrices much more slowly than another one."""
    return _rates("matmul", job, lambda report: report.gflops, "GFLOP/s in float32")


def _rates(check: str, job: Job, rate: Callable[[Report], float], unit: str) -> list[Finding]:
    measured = {i: rate(report) for i, report in job.reports.items() if rate(report)}
    if not measured:
        return [skipped(check, "TensorFlow cannot be used")]
    best = max(measured, key=lambda i: measured[i])
    slow = [
        not_fine(
            check,
            f"{_who(i)}: {_number(value)} {unit}, {_who(best)}: {_number(measured[best])}",
            "See what else runs there, and whether its processor is throttled: all wait for it.",
        )
        for i, value in measured.items()
        # Processes of one machine share its cores, and disturb each other here.
        if value < SLOW * measured[best] and job.between_machines(i, best)
    ]
    return slow or [fine(check, f"{_range(measured.values())} {unit}")]


def check_workers(job: Job) -> list[Finding]:
    """The doctors of all workers have been heard."""
    missing = [i for i in range(len(job.workers)) if i not in job.reports]
    if not missing:
        return [fine("workers", f"all {len(job.workers)} were heard")]
    remedy = "Start the doctor on all machines at once. If it runs there, see tcp."
    return [not_fine("workers", f"nothing was heard of {_who(*missing)}", remedy)]


def check_hosts(job: Job) -> list[Finding]:
    """The host names of the others have addresses, which are those of other machines."""
    found = []
    for i, j, link in job.links():
        host = job.host(j)
        if not link.address:
            found.append(
                not_fine(
                    "hosts",
                    f"{_who(i)} finds no address of {host}, {_who(j)}: {link.unresolved}",
                    f"Correct the name, or add its address to /etc/hosts of {_who(i)}.",
                )
            )
        elif link.refused and _is_loopback(link.address) and not _is_loopback(host):
            found.append(
                not_fine(
                    "hosts",
                    f"{_who(i)} takes {host}, {_who(j)}, for itself ({link.address})",
                    f"Give {host} its address in /etc/hosts of {_who(i)}.",
                )
            )
    addresses = ", ".join(sorted({link.address for *_, link in job.links()}))
    return found or [fine("hosts", f"have addresses: {addresses}")]


def check_tcp(job: Job) -> list[Finding]:
    """Every worker reaches every other one at its TCP port."""
    found = []
    for i, j, link in job.links():
        if not link.refused or not link.address:
            continue
        if link.stranger:
            remedy = "Give all the same --workers and CTL_JOB_SECRET, and each its --worker_index."
            found.append(not_fine("tcp", f"{_who(i)}: {link.refused}", remedy))
            continue
        back = job.reports[j].links.get(i) if j in job.reports else None
        there = link.came or bool(back and not back.refused)
        more = ", but the other way is open" if there else ""
        found.append(
            not_fine(
                "tcp",
                f"{job.way(i, j, link)}: {link.refused}{more}",
                f"Open the port on {_who(j)}, as root:"
                if there
                else f"Start the doctor on {_who(j)}, too, and open its port, as root:",
                job.opening(j, link, "tcp"),
            )
        )
    return found or [fine("tcp", f"{job.ways()} are open")]


def check_udp(job: Job) -> list[Finding]:
    """Every worker hears the datagrams of every other one: beats, by which messages about a hang
    name the worker that others wait for."""
    found, unknown = [], []
    for i, j, link in job.links():
        if link.heard is None:
            unknown.append((i, j))
        elif not link.heard:
            found.append(
                not_fine(
                    "udp",
                    f"{job.way(i, j, link)}: nothing arrives",
                    f"Open the port on {_who(j)}, as root:",
                    job.opening(j, link, "udp"),
                )
            )
        elif link.heard < link.sent - 1:
            found.append(
                not_fine(
                    "udp",
                    f"{job.way(i, j, link)}: {link.sent - link.heard} of {link.sent} "
                    "datagrams were lost",
                    "Look for a bad cable, a full switch or a wireless link: all-reduces wait for "
                    "what is sent again.",
                )
            )
    return found or _measured("udp", unknown, f"{job.ways()} are open")


def check_mtu(job: Job) -> list[Finding]:
    """Packets as large as the devices send arrive."""
    found, unknown, sizes = [], [], set()
    for i, j, link in job.links():
        if not link.heard or link.large_heard is None:
            unknown.append((i, j))
        elif not link.large_heard:
            found.append(
                not_fine(
                    "mtu",
                    f"{_who(i)} sends packets of {link.mtu} bytes, which do not arrive at "
                    f"{_who(j)}",
                    f"Give all devices on the way the same MTU, or {_who(i)} a smaller one, as "
                    "root:",
                    f"ip link set dev {link.device} mtu 1500",
                )
            )
        else:
            sizes.add(link.mtu or 0)
    return found or _measured("mtu", unknown, f"{_range(sizes)} bytes")


def check_clock(job: Job) -> list[Finding]:
    """The clocks agree within a second: by them, the records of a hang are put side by side."""
    found, unknown, offsets, told = [], [], [0.0], set()
    for i, j, link in job.links():
        if link.clock is None:
            unknown.append((i, j))
            continue
        offsets.append(link.clock)
        if link.clock > MOST_CLOCK_SECONDS and (j, i) not in told:
            told.add((i, j))
            how = "ahead of" if link.ahead else "behind"
            found.append(
                not_fine(
                    "clock",
                    f"that of {_who(j)} is {link.clock:.1f} s {how} that of {_who(i)}",
                    "Let a time server set both:",
                    "timedatectl set-ntp true",
                )
            )
    return found or _measured("clock", unknown, f"all agree within {max(offsets) + 0.001:.3f} s")


def check_latency(job: Job) -> list[Finding]:
    """Messages are on the way for a short time: every all-reduce waits for several."""
    found, unknown, typical = [], [], []
    for i, j, link in job.links():
        if link.latency is None or link.typical is None:
            unknown.append((i, j))
            continue
        typical.append(link.typical)
        if link.latency > MOST_LATENCY_MS:
            found.append(
                not_fine(
                    "latency",
                    f"{job.way(i, j, link)} and back takes {link.latency:.1f} ms or more",
                    "Put the machines into one place or zone: every all-reduce waits for several "
                    "messages.",
                )
            )
    return found or _measured("latency", unknown, f"{_range(typical)} ms for a round trip")


def check_bandwidth(job: Job) -> list[Finding]:
    """No link is slower than gradients need, or much slower than the others of the job."""
    found, unknown = [], []
    rates: dict[tuple[int, int], float] = {}
    for i, j, link in job.links():
        if i < j and (link.send is None or link.receive is None):
            unknown.append((i, j))
        elif i < j:
            rates |= {(i, j): link.send or 0.0, (j, i): link.receive or 0.0}
    between = [rate for (i, j), rate in rates.items() if job.between_machines(i, j)]
    usual = statistics.median(between) if between else 0.0
    for (i, j), rate in rates.items():
        slow = job.between_machines(i, j) and rate < SLOW * usual
        if rate < LEAST_MEGABYTES or slow:
            more = f", others {_number(usual)}" if rate >= LEAST_MEGABYTES else ""
            found.append(
                not_fine(
                    "bandwidth",
                    f"{_who(i)} to {_who(j)}: {_number(rate)} MB/s{more}",
                    "Look at the speed of both network devices (ethtool), at mtu and udp above, "
                    "and at what else uses the link.",
                )
            )
    return found or _measured("bandwidth", unknown, f"{_range(rates.values())} MB/s")


def check_shared(job: Job) -> list[Finding]:
    """All workers have one model_dir."""
    found = []
    for i, report in job.reports.items():
        unseen = [j for j, sees in report.shares.items() if not sees]
        if unseen:
            found.append(
                not_fine(
                    "shared",
                    f"{_who(i)} does not see what {_who(*unseen)} wrote to --model_dir",
                    "Give all workers the same directory of a file system that all have mounted.",
                )
            )
        elif report.torn:
            found.append(
                not_fine(
                    "shared",
                    f"{_who(i)}: {report.torn} of {report.reads} reads of files that others "
                    "replaced met no file or half of one",
                    "A rename is not atomic there. Choose a --model_dir on an NFS or a file system "
                    "of the cluster.",
                )
            )
    silent = [i for i, report in job.reports.items() if not report.writes]
    if silent and not found:
        return [skipped("shared", f"{_who(*silent)} wrote to no --model_dir")]
    reads = sum(report.reads for report in job.reports.values())
    return found or [fine("shared", f"all see one model_dir; {reads} reads met whole files")]


def check_job(job: Job) -> list[Finding]:
    """All checks above; those between workers if there are several."""
    checks = [check_versions, check_memory, check_matmul]
    if len(job.workers) > 1:
        checks += [check_workers, check_hosts, check_tcp, check_udp, check_mtu, check_clock]
        checks += [check_latency, check_bandwidth, check_shared]
    return [finding for check in checks for finding in check(job)]


def _measured(check: str, unknown: Sequence[tuple[int, int]], seen: str) -> list[Finding]:
    """Fine, unless some ways could not be measured."""
    if not unknown:
        return [fine(check, seen)]
    ways = ", ".join(f"{i} to {j}" for i, j in unknown[:4]) + (" …" if len(unknown) > 4 else "")
    return [skipped(check, f"not measured between workers {ways}; see tcp and udp")]


def _range(values: Iterable[float]) -> str:
    """The smallest and the largest of some numbers, with three digits."""
    shown = [_number(value) for value in sorted(values)]
    return " to ".join(dict.fromkeys((shown[0], shown[-1]))) if shown else "no"


def _number(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _who(*workers: int) -> str:
    return f"worker{'s' if len(workers) > 1 else ''} {', '.join(map(str, workers))}"


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
