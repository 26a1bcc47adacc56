"""The picture of a schedule, its table, and the command that draws them."""

from __future__ import annotations

import subprocess
import sys
import xml.etree.ElementTree as ET

import numpy as np
import pytest

from ctl.schedule import (
    Constant,
    Cosine,
    Exponential,
    InverseSqrt,
    Piecewise,
    Polynomial,
    Schedule,
    plot,
)

BILLION = 10**9


PICTURES = [
    (Constant(1e-3), 100, 10.0),
    (Constant(0.0), 3, 10.0),
    (Cosine(1e-3, 1872, warmup_steps=78), 1872, 156.0),
    (Cosine(3e-4, BILLION, warmup_steps=10**6), BILLION, 12_345.6),
    (Polynomial(1e-3, 7, power=2.0), 7, 7.0),
    (Exponential(1e-3, 0.5, 312), 1872, 156.0),
    (InverseSqrt(7e-4, warmup_steps=4000), 100_000, 5000.5),
    (Piecewise([468, 1092], [1e-3, 1e-4, 1e-5]), 1872, 156.0),
    (Piecewise([400], [1.0, 1e-9], warmup_steps=100), 1000, 300.0),
    (Piecewise([5, 10], [1e-3, 1e-4, 0.0]), 20, 10.0),
    (Constant(1e-3, warmup_steps=50), 20, 10.0),
]


@pytest.mark.parametrize(("schedule", "total", "per_epoch"), PICTURES)
def test_picture(schedule, total, per_epoch):
    """Valid XML, the curve inside the frame from end to end, no label on another or outside."""
    svg = ET.fromstring(plot.draw(schedule, total, per_epoch))
    elements = {
        name: [e for e in svg if e.get("class") == name] for name in ("x", "y", "title", "curve")
    }
    points = curve(elements["curve"][0].get("d"))
    assert points[0][0] == plot.LEFT and points[-1][0] == plot.RIGHT
    assert all(plot.TOP <= y <= plot.BOTTOM for _, y in points)
    assert type(schedule).__name__ in elements["title"][0].text
    heights = sorted(float(e.get("y")) for e in elements["y"])
    assert len(heights) >= 2 and min(np.diff(heights)) >= 12
    for height in {e.get("y") for e in elements["x"]}:
        row = [(float(e.get("x")), e.text) for e in elements["x"] if e.get("y") == height]
        edges = [(x - 3.5 * len(text), x + 3.5 * len(text)) for x, text in sorted(row)]
        assert edges[0][0] >= 0 and edges[-1][1] <= plot.WIDTH
        assert all(left[1] < right[0] for left, right in zip(edges, edges[1:], strict=False))


def curve(path):
    """The corners of a path of M, H and V commands."""
    x, y = (float(number) for number in path[1:].partition("H")[0].split())
    points = [(x, y)]
    for command in path[path.index("H") :].replace("H", " H").replace("V", " V").split():
        x, y = (float(command[1:]), y) if command[0] == "H" else (x, float(command[1:]))
        points.append((x, y))
    return points


def test_picture_is_to_scale():
    """On a linear axis from 0 to 105 % of the peak; the step of a boundary has the new rate."""
    svg = ET.fromstring(plot.draw(Piecewise([4], [1.0, 0.5]), 10, 5.0))
    (path,) = (e.get("d") for e in svg if e.get("class") == "curve")
    height, width = plot.BOTTOM - plot.TOP, plot.RIGHT - plot.LEFT
    corners = [p for p in curve(path) if abs(p[0] - (plot.LEFT + 0.4 * width)) < 0.1]
    assert [y for _, y in corners] == pytest.approx(
        [plot.BOTTOM - height / 1.05, plot.BOTTOM - height / 2.1], abs=0.1
    )


def test_picture_escapes_text():
    class Mine(Schedule):
        def decay(self, step):
            return step

    Mine.__name__ = "<Mine & yours>"
    svg = ET.fromstring(plot.draw(Mine(), 10, 5.0))
    assert "<Mine & yours>" in svg[0].text


def test_table():
    lines = plot.table(Piecewise([3, 7], [1e-3, 1e-4, 1e-5]), 10, 2.0).splitlines()
    rows = {int(step): (epoch, rate) for step, epoch, rate in map(str.split, lines[2:])}
    assert rows[2] == ("1.00", "0.001") and rows[3] == ("1.50", "0.0001")
    assert rows[6] == ("3.00", "0.0001") and rows[7] == ("3.50", "1e-05")
    assert {0, 9} <= set(rows)


@pytest.mark.sample
def test_command_draws(zygote, tmp_path):
    picture = tmp_path / "rate.svg"
    flags = ("--boundaries=3ep,7ep", "--rates=1e-3,1e-4,1e-5", "--warmup=10")
    result = zygote.run("ctl.schedule.plot", f"--plot={picture}", "--schedule=piecewise", *flags)
    result_of_steps = zygote.run("ctl.schedule.plot", "--train_steps=80")
    assert "total_steps=80" in result_of_steps.stdout and "        79 " in result_of_steps.stdout
    assert "warmup_steps=10" in result.stdout and "     1,092     7.00  1e-05" in result.stdout
    assert ET.parse(picture).getroot().tag == "{http://www.w3.org/2000/svg}svg"


@pytest.mark.parametrize(
    ("arguments", "code", "out", "error"),
    [
        (["--help"], 0, "--warmup\n        Linear warm-up", ""),
        (["--schedule=cosine", "--rates=1"], 2, "", "--rates is for --schedule=piecewise"),
        (["--lerning_rate=1"], 2, "", "Did you mean: learning_rate"),
        (["--steps=80"], 2, "", "Unknown command line flag 'steps': ctl calls it --train_steps"),
        (["--epochs=-1"], 2, "", "--epochs must be above 0, got -1"),
        (["cosine"], 2, "", "unexpected argument 'cosine': see --help"),
    ],
)
def test_command_answers_without_tensorflow(arguments, code, out, error):
    program = (
        "import runpy, sys; sys.modules.update(tensorflow=None, keras=None, numpy=None)\n"
        "runpy.run_module('ctl.schedule', run_name='__main__', alter_sys=True)"
    )
    result = subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=False
    )
    assert result.returncode == code, result.stderr
    assert out in result.stdout and error in result.stderr
    assert result.stderr.count("\n") == (1 if error else 0)
