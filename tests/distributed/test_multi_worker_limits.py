"""Workers that wait for one that is lost, frozen or late: they end in time and say why."""

from __future__ import annotations

import re
import time

import pytest
from worker_jobs import assert_codes, codes, last_line, run_job, said

from ctl import launch
from ctl.distributed.watch import hang
from ctl.inspect.commands import hang as hang_command

pytestmark = pytest.mark.slow  # starts processes


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
    ("fault", "culprit", "timeout", "bound", "what", "blamed"),
    [
        ("kill", 0, 10, 12, "broke off", "gone: "),
        ("raise", 1, 10, 15, "broke off", "gone: "),
        ("freeze", 1, 8, 25, "(timed out|broke off)", "frozen or dead: silent for "),
        ("freeze", 0, 8, 25, "(timed out|broke off)", "frozen or dead: silent for "),
        ("absent", 1, 8, 25, "timed out", "in the action Faulty after step 5 "),
    ],
)
def test_survivors_end_in_time_and_say_why(
    job, tmp_path, fault, culprit, timeout, bound, what, blamed
):
    survivors, seconds = end_of(job, tmp_path, fault, culprit, f"timeout={timeout}", "loop=1")
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
    options = "timeout=8", "place=saving", "step=10"
    survivors, seconds = end_of(job, tmp_path, "absent", 0, *options)
    assert seconds < 25
    for index in survivors:
        doing = "comparing the replicas after step 10"
        line = rf"worker {index} of 3: a collective in {doing} timed out: "
        blamed = r"waiting for worker 0 \(in saving after step 10 "
        assert re.search(f"{line}.*; {blamed}", said(tmp_path, index))


@pytest.mark.parametrize(
    ("fault", "culprit", "bound", "what", "blamed"),
    [
        ("kill", 1, 25, "broke off", "gone: "),
        ("raise", 0, 25, "broke off", "gone: "),
        ("absent", 0, 30, "timed out", "in host code "),
        ("freeze", 1, 25, "(timed out|broke off)", "frozen or dead: silent for "),
    ],
)
def test_while_the_model_is_built(job, tmp_path, fault, culprit, bound, what, blamed):
    """The others wait for its variables: in code of users, before there is a loop."""
    limits = ("startup=11", "quiet=3") if fault == "absent" else ("startup=14",)
    survivors, seconds = end_of(job, tmp_path, fault, culprit, "place=building", *limits)
    assert seconds < bound
    blamed = rf"worker {culprit} \({blamed}"
    for index in survivors:
        building = rf"worker {index} of 3: a collective in making variables {what}: "
        assert re.search(rf"{building}.*; waiting for {blamed}", said(tmp_path, index))
        if fault == "absent":
            early = rf"worker {index} has waited \d+ s in making variables for {blamed}"
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


def test_a_peer_that_never_comes(job, tmp_path):
    addresses = launch.cluster(2)["worker"]
    limits = "startup=4", "quiet=2"
    run_job(job, tmp_path, *limits, workers=1, addresses=addresses, code=5)
    absent = f"worker 1 at {addresses[1]} (Connection refused)"
    assert f"worker 0 has waited 2 s for {absent}" in said(tmp_path, 0)
    assert f"gave up after 4 s (--startup_timeout) waiting for {absent}" in last_line(tmp_path, 0)
