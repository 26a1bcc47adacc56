"""A population of seeds: its statistics, and that each run is that of its seed."""

from __future__ import annotations

import json
import math
import re

import numpy as np
import pytest

import ctl
from ctl.errors import UsageError
from ctl.recipes import population
from ctl.recipes.population import check_steps, table


def test_statistics_are_those_of_numpy():
    results = np.random.default_rng(0).normal(size=(5, 2))
    lines = table(
        {3 + i: {"step": 9, "loss": a, "accuracy": b} for i, (a, b) in enumerate(results)}
    )
    assert lines[0].split() == ["seed", "loss", "accuracy"]
    rows = {title: [*map(float, values)] for title, *values in map(str.split, lines[1:])}
    wanted = {
        **{str(3 + i): row for i, row in enumerate(results)},
        "mean": results.mean(axis=0),
        "deviation": results.std(axis=0, ddof=1),
        "least": results.min(axis=0),
        "most": results.max(axis=0),
    }
    assert list(rows) == list(wanted)
    for title, row in wanted.items():
        np.testing.assert_allclose(rows[title], row, rtol=1e-5)


def test_runs_that_differ_in_length_or_results():
    results = {0: {"step": 9, "loss": 1.0, "f1": 0.5}, 1: {"loss": math.nan, "step": 8}}
    with pytest.raises(UsageError, match="steps: seed 0 at 9, seed 1 at 8; use another --model"):
        check_steps(results, None)
    check_steps(results, "loss:3")
    for order in ([0, 1], [1, 0]):  # the place of NaN decides nothing
        lines = table({seed: results[seed] for seed in order})
        assert sorted(lines[0].split()) == ["loss", "seed", "step"]
        assert lines[-1] == "missing for some seeds: f1"
        assert "nan" in lines[-2] and "nan" in lines[-3] and "9" in lines[-2] and "8" in lines[-3]


def test_the_last_evaluation_of_a_run(tmp_path, monkeypatch, capsys):
    """Its log has a damaged line and records that are of no evaluation."""
    monkeypatch.setattr(ctl.launch, "launch", lambda command, workers: 0)
    monkeypatch.setattr(population, "FLAGS", {})
    (tmp_path / "config.json").write_text('{"schema": 1, "flags": {}}')
    phases = [("eval", 4, 1.0), ("eval", 8, "NaN"), ("inspect", 8, 9.0)]
    text = "".join(f'{{"phase": "{p}", "step": {s}, "loss": {v!r}}}\n' for p, s, v in phases)
    (tmp_path / "metrics.jsonl").write_text("{\n" + text.replace("'", '"'))
    found = population.trained(0, tmp_path)
    assert found["step"] == 8 and math.isnan(found["loss"])
    assert "1 damaged line of metrics.jsonl is left out" in capsys.readouterr().err
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"phase": "test", "step": 8, "loss": 0.5}\n')
    assert population.trained(0, tmp_path) == {"step": 8, "loss": 0.5}


@pytest.mark.slow  # starts processes
def test_each_run_is_that_of_its_seed(zygote, tmp_path):
    flags = ["--model=dense", "--train_steps=8", "--noexport", "--notensorboard", "--log_every=4"]
    alone = zygote.run("ctl.train", f"--model_dir={tmp_path}/alone", "--seed=4", *flags)
    command = zygote.run(
        "ctl.recipes.population", "--seeds=2", "--seed=3", f"--model_dir={tmp_path}", *flags
    )
    assert "seed 3: 1 of 2\n" in command.stdout and "seed 4: 2 of 2\n" in command.stdout
    results = {}
    for name in ("alone", "seed-3", "seed-4"):
        last = json.loads((tmp_path / name / "metrics.jsonl").read_text().splitlines()[-1])
        results[name] = [last["loss"], last["accuracy"]]
    assert results["alone"] == results["seed-4"] != results["seed-3"], alone.stdout
    printed = re.search(r"^4 +(\S+) +(\S+)$", command.stdout, re.MULTILINE)
    assert [*map(float, printed.groups())] == pytest.approx(results["seed-4"], rel=1e-5)

    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "seed-0").touch()
    bad = ["--seeds=2", f"--model_dir={tmp_path}/bad"]
    command = zygote.run("ctl.recipes.population", *bad, exit_code=2)
    assert command.stdout == "seed 0: 1 of 2\n"  # ends with the first run that fails
