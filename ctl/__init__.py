"""Custom training loops for TensorFlow: an explicit loop that owns its all-reduce.

Read the hot path in this order: `ctl.loop`, `ctl.step`, `ctl.reduce`.

Names load on first use, so ``import ctl`` and ``--help`` do not wait for TensorFlow, which takes
seconds to load.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # for editors and type checkers
    from ctl import (
        actions,
        checkpoint,
        cluster,
        data,
        errors,
        models,
        named,
        passes,
        phases,
        reduce,
        schedule,
        strategy,
        testing,
        workers,
    )
    from ctl.actions import Every
    from ctl.checkpoint import CheckpointManager
    from ctl.control.copies import CompareReplicas
    from ctl.control.patience import EarlyStopping
    from ctl.evaluator import Evaluator
    from ctl.flags.option import option
    from ctl.loop import Loop
    from ctl.step import EvalStep, TrainStep
    from ctl.strategy import make_strategy

__version__ = "0.1.0"

__all__ = [
    "CheckpointManager",
    "CompareReplicas",
    "EarlyStopping",
    "EvalStep",
    "Evaluator",
    "Every",
    "Loop",
    "TrainStep",
    "actions",
    "checkpoint",
    "cluster",
    "data",
    "errors",
    "make_strategy",
    "models",
    "named",
    "option",
    "passes",
    "phases",
    "reduce",
    "schedule",
    "strategy",
    "testing",
    "workers",
]

_WHERE = {
    "CheckpointManager": "ctl.checkpoint",
    "CompareReplicas": "ctl.control.copies",
    "EarlyStopping": "ctl.control.patience",
    "EvalStep": "ctl.step",
    "Evaluator": "ctl.evaluator",
    "Every": "ctl.actions",
    "Loop": "ctl.loop",
    "TrainStep": "ctl.step",
    "make_strategy": "ctl.strategy",
    "option": "ctl.flags.option",
}


def load_lazily(
    package: str, names: list[str], where: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Makes the ``__getattr__`` and ``__dir__`` of a package whose names load on first use.

    Args:
        package: ``__name__`` of the package.
        names: ``__all__`` of the package.
        where: the module that defines each name. A name without an entry is a submodule.
    """

    def get(name: str) -> Any:
        if name in where:
            return getattr(importlib.import_module(where[name]), name)
        if name in names:
            return importlib.import_module(f"{package}.{name}")
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return get, lambda: sorted({*names, *importlib.import_module(package).__dict__})


__getattr__, __dir__ = load_lazily(__name__, __all__, _WHERE)


class _QuietImport:
    """Finds TensorFlow for an import that follows, so that `ctl.logs.quiet` can filter it."""

    @classmethod
    def find_spec(cls, name: str, path: Any = None, target: Any = None) -> Any:
        if name != "tensorflow":
            return None
        sys.meta_path.remove(cls)
        from ctl.logs import quiet

        quiet.set_level()
        return quiet.spec_of_tensorflow()


if "tensorflow" not in sys.modules:
    sys.meta_path.insert(0, _QuietImport)
