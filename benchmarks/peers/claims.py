"""What README.md says of Keras `fit`, each as two small programs: one in Keras, one in ctl.

Nearly all train the same thing, one weight from 0, with SGD 1.0 and losses `label * weight`. So the
gradient of an example is its label, that of a batch is the mean of its labels, and after a step the
weight is minus that: what is right can be told without running anything.

    python benchmarks/peers/claims.py clipping keras

runs one program and answers with lines of JSON (`lines.py`): `benchmarks/why_not_fit.py` runs all
of them, `tests/test_readme.py` those that need one process.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

# Seconds that ctl waits, where a peer is missing. Keras gets longer, see --patience.
_TIMEOUT = 8.0


class Seen(NamedTuple):
    """What a program did, in words, and whether README.md says that it does."""

    text: str
    as_said: bool


@dataclasses.dataclass(frozen=True)
class Claim:
    """``says`` is the first cell of a row in README.md's table, as it is written there."""

    says: str
    keras: Callable[[Any], Seen]
    ctl: Callable[[Any], Seen]
    workers: int = 1
    started: int = 1  # of them; the others never come
    silent: bool = False  # Keras is said to wait without a word


def _model():
    import keras

    return keras.Sequential(
        [keras.Input([1]), keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")]
    )


def _embedding():
    import keras

    row = keras.layers.Embedding(1, 1, embeddings_initializer="zeros")
    return keras.Sequential([keras.Input([1]), row, keras.layers.Flatten()])


def _data(labels: Sequence[float], ids: bool = False):
    import numpy as np

    labels = np.array(labels, "float32")[:, None]
    return np.zeros_like(labels) if ids else np.ones_like(labels), labels


def _loss(labels, outputs):
    return labels[:, 0] * outputs[:, 0]


def _sgd(**arguments):
    import keras

    return lambda: keras.optimizers.SGD(1.0, **arguments)


def _fit(
    strategy,
    labels: Sequence[float],
    batch_size: int,
    optimizer: Callable[[], Any],
    model: Callable[[], Any] = _model,
    callbacks: Sequence[Any] = (),
    **options: Any,
) -> float:
    """The weight after one epoch of `fit`."""
    with strategy.scope():
        network = model()
        network.compile(optimizer(), loss=_loss, **options)
    network.fit(
        *_data(labels, ids=model is _embedding),
        batch_size=batch_size,
        shuffle=False,
        verbose=0,
        callbacks=list(callbacks),
    )
    return network.get_weights()[0].item()


def _loop(
    strategy,
    labels: Sequence[float],
    batch_size: int,
    optimizer: Callable[[], Any],
    model: Callable[[], Any] = _model,
    checkpoints=None,
    actions: Sequence[Any] = (),
    **options: Any,
):
    """A `ctl.Loop` on the same, and its weight."""
    import tensorflow as tf

    import ctl

    with strategy.scope():
        step = ctl.TrainStep(model(), optimizer(), _loss, **options)
    batches = tf.data.Dataset.from_tensor_slices(_data(labels, ids=model is _embedding))
    loop = ctl.Loop(
        step,
        batches.batch(batch_size),
        strategy=strategy,
        checkpoints=checkpoints,
        actions=actions,
    )
    return loop, lambda: step.model.get_weights()[0].item()


def _train(strategy, labels: Sequence[float], batch_size: int, *args: Any, **options: Any) -> float:
    """The weight after one epoch of a `ctl.Loop`."""
    loop, weight = _loop(strategy, labels, batch_size, *args, **options)
    loop.train(-(-len(labels) // batch_size))
    return weight()


def _moved(weight: float, right: float) -> tuple[str, bool]:
    """In words, and whether it is right."""
    import math

    if math.isclose(weight, right, rel_tol=1e-4, abs_tol=1e-6):
        return f"the weight is {weight:g}, as it should", True
    return f"the weight is {weight:g} instead of {right:g}", False


def _wrong(weight: float, right: float) -> Seen:
    text, is_right = _moved(weight, right)
    return Seen(text, not is_right)


def _right(weight: float, right: float) -> Seen:
    return Seen(*_moved(weight, right))


def _fails(run: Callable[[], float], kind: type[Exception], says: str) -> Seen:
    """Whether ``run`` raises ``kind`` with a text that contains ``says``."""
    try:
        weight = run()
    except Exception as error:
        _, found, rest = " ".join(str(error).split()).partition(says)
        text = found + rest if found else str(error)
        return Seen(
            f"{type(error).__name__}: {text[:200]}", isinstance(error, kind) and bool(found)
        )
    return Seen(f"trains; the weight is {weight:g}", False)


# Clipping. The gradients are 10 on replica 0 and 2 on replica 1, their mean is 6.
_TEN_AND_TWO = [10.0, 2.0]


def _keras_clipping(strategy) -> Seen:
    return _wrong(_fit(strategy, _TEN_AND_TWO, 2, _sgd(global_clipnorm=1.0)), -1.0)


def _ctl_clipping(strategy) -> Seen:
    return _right(_train(strategy, _TEN_AND_TWO, 2, _sgd(), clip_norm=1.0), -1.0)


# Accumulation. Two micro-batches, one update.
def _keras_accumulation(strategy) -> Seen:
    return _fails(
        lambda: _fit(strategy, [1, 2, 3, 4], 2, _sgd(gradient_accumulation_steps=2)),
        RuntimeError,
        "`merge_call` called while defining a new graph or a tf.function",
    )


def _ctl_accumulation(strategy) -> Seen:
    return _right(_train(strategy, [1, 2, 3, 4], 4, _sgd(), accumulate_steps=2), -2.5)


# The loss scale, 2**15, makes an Inf of the gradient on replica 1. The update must be left out.
_OVERFLOW = [1.0, 3e38]


def _keras_loss_scale(strategy) -> Seen:
    import keras

    return _wrong(
        _fit(strategy, _OVERFLOW, 2, lambda: keras.optimizers.LossScaleOptimizer(_sgd()())), 0.0
    )


def _ctl_loss_scale(strategy) -> Seen:
    return _right(_train(strategy, _OVERFLOW, 2, _sgd(), loss_scale=True), 0.0)


# An uneven last batch: two examples for replica 0 and one for replica 1. The full batch before it
# moves nothing.
_UNEVEN = [0.0, 0.0, 0.0, 0.0, 1.0, 2.0, 6.0]


def _keras_uneven(strategy) -> Seen:
    return _wrong(_fit(strategy, _UNEVEN, 4, _sgd()), -3.0)


def _ctl_uneven(strategy) -> Seen:
    return _right(_train(strategy, _UNEVEN, 4, _sgd()), -3.0)


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

    loop, _ = _loop(strategy, [1.0, 1.0], 2, _sgd(), model)
    text, equal = _same_masks(strategy, loop.step.model.layers[0])
    return Seen(text, not equal)


# A row that is looked up twice in a batch, with gradients of 1 and 3. Adagrad divides the mean
# gradient, 2, by the root of its square.
def _adagrad():
    import keras

    return keras.optimizers.Adagrad(1.0, initial_accumulator_value=0.0, epsilon=0.0)


def _keras_embedding(strategy) -> Seen:
    return _wrong(_fit(strategy, [1.0, 3.0], 2, _adagrad, _embedding), -1.0)


def _ctl_embedding(strategy) -> Seen:
    return _right(_train(strategy, [1.0, 3.0], 2, _adagrad, _embedding), -1.0)


# Stopped after 4 of the 6 batches of an epoch, where the state had just been saved, and resumed:
# the mean gradients of the batches are 1 to 6.
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
            _fit(strategy, _SIX_BATCHES, 2, _sgd(), callbacks=[backup(), Stop()])
        return _wrong(_fit(strategy, _SIX_BATCHES, 2, _sgd(), callbacks=[backup()]), -21.0)


def _ctl_resume(strategy) -> Seen:
    import ctl

    with tempfile.TemporaryDirectory() as directory:
        for until in (4, 6):
            with ctl.CheckpointManager(directory) as checkpoints:
                loop, weight = _loop(strategy, _SIX_BATCHES, 2, _sgd(), checkpoints=checkpoints)
                loop.restore()
                loop.train(until)
                loop.save()
    return _right(weight(), -21.0)


# Several steps in one call. ctl takes as many as fit in half a second, here all.
def _keras_several_steps(strategy) -> Seen:
    import tensorflow as tf

    return _fails(
        lambda: _fit(strategy, _SIX_BATCHES, 2, _sgd(), steps_per_execution=3),
        tf.errors.InvalidArgumentError,
        "You must feed a value for placeholder",
    )


def _ctl_several_steps(strategy) -> Seen:
    return _right(_train(strategy, _SIX_BATCHES, 2, _sgd()), -21.0)


def _keras_workers(strategy) -> Seen:
    return _fails(
        lambda: _fit(strategy, _SIX_BATCHES, 2, _sgd()),
        ValueError,
        "Attempt to convert a value (PerReplica",
    )


def _worker(strategy) -> int:
    return strategy.cluster_resolver.task_id


# The second of two workers is alive and never comes to the third all-reduce.
def _sleep(_=None) -> None:
    time.sleep(3600)


def _keras_absent(strategy) -> Seen:
    """Keras's optimizer in a loop by hand, since `fit` does not get there."""
    import tensorflow as tf

    with strategy.scope():
        variables = _model().trainable_variables
        optimizer = _sgd()()
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
    loop, _ = _loop(strategy, _SIX_BATCHES, 2, _sgd(), actions=actions)
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
    """Of two replicas on CPUs, as the users of each would make it."""
    import tensorflow as tf

    from ctl import cluster
    from ctl.strategy import make_multi_worker, make_strategy

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

    os.environ["CUDA_VISIBLE_DEVICES"] = "-1"  # two replicas, whatever the machine has
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
    sys.stdin.read()  # its peers may not have ended


if __name__ == "__main__":
    main(*sys.argv[1:])
