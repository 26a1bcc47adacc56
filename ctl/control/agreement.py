"""Whether all workers are about to do the same: TensorFlow would sum wrong pairs in silence."""

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
    """Before the first step: compares with the other workers what they train, on what, and how it
    is reduced. ``trace`` traces the step, for which all of them wait.

    Raises:
        UsageError: they differ.
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
    """What the graph of the step would move; empty where it cannot be read."""
    try:
        return step.plan().facts()
    except Exception as error:  # a graph that cannot be read trains all the same
        logging.warning("the plan of the all-reduces is not compared: %r", error)
        return {}
