"""Tries values of a setting and keeps the fastest: ``--bytes_per_pack=auto``,
``--jit_compile=auto``.

A trial does not affect training: it reads batches of its own and restores every variable on every
replica.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import math
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tensorflow as tf
from absl import logging

from ctl.base import durable
from ctl.base.cache import processor
from ctl.checkpoint.manifest import unnumbered
from ctl.control import source_hash
from ctl.distributed import workers
from ctl.distributed.replicas import layers_of, shares_variables, synchronizes
from ctl.distributed.watch import watchdog
from ctl.errors import UsageError
from ctl.phases.marks import Marks
from ctl.phases.observer import NO_OBSERVER
from ctl.phases.tracked_state import put_back
from ctl.reduce import make_packs

if TYPE_CHECKING:
    from ctl.loop import Loop
    from ctl.step import TrainStep

# In bytes. A collective takes about a millisecond between machines, mostly latency below this size.
_SMALLEST = 64 << 10
_LEAST_ROUNDS, _MOST_ROUNDS = 7, 40
_BLOCK_SECONDS = 0.1
_MOST_STEPS = 100  # in a block
_LEAST_GAIN = 0.03  # a smaller one is noise, and each pack adds an operation
_MOST_SHARE = 0.03  # of the time of a training
_MOST_CHOICES = 256  # in a file of earlier trials; the oldest go first
# What a step raises that XLA cannot compile.
_IMPOSSIBLE = (tf.errors.InvalidArgumentError, tf.errors.UnimplementedError, UsageError)


def candidates(tensors: Sequence[Any]) -> list[int]:
    """Values of ``bytes_per_pack`` to try: 0 (no limit), then a half, a quarter, an eighth and a
    sixteenth of the size of all ``tensors``, except sizes that give the same packs or are too
    small.

    Args:
        tensors: objects with a ``shape`` and a ``dtype``.
    """
    total = sum((t.shape.num_elements() or 0) * t.dtype.size for t in tensors)
    found = {0: make_packs(tensors)}
    for parts in (2, 4, 8, 16):
        size = math.ceil(total / parts / 1024) * 1024
        packs = make_packs(tensors, size)
        if size >= _SMALLEST and packs not in found.values():
            found[size] = packs
    return list(found)


def tune_packs(loop: Loop, steps: int | None = None, cache: Path | None = None) -> int:
    """Tries pack sizes before ``loop.train`` and sets the fastest as the step's ``bytes_per_pack``.

    All workers must call it; all get the same size, in bytes.

    Args:
        loop: to try them in.
        steps: of the training. A trial takes at most 3 % of its time: none is made of a short
            training, which keeps the first value. None sets no limit.
        cache: file of the choices of earlier trials, which are not made again.
    """
    return _tune(loop, "bytes_per_pack", _sizes, steps, cache)


def tune_jit_compile(loop: Loop, steps: int | None = None, cache: Path | None = None) -> bool:
    """Tries both values of ``jit_compile``, as `tune_packs` tries pack sizes; the first is that of
    the step, or of the rule of `ctl.control.jit`.

    On a CPU, XLA may double the speed of small steps and cut that of convolutions to a quarter.
    """
    loop.step.jit_by_rule = None  # from here on, the trial decides
    return _tune(loop, "jit_compile", _with_and_without_xla, steps, cache)


def _tune(loop: Loop, name: str, choices: Callable, steps: int | None, cache: Path | None) -> Any:
    with loop.translate_failures(f"the trial of {name}"):
        loop.begin(loop.global_step)
        values, why_one = choices(loop)
        if len(values) == 1:
            logging.info("%s: %s, %s", name, "off" if values[0] is False else values[0], why_one)
        chosen = _fastest(loop, name, values, steps, cache) if len(values) > 1 else values[0]
        setattr(loop.step, name, chosen)
    loop.scalars.reset()
    return getattr(loop.step, name)


def _sizes(loop: Loop) -> tuple[list[int], str]:
    """The sizes to try, and why there is one."""
    if loop.strategy.num_replicas_in_sync == 1:
        return [0], "there is one replica and nothing to reduce"
    return candidates(loop.step.reduced_specs()), "the gradients are too small to cut"


def _with_and_without_xla(loop: Loop) -> tuple[list[bool], str]:
    """The values of ``jit_compile`` to try, and why there is one."""
    if shares_variables(loop.strategy):
        return [False], "replicas share their variables"
    if synchronizes(loop.strategy, loop.step.tracked.layer):
        return [False], "replicas exchange the statistics of BatchNormalization"
    first = bool(loop.step.jit_compile)
    return [first, not first], ""


def _fastest(
    loop: Loop, name: str, values: Sequence[Any], steps: int | None, cache: Path | None
) -> Any:
    """The fastest of ``values`` for ``name``; the first if the gain or the data are too small."""
    known = Known(cache, loop, name, values) if cache else None
    if known and (value := known.value()) is not None:
        logging.info("%s: %s, chosen by an earlier trial (%s)", name, value, cache)
        return value
    # Tracing each value takes as long as a first step. The state is held twice meanwhile.
    first = values[0]
    try:
        with preserved(loop.step):
            times = _time(loop, name, values, steps)
    except tf.errors.OutOfRangeError:
        logging.warning("%s: %s, the dataset has too few batches to try others", name, first)
        return first
    if not times:
        logging.info("%s: %s, the training is too short for a trial", name, first)
        return first
    best = fastest(times)
    typical = {value: statistics.median(seconds) for value, seconds in times.items()}
    tried = ", ".join(f"{value}: {1e3 * seconds:.3g} ms" for value, seconds in typical.items())
    logging.info("%s: %s is kept; tried %s per step", name, best, tried)
    if known:
        known.note(best)
    return best


def fastest(times: Mapping[Any, Sequence[float]]) -> Any:
    """The value with the least time, of those that gain over the first; the first if none does.

    Args:
        times: of each value, seconds of a block in every round. Blocks of one round are compared.
    """
    first = next(iter(times))
    ratios = {value: _ratios(times, value) for value in times if value != first}
    gaining = {v: statistics.median(found) for v, found in ratios.items() if _gains(found)}
    return min(gaining, key=gaining.__getitem__, default=first)


def _ratios(times: Mapping[Any, Sequence[float]], value: Any) -> list[float]:
    first = next(iter(times.values()))
    return [mine / other for mine, other in zip(times[value], first, strict=True)]


def _gains(ratios: Sequence[float]) -> bool | None:
    """Whether the median of ``ratios`` is below 1 by `_LEAST_GAIN`; None if that is not decided.

    Between the k-th least and the k-th largest of n lies the median, but for a chance of 2 P(X < k)
    with X from the binomial distribution of n and 1/2 (David and Nagaraja 2003, Order Statistics,
    section 7.1). That chance is 2 % at most.
    """
    n, below, k = len(ratios), 0.0, 0
    while 2 * (below + math.comb(n, k) / 2**n) <= 0.02:
        below += math.comb(n, k) / 2**n
        k += 1
    if not k:
        return None
    low, high = sorted(ratios)[k - 1], sorted(ratios)[n - k]
    if high < 1 and statistics.median(ratios) <= 1 - _LEAST_GAIN:
        return True
    return False if low > 1 - _LEAST_GAIN else None


def _time(
    loop: Loop, name: str, values: Sequence[Any], steps: int | None
) -> dict[Any, list[float]]:
    """Seconds per step of each block on the slowest worker, for each value that compiles; empty if
    a training of ``steps`` steps is too short to try."""
    step, strategy = loop.step, loop.strategy
    before, observer = getattr(step, name), step.observer
    if isinstance(observer, Marks):
        step.observer = NO_OBSERVER  # the marks belong to the packs of `before`
    nothing = tf.zeros([3])  # the report to the other workers
    feed = loop.steps.open(loop.global_step)

    def block(value: Any, steps: int, traces: bool = False) -> float:
        nonlocal feed
        setattr(step, name, value)
        start = time.perf_counter()
        left = steps
        while left:
            some = loop.steps.reserve(left)
            with watchdog.collective(f"trying {name}={value}", first=traces):
                outcome = loop.steps.call(feed, tf.constant(some), nothing, step.trace_key)
                outcome.totals()
            feed = feed._replace(position=outcome.position)
            left -= some
        return (time.perf_counter() - start) / steps

    def round_of(values: Sequence[Any], steps: int, number: int) -> list[float]:
        """One block of each value, the first one first or last in turns, so that no value always
        runs in the wake of the same other."""
        order = values if number % 2 == 0 else values[::-1]
        seconds = {value: block(value, steps) for value in order}
        return _slowest(strategy, [seconds[value] for value in values])

    try:
        [traced] = _slowest(strategy, [block(values[0], 1, traces=True)])
        [alone] = _slowest(strategy, [min(block(values[0], 2), block(values[0], 2))])
        per_block = min(_MOST_STEPS, max(2, int(_BLOCK_SECONDS / alone)))
        budget = math.inf if steps is None else _MOST_SHARE * steps * alone
        # To compile another value takes longer than to trace the first.
        budget -= (len(values) - 1) * 2 * traced
        if budget < _LEAST_ROUNDS * len(values) * per_block * alone:
            return {}
        for value in values[1:]:
            try:
                block(value, 1, traces=True)
            except _IMPOSSIBLE as error:
                reason = getattr(error, "message", str(error)).strip().partition("\n")[0]
                logging.warning("%s: %s is not possible: %.200s", name, value, reason)
                values = [other for other in values if other != value]
        times: dict[Any, list[float]] = {value: [] for value in values}
        for number in range(_MOST_ROUNDS if len(values) > 1 else 1):
            seconds = round_of(values, per_block, number)
            budget -= sum(seconds) * per_block
            for value, one in zip(values, seconds, strict=True):
                times[value].append(one)
            decided = all(_gains(_ratios(times, value)) is not None for value in values[1:])
            if number + 1 >= _LEAST_ROUNDS and (decided or budget < 0):
                break
    finally:
        setattr(step, name, before)
        step.observer = observer
    return times


def _slowest(strategy: tf.distribute.Strategy, seconds: Sequence[float]) -> list[float]:
    """The maximum over workers of each of ``seconds``; every worker must call it."""
    texts = workers.all_gather(strategy, json.dumps(seconds).encode(), "a gather")
    return [max(values) for values in zip(*map(json.loads, texts), strict=True)]


@contextlib.contextmanager
def preserved(step: TrainStep) -> Iterator[None]:
    """Restores the state and the metrics of ``step`` on exit, on each replica to its own value."""
    variables = [v for group in step.state().values() for v in group]
    variables += (
        step.per_replica_variables.variables
    )  # `state` has what the last save has copied of them
    variables += step.logged.variables  # a trial that finds the end of the data leaves its rows
    variables += [v.value for metric in step.all_metrics() for v in metric.variables]
    try:
        with put_back(step.strategy, variables):
            yield
    finally:
        step.tables.restored()


# Earlier trials ---------------------------------------------------------------------------------


class Known:
    """The choice of an earlier trial of the same step, batch, devices and versions.

    Workers use it where all of them know the same one. A file that cannot be read or written only
    costs a trial.

    Args:
        path: of the file, see `ctl.base.cache`.
        loop: of the trial.
        name: of the setting.
        values: to choose from.
    """

    def __init__(self, path: Path, loop: Loop, name: str, values: Sequence[Any]):
        self._path, self._strategy, self._values = path, loop.strategy, values
        self._key = source_hash.hash_of([json.dumps(_facts(loop, name, values)).encode()])

    def value(self) -> Any:
        """The choice; None if there is none."""
        mine = self._read().get(self._key)
        texts = workers.all_gather(self._strategy, json.dumps(mine).encode(), "a gather")
        if len(set(texts)) > 1:
            return None
        return next((v for v in self._values if v == mine and type(v) is type(mine)), None)

    def note(self, value: Any) -> None:
        """Writes a choice, beside those that other processes may have written meanwhile."""
        choices = {**self._read(), self._key: value}
        kept = dict(list(choices.items())[-_MOST_CHOICES:])
        try:
            durable.write_json(self._path, kept, via=self._path.parent)
        except OSError as error:
            logging.warning("cannot save the choice for later runs: %s", error)

    def _read(self) -> dict[str, Any]:
        with contextlib.suppress(OSError, durable.Damaged):
            content = durable.read_json(self._path)
            if isinstance(content, dict):
                return content
        return {}


def _facts(loop: Loop, name: str, values: Sequence[Any]) -> list[Any]:
    """All on which the time of a step depends."""
    step, data = loop.step, loop.dataset
    settings = ("clip_norm", "accumulate_steps", "ema_decay", "loss_scale", "on_nan", "jit_update")
    return [
        name,
        [*values],
        _network(step),
        [f"{v.dtype.name}{v.shape}" for v in step.trainable_variables],
        source_hash.class_name(step),
        source_hash.of_step(step),
        source_hash.of_ctl(),
        [str(getattr(step, setting)) for setting in settings],
        [type(optimizer).__name__ for optimizer in step.updater.optimizers().values()],
        [data.global_batch_size, type(data).__name__],
        [type(loop.strategy).__name__, loop.strategy.num_replicas_in_sync],
        _between(loop),
        sorted({v.device for v in step.trainable_variables}),
        [processor(), platform.machine()],
        [importlib.metadata.version(package) for package in ("tensorflow", "keras", "numpy")],
        [device.name for device in tf.config.list_physical_devices()],
    ]


def _between(loop: Loop) -> list[str]:
    """How replicas communicate, and on how many hosts."""
    options = loop.step.options
    several = workers.is_multi_worker(loop.strategy)
    addresses = workers.cluster_of(loop.strategy).workers if several else ()
    hosts = {address.rpartition(":")[0] for address in addresses}
    return [str(options and options.implementation), str(len(hosts))]


def _network(step: TrainStep) -> str:
    layers = [type(layer).__name__ for layer in layers_of(step.tracked.layer)]
    with contextlib.suppress(Exception):  # a model of the user's may have no configuration
        return unnumbered(f"{layers} {step.model.get_config()}")
    return str(layers)
