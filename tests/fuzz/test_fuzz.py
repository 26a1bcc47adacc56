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

DRAWN = 36
NUMBERS = {"sizes", "fault_row", "bad_label", "pause", "seed"}
# Of which other tests have each value: `test_step.py::test_every_optimizer_equals_plain_keras`,
# and `test_testing.py` the steps that `check_step` accepts and the mistakes that it finds.
ELSEWHERE = {"optimizer", "checked"}


def values_of(case: Case) -> set:
    return {(k, v) for k, v in dataclasses.asdict(case).items() if k not in NUMBERS | ELSEWHERE}


@functools.cache
def chosen() -> list[Case]:
    """All that were kept, and few of 36 drawn cases: two that call `check_step`, and some that have
    all other values that these have. The same in every run."""
    left = drawn(DRAWN, number=0)
    found = [*kept().values(), *[case for case in left if case.checked][:2]]
    missing = set().union(*map(values_of, left)) - set().union(*map(values_of, found))
    while missing:
        found.append(max(left, key=lambda case: len(values_of(case) & missing)))
        missing -= values_of(found[-1])
    return found


@pytest.mark.slow
@pytest.mark.parametrize("third", [pytest.param(0, marks=pytest.mark.sample), 1, 2])
def test_cases_equal_a_plain_loop(third):
    """To draw others: ``python -m tests.fuzz.run``."""
    cases = chosen()[third::3]
    with contextlib.closing(judged(cases, jobs=1)) as results:
        bugs = [f"{case}\n  {text}" for case, kind, text in results if kind == "bug"]
    assert not bugs, "\n".join(bugs)


def test_every_step_is_drawn():
    assert RIGHT_STEPS.keys() == right_steps.RIGHT.keys()
    assert {*MISTAKES} == wrong_steps.WRONG.keys()
    assert COMPOSED == wrong_steps.COMPOSED
    assert {*right_steps.NOT_COMPOSED, "muon"} == NOT_COMPOSED
