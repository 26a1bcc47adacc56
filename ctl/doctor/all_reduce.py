"""Checks the all-reduce: `ctl.doctor.sums` runs on all workers, and every sum must be right."""

from __future__ import annotations

import dataclasses

from ctl.base.units import size_text
from ctl.distributed.cluster.members import Cluster
from ctl.distributed.watch.beats import from_json
from ctl.doctor.checks import Job
from ctl.doctor.program import Failed, answer_of
from ctl.doctor.report import Finding, fine, not_fine, skipped

_STARTUP_SECONDS = 60.0
MOST_SECONDS = 120.0  # beside those of the sums: TensorFlow loads, the workers meet, one is stuck


@dataclasses.dataclass(frozen=True)
class Sums:
    """What `ctl.doctor.sums.checked_sums` returns."""

    sums: int
    bytes: int
    replicas: int
    wrong: int
    seconds: float


def why_not(job: Job) -> str:
    """Why the workers cannot sum; "" if they can."""
    if len(job.reports) < len(job.workers):
        return "some workers were not heard"
    if any(not report.versions for report in job.reports.values()):
        return "TensorFlow cannot be used"
    if any(link.refused for *_, link in job.links()):
        return "some workers cannot reach others, see tcp"
    if any(0.0 in (link.send, link.receive) for *_, link in job.links()):
        return "a link carries nothing, see bandwidth"
    return ""


def check_all_reduce(job: Job, cluster: Cluster | None, seconds: float) -> list[Finding]:
    """All sums of some ``seconds`` are right; on GPUs, NCCL carries them."""
    least = 1 if cluster else 2
    on_gpus = all(report.gpus >= least for report in job.reports.values())
    no_nccl = "" if on_gpus else "no GPU"
    if not on_gpus and any(report.gpus for report in job.reports.values()):
        no_nccl = "not all workers have GPUs" if cluster else "a single GPU"
    if why := why_not(job) or ("" if seconds else "--all_reduce_seconds=0"):
        return [skipped("all_reduce", why), skipped("nccl", no_nccl or why)]
    environ = {"TF_CONFIG": cluster.tf_config()} if cluster else {}
    if not on_gpus:
        environ["CUDA_VISIBLE_DEVICES"] = "-1"
    arguments = str(seconds), "nccl" if on_gpus and cluster else "auto", str(_STARTUP_SECONDS)
    try:
        answer = answer_of(
            "ctl.doctor.sums",
            *arguments,
            doing="the all-reduce",
            seconds=seconds + MOST_SECONDS,
            **environ,
        )
    except Failed as error:
        found = not_fine("all_reduce", str(error), "See what is not fine above.")
        if no_nccl:
            return [found, skipped("nccl", no_nccl)]
        remedy = "See what NCCL says, and name its network device in NCCL_SOCKET_IFNAME:"
        return [found, not_fine("nccl", "see all_reduce", remedy, "export NCCL_DEBUG=INFO")]
    sums = from_json(Sums, answer, "the sums")
    return [judged(sums), skipped("nccl", no_nccl) if no_nccl else fine("nccl", "carried the sums")]


def judged(sums: Sums) -> Finding:
    """Every element of every sum must be right."""
    what = f"{sums.sums} sums of {size_text(sums.bytes)} over {sums.replicas} replicas"
    if sums.wrong:
        remedy = "Memory, a processor or a network device is broken: leave this machine out."
        return not_fine("all_reduce", f"{what}: {sums.wrong} elements are wrong", remedy)
    # Bytes on each link of a ring: nccl-tests, doc/PERFORMANCE.md, "AllReduce".
    bus = sums.bytes / sums.seconds * 2 * (sums.replicas - 1) / sums.replicas / 1e9
    each = f"{1e3 * sums.seconds:.1f} ms each, {bus:.2f} GB/s on a link"
    return fine("all_reduce", f"{what} are right, {each}")
