"""Methods that need more of a step than a gradient, on two workers."""

from __future__ import annotations

import re

import keras
import numpy as np
import pytest
from contrastive import plain_tensorflow, views
from helpers import largest_difference, mlp, plain_keras
from paths import SUPPORT
from sam import sam_batches, trained_plainly
from worker_jobs import last_line, run_job

SIZES = [9, 13, 6, 9]  # as in methods_worker.py


@pytest.fixture(scope="module")
def out(job, tmp_path_factory):
    """Where two workers left the weights that they trained. They end with a `DivergedError`."""
    out = tmp_path_factory.mktemp("methods")
    run_job(job, out, program=SUPPORT / "methods_worker.py", code=3)
    return out


@pytest.mark.parametrize("method", ["contrastive", "sam", "zero1"])
def test_two_workers_equal_plain_tensorflow(out, method):
    """Batches of odd sizes, so that workers have unequal parts."""
    if method == "sam":
        wanted = trained_plainly(len(SIZES), SIZES)
    elif method == "zero1":
        keras.utils.set_random_seed(1)
        model, batches = mlp(), sam_batches(SIZES, len(SIZES))
        plain_keras(model, keras.optimizers.SGD(0.1, momentum=0.9), batches)
        wanted = model.get_weights()
    else:
        wanted = plain_tensorflow(views(SIZES))
    for worker in range(2):
        saved = np.load(out / f"{method}-{worker}.npz")
        assert largest_difference(saved.values(), wanted) <= 1e-6


def test_a_copy_that_differs_ends_both_workers(out):
    for worker in range(2):
        assert re.fullmatch(
            r"replica 0 \(worker 0, CPU:0\) and replica 1 \(worker 1, CPU:0\) differ in "
            r".*kernel at step 10, and did not at step 8: check the device, and resume .*",
            last_line(out, worker),
        )
