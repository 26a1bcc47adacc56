"""Checks that a step of one's own is right, for pytest or by hand.

A test gives a function that makes a loop. The checks call it for one replica and for several, which
are logical devices of the CPU::

    import ctl, keras
    from ctl import testing

    def make(strategy, checkpoints):
        with strategy.scope():
            step = MyStep(my_model(), keras.optimizers.SGD(0.1))
        return ctl.Loop(step, my_data(), strategy=strategy, checkpoints=checkpoints)

    def test_my_step():
        testing.check_step(make)

Each check raises an `AssertionError` of one line that says what is wrong. Take SGD: Adam divides a
gradient by its own size, and so hides one that is twice too large.
"""

from __future__ import annotations

import functools
import itertools
import random
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from ctl.checkpoint import CheckpointManager
from ctl.distributed import replicas as of_replicas
from ctl.distributed.strategy import make_strategy
from ctl.loop import Loop

Make = Callable[[tf.distribute.Strategy, CheckpointManager | None], Loop]

_SEED = 1


@functools.cache  # two strategies over the same devices share the keys of their collectives
def strategy_over(replicas: int) -> tf.distribute.Strategy:
    """A strategy over logical devices of the CPU. Call it before TensorFlow runs an operation, with
    the largest number first.

    Raises:
        UsageError: TensorFlow has fewer devices, and runs already.
    """
    if replicas == 1:
        return make_strategy("one_device", replicas=1).strategy
    operation = "reduction_to_one_device"
    return make_strategy("mirrored", replicas=replicas, cross_device_ops=operation).strategy


def check_step(
    make: Make,
    *,
    replicas: Sequence[int] = (4, 2),
    steps: int = 4,
    tolerance: float = 1e-5,
    reference: Callable[[keras.Model, list[Any]], None] | None = None,
) -> None:
    """Makes all checks of this module.

    Args:
        make: ``make(strategy, checkpoints)`` returns a loop. It must make the same model and data
            each time. The seeds of Keras are set before.
        replicas: how many replicas to compare with one. The global batch must have at least as many
            examples. Empty if N replicas are not meant to equal one.
        steps: steps of each training.
        tolerance: largest difference of a variable, times its largest value where that is above 1.
            A weight must move by ten times as much, or nothing would be compared.
        reference: see `check_reference`.
    """
    for count in replicas:
        check_replicas_equal_one(make, count, steps=steps, tolerance=tolerance)
        check_reduced_once(make, count)
        check_noise(make, count)
    for count in (1, *replicas[:1]):
        check_resumed(make, count, steps=steps)
        check_one_trace(make, count, steps=steps)
    if reference:
        check_reference(make, reference, steps=steps, tolerance=tolerance)


def check_replicas_equal_one(
    make: Make, replicas: int, *, steps: int = 4, tolerance: float = 1e-5
) -> None:
    """Compares state, loss and metrics after 1 and after ``steps`` steps of N replicas with one.

    Raises:
        AssertionError: they differ, the replicas do, no weight moves, or the model has layers for
            which they must differ: a BatchNormalization that is not synchronized, or Dropout.
    """
    one, several = _made(make, 1), _made(make, replicas)
    _check_comparable(several)
    before, names = _values(one), _names(several)
    for until in (1, steps):
        try:
            scalars = [loop.train(until) for loop in (one, several)]
        except Exception as error:
            if getattr(error, "exit_code", None) == 3:  # the training has compared the replicas
                _check_agreement(several, replicas)
            raise
        _check_agreement(several, replicas)
        wanted, found = _values(one), _values(several)
        when = f"after {until} step{'s' * (until > 1)}"
        for name in wanted:
            difference = np.abs(found[name] - wanted[name]).max(initial=0.0)
            if difference > tolerance * max(1.0, np.abs(wanted[name]).max(initial=0.0)):
                raise AssertionError(
                    f"{replicas} replicas do not equal one: {when}, {names[name]} differs by "
                    f"{difference:.2g}: {_guess(before[name], wanted[name], found[name], replicas)}"
                )
        for name, one_replica in scalars[0].items():
            value = scalars[1][name]
            if "_per_second" not in name and not np.isclose(value, one_replica, 1e-3, 1e-5):
                raise AssertionError(
                    f"{replicas} replicas do not equal one: {when}, {name} is {value:.6g}, not "
                    f"{one_replica:.6g}: does it count the examples of all replicas?"
                )
    moves = [np.abs(wanted[n] - before[n]).max(initial=0.0) for n in wanted if "model " in names[n]]
    assert max(moves, default=0.0) > 10 * tolerance, (
        f"in {steps} steps, no weight has moved by more than {max(moves, default=0.0):.2g}, so "
        "nothing was compared: take a larger learning rate"
    )


