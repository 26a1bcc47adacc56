"""Flags of what a training shows and writes."""

from __future__ import annotations

from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest
import tensorflow as tf

from ctl.errors import UsageError
from ctl.jobs import outputs


def test_there_is_nothing_to_compare_with_one_replica(tmp_path):
    loop: Any = SimpleNamespace(strategy=tf.distribute.get_strategy())
    prepared: Any = SimpleNamespace(flags=SimpleNamespace(check_replicas_every="5"))
    with pytest.raises(UsageError, match="--check_replicas_every has no effect with one replica"):
        outputs.add_actions(loop, prepared, ExitStack(), tmp_path, True, None)
