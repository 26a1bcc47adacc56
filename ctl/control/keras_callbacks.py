"""The epochs of a training, for its history and for callbacks of Keras, which are called at the
places that `fit` has."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras

from ctl.base.actions import STOP, Status, resets
from ctl.base.best import usual_mode
from ctl.base.names import check_name
from ctl.control.evaluator import Evaluator
from ctl.control.scalars import Scalars
from ctl.data.epochs import completed, end_of, steps_per_epoch
from ctl.errors import UsageError
from ctl.phases.logged import TAKEN
from ctl.step import TrainStep

# What ctl does itself. By name, since not every Keras has each of them.
_REFUSED = {
    "BackupAndRestore": "give Loop(checkpoints=DIRECTORY) and call loop.restore()",
    "OrbaxCheckpoint": "give Loop(checkpoints=DIRECTORY)",
    "ProgbarLogger": "give progress=True",
    "SwapEMAWeights": "give TrainStep(ema_decay=...), whose average evaluations use",
}
_SETS_RATE = keras.callbacks.LearningRateScheduler, keras.callbacks.ReduceLROnPlateau

_Logs = dict[str, float]


class Epochs:
    """Ends the epochs of a training, adds their scalars to its history and calls ``callbacks`` of
    Keras: what a loop calls as an action and as an evaluation action, after all of the user's.

    An epoch is that of the data, if epochs are ``of_data`` and their length is known, else what is
    trained between two evaluations. Its logs have its scalars, see `Scalars.read_epoch`, and the
    results of the last evaluation in it as ``val_…``. ``on_train_batch_end`` is called once for
    each call of the loop, which runs several steps, with the number of the last one.
    ``on_test_batch_…`` are not called.

    Attributes:
        ended_by: the class of the callback that has set ``model.stop_training``.
        results: of the evaluation of an earlier step, if a callback has given the model the weights
            of that step at the end (``restore_best_weights``); else empty.

    Args:
        callbacks: of Keras.
        step: a built step.
        scalars: of the loop, whose window of the epoch this ends.
        ended: called with the step at the end of an epoch and with its logs.
        dataset: the training data.
        start: the global step at which the training begins.
        until: the step at which it ends.
        evaluate_every: steps between two evaluations; None without evaluations.
        of_data: whether an epoch is that of the data.
        evaluator: of the loop.

    Raises:
        UsageError: ctl has something else for a callback, or one sets a learning rate that is given
            by a schedule or by parameter groups, or monitors a metric that there is not, or one of
            unknown mode.
    """

    def __init__(
        self,
        callbacks: Sequence[keras.callbacks.Callback],
        step: TrainStep,
        dataset: Any,
        *,
        scalars: Scalars,
        ended: Callable[[int, _Logs], None],
        start: int,
        until: int,
        evaluate_every: float | None,
        of_data: bool = True,
        evaluator: Evaluator | None = None,
    ):
        self.callbacks = keras.tree.flatten(callbacks)
        steps = [step, evaluator.step] if self.callbacks and evaluator else [step]
        metrics = [metric for each in steps for metric in each.all_metrics()]
        all_known = True
        for callback in self.callbacks:
            _check(callback, step)
            # One of the user's may add to the logs of those after it.
            all_known &= (
                _of_keras(callback) and type(callback) is not keras.callbacks.LambdaCallback
            )
            if all_known:
                _check_monitored(callback, step, evaluator)
            _choose_mode(callback, metrics)
        self._model: Any = step.model
        self.ended_by = "a callback"
        self._scalars, self._add_to_history = scalars, ended
        self._every = evaluate_every
        of_one = steps_per_epoch(dataset) if of_data else None
        self._steps = of_one or evaluate_every or max(1, until - start)
        self._reads = any(map(_has_batch_end, self.callbacks))
        self._step = self._begun = start  # of the last call; of the epoch
        self._epoch = completed(start, self._steps)
        self._is_open = False  # an epoch has begun
        self._final = False  # the training ends at this step
        self._ended: _Logs | None = None  # logs of an epoch that waits for its evaluation
        self._evaluated: _Logs = {}  # results in this epoch
        self._last: _Logs = {}
        self._restoring = [c for c in self.callbacks if getattr(c, "restore_best_weights", False)]
        self._best: dict[Any, tuple[int, _Logs]] = {}  # of these: step and evaluation of the best
        self.results: _Logs = {}
        epochs = max(1, -(-until // self._steps))
        params = {"verbose": 0, "epochs": int(epochs), "steps": int(-(-self._steps // 1))}
        for callback in self.callbacks:
            callback.set_params(params)
            callback.set_model(self._model)

    def begin(self) -> None:
        """Before the first step."""
        self._call("on_train_begin", {})
        self._begin_epoch()

    def end(self) -> str:
        """After the last step and its evaluation. Returns what to say of the model's weights, if
        they are not those of the last step."""
        if self._is_open and self._step > self._begun:
            self._final = True
            logs = self._ended
            if logs is None:  # a training that goes on with another call
                logs = self._logs()
                self._scalars.end_epoch()
            self._end_epoch(logs)
        self._call("on_train_end", self._last)
        said = ""
        for callback, (step, evaluated) in self._best.items():
            if callback.best_weights is not None and step < self._step:
                self.results = {name[len("val_") :]: value for name, value in evaluated.items()}
                said = (
                    f"{type(callback).__name__} gave the model the weights of step {step}, the "
                    f"best; optimizer and checkpoints are those of step {self._step}"
                )
        return said

    def steps_until_due(self, step: int) -> int:
        """Steps until the epoch ends, see `ctl.actions.Every`."""
        return end_of(completed(step, self._steps) + 1, self._steps) - step

    def __call__(self, status: Status) -> None:
        self._final = status.final
        goes_on = status.step > self._step and self._is_open
        if goes_on:
            self._step = status.step
            logs = self._logs() if self._reads else {}
            self._call("on_train_batch_end", self._batch - 1, logs)
        ends = status.final or completed(status.step, self._steps) > self._epoch
        if ends and self._is_open and self._ended is None:
            self._ended = self._logs()
            if not status.final:  # at the end, `Scalars.begin` does it
                self._scalars.end_epoch()
            if not self._evaluates_at(status):
                self._end_epoch(self._ended)
        if self._stops and not status.final:
            status.stop()
        elif goes_on and not ends:
            self._call("on_train_batch_begin", self._batch, {})

    @property
    def _batch(self) -> int:
        """Number of the next batch in its epoch, from 0."""
        return self._step - end_of(self._epoch, self._steps)

    def _evaluates_at(self, status: Status) -> bool:
        if self._every is None:
            return False
        step = status.step
        return status.final or completed(step, self._every) > completed(step - 1, self._every)

    def evaluated(self, step: int, results: Mapping[str, float]) -> object:
        """Returns `STOP` if a callback has set ``model.stop_training``."""
        self._call("on_test_begin", {})
        self._call("on_test_end", dict(results))
        if step > self._begun:
            self._evaluated = {f"val_{name}": value for name, value in results.items()}
        if self._ended is not None:
            self._end_epoch(self._ended)
        return STOP if self._stops else None

    def _begin_epoch(self) -> None:
        self._is_open, self._begun = True, self._step
        self._call("on_epoch_begin", self._epoch, {})
        self._call("on_train_batch_begin", self._batch, {})

    def _end_epoch(self, logs: _Logs) -> None:
        evaluated, self._last = self._evaluated, logs | self._evaluated
        self._ended, self._evaluated, self._is_open = None, {}, False
        self._call("on_epoch_end", self._epoch, self._last)  # which may add to them
        self._add_to_history(self._step, self._last)
        for callback in self._restoring:
            if getattr(callback, "best_epoch", None) == self._epoch:
                self._best[callback] = self._step, evaluated
        self._epoch += 1
        if not (self._final or self._stops):
            self._begin_epoch()

    def _logs(self) -> _Logs:
        scalars = self._scalars.read_epoch()
        return {name: scalars[name] for name in scalars if not name.endswith("_per_second")}

    @property
    def _stops(self) -> bool:
        return bool(self.callbacks) and self._model.stop_training

    def _call(self, hook: str, *arguments: Any) -> None:
        for callback in self.callbacks:
            stopped = self._model.stop_training
            getattr(callback, hook)(*arguments)
            if self._model.stop_training and not stopped:
                self.ended_by = type(callback).__name__


def _check(callback: Any, step: TrainStep) -> None:
    name = type(callback).__name__
    if not isinstance(callback, keras.callbacks.Callback):
        raise UsageError(
            f"callbacks must be a list of keras.callbacks.Callback objects, not of {callback!r}"
        )
    if _of_keras(callback) and name in _REFUSED:
        raise UsageError(f"{name} is not used with ctl: {_REFUSED[name]}")
    groups = step.updater.groups
    if isinstance(callback, _SETS_RATE) and (len(groups) > 1 or groups[0].schedule is not None):
        what = "several parameter groups" if len(groups) > 1 else "a schedule"
        raise UsageError(
            f"{name} sets the learning rate of the optimizer, and the loop has {what}: leave out "
            "the one or the other (ctl.schedule.Plateau is a schedule)"
        )


def _of_keras(callback: Any) -> bool:
    return type(callback).__module__.startswith("keras.")


def _check_monitored(callback: Any, step: TrainStep, evaluator: Evaluator | None) -> None:
    """Refuses what a callback monitors if no log will have it, as far as the names are known: those
    of a step of one's own are, once it is traced, and only the evaluation is traced here."""
    monitored = getattr(callback, "monitor", None)
    if not isinstance(monitored, str) or not getattr(callback, "save_best_only", True):
        return
    of_evaluation = monitored.startswith("val_")
    if type(step) is not TrainStep and (evaluator is None or not of_evaluation):
        return
    none = "" if evaluator else "; names with val_ need Loop(evaluator=…) and train_and_evaluate(…)"
    results = evaluator.known_results(monitored.removeprefix("val_")) if evaluator else []
    known = ["loss", *step.results(), *(f"val_{name}" for name in results)]
    if of_evaluation or monitored not in TAKEN:
        check_name(f"monitor of {type(callback).__name__}", monitored, known, none)