def _guess(before: np.ndarray, wanted: np.ndarray, found: np.ndarray, replicas: int) -> str:
    moved = wanted - before
    ratio = float((moved * (found - before)).sum() / max((moved**2).sum(), 1e-30))
    if abs(ratio / replicas - 1.0) < 0.02:
        return (
            f"it has moved {replicas} times as far: is its gradient reduced twice, or divided by "
            "the examples of one replica?"
        )
    if abs(ratio * replicas - 1.0) < 0.02:
        return f"it has moved 1/{replicas} as far: is its gradient divided by the replicas?"
    return "is a part of the step not a sum over examples, such as clipping before the reduce?"


def _check_agreement(loop: Loop, replicas: int) -> None:
    seeds = {id(v) for v in of_replicas.dropout_seeds(loop.step.tracked.layer)}
    for label, _, variable in _variables(loop):
        copies = loop.strategy.experimental_local_results(variable)
        if id(variable) not in seeds and len({c.numpy().tobytes() for c in copies}) > 1:
            raise AssertionError(
                f"{label} differs between the {replicas} replicas: is its gradient not reduced, or "
                "is it updated with one replica's part of the batch?"
            )


def _check_comparable(loop: Loop) -> None:
    for layer in of_replicas.layers_of(loop.step.tracked.layer):
        norm = isinstance(layer, keras.layers.BatchNormalization) and layer.trainable
        assert not norm or layer.synchronized, (
            f"several replicas do not equal one with layer {layer.name}, which normalizes over the "
            "examples of a replica: make it synchronized for the test, or give replicas=()"
        )
    assert not of_replicas.dropout_seeds(loop.step.tracked.layer), (
        "several replicas do not equal one with Dropout or a seed generator, since each draws "
        "other numbers: leave it out for the test, or give replicas=()"
    )


def check_reduced_once(make: Make, replicas: int) -> None:
    """Reads from the graph that each gradient is summed once, and that no collective repeats.

    Raises:
        AssertionError: the first variable of which this is not so.
    """
    loop = _made(make, replicas)
    loop.begin(0)
    plan = loop.plan()
    again = [c.name for c in plan.collectives if c.again]
    assert not again, f"{again[0]} sums what was summed before: a gradient is reduced twice"
    found = [path for c in plan.collectives for member in c.members for path in member.variables]
    if loop.step.has_custom_all_reduce:
        return  # what an own collective moves need not have the shape of a variable
    for variable, trains in zip(
        loop.step.updater.trainable_variables, loop.step.trainable_mask, strict=True
    ):
        if not trains:
            continue
        count = found.count(variable.path)
        assert count == 1, f"the gradient of {variable.path} is reduced {count} times in the graph"


def check_noise(make: Make, replicas: int) -> None:
    """Gives all replicas the same examples: if the losses are random, each must draw its own.

    Raises:
        AssertionError: the losses are random, and equal on all replicas.
    """
    loop = _made(make, replicas)
    batch = next(_batches(loop.dataset))

    @tf.function
    def losses() -> Any:
        def replica() -> tf.Tensor:
            return tf.reduce_sum(loop.step.sum_of(loop.step.loss(batch), batch)[0])

        return loop.strategy.run(replica)

    drawn = [
        [float(v) for v in loop.strategy.experimental_local_results(losses())] for _ in range(2)
    ]
    if drawn[0] != drawn[1]:
        assert len(set(drawn[0])) > 1, (
            "all replicas draw the same random numbers: make the seed generator an attribute of "
            "the step or of a layer of its model, where ctl finds it"
        )


