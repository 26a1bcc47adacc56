"""ctl.phases.server_shards: tables on several parameter servers learn what a whole table does."""

from __future__ import annotations

import json

from paths import SUPPORT


def test_three_servers_equal_one_device(zygote, tmp_path):
    """With one worker, nothing is asynchronous. Shared and small tables, micro-batches, a resume on
    another number of servers, and a step that takes the model over. Of a table of 3.1 MiB, a step
    sends a twentieth at most; a dense gradient would send twice the table."""
    done = zygote.run("servers_in_one_process", tmp_path, path=[SUPPORT])
    found = json.loads(done.stdout)
    assert found.pop("auto") == 2
    assert 1000 < found.pop("sent") < 0.05 * 4 * 8 * 100_000
    assert "Adam moves rows that have no gradient, which cannot be made up" in found.pop("refused")
    assert "looked up in a loop, and split over the parameter servers" in found.pop("in a loop")
    assert "XLA works within one process" in found.pop("compiled")
    assert {*found} == {"adagrad", "adam, lazily", "from", "to", "made whole again"}
    assert max(found.values()) < 1e-6
