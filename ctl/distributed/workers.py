"""Coordinates workers outside of the step: membership, barriers, agreement and lost workers."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

import numpy as np
import tensorflow as tf
from absl import logging

from ctl.base import tf_internals
from ctl.base.differences import differences
from ctl.base.ledger import LEDGER
from ctl.distributed.cluster.members import Cluster, strategy_for
from ctl.distributed.watch import watchdog
from ctl.errors import CtlError, PeerError, UsageError

_SHOWN = 5  # differences in one message

# Seconds that a worker whose data have ended waits for the data of the others to end.
_ENDED_SECONDS = 10.0

# Seconds that a worker waits after a barrier before it exits: it may still owe others the message
# that releases them.
_LAST_MESSAGES_SECONDS = 0.5

# Bytes of a text that workers exchange by one gather.
_SHORT = 64

# A stack trace of the graph, up to its last frame.
_GRAPH = re.compile(
    r'.*(?:<stack traces unavailable>|\n  File "[^\n]*(?:\n    [^\n]*)?)\n', flags=re.DOTALL
)

# Errors that a collective raises when a worker died, froze, did not start or failed.
LOST = (
    tf.errors.UnavailableError,
    tf.errors.DeadlineExceededError,
    tf.errors.AbortedError,
    tf.errors.CancelledError,
    tf.errors.InternalError,
)


def is_multi_worker(strategy: tf.distribute.Strategy) -> bool:
    """Whether ``strategy`` is a `tf.distribute.MultiWorkerMirroredStrategy`."""
    return isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy)


def cluster_of(strategy: tf.distribute.MultiWorkerMirroredStrategy) -> Cluster:
    """The addresses of the workers of ``strategy``, and the index of this worker."""
    resolver = strategy.cluster_resolver
    addresses = resolver.cluster_spec().as_dict().get("worker", ["localhost:0"])
    return Cluster(tuple(addresses), resolver.task_id or 0, "the strategy")


def number_of(strategy: tf.distribute.Strategy) -> int:
    """The number of workers that train; 1 unless `is_multi_worker`."""
    return len(cluster_of(strategy).workers) if is_multi_worker(strategy) else 1


def is_chief(strategy: tf.distribute.Strategy) -> bool:
    """Whether this process writes checkpoints and logs: worker 0, or the only process."""
    return not is_multi_worker(strategy) or cluster_of(strategy).is_chief


def mean(strategy: tf.distribute.Strategy, total: float) -> float | None:
    """Divides ``total``, a sum over replicas, by their number; None unless `is_multi_worker`."""
    return float(total) / strategy.num_replicas_in_sync if is_multi_worker(strategy) else None


@contextlib.contextmanager
def naming_lost_peers(
    strategy: tf.distribute.Strategy, doing: str, step: Callable[[], int] | None = None
) -> Iterator[None]:
    """Turns TensorFlow's errors of a collective inside into a `PeerError` that names the lost
    worker, what the caller is ``doing`` and the global step."""
    try:
        yield
    except LOST as error:
        number = step() if step else None
        where = doing if number is None else f"{doing} after step {number}"
        timed_out = isinstance(error, tf.errors.DeadlineExceededError)
        if is_multi_worker(strategy):
            cluster, how = cluster_of(strategy), "timed out" if timed_out else "broke off"
            raise PeerError(
                f"worker {cluster.index} of {len(cluster.workers)}: a collective in {where} {how}: "
                f"{reason(error)}; waiting for {watchdog.broke_off(cluster, number)}"
            ) from error
        if not timed_out:
            raise
        raise PeerError(f"an all-reduce in {where} timed out") from error


def watch(strategy: tf.distribute.Strategy, **options: Any) -> bool:
    """Returns whether there are several workers. If so, starts `ctl.distributed.watch.watchdog`
    with ``options``, unless it runs already. If not, and ``TF_CONFIG`` names several, warns."""
    several = number_of(strategy) > 1
    if several:
        watchdog.start(cluster_of(strategy), abort=tf_internals.abort_collectives, **options)
    elif not isinstance(strategy, tf.distribute.ParameterServerStrategy):
        _warn_alone()
    return several


def _warn_alone() -> None:
    with contextlib.suppress(UsageError):  # a TF_CONFIG that cannot be read
        if strategy_for(os.environ):
            logging.warning(
                "TF_CONFIG names several processes, and this one trains alone: to train together, "
                "give the strategy of ctl.strategy.make_multi_worker(ctl.cluster.resolve()) to "
                "ctl.Loop"
            )


@contextlib.contextmanager
def watching_variables(strategy: tf.distribute.Strategy) -> Iterator[None]:
    """While inside, the watchdog watches this thread create variables.

    With several workers, each waits there for the initial value, which the chief sends.

    Raises:
        PeerError: a worker was lost while it created a variable.
    """
    doing = "making variables"

    def create(next_creator: Callable[..., tf.Variable], **options: Any) -> tf.Variable:
        with (
            LEDGER.spend("waiting"),
            naming_lost_peers(strategy, doing),
            watchdog.building(doing),
        ):
            return next_creator(**options)

    if not is_multi_worker(strategy):
        yield
        return
    with tf.variable_creator_scope(create):
        yield


@contextlib.contextmanager
def own_initial_values(strategy: tf.distribute.Strategy) -> Iterator[None]:
    """The scope of ``strategy``, which must not have been entered. Each worker gives the variables
    that are made inside its own initial values. Use it for values that are equal on all workers, or
    may differ: TensorFlow sends those of the first worker to all others, which takes several times
    the memory of a variable."""
    if not is_multi_worker(strategy):
        with strategy.scope():
            yield
        return
    given: list[Any] = []

    def note(creator: Callable[..., tf.Variable], **options: Any) -> tf.Variable:
        given[:] = [options["initial_value"]]
        return creator(**options)

    def give(creator: Callable[..., tf.Variable], **options: Any) -> tf.Variable:
        return creator(**options | {"initial_value": given[0]})

    # The strategy's own creator runs between these two.
    with tf.variable_creator_scope(give), strategy.scope(), tf.variable_creator_scope(note):
        yield


def reason(error: tf.errors.OpError) -> str:
    """Returns the cause of ``error`` in TensorFlow's words, without the graph before it and the
    ways by which other workers passed it on after it."""
    message = re.sub(r"\{\{.*?\}\} ?", "", error.message).split("\n\t [[")[0]
    text = " ".join(_GRAPH.sub("", message).split())
    frozen = re.search(r"stopped sending heartbeats\)?:((?: /job:\w+/replica:\d+/task:\d+)+)", text)
    if frozen:
        tasks = sorted(map(int, re.findall(r"task:(\d+)", frozen[1])))
        who = f"worker{'s' if len(tasks) > 1 else ''} {', '.join(map(str, tasks))}"
        return f"{who} stopped sending heartbeats"
    aborted = re.search(r"(?:Collective ops is aborted by: )+(.*)", text)
    text = aborted[1] if aborted else text
    return re.split(r" Additional GRPC|\W+The error could be from| \[Op:", text)[0][:120]


def barrier(
    strategy: tf.distribute.Strategy,
    timeout: float | None = None,
    otherwise: CtlError | None = None,
) -> None:
    """Returns when every worker has called it.

    Args:
        strategy: the strategy of the workers.
        timeout: seconds after which the watchdog ends the process; by default its own limit.
        otherwise: error that replaces the message and the exit code of the watchdog.

    Raises:
        PeerError: a worker was lost.
    """

    doing = "a barrier"
    section = watchdog.collective(doing, timeout=timeout, otherwise=otherwise)
    with LEDGER.spend("waiting"), naming_lost_peers(strategy, doing), section:
        _exchange(strategy, b"", _SHORT)


def leave_together(strategy: tf.distribute.Strategy) -> None:
    """Waits, after the last collective, until every worker is here or has left.

    A worker that exits earlier would look lost to workers that still compute. Work of one worker
    alone, such as an export, comes after this call. Returns at once unless `is_multi_worker`.
    """
    if not is_multi_worker(strategy):
        return
    with contextlib.suppress(PeerError):
        barrier(strategy)
        time.sleep(_LAST_MESSAGES_SECONDS)


def check_all_ended(strategy: tf.distribute.Strategy, step: int) -> None:
    """Returns when the data of all workers have ended at this step.

    Raises:
        UsageError: the data of some workers go on. These workers are in the all-reduce of the next
            step, and would sum their gradients with whatever this worker reduces next.
    """
    if not is_multi_worker(strategy):
        return
    not_all = UsageError(
        f"worker {cluster_of(strategy).index}: its data ended after step {step}, but other workers "
        "have more: give all workers the same batches"
    )
    try:
        barrier(strategy, _ENDED_SECONDS, otherwise=not_all)
    except PeerError as error:
        raise not_all from error


def check_agreement(
    strategy: tf.distribute.Strategy,
    facts: Mapping[str, Any],
    common: Mapping[str, Any] | None = None,
) -> None:
    """Compares ``facts`` (JSON values by name) over all workers. All workers must call it.

    Args:
        strategy: a `tf.distribute.MultiWorkerMirroredStrategy`.
        facts: what every worker must have.
        common: facts that some workers may lack, such as modules that only the chief imports. Only
            facts that all workers have are compared.

    Raises:
        UsageError: facts differ. It is raised on every worker and names the values of each.
    """
    doing = "comparing the workers"
    local_facts = json.dumps([facts, common or {}], sort_keys=True, default=str).encode()
    if len(set(all_gather(strategy, hashlib.sha256(local_facts).digest(), doing))) == 1:
        return
    texts = [json.loads(text) for text in all_gather(strategy, local_facts, doing)]
    shared = set.intersection(*(set(some) for _, some in texts))
    differ = differences([all_ | {n: some[n] for n in shared} for all_, some in texts])
    if differ:
        shown = "; ".join(
            f"{name} is "
            + ", ".join(f"{_short(value)} on worker {i}" for i, value in enumerate(values))
            for name, values in list(differ.items())[:_SHOWN]
        )
        more = f" and {len(differ) - _SHOWN} more" if len(differ) > _SHOWN else ""
        remedy = "start all with the same code, flags and data"
        raise_together(strategy, UsageError(f"the workers do not agree: {shown}{more}; {remedy}"))


def raise_together(strategy: tf.distribute.Strategy, error: CtlError) -> NoReturn:
    """Raises ``error``, which every worker found in the gathered data."""
    # A worker that exits now would look lost to one that still gathers. After the barrier, all have
    # gathered. It breaks off if a worker has left it already, which means the same.
    if is_multi_worker(strategy):
        with contextlib.suppress(PeerError):
            barrier(strategy, _ENDED_SECONDS, otherwise=error)
    raise error


def earliest(strategy: tf.distribute.Strategy, step: int) -> int:
    """The minimum of ``step`` over all workers. All workers must call it."""
    return min(int(text) for text in all_gather(strategy, str(step).encode(), "a gather"))


def step_of_chief(strategy: tf.distribute.Strategy, step: int) -> int:
    """The ``step`` of worker 0. All workers must call it."""
    return int(all_gather(strategy, str(step).encode(), "restoring the step of the chief")[0])


def any_of(strategy: tf.distribute.Strategy, asked: bool) -> bool:
    """Whether ``asked`` is true on any worker. All workers must call it."""
    return b"1" in all_gather(strategy, b"1" if asked else b"0", "asking whether to end")


def all_gather(
    strategy: tf.distribute.Strategy, text: bytes, doing: str, step: int | None = None
) -> list[bytes]:
    """Gathers the ``text`` of every worker. All workers must call it.

    Args:
        strategy: any strategy.
        text: this worker's bytes, of any length.
        doing: what the caller does, for messages.
        step: the global step, for messages. It says that the workers have trained together, so that
            none of them may be late by the time of a first call.

    Returns:
        One text per worker, in the order of the workers; the same list on every worker.

    Raises:
        PeerError: a worker was lost.
    """
    if not is_multi_worker(strategy):
        return [text]

    with (
        LEDGER.spend("waiting"),
        naming_lost_peers(strategy, doing, None if step is None else lambda: step),
        watchdog.collective(doing, first=step is None, step=step),
    ):
        texts, longest = _exchange(strategy, text, _SHORT)
        if longest > _SHORT:
            texts, _ = _exchange(strategy, text, 1 << (longest - 1).bit_length())
    return texts


def _exchange(strategy: tf.distribute.Strategy, text: bytes, size: int) -> tuple[list[bytes], int]:
    """The first ``size`` bytes, a multiple of 4, of the text of every worker, and the length of the
    longest text."""
    # As int32: not every collective takes bytes.
    row = np.frombuffer(text[:size].ljust(size, b"\0"), np.int32)
    rows = _gather(strategy, tf.constant([np.insert(row, 0, len(text))])).numpy()
    rows = rows[:: len(rows) // number_of(strategy)]  # all replicas of a worker send the same
    texts = [row[1:].tobytes()[: row[0]] for row in rows]
    return texts, int(rows[:, 0].max())


def gather(strategy: tf.distribute.Strategy, parts: Any, doing: str) -> tf.Tensor:
    """Concatenates the ``parts`` of all replicas along their first axis. All workers must call it.

    Args:
        strategy: any strategy.
        parts: a tensor for each replica, as returned by ``strategy.run``, of one shape on all.
        doing: what the caller does, for messages.

    Raises:
        PeerError: a worker was lost.
    """
    if not is_multi_worker(strategy):
        return tf.concat(strategy.experimental_local_results(parts), axis=0)
    with naming_lost_peers(strategy, doing), watchdog.collective(doing, first=True):
        return _gather(strategy, parts)


def _gather(strategy: tf.distribute.Strategy, parts: Any) -> tf.Tensor:
    with _without_warnings():
        return _gathering(strategy)(parts)


# `tf.distribute.Strategy.gather` traces a function in each call; this one is traced for each shape.
@functools.cache
def _gathering(strategy: tf.distribute.Strategy) -> Callable[[Any], tf.Tensor]:
    def gathered(part: tf.Tensor) -> tf.Tensor:
        part = tf.identity(part)  # an argument is on no device yet
        return tf.distribute.get_replica_context().all_gather(part, axis=0)

    @functools.partial(tf.function, autograph=False)
    def gather(parts: Any) -> tf.Tensor:
        return strategy.experimental_local_results(strategy.run(gathered, args=(parts,)))[0]

    return gather


@contextlib.contextmanager
def _without_warnings() -> Iterator[None]:
    """Silences TensorFlow, which warns of a function that is traced for many shapes."""
    logger = tf.get_logger()
    level = logger.level
    logger.setLevel("ERROR")
    try:
        yield
    finally:
        logger.setLevel(level)


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
