"""Drawn trainings equal those of a plain loop; so do all that did not once."""

from __future__ import annotations

import contextlib

import pytest

from .cases import Case, drawn
from .run import judged, kept

pytestmark = pytest.mark.xdist_group("processes")


def bugs(chosen: list[Case], jobs: int = 2) -> list[str]:
    with contextlib.closing(judged(chosen, jobs)) as results:
        return [f"{case}\n  {text}" for case, kind, text in results if kind == "bug"]


@pytest.mark.slow
def test_drawn_cases():
    """The same 150 in every run. To draw others: ``python -m tests.fuzz.run``."""
    found = bugs(drawn(150, number=0))
    assert not found, "\n".join(found)


@pytest.mark.slow
def test_kept_cases():
    found = bugs(list(kept().values()))
    assert not found, "\n".join(found)