def _choose_mode(callback: Any, metrics: Sequence[keras.metrics.Metric]) -> None:
    """Sets ``mode="auto"`` of what a callback monitors, which Keras takes from compiled metrics."""
    monitored = getattr(callback, "monitor", None)
    if getattr(callback, "mode", None) != "auto" or not isinstance(monitored, str):
        return
    name = monitored.removeprefix("val_")
    directions = {getattr(one, "_direction", "") for one in metrics if one.name == name}
    by_direction = "max" if "up" in directions else "min" if "down" in directions else None
    if mode := by_direction or usual_mode(name):
        callback.mode = mode
    elif _of_keras(callback):
        raise UsageError(
            f"{type(callback).__name__} monitors {monitored}: give mode='max' or mode='min', as is "
            "best"
        )


def _has_batch_end(callback: Any) -> bool:
    """Whether a callback has code that takes the logs of a batch."""
    base = keras.callbacks.Callback
    return any(
        getattr(getattr(callback, hook), "__func__", None) is not getattr(base, hook)
        for hook in ("on_train_batch_end", "on_batch_end")
    )


@contextlib.contextmanager
def counting_epochs(
    callbacks: Any,
    loop: Any,
    until: int,
    every: float | None,
    epochs: float | None,
    say: Callable[[str], None],
) -> Iterator[Epochs | None]:
    """Begins the windows of a training of ``loop`` to step ``until``, and ends its epochs inside,
    if it has some: it was given in ``epochs``, evaluates ``every`` so many steps, or has
    ``callbacks`` of Keras. Without epochs or steps to run, or inside another training, gives None.
    Calls ``say`` with what the user should know at the end.

    The model has the optimizer of the step inside, as callbacks expect it.
    """
    step, scalars, start = loop.step, loop.scalars, loop.global_step
    if start >= until or loop.stopped or scalars.counts_epochs:
        yield None
        return
    without = not callbacks and epochs is every is None
    scalars.begin(of_epochs=not without)
    if without:
        with scalars.noting_errors():
            yield None
        return
    if callbacks:
        step.model.stop_training = False
    with _optimizer_of(step) if callbacks else contextlib.nullcontext():
        counted = Epochs(
            callbacks or (),
            step,
            loop.dataset,
            scalars=scalars,
            ended=loop.history.add_epoch,
            start=start,
            until=until,
            evaluate_every=every,
            of_data=bool(callbacks) or epochs is not None,
            evaluator=loop.evaluator,
        )
        loop.watchers.insert(0, counted)
        scalars.counts_epochs, scalars.has_log = True, any(map(resets, loop.actions))
        try:
            counted.begin()
            with scalars.noting_errors():
                yield counted
            if said := counted.end():
                say(said)
        finally:
            loop.watchers.remove(counted)
            scalars.counts_epochs = False


@contextlib.contextmanager
def _optimizer_of(step: TrainStep) -> Iterator[None]:
    """Inside, ``model.optimizer`` is that of ``step``, unless it has several."""
    attributes, groups = vars(step.model), step.updater.groups
    before = attributes.get("optimizer")
    if len(groups) == 1:  # a plain assignment would make it a part of an exported model
        attributes["optimizer"] = groups[0].optimizer
    try:
        yield
    finally:
        attributes["optimizer"] = before
