"""A small GPT: a transformer that predicts the next byte of Python's own sources, and writes some.

    python -m ctl.examples.gpt

The targets are the bytes one place later, so data, loss and metric are those of a classifier, at
each place. With Python 3.11, it prints ``loss 2.23 per byte, accuracy 0.41``, and what looks like
words.
"""

from typing import Any

import keras
import numpy as np
from keras import layers, ops

import ctl

CONTEXT, WIDTH, BLOCKS, BATCH, STEPS = 32, 64, 1, 32, 400


def make_model() -> keras.Model:
    """From tokens, int [n, CONTEXT], to logits, float32 [n, CONTEXT, 256]. A place sees
    itself and those before it."""
    tokens = keras.Input([CONTEXT], dtype="int32")
    x = layers.Embedding(256, WIDTH)(tokens)
    x += layers.Embedding(CONTEXT, WIDTH)(ops.arange(CONTEXT))
    for _ in range(BLOCKS):
        y = layers.LayerNormalization()(x)
        x += layers.MultiHeadAttention(4, WIDTH // 4)(y, y, use_causal_mask=True)
        y = layers.Dense(4 * WIDTH, "gelu")(layers.LayerNormalization()(x))
        x += layers.Dense(WIDTH)(y)
    return keras.Model(tokens, layers.Dense(256)(layers.LayerNormalization()(x)))


def make_loop() -> ctl.Loop:
    train, test = ctl.data.text.python_sources(CONTEXT, global_batch_size=BATCH)
    loss, metrics = "sparse_categorical_crossentropy", ["accuracy"]
    model = make_model()
    optimizer = keras.optimizers.AdamW(weight_decay=0.1)
    return ctl.Loop(
        ctl.TrainStep(model, optimizer, loss, metrics=metrics, clip_norm=1.0),
        shifted(train),
        global_batch_size=BATCH,
        schedule=ctl.schedule.Cosine(3e-3, STEPS, warmup_steps=50),
        evaluator=ctl.Evaluator(ctl.EvalStep(model, loss, metrics), shifted(test)),
    )


def shifted(rows: Any) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and targets, uint8 [n, CONTEXT]."""
    return rows.arrays[:, :-1], rows.arrays[:, 1:]


def write(model: keras.Model, text: str, length: int, seed: int = 0) -> str:
    """``text``, and so many bytes more, drawn one by one."""
    random, tokens = np.random.default_rng(seed), list(text.encode())
    for _ in range(length):
        seen = tokens[-CONTEXT:]
        row = np.array([seen + [0] * (CONTEXT - len(seen))])
        logits = model(row)[0, len(seen) - 1].numpy().astype(float) / 0.5
        odds = np.exp(logits - logits.max())
        tokens.append(int(random.choice(256, p=odds / odds.sum())))
    return bytes(tokens).decode(errors="replace")


def main() -> None:
    keras.utils.set_random_seed(1)
    loop = make_loop()
    results = loop.train_and_evaluate(STEPS, evaluate_every=STEPS)
    print(f"loss {results['loss']:.2f} per byte, accuracy {results['accuracy']:.2f}")
    print(write(loop.step.model, "def ", 200))


if __name__ == "__main__":
    main()
