"""The table of claims against Keras: what runs, what is shown of a claim that no longer holds."""

from __future__ import annotations

import json

import pytest
from scripts import results, run_changed

pytestmark = pytest.mark.slow  # starts processes


# The command with rows that are given, instead of those that processes answer.
GIVEN_ROWS = """
import json

import why_not_fit

rows = json.loads(sys.argv.pop(1))

why_not_fit.ask = lambda name, claim: rows[name]
why_not_fit.run_command(why_not_fit.main, "")
"""


def row(keras: bool, ctl: bool) -> dict:
    return {
        "claim": "`a flag`",
        "versions": {"keras": "9.9"},
        "keras": {"seen": "the weight is 2", "as_said": keras},
        "ctl": {"seen": "the weight is 1", "as_said": ctl},
        "still_true": keras,
    }


@pytest.mark.parametrize(
    "keras, ctl, exit_code, says, is_silent_about",
    [
        (True, True, 0, "yes", ["NO", "WRONG"]),
        (False, True, 0, "NO LONGER TRUE, remove from README.md: uneven", ["WRONG"]),
        (True, False, 1, "WRONG: the weight is 1", ["NO"]),
    ],
)
def test_a_claim_that_is_refuted_is_shown(keras, ctl, exit_code, says, is_silent_about):
    rows = json.dumps({"uneven": row(keras, ctl)})
    done = run_changed(GIVEN_ROWS, rows, "--claims=uneven")
    assert done.returncode == exit_code, done.stderr
    assert says in done.stdout and "keras 9.9" in done.stdout
    assert not any(word in done.stdout for word in is_silent_about)
    assert ("ctl does not do what README.md says: uneven" in done.stderr) == (not ctl)


def test_both_sides_run(tmp_path):
    found, done = results(tmp_path, "why_not_fit.py --claims=several_steps")
    row = found["claims"]["several_steps"]
    assert row["ctl"] == {"seen": "the weight is -21, as it should", "as_said": True}
    assert row["still_true"], "take it out of README.md"
    assert "InvalidArgumentError" in done.stdout


# The command with processes that start and then say no more.
SILENT = """
import why_not_fit

script = sys.argv.pop(1)
why_not_fit._start = lambda name, side, claim: [why_not_fit.Peer(side, [script])]
why_not_fit.run_command(why_not_fit.main, "")
"""


def test_who_is_silent_is_killed(tmp_path):
    script, out = tmp_path / "silent.py", tmp_path / "out.json"
    script.write_text("import time\nprint('{\"versions\": {}}', flush=True)\ntime.sleep(1000)\n")
    done = run_changed(SILENT, script, "--claims=missing", "--patience=0", f"--json={out}")
    row = json.loads(out.read_text())["claims"]["missing"]
    # Without patience, ctl has no time to name the worker that is missing.
    silence = "nothing for 0 s, then killed"
    assert row["keras"] == {"seen": silence, "as_said": True}
    assert row["ctl"] == {"seen": silence, "as_said": False}
    assert done.returncode == 1
    assert "ctl does not do what README.md says: missing" in done.stderr
