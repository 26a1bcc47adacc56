"""ctl.inspect.flight: which marks of the running step have fired, by the last stamps of all."""

from __future__ import annotations

import numpy as np
import pytest

from ctl.inspect.flight import fired
from ctl.inspect.record import phase_of

NAMES = ("input", "forward", "backward", "ready0", "done0", "apply")
BEFORE = [10.0, 10.1, 10.2, 10.3, 10.4, 10.5]  # the stamps of the step before


def stamps(*now: float) -> np.ndarray:
    """Of a step of which the first marks have fired."""
    return np.array([[*now, *BEFORE[len(now) :]]])


@pytest.mark.parametrize(
    ("number", "finished", "until", "seen", "phase"),
    [
        (7, 7, 20, stamps(11.0), "forward"),
        (7, 7, 20, stamps(11.0, 11.1, 11.2, 11.3), "pack0"),
        (7, 7, 20, stamps(11.0, 11.1, 11.2, 11.3, 11.4), "apply"),
        (6, 7, 20, stamps(), "input"),  # step 7 has no batch yet
        (6, 7, 7, stamps(), ""),  # it was the last of the call
        (0, 0, 20, np.zeros([1, 6]), "input"),  # nothing has run yet
    ],
)
def test_where_in_its_step_a_worker_is(number, finished, until, seen, phase):
    ages, waiting = fired(NAMES, [number], seen, finished, until, now=12.0)
    assert phase_of(ages, waiting) == phase
    assert set(ages) | set(waiting) == set(NAMES)
    assert all(0.5 < age < 2.1 for age in ages.values())


def test_the_replica_that_is_behind_counts():
    seen = np.concatenate([stamps(11.0, 11.1, 11.2, 11.3), stamps(11.0, 11.5)])
    ages, waiting = fired(NAMES, [7, 7], seen, 7, 20, now=12.0)
    assert ages == {"input": 1.0, "forward": 0.5} and waiting[0] == "backward"
    ages, waiting = fired(NAMES, [7, 6], np.concatenate([seen[:1], stamps()]), 7, 20, now=12.0)
    assert ages == {} and waiting == NAMES
