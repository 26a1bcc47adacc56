"""`time_to_accuracy.py`, `long_run.py` and `gpu.py` say what they did; no time is judged."""

from __future__ import annotations

import json
import xml.etree.ElementTree

import pytest
from paths import BENCHMARKS
from scripts import run

# They start processes, see `conftest.py`.
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("processes")]


def test_time_to_accuracy(tmp_path):
    out = tmp_path / "out.json"
    arguments = (
        "--seeds=1",
        "--variants=ctl,orbit,torch",
        "--steps=250",
        f"--json={out}",
    )
    done = run("time_to_accuracy.py", *arguments)
    runs = {key.split()[1]: of for key, of in json.loads(out.read_text())["runs"].items()}
    assert set(runs) == {"ctl", "orbit", "torch"}
    for name in ("orbit", "torch"):  # where it is not installed, how to
        if "failure" in runs[name]:
            assert "is not installed" in runs.pop(name)["failure"]
    for of in runs.values():  # 250 steps do not reach the goal of 2,000
        assert of["step"] == 250 and of["seconds"] is None
        (accuracy,) = of["accuracies"]
        assert 0.7 < accuracy < 0.86
    assert "ctl          0 of 1      inf" in done.stdout
    again = run("time_to_accuracy.py", *arguments)  # goes on: there is nothing left to run
    assert "seed 1" in done.stdout and "seed 1" not in again.stdout
    assert again.stdout.splitlines()[1:] == [
        line for line in done.stdout.splitlines()[1:] if "seed 1" not in line
    ]


def test_long_run(tmp_path):
    """The first checkpoint comes late, so files have grown that are no logs."""
    out = tmp_path / "out.json"
    steps = ("--what=long", "--steps=5000", f"--json={out}")
    often = ("--log_every=10", "--evaluate_every=5000", "--jit_compile=off")
    done = run("long_run.py", *steps, "--", *often, exit_code=1)
    assert "run/checkpoints/latest.json has grown" in done.stderr
    assert "metrics.jsonl" not in done.stderr and len(done.stderr.splitlines()) == 1
    long = json.loads(out.read_text())["long"]
    for key in ("ms", "resident", "anonymous"):
        assert long[key]["ratio"] == long[key]["last"] / long[key]["first"]
    assert long["resident"]["first"] > long["anonymous"]["first"] > 50 << 20
    assert long["grown"]["run/metrics.jsonl"] > 10_000


def test_tenths_and_growth(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    import growth

    samples = [{"step": step, "x": float(step)} for step in range(0, 101, 2)]
    assert growth.tenths(samples, 100, "x") == (6.0, 96.0)
    for name, size in (("ckpt-1/a", 5), ("ckpt-22/a", 7), ("b", 1)):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(bytes(size))
    assert growth.sizes(tmp_path) == {"ckpt-#/a": 12, "b": 1}


def test_gpu(tmp_path):
    """One check and one table, on logical CPUs; the page is well-formed and says so."""
    out, page = tmp_path / "out.json", tmp_path / "out.html"
    done = run(
        "gpu.py",
        "--devices=cpu",
        "--effort=short",
        "--what=bytes,plan,startup",
        f"--json={out}",
        f"--page={page}",
    )
    rows = json.loads(out.read_text())["rows"]
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


@pytest.mark.parametrize(
    "script, argument, says",
    [
        ("time_to_accuracy.py", "--dataset=mnits", "unknown dataset 'mnits'"),
        ("time_to_accuracy.py", "--variants=keras", "unknown variant 'keras'"),
        ("long_run.py", "--steps=1234", "--steps must be divisible by 1000"),
        ("gpu.py", "--what=speed", "nothing is called 'speed'"),
    ],
)
def test_an_error_is_one_line(script, argument, says):
    done = run(script, argument, exit_code=2)
    assert says in done.stderr and len(done.stderr.splitlines()) == 1
