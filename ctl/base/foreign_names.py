"""Errors about arguments and methods that a step or a loop does not have: they say what Keras and
Lightning call so, or which name is close."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import NoReturn, ParamSpec, TypeVar

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
    "learning_rate": "give it to the optimizer, or give Loop(schedule=…), a function of the step",
    "batch_size": "give Loop(global_batch_size=…), the examples of all replicas together",
    "callbacks": "give it to loop.train(…) or loop.train_and_evaluate(…)",
    "epochs": "give it to loop.train(…) or loop.train_and_evaluate(…)",
    "max_epochs": "give epochs= to loop.train(…) or loop.train_and_evaluate(…)",
    "steps": "give until=STEP to loop.train(…), the step at which it ends",
    "initial_epoch": "give Loop(checkpoints=DIRECTORY), and call loop.restore()",
    "monitor": "call it metric, without val_: the name of a result, such as loss",
    "verbose": "give progress=False or progress=True to loop.train(…)",
}
_OPTIMIZER = "give it to the optimizer, such as keras.optimizers.AdamW({name}=…)"
_LOOP = "give it to ctl.Loop(step, data, …)"
OF_STEPS = {
    **dict.fromkeys(("learning_rate", "weight_decay", "momentum"), _OPTIMIZER),
    "lr": _OPTIMIZER.format(name="learning_rate"),
    "loss": "call it loss_fn",
    "loss_weights": "give one function as loss_fn, which adds the losses with their weights: "
    "lambda labels, outputs: one(labels['a'], outputs['a']) + 0.5 * other(labels['b'], …)",
    **dict.fromkeys(
        ("clipnorm", "global_clipnorm", "max_grad_norm", "gradient_clip_val"), "call it clip_norm"
    ),
    "gradient_accumulation_steps": "call it accumulate_steps",
    "auto_scale_loss": "call it loss_scale, and give it with a mixed_float16 policy",
    "label_smoothing": "give loss_fn=functools.partial(ctl.losses.cross_entropy, smoothing=…)",
    "seed": "call it random_seed",
    "run_eagerly": "give eager=True to loop.train(…)",
    "steps_per_execution": "give Loop(steps_per_loop=…), or leave it out: ctl chooses it",
    **dict.fromkeys(("strategy", "schedule", "checkpoints", "evaluator"), _LOOP),
    "dataset": _LOOP,
}
METHODS = {
    **dict.fromkeys(("fit", "run"), _TRAINING),
    "compile": "give optimizer, loss and metrics to ctl.TrainStep(model, …)",
    "predict": "call model.predict(…)",
    "validate": "call loop.evaluate()",
    "test": "call loop.evaluate()",
    "model": "it is loop.step.model",
    "callbacks": "give callbacks= to loop.train(…) or loop.train_and_evaluate(…)",
    **dict.fromkeys(
        ("save_weights", "save_model", "save_checkpoint"),
        "call loop.step.model.save(…) for the model; give Loop(checkpoints=DIRECTORY) to resume",
    ),
    **dict.fromkeys(
        ("load_weights", "load_model", "load_checkpoint"),
        "call loop.step.model.load_weights(…); give Loop(checkpoints=DIRECTORY), and call "
        "loop.restore(), to resume",
    ),
}
OF_HISTORY = {"history": "it is loop.history.epochs, an entry for each epoch"}
OF_PACKAGES = {
    "ctl": {
        "Trainer": "call ctl.Loop(step, data).train(epochs=…)",
        "fit": "call ctl.Loop(step, data).train(epochs=…)",
        "callbacks": "give those of keras.callbacks to loop.train(callbacks=[…]), or ctl.actions "
        "to ctl.Loop(actions=[…])",
        "metrics": "give those of keras.metrics, or their names, to ctl.TrainStep(metrics=[…])",
        "ModelCheckpoint": "give ctl.Loop(checkpoints=DIRECTORY), or that of keras.callbacks to "
        "loop.train(callbacks=[…])",
    },
    "ctl.schedule": {
        name: f"call it ctl.schedule.{ours}"
        for name, ours in (
            *(("ReduceLROnPlateau", "Plateau"), ("PiecewiseConstantDecay", "Piecewise")),
            *(("CosineDecay", "Cosine"), ("CosineAnnealingLR", "Cosine")),
            *(("ExponentialDecay", "Exponential"), ("PolynomialDecay", "Polynomial")),
        )
    },
}

_P = ParamSpec("_P")
_R = TypeVar("_R")


def refuses_foreign(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Returns ``function``, which raises `UsageError` for an argument that it does not have and
    that is one of `ARGUMENTS`, and `TypeError` with the closest name for others."""
    known = inspect.signature(function).parameters.keys()

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        for name in kwargs.keys() - known:
            is_made = function.__name__ == "__init__"
            called = type(args[0]).__name__ if is_made else function.__qualname__
            if advice := ARGUMENTS.get(name):
                raise UsageError(f"{called} has no argument {name}: {advice}")
            raise _unexpected(called, name, known)
        return function(*args, **kwargs)

    return call


def refuse_argument_of_step(kind: type, name: str, options: Iterable[str]) -> NoReturn:
    """Raises the error for an argument that a step of the class ``kind`` does not have:
    `UsageError` if it is one of `OF_STEPS` or `ARGUMENTS`, else `TypeError` with the closest name.
    ``options``: the arguments that no ``__init__`` names."""
    of_loop = {one: advice for one, advice in ARGUMENTS.items() if advice is not _STEP}
    if advice := (of_loop | OF_STEPS).get(name):
        raise UsageError(f"{kind.__name__} has no argument {name}: {advice.format(name=name)}")
    made = [vars(base)["__init__"] for base in kind.__mro__[:-1] if "__init__" in vars(base)]
    known = {each for function in made for each in inspect.signature(function).parameters}
    raise _unexpected(kind.__name__, name, known | {*options})


def refuse_unknown(kind: type, named: Iterable[str]) -> None:
    """Raises `TypeError`, with the closest name, if ``kind`` does not take an argument ``named``
    so."""
    known = inspect.signature(kind.__init__).parameters  # type: ignore[misc]
    if any(one.kind is one.VAR_KEYWORD for one in known.values()):
        return
    for name in named:
        if name not in known:
            raise _unexpected(kind.__name__, name, known)


def _unexpected(function: str, name: str, known: Iterable[str]) -> TypeError:
    """The error of Python, with the name in ``known`` that is closest to ``name``."""
    close = difflib.get_close_matches(name, sorted(known), n=1)
    hint = f". Did you mean {close[0]!r}?" if close else ""
    return TypeError(f"{function}() got an unexpected keyword argument {name!r}{hint}")


def missing_attribute(
    owner: object, name: str, known: Mapping[str, str] = METHODS
) -> AttributeError:
    """The error for an attribute that ``owner`` does not have: `METHODS` of a loop, or others that
    are ``known``."""
    return _missing(f"{type(owner).__name__!r} object", name, known)


def missing_name(package: str, name: str) -> AttributeError:
    """The error for a name that a ``package`` does not have."""
    return _missing(f"module {package!r}", name, OF_PACKAGES.get(package, {}))


def _missing(owner: str, name: str, known: Mapping[str, str]) -> AttributeError:
    advice = f": {known[name]}" if name in known else ""
    return AttributeError(f"{owner} has no attribute {name!r}{advice}")
