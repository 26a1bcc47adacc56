"""Keras `Model.fit`: one call, with an epoch for each block."""

from __future__ import annotations

import queue
import threading

import tutorial
import worker
from absl import flags

from ctl.flags.parsing import group

with group("This peer"):
    _STEPS_PER_EXECUTION = flags.DEFINE_integer(
        "steps_per_execution", 1, "steps in one call, an argument of compile", lower_bound=1
    )


def build(setting: worker.Setting):
    program = tutorial.make(setting)

    import keras

    with program.strategy.scope():
        program.model.compile(
            optimizer=program.optimizer,
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=[program.accuracy],
            steps_per_execution=_STEPS_PER_EXECUTION.value,
            jit_compile=setting.jit_compile,
        )

    # One call of fit for all blocks, as users run it: each call would make a new iterator and
    # refill the shuffle buffer. It runs in a thread that waits between epochs.
    asked: queue.Queue[None] = queue.Queue()
    ended: queue.Queue[float | Exception] = queue.Queue()

    class Blocks(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            asked.get()

        def on_epoch_end(self, epoch, logs=None):
            ended.put(float(logs["loss"]))

    def fit(steps: int) -> None:
        try:
            program.model.fit(
                program.dataset,
                steps_per_epoch=steps,
                epochs=1_000_000,
                verbose=0,
                callbacks=[Blocks()],
            )
        except Exception as error:  # raised in the thread that asked
            ended.put(error)

    thread: list[threading.Thread] = []

    def train(steps: int) -> float:
        if not thread:
            thread.append(threading.Thread(target=fit, args=(steps,), daemon=True))
            thread[0].start()
        asked.put(None)
        loss = ended.get()
        if isinstance(loss, Exception):
            raise loss
        return loss

    return train, program.about


if __name__ == "__main__":
    worker.serve(build)
