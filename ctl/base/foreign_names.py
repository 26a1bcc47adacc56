"""What Keras and Lightning call arguments and methods of a loop, for the errors about them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from ctl.errors import UsageError

_STEP = "give it to ctl.TrainStep(model, …)"
_EVALUATION = (
    "give Loop(evaluator=ctl.Evaluator(ctl.EvalStep(model, loss), data)), and call "
    "loop.train_and_evaluate(…)"
)
_TRAINING = "call loop.train(epochs=…), or loop.train_and_evaluate(epochs=…)"
ARGUMENTS = {
    **dict.fromkeys(("validation_data", "val_data", "val_dataloaders"), _EVALUATION),
    "validation_split": "split the arrays, such as (x[:-1000], y[:-1000]) for the loop and "
    "(x[-1000:], y[-1000:]) for its evaluator",
    **dict.fromkeys(
        ("validation_freq", "steps_per_epoch"),
        "call loop.train_and_evaluate(until=STEPS, evaluate_every=STEPS)",
    ),
    **dict.fromkeys(("optimizer", "loss", "loss_fn", "metrics", "class_weight"), _STEP),
    "batch_size": "give Loop(global_batch_size=…), the examples of all replicas together",
    "callbacks": "give it to loop.train(…) or loop.train_and_evaluate(…)",
    "epochs": "give it to loop.train(…) or loop.train_and_evaluate(…)",
    "max_epochs": "give epochs= to loop.train(…) or loop.train_and_evaluate(…)",
    "steps": "give until=STEP to loop.train(…), the step at which it ends",
    "initial_epoch": "give Loop(checkpoints=DIRECTORY), and call loop.restore()",
    "verbose": "give progress=False or progress=True to loop.train(…)",
}
METHODS = {
    "fit": _TRAINING,
    "compile": "give optimizer, loss and metrics to ctl.TrainStep(model, …)",
    "predict": "call model.predict(…)",
    "validate": "call loop.evaluate()",
    "test": "call loop.evaluate()",
}

_P = ParamSpec("_P")
_R = TypeVar("_R")


def refuses_foreign(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Returns ``function``, which raises `UsageError` for an argument that it does not have and
    that is one of `ARGUMENTS`."""
    known = inspect.signature(function).parameters.keys()

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        for name in kwargs.keys() - known:
            if advice := ARGUMENTS.get(name):
                raise UsageError(f"{function.__qualname__} has no argument {name}: {advice}")
        return function(*args, **kwargs)

    return call


def missing_attribute(owner: object, name: str) -> AttributeError:
    """The error for an attribute that ``owner`` does not have."""
    advice = f": {METHODS[name]}" if name in METHODS else ""
    return AttributeError(f"{type(owner).__name__!r} object has no attribute {name!r}{advice}")
