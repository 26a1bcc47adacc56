"""What the reports of a job say, and the table of it."""

from __future__ import annotations

import dataclasses

import pytest

from ctl.doctor import checks, firewall, table
from ctl.doctor.checks import Job
from ctl.doctor.report import FINE, NOT_FINE, SKIPPED, Link, Report, fine, not_fine, skipped

WORKERS = [f"host{i}:2222" for i in range(4)]
LINK = Link("10.0.0.1", own="10.0.0.2", device="eth0", came=True, sent=100, heard=100, mtu=1500)
LINK = dataclasses.replace(LINK, large_heard=5, latency=0.1, typical=0.2, clock=0.0)
LINK = dataclasses.replace(LINK, send=1000.0, receive=1100.0)


def report(worker: int, **more) -> Report:
    links = {j: LINK for j in range(len(WORKERS)) if j != worker}
    versions = {"tensorflow": "2.21"}
    made = Report(f"host{worker}", versions, (), 0, 10.0, 100.0, "", True)
    return dataclasses.replace(made, shares=dict.fromkeys(links, True), links=links, **more)


def job(**more: Report) -> Job:
    return Job(WORKERS, {i: more.get(f"w{i}", report(i)) for i in range(len(WORKERS))})


def wrong(check, of: Job) -> list[str]:
    return [finding.seen for finding in check(of) if finding.state == NOT_FINE]


def with_link(worker: int, other: int, **more) -> Report:
    made = report(worker)
    return dataclasses.replace(made, links={**made.links, other: dataclasses.replace(LINK, **more)})


def test_a_job_without_faults():
    assert {finding.state for finding in checks.check_job(job())} == {FINE}


@pytest.mark.parametrize(
    ("check", "field", "seen"),
    [
        (checks.check_memory, "copied", "worker 2: 4 GB/s copied by a thread, worker 0: 10"),
        (checks.check_matmul, "gflops", "worker 2: 4 GFLOP/s in float32, worker 0: 100"),
    ],
)
def test_a_machine_that_is_slower(check, field, seen):
    slow = report(2, **{field: 4.0})
    assert wrong(check, job(w2=slow)) == [seen]
    # Workers of one machine share its cores.
    assert not wrong(check, Job(WORKERS[:1], {0: report(0), 1: report(1, host="host0")}))


def test_a_link_that_is_slower_than_the_others():
    slow = with_link(1, 3, send=120.0)
    assert wrong(checks.check_bandwidth, job(w1=slow)) == [
        "worker 1 to worker 3: 120 MB/s, others 1050"
    ]


def test_one_lost_datagram_is_none():
    assert not wrong(checks.check_udp, job(w0=with_link(0, 1, heard=99)))
    assert wrong(checks.check_udp, job(w0=with_link(0, 1, heard=98)))


def test_files_that_others_met_in_part():
    seen = wrong(checks.check_shared, job(w3=report(3, torn=2, reads=50)))
    assert seen == [
        "worker 3: 2 of 50 reads of files that others replaced met no file or half of one"
    ]


def test_a_directory_that_one_worker_did_not_write_to_is_not_shared_by_all():
    (finding,) = checks.check_shared(job(w1=report(1, writes=False)))
    assert finding == skipped("shared", "worker 1 wrote to no --model_dir")


def test_versions_are_told_for_many_workers_at_once():
    other = {f"w{i}": report(i, versions={"tensorflow": "2.20"}) for i in (1, 3)}
    assert wrong(checks.check_versions, job(**other)) == [
        "tensorflow is 2.21 on workers 0, 2, 2.20 on workers 1, 3"
    ]


def test_a_clock_is_told_once_for_both_ways():
    both = {"w0": with_link(0, 1, clock=3.0), "w1": with_link(1, 0, clock=3.0, ahead=True)}
    assert wrong(checks.check_clock, job(**both)) == [
        "that of worker 1 is 3.0 s behind that of worker 0"
    ]
    only = job(w1=with_link(1, 0, clock=3.0, ahead=True))
    assert wrong(checks.check_clock, only) == [
        "that of worker 0 is 3.0 s ahead of that of worker 1"
    ]


def test_what_was_not_measured_is_not_fine_by_silence():
    (finding,) = checks.check_latency(job(w0=with_link(0, 1, latency=None)))
    assert finding.state == SKIPPED and "workers 0 to 1" in finding.seen


@pytest.mark.parametrize("tool", ["", *firewall.TOOLS])
def test_the_line_for_a_firewall_names_what_it_opens(tool):
    refused = with_link(0, 1, refused="timed out")
    (finding,) = checks.check_tcp(job(w0=refused, w1=report(1, firewall=tool)))
    assert finding.command.startswith(tool or "ufw")
    assert all(word in finding.command for word in ("10.0.0.2", "2222", "tcp"))


def test_the_firewall_of_a_machine_is_found(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert firewall.tool() == ""
    (tmp_path / "nft").write_text("#!/bin/sh\n")
    (tmp_path / "nft").chmod(0o755)
    assert firewall.tool() == "nft"


ROWS = [
    *table.merged({0: [fine("devices", "a CPU, no GPU")], 1: [fine("devices", "a CPU, no GPU")]}),
    *table.merged({0: [fine("cores", "2 of 2")], 1: [not_fine("cores", "1 core", "Do it:", "do")]}),
    table.Row(
        not_fine(
            "tcp",
            "worker 0 to worker 1 (10.77.0.2:2222): timed out, but the other way is open",
            "Open the port on worker 1, as root:",
            firewall.opening("firewall-cmd", "10.77.0.1", "2222", "tcp"),
        ),
        (),
    ),
    table.Row(skipped("nccl", "no GPU"), ()),
]


@pytest.mark.parametrize("columns", [80, 60, 40])
def test_the_table_fits_the_terminal_and_commands_stay_whole(columns):
    lines = table.printed(ROWS, 2, columns).splitlines()
    commands = {f"    {row.finding.command}" for row in ROWS if row.finding.command}
    assert commands <= set(lines)
    assert all(len(line) <= columns for line in lines if line not in commands)
    assert lines[-1] == "2 fine, 2 not fine, 1 skipped"


def test_equal_findings_are_one_row_and_others_name_their_workers():
    text = table.printed(ROWS, 2, 80)
    assert "devices  fine      a CPU, no GPU" in text
    assert "cores    fine      worker 0: 2 of 2" in text
    assert "cores    NOT FINE  worker 1: 1 core" in text


def test_json_has_what_the_table_has():
    made = table.as_json(ROWS, 2)
    assert made["schema"] == 1 and made["workers"] == 2 and not made["fine"]
    assert made["checks"][0] == {
        **{"check": "devices", "state": "fine", "seen": "a CPU, no GPU"},
        **{"remedy": "", "command": "", "workers": [0, 1]},
    }