def check_resumed(make: Make, replicas: int = 1, *, steps: int = 4, seed: int = 0) -> None:
    """Pauses at a random step of ``steps`` (2 or more), and restores into a new loop with other
    weights: it must end with the bits of a training without a pause.

    Raises:
        AssertionError: the first variable that differs.
    """
    pause = random.Random(seed).randint(1, steps - 1)
    straight = _made(make, replicas)
    straight.train(steps)
    with tempfile.TemporaryDirectory() as directory:
        checkpoints = CheckpointManager(directory)
        first = _made(make, replicas, checkpoints)
        first.train(pause, total=steps)
        first.save(wait=True)
        saved = _bits(first)
        checkpoints.close()
        checkpoints = CheckpointManager(directory)
        second = _made(make, replicas, checkpoints, seed=_SEED + 1)
        second.restore()
        checkpoints.close()
        restored = _bits(second)
    second.train(steps)
    advice = "what a step depends on must be an attribute of the step, which is saved"
    names = _names(second)
    for name, value in saved.items():
        assert restored[name] == value, f"{names[name]} is not restored: {advice}"
    for (name, value), now in zip(_bits(straight).items(), _bits(second).values(), strict=True):
        assert value == now, (
            f"{names[name]} differs after a resume at step {pause}, {steps - pause} steps later: "
            f"{advice}"
        )


def check_one_trace(make: Make, replicas: int = 1, *, steps: int = 4) -> None:
    """Counts how often TensorFlow traces the step.

    Raises:
        AssertionError: more than once.
    """
    loop = _made(make, replicas)
    for until in range(1, steps + 1):
        loop.train(until, total=steps)
    traces = loop.steps.run.experimental_get_tracing_count()
    assert traces == 1, (
        f"{steps} steps were traced {traces} times: does the step depend on a Python value that "
        "changes, or do the batches have several static shapes?"
    )


def check_reference(
    make: Make,
    reference: Callable[[keras.Model, list[Any]], None],
    *,
    steps: int = 4,
    tolerance: float = 1e-5,
) -> None:
    """Compares the weights of one replica with those of a plain loop.

    Args:
        make: see `check_step`.
        reference: ``reference(model, batches)`` trains a copy of the model in place, without ctl.
            ``batches`` are the global batches of the steps.
        steps, tolerance: see `check_step`.

    Raises:
        AssertionError: a variable of the model differs.
    """
    loop, plain = _made(make, 1), _made(make, 1)
    reference(plain.step.model, list(itertools.islice(_batches(plain.dataset), steps)))
    loop.train(steps)
    for mine, other in zip(loop.step.model.variables, plain.step.model.variables, strict=True):
        wanted, found = (v.numpy().astype(np.float64) for v in (other, mine))
        difference = np.abs(found - wanted).max(initial=0.0)
        assert difference <= tolerance * max(1.0, np.abs(wanted).max(initial=0.0)), (
            f"{mine.path} differs from the reference by {difference:.2g} after {steps} steps"
        )


def _made(
    make: Make, replicas: int, checkpoints: CheckpointManager | None = None, seed: int = _SEED
) -> Loop:
    keras.utils.set_random_seed(seed)
    return make(strategy_over(replicas), checkpoints)


def _variables(loop: Loop) -> Iterator[tuple[str, str, tf.Variable]]:
    """Yields the label, a name that two loops share (Keras numbers its own), and each variable of
    the state."""
    loop.state.collect()
    for group, variables in loop.state.variables().items():
        for number, variable in enumerate(variables):
            name = f"{group} {number}"
            yield f"{name} ({variable.name.removesuffix(':0')})", name, variable


def _names(loop: Loop) -> dict[str, str]:
    """The labels of all variables, by name."""
    return {name: label for label, name, _ in _variables(loop)}


def _values(loop: Loop) -> dict[str, np.ndarray]:
    """The values by name; not those that differ between replicas."""
    return {
        name: variable.numpy().astype(np.float64)
        for _, name, variable in _variables(loop)
        if not name.startswith("replicas ")
    }


def _bits(loop: Loop) -> dict[str, list[bytes]]:
    """The bits of all copies, by name."""
    copies = loop.strategy.experimental_local_results
    return {name: [c.numpy().tobytes() for c in copies(v)] for _, name, v in _variables(loop)}


def _batches(dataset: Any) -> Iterator[Any]:
    """The global batches of a training, from the first."""
    arrays = getattr(dataset, "arrays", None)
    for element in dataset.batches():
        if arrays is None:
            yield dataset.on_replica(element, ())
        else:
            yield tf.nest.map_structure(lambda array, at=element: tf.gather(array, at), arrays)
