"""DiLoCo equals models that are trained one by one, and numpy's outer steps between rounds."""

from __future__ import annotations

import pytest
from rounds import assert_equals_reference

from ctl.recipes.diloco import DiLoCo


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [1, 2])
def test_it_equals_models_that_are_trained_one_by_one(mirrored, replicas):
    assert_equals_reference(mirrored(replicas), DiLoCo)
