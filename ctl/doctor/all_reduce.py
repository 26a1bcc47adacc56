"""The all-reduce: `ctl.doctor.sums` runs on all workers, and every sum must be right."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

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
    """What `ctl.doctor.sums.checked_sums` returned on a worker; or why it ``failed``, or was
    ``left_out`` on all of them."""

    failed: str = ""
    left_out: str = ""
    sums: int = 0
    bytes: int = 0
    replicas: int = 0
    wrong: int = 0
    seconds: float = 0.0


def why_not(job: Job, seconds: float) -> str:
    """Why the workers do not sum; "" if they do."""
    if not seconds:
        return "--all_reduce_seconds=0"
    if len(job.reports) < len(job.workers):
        return "some workers were not heard"
    if any(not report.versions for report in job.reports.values()):
        return "TensorFlow cannot be used"
    if any(link.refused for *_, link in job.links()):
        return "some workers cannot reach others, see tcp"
    if any(0.0 in (link.send, link.receive) for *_, link in job.links()):
        return "a link carries nothing, see bandwidth"
    return ""


def why_no_nccl(job: Job) -> str:
    """Why NCCL does not carry the sums; "" if it does."""
    gpus = [report.gpus for report in job.reports.values()]
    if not any(gpus):
        return "no GPU"
    if len(job.workers) == 1:
        return "" if gpus[0] > 1 else "a single GPU"
    return "" if all(gpus) else "not all workers have GPUs"


def run(job: Job, cluster: Cluster | None, seconds: float) -> Sums:
    """Sums for so many ``seconds``; over the devices of this machine if ``cluster`` is None. All
    workers call it at once."""
    if left_out := why_not(job, seconds):
        return Sums(left_out=left_out)
    environ = {"TF_CONFIG": cluster.tf_config()} if cluster else {}
    nccl = not why_no_nccl(job)
    if not nccl:
        environ["CUDA_VISIBLE_DEVICES"] = "-1"
    arguments = str(seconds), "nccl" if nccl else "ring", str(_STARTUP_SECONDS)
    limit = seconds + MOST_SECONDS
    try:
        answer = answer_of(
            "ctl.doctor.sums", *arguments, doing="the all-reduce", seconds=limit, **environ
        )
    except Failed as error:
        return Sums(failed=str(error))
    return from_json(Sums, dataclasses.asdict(Sums()) | answer, "the sums")


def check_all_reduce(job: Job, of_all: Mapping[int, Sums]) -> list[Finding]:
    """Every element of every sum is right, and on GPUs, NCCL carries them."""
    found = []
    for worker, sums in of_all.items():
        who = f"worker {worker}: " if len(job.workers) > 1 else ""
        if sums.failed:
            found.append(
                not_fine("all_reduce", f"{who}{sums.failed}", "See what is not fine above.")
            )
        elif sums.wrong:
            found.append(
                not_fine(
                    "all_reduce",
                    f"{who}{sums.wrong} elements of {sums.sums} sums are wrong",
                    "Memory, a processor or a network device is broken. Leave out one machine "
                    "after the other to find it.",
                )
            )
    slowest = max(of_all.values(), key=lambda sums: sums.seconds)
    why = why_no_nccl(job) or slowest.left_out
    if slowest.left_out:
        return [skipped("all_reduce", slowest.left_out), skipped("nccl", why)]
    if not found:
        # Bytes on each link of a ring: nccl-tests, doc/PERFORMANCE.md, "AllReduce".
        on_link = 2 * (slowest.replicas - 1) / slowest.replicas * slowest.bytes
        seen = (
            f"{slowest.sums} sums of {size_text(slowest.bytes)} over {slowest.replicas} replicas "
            f"are right; {1e3 * slowest.seconds:.1f} ms each, "
            f"{on_link / slowest.seconds / 1e9:.2f} GB/s on a link"
        )
        nccl = skipped("nccl", why) if why else fine("nccl", "carried the sums")
        return [fine("all_reduce", seen), nccl]
    if why:
        return [*found, skipped("nccl", why)]
    remedy = "See what NCCL says, and name its network device in NCCL_SOCKET_IFNAME:"
    return [*found, not_fine("nccl", "see all_reduce", remedy, "export NCCL_DEBUG=INFO")]
