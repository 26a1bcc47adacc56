"""The order of the checks: of this machine alone, and together with the other workers of a job."""

from __future__ import annotations

import contextlib
import dataclasses
import socket
from collections.abc import Mapping
from typing import Any

from ctl.distributed.cluster.members import Cluster
from ctl.distributed.watch.beats import from_json
from ctl.doctor import all_reduce, firewall, links, machine
from ctl.doctor.checks import Job, check_job
from ctl.doctor.peers import Peers
from ctl.doctor.program import say
from ctl.doctor.report import FINE, Report, not_fine
from ctl.doctor.shared import see
from ctl.doctor.storage import check_model_dir
from ctl.doctor.table import Row, merged
from ctl.errors import PeerError

_STAGE_SECONDS = 60.0  # for the slowest worker


def alone(model_dir: str | None, seconds: float) -> list[Row]:
    """Checks this machine; sums over its devices for so many ``seconds``."""
    job = Job([""], {0: _here(model_dir)})
    return _rows(job, {0: all_reduce.run(job, None, seconds)})


def together(
    cluster: Cluster, model_dir: str | None, seconds: float, timeout: float
) -> tuple[list[Row], set[int]]:
    """Checks this machine, and what is between the workers of ``cluster``, which call this at once.

    Args:
        cluster: the workers.
        model_dir: the directory that all should see; None for none.
        seconds: for which the workers sum; 0 leaves it out.
        timeout: seconds to wait for the others to come.

    Returns:
        What was found, and the workers that were heard, this one included.
    """
    here, me = _here(model_dir), cluster.index
    try:
        peers = Peers(cluster, timeout)
    except PeerError as error:
        remedy = "End what uses the port, or choose another one. This shows what it is, as root:"
        port = cluster.workers[me].rpartition(":")[2]
        taken = not_fine("port", str(error), remedy, f"ss -tulpn | grep :{port}")
        here = dataclasses.replace(here, findings=(*here.findings, taken))
        return _rows(Job(cluster.workers, {me: here}), {}), {me}
    with peers:
        peers.meet()
        usable = model_dir if here.findings[-1].state == FINE else None
        here = dataclasses.replace(here, links=links.measure(peers), **see(peers, usable))
        told = _told(peers, "report", dataclasses.asdict(here), Report, _STAGE_SECONDS)
        reports = dict(sorted(({me: here} | told).items()))
        job = Job(cluster.workers, reports)
        peers.close_port()
        peers.exchange("port closed", None, _STAGE_SECONDS)  # TensorFlow needs it
        own = all_reduce.run(job, cluster, seconds)
        limit = seconds + all_reduce.MOST_SECONDS
        told = _told(peers, "sums", dataclasses.asdict(own), all_reduce.Sums, limit)
        silent = dict.fromkeys(reports, all_reduce.Sums(failed="its doctor was lost"))
        sums = silent | {me: own} | told
    return _rows(job, sums), set(reports)


def _here(model_dir: str | None) -> Report:
    say("checks this machine")
    tensorflow, probe = machine.check_tensorflow()
    findings = (
        tensorflow,
        machine.check_devices(probe),
        machine.check_cores(),
        machine.check_names(),
        machine.check_loopback(),
        check_model_dir(model_dir),  # the last, see `together`
    )
    return Report(
        host=socket.gethostname(),
        versions=probe.versions,
        findings=findings,
        gpus=len(probe.gpus),
        copied=probe.copied,
        gflops=probe.gflops,
        firewall=firewall.tool(),
    )


def _told(peers: Peers, stage: str, value: Any, kind: Any, seconds: float) -> dict[int, Any]:
    """Tells ``value`` to the others. Returns what they tell within ``seconds``, each a ``kind``."""
    told = {}
    for worker, theirs in peers.exchange(stage, value, seconds).items():
        with contextlib.suppress(ValueError):  # of another version of ctl
            told[worker] = from_json(kind, theirs, stage)
    return told


def _rows(job: Job, sums: Mapping[int, all_reduce.Sums]) -> list[Row]:
    local = {worker: report.findings for worker, report in job.reports.items()}
    of_job = check_job(job) + (all_reduce.check_all_reduce(job, sums) if sums else [])
    return merged(local) + [Row(finding, ()) for finding in of_job]
