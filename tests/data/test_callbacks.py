"""A program ends though threads of TensorFlow still call its Python functions."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import time
import numpy as np
import tensorflow as tf
from ctl.data import Streaming
from ctl.data.feed import open_batches
from ctl.data.sources import Items

def example(row):
    time.sleep(0.05)
    return row

data = Streaming(Items(np.zeros([64, 2]), example), global_batch_size=4)
iterator = open_batches(data, tf.distribute.OneDeviceStrategy("/cpu:0"))
next(iterator)
"""


@pytest.mark.slow
def test_a_program_that_reads_ahead_ends():
    """Without `ctl.data.callbacks`, it hangs or is aborted."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr
