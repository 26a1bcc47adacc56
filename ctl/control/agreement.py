"""Checks that all workers run the same step; TensorFlow would silently sum the wrong tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from absl import logging

import ctl
from ctl import workers
from ctl.data.dataset import Dataset
from ctl.step import TrainStep
from ctl.watch import watchdog


def agree(step: TrainStep, dataset: Dataset, trace: Callable[[], Any]) -> None:
    """Compares model, optimizer, data and all-reduces over all workers, before the first step.

    Args:
        step: a built step.
        dataset: the dataset of the loop.
        trace: traces the step. All workers wait until each has traced it.

    Raises:
        UsageError: the workers differ.
        PeerError: a worker is missing.
    """
    strategy = step.strategy
    workers.check_agreement(
        strategy,
        {
            "the step": int(step.global_step.numpy()),
            "the code of ctl": ctl.__version__,
            "bytes_per_pack": step.bytes_per_pack,
            "the optimizer": step.optimizer.get_config(),
            **{f"data: {key}": value for key, value in dataset.fingerprint().items()},
            **{
                f"variable {number}": f"{v.path} {v.dtype} {list(v.shape)}"
                for number, v in enumerate(step.model.trainable_variables)
            },
        },
    )
    trace()
    workers.barrier(strategy, watchdog.FIRST_CALL_SECONDS)
    workers.check_agreement(strategy, plan_facts(step))


def plan_facts(step: TrainStep) -> dict[str, str]:
    """The all-reduces in the graph of the step; empty if the graph cannot be read."""
    try:
        return step.plan().facts()
    except Exception as error:  # training works without the plan
        logging.warning("the plan of the all-reduces is not compared: %r", error)
        return {}
