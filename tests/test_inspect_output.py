"""The files of an inspection, and what the terminal says of them."""

from __future__ import annotations

import dataclasses
import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
import simulated

from ctl.errors import CheckpointError
from ctl.inspect.output import show
from ctl.inspect.plan import Plan
from ctl.inspect.timeline import join


def shown(timeline, directory: Path) -> str:
    file = io.StringIO()
    show(timeline, directory, file=file)
    return file.getvalue()


def test_the_page_and_the_trace_are_written_and_named(tmp_path):
    timeline = join(simulated.windows(2, packs=2, late=(1, "input", 0.03)))
    text = shown(timeline, tmp_path / "inspect")
    assert sorted(p.name for p in (tmp_path / "inspect").iterdir()) == ["report.html", "trace.json"]
    for name in ("report.html", "trace.json"):
        assert str(tmp_path / "inspect" / name) in text
    page = (tmp_path / "inspect/report.html").read_text("utf-8")
    verdict = "waits for worker 1"
    assert verdict in page and verdict in text and "busbw GB/s" in text
    assert json.loads((tmp_path / "inspect/trace.json").read_text())["traceEvents"]
    assert "What the step moves" not in page and "cannot be shown" not in text


def test_a_plan_that_cannot_be_read_costs_the_plan_only(tmp_path):
    plan = Plan("MirroredStrategy", 2, 1, (), ()).to_json()
    timeline = dataclasses.replace(join(simulated.windows()), plan=plan)
    shown(timeline, tmp_path)
    assert "What the step moves" in (tmp_path / "report.html").read_text("utf-8")
    timeline = dataclasses.replace(timeline, plan={**plan, "replicas": 3.5})
    assert "what the step moves cannot be shown: plan.replicas" in shown(timeline, tmp_path)
    assert "What the step moves" not in (tmp_path / "report.html").read_text("utf-8")


def test_a_directory_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "inspect").write_text("a file")
    with pytest.raises(CheckpointError, match="cannot write .*inspect/report.html"):
        shown(join(simulated.windows()), tmp_path / "inspect")


def test_no_tensorflow_is_needed():
    program = "import sys; sys.modules['tensorflow'] = None; import ctl.inspect.output"
    subprocess.run([sys.executable, "-c", program], check=True, cwd=Path(__file__).parents[1])
