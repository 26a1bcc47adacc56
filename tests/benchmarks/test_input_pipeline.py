"""The benchmark of input says what it did; no time is judged."""

from __future__ import annotations

import pytest
from scripts import results

pytestmark = pytest.mark.slow  # starts processes


def test_input_pipeline(tmp_path):
    how = "--replicas=2 --pipelines=tutorial,ctl_own,ctl --rounds=2 --steps=80 --warm_up=1"
    rows = results(tmp_path, f"input_pipeline.py {how}")[0]["replicas"]["2"]
    assert rows["tutorial"]["ratio"] == {"median": 1.0, "min": 1.0, "max": 1.0}
    # One epoch or so: the images are those of the same dataset, in the same units.
    for name in ("ctl_own", "ctl"):
        assert rows[name]["mean"] == pytest.approx(rows["tutorial"]["mean"], rel=0.02)
    rounds = rows["ctl"]["rounds"]
    assert [r["images"] for r in rounds] == [80 * 128] * 2
    assert rows["ctl"]["images_per_second"]["max"] == max(
        r["images"] / r["seconds"] for r in rounds
    )


def test_streams(tmp_path):
    what = "--stream_images=800 --stream_peers=tf.data,grain"
    how = "--rounds=1 --stream_steps=20 --global_batch_size=32"
    found, done = results(tmp_path, f"input_pipeline.py {what} {how}")
    rows = found["streams"]["png"]
    where = ("", ", 2 replicas", ", worker 1 of 2")
    peers = ("ctl", "tf.data, tuned", "Grain")
    blocks, other = "ctl, blocks of 16", "ctl, worker 2 of 2"
    assert {blocks, other, *(f"{peer}{of}" for peer in peers for of in where)} == set(rows)
    missing = {name for name, row in rows.items() if not row["steps"]}
    assert missing in (set(), {f"Grain{of}" for of in where})
    assert done.stdout.count("not installed: pip install grain") == len(missing)
    of = {name: row["steps"][0] for name, row in rows.items() if name not in missing}
    for name, answer in of.items():
        assert f"\n{name} " in done.stdout
        assert min(answer[key] for key in ("seconds", "cpu_seconds", "peak_mib")) > 0
    for worker in (1, 2):
        share = of[f"ctl, worker {worker} of 2"]["bytes"] / of["ctl"]["bytes"]
        assert 0.3 < share < 0.7
    for theirs in ("tf.data, tuned", "tf.data, tuned, 2 replicas"):
        assert f"\nctl / {theirs}: images/s " in done.stdout
