"""The benchmark of slow links counts bytes as the network card does."""

from __future__ import annotations

import json

import pytest
from scripts import run

pytestmark = pytest.mark.slow  # starts processes


def test_low_communication(tmp_path):
    """The plan counts the bytes on the wire, and the network card does, headers included."""
    out = tmp_path / "out.json"
    done = run(
        "low_communication.py --methods=all_reduce,diloco --models=dense --workers=2 --mbit=100 "
        f"--rounds=1 --seconds=0.1 --warm_up=2 --json={out}",
        exit_code=None,
    )
    if any(text in done.stderr for text in ("namespaces", "iproute2", "ip netns", "ip link")):
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stderr
    content = json.loads(out.read_text())
    whole, rare = content["rows"]
    assert (whole["method"], rare["method"]) == ("all_reduce", "diloco")
    for row in (whole, rare):
        assert row["planned"] < row["sent"] < 1.3 * row["planned"]
        assert row["fast"] > 0 and row["predicted"] > row["fast"]
    assert 45 * rare["planned"] < whole["planned"]
    assert 45 * rare["sent"] < 1.1 * whole["sent"]
    (cell,) = content["cells"]
    assert cell["among"] == "all" and f"predicted in {cell['loses'] == 0:d} of 1" in done.stdout
