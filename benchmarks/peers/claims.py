"""README.md's claims about Keras `fit`, each as two small programs: one in Keras, one in ctl.

Nearly all train the weight of `one_weight.py`, whose right value is known by hand.

    python benchmarks/peers/claims.py clipping keras

runs one program and answers with lines of JSON (`lines.py`). `benchmarks/why_not_fit.py` runs all
programs, `tests/test_readme.py` those for Keras that need one process.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

from one_weight import (
    Seen,
    fails,
    fit,
    make_embedding,
    make_loop,
    make_model,
    misses,
    reaches,
    sgd,
    train,
)

_TIMEOUT = 8.0  # seconds that ctl waits for a missing worker; for Keras, see --patience


@dataclasses.dataclass(frozen=True)
class Claim:
    """A row of the table in README.md.

    Attributes:
        says: the first cell of the row, as README.md has it.
        keras, ctl: the programs. Each takes a strategy of two replicas.
        workers: processes that the program expects.
        started: how many of them are started.
        silent: whether README.md says that Keras hangs without a message.
    """

    says: str
    keras: Callable[[Any], Seen]
    ctl: Callable[[Any], Seen]
    workers: int = 1
    started: int = 1
    silent: bool = False


# Clipping. The gradients are 10 on replica 0 and 2 on replica 1; their mean is 6.
_TEN_AND_TWO = [10.0, 2.0]


def _keras_clipping(strategy) -> Seen:
    return misses(fit(strategy, _TEN_AND_TWO, 2, sgd(global_clipnorm=1.0)), -1.0)


def _ctl_clipping(strategy) -> Seen:
    return reaches(train(strategy, _TEN_AND_TWO, 2, sgd(), clip_norm=1.0), -1.0)


# Accumulation. Two micro-batches, one update.
def _keras_accumulation(strategy) -> Seen:
    return fails(
        lambda: fit(strategy, [1, 2, 3, 4], 2, sgd(gradient_accumulation_steps=2)),
        RuntimeError,
        "`merge_call` called while defining a new graph or a tf.function",
    )


def _ctl_accumulation(strategy) -> Seen:
    return reaches(train(strategy, [1, 2, 3, 4], 4, sgd(), accumulate_steps=2), -2.5)


# The loss scale, 2**15, turns the gradient on replica 1 into an Inf. The update must be skipped.
_OVERFLOW = [1.0, 3e38]


def _keras_loss_scale(strategy) -> Seen:
    import keras

    return misses(
        fit(strategy, _OVERFLOW, 2, lambda: keras.optimizers.LossScaleOptimizer(sgd()())), 0.0
    )


def _ctl_loss_scale(strategy) -> Seen:
    return reaches(train(strategy, _OVERFLOW, 2, sgd(), loss_scale=True), 0.0)


# An uneven last batch: two examples on replica 0 and one on replica 1. The batch before it has zero
# gradients.
_UNEVEN = [0.0, 0.0, 0.0, 0.0, 1.0, 2.0, 6.0]


def _keras_uneven(strategy) -> Seen:
    return misses(fit(strategy, _UNEVEN, 4, sgd()), -3.0)


def _ctl_uneven(strategy) -> Seen:
    return reaches(train(strategy, _UNEVEN, 4, sgd()), -3.0)


def _same_masks(strategy, layer) -> tuple[str, bool]:
    import numpy as np
    import tensorflow as tf

    @tf.function
    def masks():
        return strategy.run(layer, args=(tf.ones([64]),), kwargs={"training": True})

    first, second = (m.numpy() for m in strategy.experimental_local_results(masks()))
    equal = np.array_equal(first, second)
    return f"{np.mean(first == second):.0%} of 64 units alike on both replicas", equal


def _keras_dropout(strategy) -> Seen:
    import keras

    with strategy.scope():
        dropout = keras.layers.Dropout(0.5)
    return Seen(*_same_masks(strategy, dropout))


def _ctl_dropout(strategy) -> Seen:
    import keras

    def model():
        return keras.Sequential(
            [keras.Input([1]), keras.layers.Dropout(0.5), keras.layers.Dense(1)]
        )

    loop, _ = make_loop(strategy, [1.0, 1.0], 2, sgd(), model)
    text, equal = _same_masks(strategy, loop.step.model.layers[0])
    return Seen(text, not equal)


# A row that is looked up twice in a batch, with gradients of 1 and 3. The first update of Adagrad
# is the mean gradient, 2, over the root of its square.
def _adagrad():
    import keras

    return keras.optimizers.Adagrad(1.0, initial_accumulator_value=0.0, epsilon=0.0)


def _keras_embedding(strategy) -> Seen:
    return misses(fit(strategy, [1.0, 3.0], 2, _adagrad, make_embedding), -1.0)


def _ctl_embedding(strategy) -> Seen:
    return reaches(train(strategy, [1.0, 3.0], 2, _adagrad, make_embedding), -1.0)


# An epoch of 6 batches, whose mean gradients are 1 to 6, is interrupted after batch 4, just after a
# save, and resumed.
_SIX_BATCHES = [float(batch) for batch in range(1, 7) for _ in range(2)]


def _keras_resume(strategy) -> Seen:
    import keras

    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 3:
                raise KeyboardInterrupt

    with tempfile.TemporaryDirectory() as directory:

        def backup():
            return keras.callbacks.BackupAndRestore(directory, save_freq=2)

        with contextlib.suppress(KeyboardInterrupt):
            fit(strategy, _SIX_BATCHES, 2, sgd(), callbacks=[backup(), Stop()])
        return misses(fit(strategy, _SIX_BATCHES, 2, sgd(), callbacks=[backup()]), -21.0)


def _ctl_resume(strategy) -> Seen:
    import ctl

    with tempfile.TemporaryDirectory() as directory:
        for until in (4, 6):
            with ctl.CheckpointManager(directory) as checkpoints:
                loop, weight = make_loop(strategy, _SIX_BATCHES, 2, sgd(), checkpoints=checkpoints)
                loop.restore()
                loop.train(until)
                loop.save()
    return reaches(weight(), -21.0)


# Several steps in one call. ctl runs as many as fit in half a second: here, all.
def _keras_several_steps(strategy) -> Seen:
    import tensorflow as tf

    return fails(
        lambda: fit(strategy, _SIX_BATCHES, 2, sgd(), steps_per_execution=3),
        tf.errors.InvalidArgumentError,
        "You must feed a value for placeholder",
    )


def _ctl_several_steps(strategy) -> Seen:
    return reaches(train(strategy, _SIX_BATCHES, 2, sgd()), -21.0)


def _keras_workers(strategy) -> Seen:
    return fails(
        lambda: fit(strategy, _SIX_BATCHES, 2, sgd()),
        ValueError,
        "Attempt to convert a value (PerReplica",
    )


def _worker(strategy) -> int:
    return strategy.cluster_resolver.task_id


# Worker 1 of two stays alive, but does not join the third all-reduce.
def _sleep(_=None) -> None:
    time.sleep(3600)


def _keras_absent(strategy) -> Seen:
    """Keras's optimizer in a hand-written loop, since `fit` fails before it trains."""
    import tensorflow as tf

    with strategy.scope():
        variables = make_model().trainable_variables
        optimizer = sgd()()
        optimizer.build(variables)

    @tf.function
    def step() -> None:
        strategy.run(lambda: optimizer.apply([tf.ones([1, 1])]))

    for number in range(3):
        if number == 2 and _worker(strategy) == 1:
            _sleep()
        step()
    return Seen("trains", False)


