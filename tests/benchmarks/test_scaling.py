"""A small run of the benchmark of scaling."""

from __future__ import annotations

import pytest
from scripts import results

from ctl.inspect.predict import cost

pytestmark = pytest.mark.slow  # starts processes


def test_scaling(tmp_path):
    """The table follows from the blocks and the link that are in the file."""
    small = "--batch=8 --layers=1 --width=16 --rounds=3 --steps=3 --link_seconds=0.02"
    found, done = results(tmp_path, f"scaling.py {small} --strategy=mirrored --counts=1,2")
    size = found["settings"]["gradient_bytes"]
    assert size == 4 * (784 * 16 + 16 + 16 * 10 + 10)
    link_of_two = cost.Link(**found["link"])
    assert link_of_two.shared
    medians = {
        (name, b["strong"], b["alone"]): sorted(b["milliseconds"])[1]
        for name, blocks in found["blocks"].items()
        for b in blocks
    }
    assert len(medians) == 5  # one replica has nothing to share or to leave out
    for kind, strong in (("weak", False), ("strong", True)):
        one, two = found[kind]
        assert (one["replicas"], one["step"]) == (1, medians["1 replicas", False, False])
        step, alone = (medians["2 replicas", strong, alone] for alone in (False, True))
        assert (two["step"], two["alone"], two["exposed"]) == (step, alone, step - alone)
        assert two["efficiency"] == one["step"] / step / (2 if strong else 1)
        predicted = 1e3 * cost.ring(cost.Network(link_of_two), 2, size)
        assert two["predicted_all_reduce"] == pytest.approx(predicted)
        assert two["predicted_step"] == pytest.approx(alone + predicted)
        assert f"{kind} scaling: 8 examples" in done.stdout
