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
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from ctl.checkpoint import CheckpointManager
from ctl.distributed import local_batch
from ctl.distributed import replicas as of_replicas
from ctl.distributed.strategy import make_strategy
from ctl.loop import Loop
from ctl.phases import evidence, passes, penalties

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
            examples. Empty if N replicas are not meant to equal one. A step that adds noise is
            better checked with noise of 0: without this check, its other mistakes are not found.
        steps: steps of each training, 2 or more.
        tolerance: largest difference of a variable, times its largest value where that is above 1.
            A weight must move by ten times as much, or nothing would be compared.
        reference: see `check_reference`.
    """
    for count in sorted(replicas, reverse=True):
        strategy_over(count)  # may cut the CPU, which is too late after the first operation
    pause = _pause(steps)
    one = resumed = _Training(make, 1, 0 if replicas else pause)
    one.check_traces(steps)
    _check_loss_scale(one)
    _check_reduce(one)
    for count in replicas:
        several = _Training(make, count, pause if count == replicas[0] else 0)
        resumed = several if several.pause else resumed
        _check_reduced_once(several)
        _check_noise(several)
        _check_equal(one, several, steps, tolerance)
    _check_resumed(resumed, steps)
    if reference:
        check_reference(make, reference, steps=steps, tolerance=tolerance)


class _State(NamedTuple):
    values: dict[str, np.ndarray]
    scalars: dict[str, float]  # of the last step


class _Training:
    """A loop of a user, and what is known of its traces.

    Attributes:
        make, replicas: see `check_step`.
        pause: the step after which the state is saved; 0 for none.
        seeds: ids of the variables from which Dropout and seed generators draw.
        states: after 0, 1, 2, ... steps.
        saved: the bits of the state after step ``pause``.
    """

    def __init__(self, make: Make, replicas: int, pause: int = 0):
        self.make, self.replicas, self.pause = make, replicas, pause
        self.evidence = evidence.Evidence()
        self._directory = tempfile.TemporaryDirectory() if pause else None
        checkpoints = CheckpointManager(self._directory.name) if self._directory else None
        self.loop = _made(make, replicas, checkpoints)
        self.step = self.loop.step
        self.names = _names(self.loop)
        self.seeds = {id(v) for v in of_replicas.dropout_seeds(self.step.tracked.layer)}
        self.states = [_State(_values(self.loop), {})]
        self.saved: dict[str, list[bytes]] = {}
        self._masks: set[Any] = set()

    def restored(self) -> Loop:
        """A loop with other weights, in which the state of step ``pause`` is restored."""
        assert self.loop.checkpoints and self._directory
        self.loop.checkpoints.close()
        with self._directory:
            checkpoints = CheckpointManager(self._directory.name)
            loop = _made(self.make, self.replicas, checkpoints, seed=_SEED + 1)
            assert self.loop.dataset.fingerprint() == loop.dataset.fingerprint(), (
                "make() gives other batches each time it is called: give their shuffle a seed, as "
                "in dataset.shuffle(1000, seed=1), and random numbers of NumPy, too; call "
                "tf.random.set_seed(1) before it, with which TensorFlow combines the seed"
            )
            loop.restore()
            checkpoints.close()
        return loop

    def trace(self) -> Any:
        """The graph that the loop runs."""
        with self.evidence.recording():
            self.loop.begin(self.loop.global_step)
            return self.loop.traced()

    def train(self, until: int) -> None:
        """Trains until step ``until``, one step at a time."""
        with self.evidence.recording():
            while (step := len(self.states)) <= until:
                self._masks.add(self.step.trainable_mask)
                scalars = self.loop.train(step, progress=False)
                self.states.append(_State(_values(self.loop), scalars))
                if step == self.pause:
                    self.loop.save(wait=True)
                    self.saved = _bits(self.loop)

    def traces(self) -> int:
        """How often a step was traced, if once is right for all that `Loop.train_only` chose."""
        traces = self.loop.steps.run.experimental_get_tracing_count()
        return max(1, traces - len(self._masks) + 1)

    def check_traces(self, steps: int) -> None:
        """See `check_one_trace`."""
        before = self.trace()
        if draw := evidence.unsaved_draw(before):
            raise AssertionError(
                f"the step draws from tf.random ({draw}), whose state no checkpoint has: use "
                "tf.random.stateless_normal(shape, self.seed('name')) and its kind"
            )
        self.check_evidence()
        if option := evidence.unread_option(self.step):
            raise AssertionError(
                f"no code of {type(self.step).__name__} names its option {option}, so --{option} "
                "has no effect: read it, or leave it out"
            )
        self.train(steps)
        self.check_evidence()
        _check_one_trace(self, steps)

    def check_evidence(self) -> None:
        """Raises `AssertionError` for a mistake that the traces so far have shown."""
        if mistake := self.evidence.mistake(self.step):
            raise AssertionError(mistake)


def check_replicas_equal_one(
    make: Make, replicas: int, *, steps: int = 4, tolerance: float = 1e-5
) -> None:
    """Compares state, loss and metrics after 1 and after ``steps`` steps of N replicas with one.

    Raises:
        AssertionError: they differ, the replicas do, no weight moves, or the model has layers for
            which they must differ: a BatchNormalization that is not synchronized, or Dropout.
    """
    several = _Training(make, replicas)  # may cut the CPU, so it comes first
    _check_equal(_Training(make, 1), several, steps, tolerance)


def _check_equal(one: _Training, several: _Training, steps: int, tolerance: float) -> None:
    replicas = several.replicas
    _check_comparable(several.loop)
    before, names = one.states[0].values, several.names
    for until in (1, steps):
        one.train(until)
        _check_undrawn(one)
        try:
            several.train(until)
        except Exception:  # the training compares the replicas, too
            _check_agreement(several)
            raise
        _check_agreement(several)
        wanted, found = one.states[until].values, several.states[until].values
        when = f"after {until} step{'s' * (until > 1)}"
        for name in wanted:
            difference = _largest(found[name] - wanted[name])
            if difference > tolerance * max(1.0, _largest(wanted[name])):
                raise AssertionError(
                    f"{replicas} replicas do not equal one: {when}, {names[name]} differs by "
                    f"{difference:.2g}: "
                    f"{_guess(one, several, before[name], wanted[name], found[name])}"
                )
        for name, one_replica in one.states[until].scalars.items():
            value = several.states[until].scalars[name]
            if "_per_second" not in name and not np.isclose(value, one_replica, 1e-3, 1e-5):
                reason = _of_other_examples(one, several) if name == "loss" else None
                reason = reason or "does it count the examples of all replicas?"
                raise AssertionError(
                    f"{replicas} replicas do not equal one: {when}, {name} is {value:.6g}, not "
                    f"{one_replica:.6g}: {reason}"
                )
    moves = [
        _largest(wanted[name] - before[name]) for name in wanted if names[name].startswith("model")
    ]
    most = max(moves, default=0.0)
    assert most > 10 * tolerance, (
        f"in {steps} steps, no weight has moved by more than {most:.2g}, so "
        "nothing was compared: take a larger learning rate"
    )


def _guess(
    one: _Training, several: _Training, before: np.ndarray, wanted: np.ndarray, found: np.ndarray
) -> str:
    """What may be wrong if a variable was ``before``, and is ``found`` in place of ``wanted``."""
    replicas = several.replicas
    if reason := _own_optimizer(several):
        return reason
    moved = wanted - before
    ratio = float((moved * (found - before)).sum() / max((moved**2).sum(), 1e-30))
    if abs(ratio / replicas - 1.0) < 0.02:
        return (
            f"it has moved {replicas} times as far: is its gradient reduced twice, or divided by "
            "the examples of one replica?"
        )
    if abs(ratio * replicas - 1.0) < 0.02:
        return f"it has moved 1/{replicas} as far: is its gradient divided by the replicas?"
    if several.evidence.draws_by_replica and _draws_matter(one):
        return (
            "self.seed() gives each replica other random numbers, so N replicas need not equal "
            "one: make the noise 0 for this check (per_replica=False is enough for noise without "
            "an axis of examples); only if you cannot, give replicas=(), which leaves the check out"
        )
    if reason := _of_other_examples(one, several):
        return reason
    return "is a part of the step not a sum over examples, such as clipping before the reduce?"


def _draws_matter(one: _Training) -> bool:
    """Whether a first step with other numbers of ``self.seed()`` gives other weights."""
    other = _Training(one.make, 1)
    other.step.seeds.run += 1
    other.train(1)
    values, others = (training.states[1].values for training in (one, other))
    return any(not np.array_equal(values[name], others[name]) for name in values)


def _own_optimizer(several: _Training) -> str | None:
    if not several.evidence.optimizers:
        return None
    return (
        f"{type(several.step).__name__} calls apply() of optimizer "
        f"{min(several.evidence.optimizers)} itself, which sums over replicas what it gets: give "
        "ctl all optimizers, as [(optimizer, variables), ...]"
    )


def _of_other_examples(one: _Training, several: _Training) -> str | None:
    batches = itertools.islice(_batches(one.loop.dataset), 4)
    if not evidence.depends_on_others(one.step, batches, several.replicas):
        return None
    drawn = ""
    if several.evidence.draws and _draws_matter(one):
        drawn = (
            "its random numbers depend on the number of examples, so make them 0 for this check "
            "(replicas=() leaves it out); or "
        )
    return (
        f"{type(several.step).__name__}.loss() gives an example another loss among other examples: "
        f"{drawn}it uses a maximum, a mean or an order of one "
        "replica's part, or [n, 1] - [n] became [n, n]: use each example alone, or "
        "ctl.reduce.all_gather"
    )


def _check_agreement(several: _Training) -> None:
    for label, _, variable in _variables(several.loop):
        copies = several.loop.strategy.experimental_local_results(variable)
        if id(variable) not in several.seeds and len({c.numpy().tobytes() for c in copies}) > 1:
            reason = _own_optimizer(several) or (
                "is its gradient not reduced, or is it updated with one replica's part of the "
                "batch?"
            )
            raise AssertionError(
                f"{label} differs between the {several.replicas} replicas: {reason}"
            )


def _check_comparable(loop: Loop) -> None:
    for layer in of_replicas.layers_of(loop.step.tracked.layer):
        norm = isinstance(layer, keras.layers.BatchNormalization) and layer.trainable
        assert not norm or layer.synchronized, (
            f"several replicas do not equal one with layer {layer.name}, which normalizes over the "
            "examples of a replica: make it synchronized for the test, or give replicas=()"
        )


def _check_undrawn(one: _Training) -> None:
    """Refuses Dropout and seed generators that draw. One at rate 0 leaves its state as it is."""
    for label, name, variable in _variables(one.loop):
        if id(variable) in one.seeds:
            before, now = (one.states[at].values[name] for at in (0, -1))
            assert np.array_equal(before, now), (
                f"several replicas do not equal one with Dropout or a seed generator ({label}), "
                "since each draws other numbers: leave it out for the test, or give replicas=()"
            )


def check_reduced_once(make: Make, replicas: int) -> None:
    """Reads from the graph that no gradient is summed twice.

    Raises:
        AssertionError: the first variable of which this is not so.
    """
    _check_reduced_once(_Training(make, replicas))


def _check_reduced_once(several: _Training) -> None:
    several.trace()
    several.check_evidence()
    plan = several.loop.plan()
    # A sum of `passes.reduced` is no gradient yet, and what is made of it is summed.
    sums = [c for c in plan.collectives if passes.SCOPE not in c.name]
    again = [c.name for c in sums if c.again]
    reason = _own_optimizer(several) or "a gradient is reduced twice"
    assert not again, f"{again[0]} sums what was summed before: {reason}"
    found = [path for c in sums for member in c.members for path in member.variables]
    if several.step.has_custom_all_reduce:
        return  # what an own collective moves need not have the shape of a variable
    # One that is transposed or flattened before it is applied is not followed to its variable.
    unknown = any(not member.variables for c in sums for member in c.members)
    for variable, trains in zip(
        several.step.updater.trainable_variables, several.step.trainable_mask, strict=True
    ):
        if variable.value in several.step.tables:
            continue  # its rows are gathered
        count = found.count(variable.path)
        assert count == 1 or not trains or (count == 0 and unknown), (
            f"the gradient of {variable.path} is reduced {count} times in the graph"
        )


def check_noise(make: Make, replicas: int) -> None:
    """Gives all replicas the same examples: if the losses are random, each must draw its own.

    Raises:
        AssertionError: the losses are random, and equal on all replicas.
    """
    _check_noise(_Training(make, replicas))


def _check_noise(several: _Training) -> None:
    loop, step = several.loop, several.step
    if not evidence.draws(several.trace()):
        return
    batch = next(_batches(loop.dataset))
    rows = int(local_batch.rows(batch)) // several.replicas
    copies = loop.strategy.experimental_local_results

    @tf.function
    def losses() -> Any:
        def replica() -> tf.Tensor:
            share = tf.nest.map_structure(lambda tensor: tf.identity(tensor[:rows]), batch)
            count = step.count(share)
            with penalties.counted(step, share, count):
                return step.forward_backward(share, count)[0]

        return loop.strategy.run(replica)

    # All but the seeds is as before in the second pass: a queue or a memory is not random.
    state = [v for group in step.state().values() for v in group]
    state += [v.value for metric in step.all_metrics() for v in metric.variables]
    state += [*step.per_replica_variables.variables, *step.logged.variables]
    state.sort(key=lambda v: id(v) in several.seeds)
    first_seed = sum(len(copies(v)) for v in state if id(v) not in several.seeds)
    kept = [copy for v in state for copy in copies(v)]
    before = [variable.numpy() for variable in kept]
    drawn = []
    for end in (first_seed, None):
        drawn.append([float(loss) for loss in copies(losses())])
        for variable, value in zip(kept[:end], before, strict=False):
            variable.assign(value)
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
    _check_resumed(_Training(make, replicas, _pause(steps, seed)), steps)


def _pause(steps: int, seed: int = 0) -> int:
    return random.Random(seed).randint(1, steps - 1)


def _check_resumed(straight: _Training, steps: int) -> None:
    straight.train(steps)
    second = straight.restored()
    restored, names = _bits(second), _names(second)
    second.train(steps, progress=False)
    advice = "what a step depends on must be an attribute of the step, which is saved"
    for name, value in straight.saved.items():
        assert restored[name] == value, f"{names[name]} is not restored: {advice}"
    pairs = zip(_bits(straight.loop).items(), _bits(second).values(), strict=True)
    for (name, value), now in pairs:
        assert value == now, (
            f"{names[name]} differs after a resume at step {straight.pause}, "
            f"{steps - straight.pause} steps later: {advice}"
        )


def check_one_trace(make: Make, replicas: int = 1, *, steps: int = 4) -> None:
    """Counts how often TensorFlow traces the step, and compares what it has traced with what it
    would trace after the training.

    Raises:
        AssertionError: more than once for each set of variables that `Loop.train_only` chooses; or
            a Python value that the trace has read is another one now.
    """
    training = _Training(make, replicas)
    training.trace()
    training.train(steps)
    _check_one_trace(training, steps)


def _check_one_trace(training: _Training, steps: int) -> None:
    kind, step = type(training.step).__name__, training.step
    traces, changed = training.traces(), step.trace_guards.retraced_for
    changed = changed and f" ({changed}; use a variable)"
    assert traces == 1, (
        f"{steps} steps were traced {traces} times: does the step depend on a Python value that "
        f"changes{changed}, or do the batches have several static shapes?"
    )
    before, attributes = training.trace(), evidence.plain_attributes(step)
    step.trace_guards.version = -1  # that no trace has
    drawn = evidence.random_states()
    try:
        after = training.trace()
    except Exception as error:
        raise AssertionError(
            f"{kind} fails if it is traced a second time, because it uses what the first trace has "
            f"left ({evidence.kept_tensor(step)}, {type(error).__name__}): use self.variable()"
        ) from error
    now = evidence.plain_attributes(step)
    set_by_trace = [name for name in attributes if now.get(name) != attributes[name]]
    if set_by_trace:
        raise AssertionError(
            f"{kind}.{set_by_trace[0]} changes when the step is traced, which happens once, not at "
            "each step: use self.variable(), or a function of self.global_step"
        )
    if evidence.fingerprint(before) == evidence.fingerprint(after):
        return
    if tensor := evidence.kept_tensor(step):
        raise AssertionError(
            f"{kind}.{tensor} keeps a tensor of the trace, which the next step does not have: use "
            "self.variable(), and assign to it"
        )
    what = evidence.difference(before, after)
    if drawn != evidence.random_states():
        raise AssertionError(
            f"the step draws from np.random or random when it is traced, and then repeats these "
            f"numbers ({what}): use tf.random.stateless_normal(shape, self.seed('name'))"
        )
    raise AssertionError(
        f"{kind} reads a Python value that has changed since the step was traced, with no effect "
        f"({what}): an array, an attribute of a module or class, or a counter; use self.variable()"
    )


def _check_loss_scale(one: _Training) -> None:
    """Trains one step with a smaller loss scale, which must change nothing.

    Raises:
        AssertionError: a gradient is not multiplied by the scale.
    """
    if not one.step.loss_scale:
        return
    other = _Training(one.make, 1)
    loss_scale: Any = other.step.updater.loss_scale
    loss_scale.scale.assign(loss_scale.scale / 16.0)
    for training in (one, other):
        training.train(1)
    wanted, found = one.states[1].values, other.states[1].values
    for name in wanted:
        label = one.names[name]
        moved = _largest(wanted[name] - one.states[0].values[name])
        if label.startswith("model") and _largest(found[name] - wanted[name]) > max(
            0.01 * moved, 1e-9
        ):
            raise AssertionError(
                f"{label} depends on the loss scale: {type(one.step).__name__} must compute "
                "gradients with self.backward(tape, loss), which multiplies them by it"
            )


def _check_reduce(one: _Training) -> None:
    """Gives an own `TrainStep.reduce` sums and their count, as with batches of unknown size, which
    it must divide.

    Raises:
        AssertionError: twice the sums with twice the count give other gradients.
    """
    step = one.step
    if not step.overrides("reduce"):
        return
    batch = next(_batches(one.loop.dataset))

    def reduced(factor: float) -> list[tf.Tensor]:
        snapshot = step.statistics.snapshot(batch)
        ones = [factor * tf.ones_like(v) for v in step.trainable_variables]
        return step.reduce(tf.constant(factor), tf.constant(factor), ones, snapshot)[2]

    run = tf.function(lambda: one.loop.strategy.run(lambda: (reduced(8.0), reduced(16.0))))
    for first, second in zip(*run(), strict=True):
        assert first is None or np.allclose(first, second, 1e-3), (
            f"{type(step).__name__}.reduce() does not divide by the count: if it is a tensor, as "
            "with batches of unknown size, sum it with the gradients, and divide by the sum, as "
            "TrainStep.reduce does"
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
    loop.train(steps, progress=False)
    for mine, other in zip(loop.step.model.variables, plain.step.model.variables, strict=True):
        wanted, found = (v.numpy().astype(np.float64) for v in (other, mine))
        difference = _largest(found - wanted)
        assert difference <= tolerance * max(1.0, _largest(wanted)), (
            f"{mine.path} differs from the reference by {difference:.2g} after {steps} steps"
        )


def _largest(values: np.ndarray) -> float:
    return float(np.abs(values).max(initial=0.0))


def _made(
    make: Make, replicas: int, checkpoints: CheckpointManager | None = None, seed: int = _SEED
) -> Loop:
    keras.utils.set_random_seed(seed)
    return make(strategy_over(replicas), checkpoints)


def _variables(loop: Loop) -> Iterator[tuple[str, str, Any]]:
    """Yields the label, a name that two loops share (Keras numbers its own), and each variable of
    the state, or what stands for one that the replicas share out."""
    loop.state.collect()
    for group, variables in loop.state.variables().items():
        for number, variable in enumerate(variables):
            if isinstance(variable, tuple):
                continue  # `ctl.control.state.Value`: whether XLA compiles the step, for instance
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
