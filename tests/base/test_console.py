"""What a command lets TensorFlow write."""

from __future__ import annotations

import pytest

from ctl.base.console import log_level


@pytest.mark.parametrize(
    ("given", "errors", "level"),
    [(None, True, "2"), (None, False, "3"), ("2", False, "3"), ("2", True, "2"), ("0", False, "0")],
)
def test_a_level_that_silences_warnings_silences_errors_that_are_none(given, errors, level):
    assert log_level(given, errors) == level
