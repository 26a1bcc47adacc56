"""The long run says what it did; no time is judged."""

from __future__ import annotations

import pytest
from paths import BENCHMARKS
from scripts import results

pytestmark = pytest.mark.slow  # starts processes


def test_long_run(tmp_path):
    """The first checkpoint comes late, so files have grown that are no logs."""
    often = "--log_every=10 --evaluate_every=3000 --jit_compile=off"
    found, done = results(tmp_path, f"long_run.py --what=long --steps=3000 -- {often}", exit_code=1)
    assert "run/checkpoints/latest.json has grown" in done.stderr
    assert "metrics.jsonl" not in done.stderr and len(done.stderr.splitlines()) == 1
    long = found["long"]
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
