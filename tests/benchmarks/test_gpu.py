"""The checks of GPUs run on logical CPUs, and say so."""

from __future__ import annotations

import xml.etree.ElementTree

import pytest
from paths import BENCHMARKS
from scripts import results

pytestmark = pytest.mark.slow  # starts processes


def test_gpu(tmp_path):
    """One check and one table, on logical CPUs; the page is well-formed and says so."""
    page = tmp_path / "out.html"
    what = f"--what=bytes,plan,startup --page={page}"
    found, done = results(tmp_path, f"gpu.py --devices=cpu --effort=short {what}")
    rows = found["rows"]
    assert list(rows) == ["plan", "bytes", "startup"]
    assert all(row["ok"] for row in rows.values())
    assert "407,084 bytes" in rows["bytes"]["found"][0] and "ring" in rows["plan"]["found"][0]
    text = "".join(xml.etree.ElementTree.fromstring(page.read_text()).itertext())
    assert "No GPU was used" in text and rows["startup"]["output"] in text
    assert "2 logical CPU devices" in done.stdout


def test_the_page_of_a_failure_escapes_what_it_shows(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    from gpu_page import make_page

    row = {"question": "?", "ok": False, "found": ["<script>"], "command": "a.py --b='<i>'"}
    about = {"devices": "<b>", "machine": {"x": "&"}, "note": "<u>"}
    page = make_page(about, {"startup": row | {"output": "</pre><a>"}})
    root = xml.etree.ElementTree.fromstring(page)
    assert not {"script", "i", "u"} & {node.tag for node in root.iter()}
    assert "1 of 1 lines failed: startup" in "".join(root.itertext())