def _ctl_absent(strategy) -> Seen:
    import ctl

    actions = [ctl.Every(_sleep, steps=2)] if _worker(strategy) == 1 else []
    loop, _ = make_loop(strategy, _SIX_BATCHES, 2, sgd(), actions=actions)
    loop.train(6)
    return Seen("trains", False)


def _starts(strategy) -> Seen:
    return Seen("starts", False)


CLAIMS = {
    "clipping": Claim("`global_clipnorm=1`, gradients of 10 and 2", _keras_clipping, _ctl_clipping),
    "accumulation": Claim(
        "`gradient_accumulation_steps=2`", _keras_accumulation, _ctl_accumulation
    ),
    "loss_scale": Claim(
        "`LossScaleOptimizer`, an Inf on replica 1 only", _keras_loss_scale, _ctl_loss_scale
    ),
    "uneven": Claim(
        "A last batch of 3 examples, gradients of 1, 2 and 6", _keras_uneven, _ctl_uneven
    ),
    "dropout": Claim("`Dropout`", _keras_dropout, _ctl_dropout),
    "embedding": Claim(
        "`Embedding`: a row that is looked up twice", _keras_embedding, _ctl_embedding
    ),
    "resume": Claim("`BackupAndRestore` within an epoch", _keras_resume, _ctl_resume),
    "several_steps": Claim(
        "`steps_per_execution=3`, the default all-reduce", _keras_several_steps, _ctl_several_steps
    ),
    "workers": Claim(
        "`MultiWorkerMirroredStrategy`", _keras_workers, _ctl_several_steps, workers=2, started=2
    ),
    "absent": Claim(
        "A worker that hangs", _keras_absent, _ctl_absent, workers=2, started=2, silent=True
    ),
    "missing": Claim("A worker that never starts", _starts, _starts, workers=2, silent=True),
}


def _strategy(side: str, workers: int):
    """Two replicas on CPUs, made as a user of ``side`` would."""
    import tensorflow as tf

    from ctl.distributed import cluster
    from ctl.distributed.strategy import make_multi_worker, make_strategy

    if side == "ctl" and workers == 1:
        return make_strategy(replicas=2).strategy
    if side == "ctl":
        return make_multi_worker(
            cluster.resolve(None, None), collective_timeout=_TIMEOUT, startup_timeout=_TIMEOUT
        ).strategy
    if workers > 1:
        return tf.distribute.MultiWorkerMirroredStrategy()
    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 2
    )
    return tf.distribute.MirroredStrategy(["/cpu:0", "/cpu:1"])


def main(name: str, side: str) -> None:
    from lines import answerer

    os.environ["CUDA_VISIBLE_DEVICES"] = "-1"  # two replicas on any machine
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    answer = answerer()

    import keras
    import tensorflow as tf

    from ctl.errors import PeerError

    answer(versions={"tensorflow": tf.__version__, "keras": keras.__version__})
    claim = CLAIMS[name]
    begun = time.monotonic()
    try:
        seen = getattr(claim, side)(_strategy(side, claim.workers))
    except PeerError as error:
        seconds = time.monotonic() - begun
        seen = Seen(f"exit code {error.exit_code} after {seconds:.0f} s: {error}", claim.silent)
    answer(seen=seen.text, as_said=seen.as_said)
    sys.stdin.read()  # other workers may still need this one


if __name__ == "__main__":
    main(*sys.argv[1:])
