"""The page: one well-formed file, without scripts or references, whatever is in it."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import re
import xml.etree.ElementTree as ET

import numpy as np
import pytest
import simulated
from simulated import collective
from simulated import timeline as timeline_of

from ctl.inspect.measure.link import Measured, Point
from ctl.inspect.measure.verdict import verdict
from ctl.inspect.show import pictures
from ctl.inspect.show.page import make_page
from ctl.inspect.show.report import duration, phase_table, scalars
from ctl.phases.plan.plan import Lint, Member, Plan

HOSTILE = "</td><script>alert('1')</script>\"]]>--><svg onload=x>\x00\u202e&amp;"
VERDICT = ("waits bound the step", "worker 1 was late", "look at its input")


def make_plan(packs: int = 2, variables: int = 3, name: str = "dense/kernel") -> Plan:
    def members(pack: int) -> tuple[Member, ...]:
        names = (f"{name}_{pack}_{number}" for number in range(variables))
        return tuple(Member((each,), (-1, 10), None) for each in names)

    about = {"shape": (500_000,), "wire_bytes": 2_000_000}
    collectives = [
        collective(f"pack{pack}", 2_000_000, (pack + 1) / packs, members=members(pack), **about)
        for pack in range(packs)
    ]
    lint = Lint("one pack", f"because {name}", "smaller packs")
    return Plan("MirroredStrategy", 2, 1, tuple(collectives), (), (lint,), (f"note {name}",))


def parse(page: str) -> ET.Element:
    """As strictly as XML is read: no tag is left open, no character is wrong."""
    assert page.startswith("<!DOCTYPE html>\n")
    return ET.fromstring(page.removeprefix("<!DOCTYPE html>\n"))


def text_of(page: str) -> str:
    return "".join(parse(page).itertext())


def numbers_of(page: str) -> list[float]:
    """All coordinates."""
    names = ("x", "y", "x1", "x2", "y1", "y2", "width", "height")
    return [float(e.get(n)) for e in parse(page).iter() for n in names if e.get(n)]


def test_it_says_what_was_measured():
    timeline = timeline_of(2, packs=2, late=(1, "input", 0.02))
    text = text_of(make_page(timeline, VERDICT, plan=make_plan()))
    words = ["2 workers", "20 steps", "101 to 120", "typical step", "worst step", "comes last"]
    words += ["waited for worker 1, in 20 of 20 steps", "20 of 20", "busbw GB/s", "ring"]
    words += ["dense/kernel_1_2 [?, 10]", "one pack"]
    for word in (*words, *VERDICT):
        assert word in text, word
    assert text.index(VERDICT[0]) < text.index("typical step")


@pytest.mark.parametrize(
    "options",
    [
        {"workers": 1, "packs": 0},
        {"workers": 1, "replicas": 4, "packs": 3},
        {"workers": 2, "steps": 1},
        {"workers": 3, "steps": 400},
        {"workers": 40, "replicas": 4, "steps": 4},
    ],
    ids=str,
)
def test_it_is_one_file_that_refers_to_nothing(options):
    page = make_page(timeline_of(**options), VERDICT, plan=make_plan())
    root = parse(page)
    tags = {element.tag for element in root.iter()}
    assert not tags & {"script", "link", "img", "iframe", "object", "a", "use", "image", "base"}
    for element in root.iter():
        for name, value in element.attrib.items():
            assert not name.startswith("on") and name not in ("href", "src", "style"), name
            assert "//" not in value
    assert not re.search(r"@import|url\((?!#hatch\))", page)
    style = root.find("head/style").text
    policy = root.find("head/meta[@http-equiv]").get("content")
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    assert "default-src 'none'" in policy and f"style-src 'sha256-{digest}'" in policy


def test_every_class_has_a_style():
    page = make_page(timeline_of(2, packs=2, late=(1, "input", 0.02)), VERDICT, plan=make_plan())
    style = parse(page).find("head/style").text
    used = {name for e in parse(page).iter() for name in (e.get("class") or "").split()}
    assert {name for name in used if f".{name}" not in style} == set()
    assert {"p-wait", "h6", "exposed"} <= used


@pytest.mark.parametrize("late", [None, (1, "input", 0.02)])
def test_exposed_and_the_step_are_one_number_everywhere(late):
    """In the verdict, the figures, the table and the scalars; its mean is that of the rows."""
    timeline = timeline_of(2, late=late, noise=0.3)
    table = phase_table(timeline)
    at, step = table.columns.index("exposed"), table.columns.index("step")
    mean, *rows = [(float(row[at]), float(row[step])) for row in table.rows]
    np.testing.assert_allclose(mean, np.mean(rows, axis=0), atol=0.06)
    exposed = scalars(timeline)["allreduce/exposed_ms"]
    assert exposed == pytest.approx(mean[0], abs=0.06)
    said = verdict(timeline)
    text = text_of(make_page(timeline, said))
    assert f"{duration(exposed / 1e3)}exposed communication, {exposed / mean[1]:.0%} of" in text
    parts = re.search(r"([\d.]+) ms wait for the last replica, ([\d.]+) ms transfer", text)
    assert sum(map(float, parts.groups())) == pytest.approx(exposed, abs=0.02)
    assert float(re.search(r"takes ([\d.]+) ms", said[0])[1]) == pytest.approx(mean[1], abs=0.06)
    if late is None:
        assert f"{exposed:.2f} ms of communication are exposed" in said[1]
        assert "ms wait for the last replica" in said[1]
    else:  # no compute, so that the step is bound by communication
        nobody = simulated.with_phases(timeline, backward=0 * timeline.late)
        nobody = dataclasses.replace(nobody, clocks=timeline.clocks[:1])
        assert f"{exposed:.2f} ms exposed" in verdict(nobody)[0]


def test_small_packs_are_compared_with_small_all_reduces():
    points = (Point(1_000_000, simulated.TRANSFER), Point(4_000_000, simulated.TRANSFER))
    measured = Measured("multi_worker", "ring", 2, points)
    text = text_of(make_page(timeline_of(2, packs=4, noise=0.0), VERDICT, measured=measured))
    share = re.search(r"bus bandwidth of the all-reduces \((\d+)% of what was measured\)", text)
    assert int(share[1]) == pytest.approx(100, abs=3)


def test_hostile_names_are_text():
    timeline = timeline_of(2)
    (pack,) = timeline.packs
    pack = dataclasses.replace(pack, name=HOSTILE)
    timeline = dataclasses.replace(timeline, packs=(pack,), description=HOSTILE)
    plan = make_plan(name=HOSTILE)
    first = dataclasses.replace(plan.collectives[0], name=HOSTILE, hint=HOSTILE, dtype=HOSTILE)
    plan = dataclasses.replace(plan, strategy=HOSTILE, collectives=(first,))
    page = make_page(timeline, [HOSTILE], plan=plan)
    root = parse(page)
    assert not {"script", "td[onload]"} & {e.tag for e in root.iter()}
    assert len(list(root.iter("svg"))) == len(list(parse(make_page(timeline, [])).iter("svg")))
    assert text_of(page).count("<script>alert('1')</script>") >= 9
    assert "\u202e" not in page and "\x00" not in page


@pytest.mark.parametrize("value", [np.nan, 0.0, 1e12, 1e-12, -1.0])
def test_wild_numbers_stay_on_the_page(value):
    """Stamps are read from files: they may be anything."""
    timeline = timeline_of(2, packs=2, steps=4)
    phases = {name: np.full_like(v, value) for name, v in timeline.phases.items()}
    packs = [
        dataclasses.replace(pack, wait=np.full_like(pack.wait, value), bytes=2**60)
        for pack in timeline.packs
    ]
    wild = np.full_like(timeline.late, value)
    changed = {"phases": phases, "packs": tuple(packs), "late": wild, "step_seconds": wild}
    page = make_page(dataclasses.replace(timeline, **changed, exposed=wild, hidden=wild), VERDICT)
    found = numbers_of(page)
    assert np.isfinite(found).all() and min(found) > -100 and max(found) < 5000
    assert not re.search(r"\b(nan|inf)\b", text_of(page).replace("exposed", ""))


@pytest.mark.parametrize(
    ("options", "variables"),
    [
        ({"workers": 2, "packs": 3}, 20),
        ({"workers": 64, "packs": 4, "steps": 100}, 500),
        ({"workers": 100, "packs": 1, "steps": 300}, 10),
        ({"workers": 2, "packs": 300}, 2),
    ],
    ids=str,
)
def test_its_size_is_bounded(options, variables):
    timeline = timeline_of(**options, late=(1, "input", 0.02), noise=0.5)
    plan = make_plan(packs=options["packs"], variables=variables)
    assert len(make_page(timeline, VERDICT, plan=plan)) < 300_000


def test_the_replicas_drawn_are_those_that_explain_the_step():
    late, wait = np.zeros(64), np.linspace(1.0, 2.0, 64)
    late[17], wait[40] = 5.0, 9.0
    chosen, notes = pictures.choose(late, wait, 8, least=1.0)
    assert len(chosen) == 8 and chosen == sorted(set(chosen))
    assert notes == {17: "comes last", 40: "waits longest"} and {17, 40} <= set(chosen)
    assert pictures.choose(late[:3], wait[:3], 8, least=3.0) == ([0, 1, 2], {})


def test_the_typical_step_is_like_most_and_the_worst_the_longest():
    timeline = timeline_of(2, steps=5, noise=0.0)
    factors = np.array([1.1, 9, 1, 3, 1.2])
    phases = {name: values * factors for name, values in timeline.phases.items()}
    changed = {"phases": phases, "step_seconds": timeline.step_seconds * factors}
    timeline = dataclasses.replace(timeline, **changed)
    assert pictures.typical_and_worst(timeline) == [("typical", 4), ("worst", 1)]
    assert pictures.typical_and_worst(timeline_of(1, steps=1)) == [("typical", 0)]


def test_packing_is_drawn_where_a_profile_shows_it():
    timeline = timeline_of(2, packs=2)
    assert 'class="p-pack"' not in make_page(timeline, VERDICT)
    page = make_page(simulated.profiled(timeline), VERDICT)
    assert 'class="p-pack"' in page and "bytes, pack 1.00 ms, wait " in text_of(page)


def test_noise_accuses_nobody():
    text = text_of(make_page(timeline_of(2, noise=0.0), VERDICT))
    assert "comes last" not in text and "waits longest" not in text
    assert "waited for the last to come" in text and "waited for worker" not in text
    assert "comes last" in text_of(make_page(timeline_of(2, late=(0, "backward", 0.01)), VERDICT))


def test_what_xla_compiles_is_one_phase():
    timeline = timeline_of(2)
    timeline = simulated.with_phases(timeline, forward=np.full_like(timeline.late, np.nan))
    assert "worker 1: forward and backward, 8" in text_of(make_page(timeline, VERDICT))


def test_a_worker_that_is_late_in_a_rhythm_is_a_figure():
    text = text_of(make_page(timeline_of(2, late=(1, "input", 0.02), every=4, noise=0.0), VERDICT))
    assert "20.0 mswaited for worker 1, in every 4th step" in text
