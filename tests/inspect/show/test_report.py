"""The tables: what they say of known durations, in a bounded number of rows, plainly."""

from __future__ import annotations

import dataclasses
import io

import numpy as np
import pytest
import simulated
from simulated import timeline as timeline_of

from ctl.inspect.measure.link import Measured, Point
from ctl.inspect.measure.timeline import Timeline
from ctl.inspect.show.report import (
    ROWS,
    WORST,
    pack_table,
    phase_table,
    print_report,
    row_names,
    scalars,
)

VERDICT = ("waits bound the step", "worker 1 was late", "look at its input")


def printed(timeline: Timeline, verdict=VERDICT, **options) -> str:
    file = io.StringIO()
    print_report(timeline, verdict, file=file, **options)
    return file.getvalue()


def column(table, name: str) -> list[float]:
    index = table.columns.index(name)
    rows = [row for row in table.rows if not row[0].startswith("mean of")]
    return [float(row[index].rstrip("%")) for row in rows]


def test_phases_are_medians_in_milliseconds():
    timeline = timeline_of(2, packs=2, late=(1, "input", 0.02), noise=0.01)
    table = phase_table(timeline)
    assert [row[0] for row in table.rows] == ["mean of 2", "worker 0", "worker 1"]
    np.testing.assert_allclose(column(table, "input"), [1, 21], rtol=0.05)
    np.testing.assert_allclose(column(table, "forward"), [4, 4], rtol=0.05)
    np.testing.assert_allclose(column(table, "backward"), [8, 8], rtol=0.05)
    np.testing.assert_allclose(column(table, "late"), [0, 20], atol=1)
    for name in ("wait", "transfer", "apply", "other", "hidden", "exposed", "step"):
        assert name in table.columns
    assert "pack" not in table.columns  # nothing measured it, so no column of dashes


def test_a_phase_that_is_not_known_has_no_column():
    timeline = timeline_of(2)
    forward = np.full(timeline.late.shape, np.nan)
    assert "forward" not in phase_table(simulated.with_phases(timeline, forward=forward)).columns
    forward[0] = 0.004
    cells = phase_table(simulated.with_phases(timeline, forward=forward))
    index = cells.columns.index("forward")
    assert [row[index] for row in cells.rows] == ["4.00", "4.00", "–"]


def test_many_replicas_are_the_spread_and_the_latest():
    table = phase_table(timeline_of(64, late=(17, "backward", 0.03), steps=8))
    names = [row[0] for row in table.rows]
    assert names[:4] == ["mean of 64", "min of 64", "median of 64", "max of 64"]
    assert "worker 17" in names and len(names) == 4 + WORST
    low, middle, high = column(table, "backward")[:3]
    assert low <= middle < 10 < 35 < high


def test_rows_are_named_in_the_fewest_words():
    assert row_names(timeline_of(1, replicas=2).rows) == ["replica 0", "replica 1"]
    assert row_names(timeline_of(2).rows) == ["worker 0", "worker 1"]
    assert row_names(timeline_of(2, replicas=2).rows)[3] == "worker 1, r1"


def test_packs_are_in_the_units_of_nccl_tests():
    timeline = timeline_of(4, packs=2, noise=0.0)
    measured = Measured("multi_worker", "ring", 4, (Point(1, 1e-3), Point(2_000_000, 1e-3)))
    table = pack_table(timeline, None, measured)
    assert [row[1] for row in table.rows] == ["1.9 MiB", "1.9 MiB"]
    np.testing.assert_allclose(column(table, "transfer ms"), [3, 3], rtol=0.02)
    # 2 MB in 3 ms; 2(n-1)/n = 1.5 for 4 replicas; what was measured is three times as fast.
    np.testing.assert_allclose(column(table, "algbw GB/s"), [2 / 3, 2 / 3], rtol=0.02)
    np.testing.assert_allclose(column(table, "busbw GB/s"), [1, 1], rtol=0.02)
    np.testing.assert_allclose(column(table, "% of measured ring"), [33, 33], atol=1)
    np.testing.assert_allclose(column(table, "ready"), [50, 100], atol=1)


def test_many_packs_are_the_slowest():
    table = pack_table(timeline_of(2, packs=100, steps=3), None, None)
    assert len(table.rows) == ROWS and "slowest of 100" in table.title


def test_scalars_are_those_of_the_latest_replica():
    values = scalars(timeline_of(2, late=(1, "input", 0.02), noise=0.0))
    assert values["allreduce/late_ms"] == pytest.approx(20, rel=0.02)
    several = timeline_of(2, packs=4, in_order=False, late=(1, "input", 0.02), noise=0.0)
    assert scalars(several)["allreduce/late_ms"] == pytest.approx(20, rel=0.02)
    assert values["allreduce/exposed_ms"] == pytest.approx(20 / 2 + 3, rel=0.02)  # one waits
    assert values["allreduce/busbw"] == pytest.approx(4e6 / 3e-3 / 1e9, rel=0.02)
    assert values["allreduce/busbw"] == pytest.approx(
        timeline_of(2, noise=0.0).packs[0].busbw, rel=0.02
    )
    late = {"allreduce/late_ms", "allreduce/late_p95_ms", "allreduce/late_worst_ms"}
    assert set(scalars(timeline_of(1, packs=0))) == {"allreduce/exposed_ms", *late}


def test_tails_show_a_replica_that_is_late_now_and_then():
    timeline = timeline_of(2, late=(1, "input", 0.02), every=4, noise=0.01)
    table = phase_table(timeline)
    np.testing.assert_allclose(column(table, "late"), [0, 0], atol=1)
    np.testing.assert_allclose(column(table, "late p95"), [0, 20], atol=1)
    np.testing.assert_allclose(column(table, "late worst"), [0, 20], atol=1)
    values = scalars(timeline)
    assert values["allreduce/late_ms"] < 1
    assert values["allreduce/late_p95_ms"] == pytest.approx(20, abs=1)
    assert values["allreduce/late_worst_ms"] == pytest.approx(20, abs=1)
    # Among many, it is one of those that are shown.
    many = phase_table(timeline_of(64, late=(17, "input", 0.02), every=4, steps=40))
    assert "worker 17" in [row[0] for row in many.rows]


def test_what_is_printed_is_plain_and_whole_where_there_is_no_terminal():
    text = printed(timeline_of(2, packs=3, late=(1, "input", 0.02)))
    assert "\x1b" not in text and "…" not in text
    for word in ("worker 1", "backward", "exposed", "pack2", "busbw GB/s", *VERDICT):
        assert word in text
    assert max(map(len, text.splitlines())) <= 160


def test_names_command_neither_the_terminal_nor_rich():
    timeline = timeline_of(2)
    evil = "[red]x[/red]\x1b[2J\x07"
    (pack,) = timeline.packs
    timeline = dataclasses.replace(timeline, packs=(dataclasses.replace(pack, name=evil),))
    text = printed(timeline, [evil])
    assert text.count("[red]x[/red]") == 2 and not set(text) & set("\x1b\x07")
