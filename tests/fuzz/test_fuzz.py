"""Drawn trainings equal those of a plain loop; so do all that did not once."""

from __future__ import annotations

import contextlib
import dataclasses
import functools

import pytest
import right_steps
import wrong_steps

from .cases import COMPOSED, MISTAKES, NOT_COMPOSED, RIGHT_STEPS, Case, drawn
from .run import judged, kept

DRAWN, PARTS = 36, 3
NUMBERS = {"sizes", "fault_row", "bad_label", "pause", "seed"}


@functools.cache
def chosen() -> list[Case]:
    """All that were kept, and those of 36 drawn cases that have a value which none before has. The
    same in every run."""
    seen, found = set(), []
    for case in drawn(DRAWN, number=0):
        values = {pair for pair in dataclasses.asdict(case).items() if pair[0] not in NUMBERS}
        if not values <= seen:
            found.append(case)
            seen |= values
    return [*kept().values(), *found]


@pytest.mark.slow
@pytest.mark.parametrize("part", [pytest.param(0, marks=pytest.mark.sample), *range(1, PARTS)])
def test_cases_equal_a_plain_loop(part):
    """To draw others: ``python -m tests.fuzz.run``. In parts with one child process each, so that
    pytest-xdist can share them out."""
    with contextlib.closing(judged(chosen()[part::PARTS], jobs=1)) as results:
        bugs = [f"{case}\n  {text}" for case, kind, text in results if kind == "bug"]
    assert not bugs, "\n".join(bugs)


def test_every_step_is_drawn():
    assert RIGHT_STEPS.keys() == right_steps.RIGHT.keys()
    assert {*MISTAKES} == wrong_steps.WRONG.keys()
    assert COMPOSED == wrong_steps.COMPOSED
    assert {*right_steps.NOT_COMPOSED, "muon"} == NOT_COMPOSED
