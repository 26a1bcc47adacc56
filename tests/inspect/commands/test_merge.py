"""The files of an inspection, and what the terminal says of them."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
import simulated

from ctl.errors import CheckpointError, UsageError
from ctl.inspect.commands.merge import show
from ctl.inspect.measure.timeline import join
from ctl.phases.plan.plan import Plan


def test_the_page_and_the_trace_are_written_and_named(tmp_path, capsys):
    timeline = simulated.timeline(2, packs=2, late=(1, "input", 0.03))
    show(timeline, None, tmp_path / "inspect")
    text = capsys.readouterr().out
    assert sorted(p.name for p in (tmp_path / "inspect").iterdir()) == ["report.html", "trace.json"]
    for name in ("report.html", "trace.json"):
        assert str(tmp_path / "inspect" / name) in text
    page = (tmp_path / "inspect/report.html").read_text("utf-8")
    verdict = "waits for worker 1"
    assert verdict in page and verdict in text and "busbw GB/s" in text
    assert json.loads((tmp_path / "inspect/trace.json").read_text())["traceEvents"]
    assert "What the step moves" not in page and "cannot show" not in text


def test_a_plan_that_cannot_be_read_costs_the_plan_only(tmp_path, capsys):
    plan = Plan("MirroredStrategy", 2, 1, (), ()).to_json()
    timeline = dataclasses.replace(simulated.timeline(), plan=plan)
    show(timeline, None, tmp_path)
    assert "What the step moves" in (tmp_path / "report.html").read_text("utf-8")
    timeline = dataclasses.replace(timeline, plan={**plan, "replicas": 3.5})
    show(timeline, None, tmp_path)
    assert "cannot show what the step moves: plan.replicas" in capsys.readouterr().out
    assert "What the step moves" not in (tmp_path / "report.html").read_text("utf-8")


@pytest.mark.parametrize("share", [0.1, 1.0])
def test_stamps_that_are_missing_break_nothing(share, tmp_path, capsys):
    """A file is read as it is: any stamp of it can be null."""
    random = np.random.default_rng(0)
    windows = []
    for window in simulated.windows(2, packs=2):
        missing = random.random(window.stamps.shape) < share
        windows.append(dataclasses.replace(window, stamps=np.where(missing, np.nan, window.stamps)))
    show(join(windows), None, tmp_path)
    assert "worker 1" in capsys.readouterr().out
    for event in json.loads((tmp_path / "trace.json").read_text())["traceEvents"]:
        assert event["ts"] >= 0 and event.get("dur", 1) > 0


def test_sums_that_marks_do_not_show_are_neither_drawn_nor_counted(tmp_path, capsys):
    show(simulated.without_packs(), None, tmp_path)
    text, page = capsys.readouterr().out, (tmp_path / "report.html").read_text("utf-8")
    for said in (text, page):
        assert "communication is not measured" in said
        assert "exposed communication" not in said and "waited for" not in said
    assert "exposed" not in text and "busbw" not in text
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {e["cat"] for e in events if "cat" in e} == {"step", "input", "forward", "backward"}


@pytest.mark.parametrize(("strategy", "replicas"), [("mirrored", 2), ("multi_worker", 4)])
def test_the_bandwidth_of_another_link_is_refused(strategy, replicas, tmp_path, capsys):
    link, timeline = tmp_path / "link.json", simulated.timeline(2)
    about = {"schema": 1, "operation": "ring", "points": [{"bytes": 1024, "seconds": 1e-4}]}
    link.write_text(json.dumps({**about, "strategy": strategy, "replicas": replicas}))
    match = f"with {replicas} replicas under {strategy}, but this run has 2 under multi_worker"
    with pytest.raises(UsageError, match=match):
        show(timeline, str(link), None)
    link.write_text(json.dumps({**about, "strategy": "multi_worker", "replicas": 2}))
    show(timeline, str(link), None)
    assert "% of measured ring" in capsys.readouterr().out


def test_a_directory_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "inspect").write_text("a file")
    with pytest.raises(CheckpointError, match="cannot write .*inspect/report.html"):
        show(simulated.timeline(), None, tmp_path / "inspect")


def test_without_a_directory_nothing_is_written(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    show(simulated.timeline(), None, None)
    assert "busbw GB/s" in capsys.readouterr().out and not list(tmp_path.iterdir())
