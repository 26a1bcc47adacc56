"""Custom training loops for TensorFlow: an explicit loop that owns its all-reduce.

Read the hot path in this order: `ctl.loop`, `ctl.step`, `ctl.reduce`.

Names load on first use, so ``import ctl`` and ``--help`` do not wait for TensorFlow, which takes
seconds to load.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ctl.base import __version__ as __version__
from ctl.base.lazy import load_lazily

if TYPE_CHECKING:  # for editors and type checkers
    from ctl import checkpoint, data, errors, flags, jobs, launch, logs, reduce, schedule, testing
    from ctl.base import actions
    from ctl.base.actions import Every
    from ctl.checkpoint.manager import CheckpointManager
    from ctl.control.copies import CompareReplicas
    from ctl.control.evaluator import Evaluator
    from ctl.distributed import cluster, local_batch, replicas, strategy, workers
    from ctl.distributed.strategy import make_strategy
    from ctl.errors import (
        CheckpointError,
        CtlError,
        DivergedError,
        PeerError,
        Preempted,
        UsageError,
    )
    from ctl.inspect.session import Inspection
    from ctl.jobs import models, named
    from ctl.loop import Loop
    from ctl.phases import freezing, losses, optimizers, passes
    from ctl.phases.base_step import BaseStep, EvalStep
    from ctl.phases.norms import global_norm
    from ctl.phases.options import option
    from ctl.phases.uninitialized import uninitialized_tables
    from ctl.schedule.patience import EarlyStopping
    from ctl.step import TrainStep

__all__ = [
    "BaseStep",
    "CheckpointError",
    "CheckpointManager",
    "CompareReplicas",
    "CtlError",
    "DivergedError",
    "EarlyStopping",
    "EvalStep",
    "Evaluator",
    "Every",
    "Inspection",
    "Loop",
    "PeerError",
    "Preempted",
    "TrainStep",
    "UsageError",
    "actions",
    "checkpoint",
    "cluster",
    "data",
    "errors",
    "flags",
    "freezing",
    "global_norm",
    "jobs",
    "launch",
    "local_batch",
    "logs",
    "losses",
    "make_strategy",
    "models",
    "named",
    "optimizers",
    "option",
    "passes",
    "reduce",
    "replicas",
    "schedule",
    "strategy",
    "testing",
    "uninitialized_tables",
    "workers",
]

_WHERE = {
    **dict.fromkeys(
        ("CheckpointError", "CtlError", "DivergedError", "PeerError", "Preempted", "UsageError"),
        "ctl.errors",
    ),
    "BaseStep": "ctl.phases.base_step",
    "CheckpointManager": "ctl.checkpoint.manager",
    "CompareReplicas": "ctl.control.copies",
    "EarlyStopping": "ctl.schedule.patience",
    "EvalStep": "ctl.step",
    "Evaluator": "ctl.control.evaluator",
    "Every": "ctl.base.actions",
    "Inspection": "ctl.inspect.session",
    "Loop": "ctl.loop",
    "TrainStep": "ctl.step",
    "actions": "ctl.base.actions",
    "cluster": "ctl.distributed.cluster",
    "freezing": "ctl.phases.freezing",
    "global_norm": "ctl.phases.norms",
    "local_batch": "ctl.distributed.local_batch",
    "losses": "ctl.phases.losses",
    "make_strategy": "ctl.distributed.strategy",
    "models": "ctl.jobs.models",
    "named": "ctl.jobs.named",
    "optimizers": "ctl.phases.optimizers",
    "option": "ctl.phases.options",
    "passes": "ctl.phases.passes",
    "replicas": "ctl.distributed.replicas",
    "strategy": "ctl.distributed.strategy",
    "uninitialized_tables": "ctl.phases.uninitialized",
    "workers": "ctl.distributed.workers",
}

__getattr__, __dir__ = load_lazily(__name__, __all__, _WHERE)
