"""The learning curves at the end of a run: a file, and text that fits the terminal."""

from __future__ import annotations

import json
import math
import sys
import xml.etree.ElementTree as ET

import pytest

from ctl.base import curves
from ctl.base.curves import Curve
from ctl.logs import summary
from ctl.logs.runs import read

FALLING = Curve([(step, 1 / step) for step in range(1, 101)])
RISING = Curve([(50, 0.5), (100, 0.9)], evaluates=True)
CHARTS = {"loss": [FALLING], "accuracy": [RISING]}
SVG = "{http://www.w3.org/2000/svg}"


def make_run(directory, records):
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps({"schema": 1, "flags": {}}))
    lines = [json.dumps({"schema": 1, "time": 1e9, **record}) + "\n" for record in records]
    (directory / "metrics.jsonl").write_text("".join(lines))
    return directory


def records(metric="accuracy"):
    for step in (10, 20, 30):
        yield {"phase": "train", "step": step, "loss": 1 / step, "learning_rate": 0.1}
    yield {"phase": "eval", "step": 30, "loss": 0.1, metric: 0.7, "auc": 0.8}


@pytest.mark.parametrize("columns", [40, 60, 79, 80, 200])
def test_text_fits_the_terminal(columns):
    lines = summary.plots(CHARTS, columns)
    assert max(map(len, lines)) <= min(columns, 80)
    text = "\n".join(lines)
    assert text.count("●") == 2 + ("evaluation" in text) and text.count("└") == 2
    assert "loss" in text and "accuracy" in text and "100" in text and "0.01" in text


def test_text_draws_the_curve_from_the_first_to_the_last_point():
    lines = curves.text_plot("loss", [FALLING], 40)
    first, *_, bottom = lines[1:-2]
    assert first.startswith("   1 │") and bottom.startswith("0.01 │") and "⣀" in bottom
    for value in (0.0, -1e308, 5.0):
        assert curves.text_plot("loss", [Curve([(1, value), (2, value)])], 40)
    assert curves.text_plot("loss", [Curve([(1, -1.7e308), (2, 1.7e308)])], 40)


def test_no_line_passes_a_value_that_is_not_finite(tmp_path):
    losses = [4.0, 3.0, math.nan, 2.0, math.inf, math.inf, 1.5, 1.0]
    run = make_run(
        tmp_path / "run",
        [
            {"phase": "train", "step": step, "loss": loss if math.isfinite(loss) else "NaN"}
            for step, loss in enumerate(losses, 1)
        ],
    )
    (trained, _) = read(run).curves("loss")
    assert trained.gaps == [3, 5, 6]
    assert trained.lines == [[(1, 4.0), (2, 3.0)], [(4, 2.0)], [(7, 1.5), (8, 1.0)]]
    path, mark = ET.fromstring(curves.chart("loss", [trained])).findall("path")
    assert path.get("d").count("M") == path.get("d").count("L") == 2
    assert mark.get("class") == "curve mark train c0" and mark.get("d").count("M") == 1
    columns = [set(line[10:]) for line in curves.text_plot("loss", [trained], 40)[1:-2]]
    whole = [set(line[10:]) for line in curves.text_plot("loss", [Curve(trained.points)], 40)[1:-2]]
    assert columns != whole


def test_nothing_is_plotted_without_two_points_or_room():
    assert summary.plots({"loss": [Curve([(1, 1.0)])], "accuracy": [Curve([])]}, 80) == []
    assert summary.plots({}, 80) == [] and summary.plots(CHARTS, 10) == []


@pytest.mark.parametrize("metric", ["accuracy", "mean_absolute_error", "<script>"])
def test_the_file_has_the_loss_and_the_first_metric_and_opens_alone(tmp_path, metric):
    run = make_run(tmp_path / "run", records(metric))
    assert summary.summarize(run) == []  # the output is no terminal
    text = (run / "summary.svg").read_text()
    root = ET.fromstring(text)
    assert [e.text for e in root.iter(f"{SVG}text") if e.get("class") == "title"] == [
        "loss",
        metric,
    ]
    assert [*root.iter(f"{SVG}script")] == [] and "prefers-color-scheme: dark" in text
    assert root.get("viewBox") and root.get("style") is None
    assert "@media screen {\nsvg.ctl-curves { max-width: 100%; height: auto }" in text
    # A style inside a page, as that of a notebook, changes nothing else there.
    rules = root.find(f"{SVG}style").text.splitlines()
    assert all(rule.startswith(("svg.ctl-curves ", "@media", "}")) for rule in rules if rule)


def test_a_terminal_gets_the_plot_and_one_without_the_characters_none(tmp_path, monkeypatch):
    run = make_run(tmp_path / "run", records())
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    assert any("●" in line for line in summary.summarize(run))
    with open(tmp_path / "ascii", "w", encoding="ascii") as file:
        monkeypatch.setattr(file, "isatty", lambda: True, raising=False)
        monkeypatch.setattr(sys, "stdout", file)
        assert summary.summarize(run) == []


def test_a_run_without_records_or_room_for_the_file_ends_well(tmp_path, monkeypatch, caplog):
    assert summary.summarize(make_run(tmp_path / "empty", [])) == []
    run = make_run(tmp_path / "run", [*records(), {"phase": "eval", "step": 40, "loss": math.inf}])
    (run / "summary.svg").mkdir()
    assert summary.summarize(run) == []
    assert "cannot write" in caplog.text
