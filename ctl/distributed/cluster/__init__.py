"""The workers of a job. Imports no TensorFlow, so a wrong description is refused at once."""

from ctl.distributed.cluster.members import Cluster, Tasks, resolve, resolve_tasks, strategy_for
from ctl.distributed.cluster.rendezvous import meet, unreachable

__all__ = [
    "Cluster",
    "Tasks",
    "meet",
    "resolve",
    "resolve_tasks",
    "strategy_for",
    "unreachable",
]
