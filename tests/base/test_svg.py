"""Text is escaped and what a page may not contain is gone; coordinates are finite."""

from __future__ import annotations

import math
import re
import xml.etree.ElementTree as ET

import pytest

from ctl.base import svg
from ctl.base.curves import COLOURS, Curve, picture

HOSTILE = "</text><script>alert(1)</script>\"'&]]>\x00\x1b[31m\ud800\u202egnp.exe"


def test_hostile_text_stays_text():
    for element in (svg.text(1, 2, HOSTILE), svg.rect(1, 2, 3, 4, "kind", HOSTILE)):
        read = "".join(ET.fromstring(element).itertext())
        assert read.startswith("</text><script>alert(1)</script>\"'&]]>")
        assert not set(read) & set("\x00\x1b\ud800\u202e")
    attribute = ET.fromstring(f'<a title="{svg.escape(HOSTILE)}"/>').get("title")
    assert attribute.startswith("</text><script>alert(1)</script>\"'&]]>")


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e300, -1e300, 1 / 3, -0.0])
def test_coordinates_are_finite_and_short(value):
    assert abs(float(svg.number(value))) <= 1e5
    assert len(svg.number(value)) <= 9


def test_shorten_keeps_what_fits_and_counts_wide_characters():
    assert svg.shorten("pack0", 100) == "pack0"
    assert svg.shorten("kernel" * 20, 100).endswith("…")
    assert svg.text_width(svg.shorten("kernel" * 20, 100)) <= 100
    assert len(svg.shorten("核" * 50, 100)) < len(svg.shorten("k" * 50, 100))


def test_a_document_is_drawn_without_its_style():
    """Some programs know neither selectors of descendants nor of screens: in a document, style is
    for dark screens alone."""
    curves = [Curve([(1, 1.0), (9, 2.0)]), Curve([(9, 2.0)], evaluates=True, run=7)]
    root = ET.fromstring(picture({"loss <&": curves, "accuracy": curves}))
    wanted = {"text": {"fill", "font-size", "font-family"}, "line": {"stroke"}, "rect": {"fill"}}
    wanted["path"] = {"stroke", "stroke-width", "fill", "stroke-dasharray"}
    seen = {}
    for element in root.iter():
        tag = element.tag.rpartition("}")[2]
        seen[tag] = seen.get(tag, 0) + 1
        assert not wanted.get(tag, set()) - element.attrib.keys(), tag
    assert min(seen[tag] for tag in wanted) > 1
    titles = [e for e in root.iter() if e.get("class") == "title"]
    assert {(e.get("font-size"), e.get("fill")) for e in titles} == {("16px", svg.LIGHT_INK)}
    marks = [e for e in root.iter() if "mark" in e.get("class", "")]
    assert {(e.get("stroke-dasharray"), e.get("stroke-width")) for e in marks} == {("none", "6")}
    assert {e.get("stroke") for e in marks} == {COLOURS[0], COLOURS[1]}
    sheet = next(e for e in root.iter() if e.tag.endswith("}style")).text
    outside = re.sub(r"@media screen[^{]*\{\n(?:svg\.ctl-curves.*\n)+\}", "", sheet)
    assert "max-width: 100%" in sheet and not outside.strip()
    assert root.get("width") == "440" and root.get("style") is None  # a height of auto may be 0


@pytest.mark.parametrize("limit", [1e-6, 0.3, 1, 7, 10, 99.9, 1e4])
def test_ticks_are_few_round_and_within(limit):
    at = svg.ticks(limit)
    assert at[0] == 0 and 2 <= len(at) <= 7 and at[-1] <= limit * (1 + 1e-9)
    digit = at[1] / 10 ** math.floor(math.log10(at[1]) + 1e-9)
    assert round(digit, 6) in (1, 2, 5)
