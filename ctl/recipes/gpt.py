"""A language model of bytes or tokens, on text of yours or Python's sources.

The model is a decoder: a transformer whose positions see only those before them (GPT: Radford et
al. 2018, "Improving language understanding by generative pre-training", section 3.1; Vaswani et al.
2017, arXiv:1706.03762, section 3.2.3), with pre-LN blocks (Radford et al. 2019). A row of
`ctl.data.text` can have several texts: positions count from the beginning of a text, and attend to
that text only. Rows are padded, so the loss is divided by the valid tokens of all replicas.
``perplexity`` is the exponential of the mean loss of a token::

    python -m ctl.train --model_dir=/tmp/gpt --step=ctl.recipes.gpt:LanguageModel \\
        --dataset=ctl.recipes.gpt:datasets --model=ctl.recipes.gpt:make_model --train_steps=2000

``--data_dir=FILE.txt``, also a table or a folder of them, trains on text of yours, see
`ctl.data.text.files`, and ``--tokenizer=FILE`` on its tokens instead of bytes. ``--rows=packed``
trains on single paragraphs, as many in a row as fit.
"""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf
from absl import flags
from keras import layers, ops

import ctl
from ctl import BaseStep

flags.DEFINE_integer("context", 64, "Context length of the model, in tokens.", lower_bound=1)
flags.DEFINE_integer("width", 64, "Width of the model: 32 per attention head.", lower_bound=32)
flags.DEFINE_integer("blocks", 2, "Number of transformer blocks.", lower_bound=1)
flags.DEFINE_enum(
    "rows",
    "windows",
    ["windows", "packed", "padded", "buckets"],
    "Rows of tokens. windows: of whole modules. Otherwise of paragraphs: several packed into a "
    "row, one padded to a row, or one per row in batches of few lengths (buckets).",
)


class Perplexity(keras.metrics.Mean):
    """The exponential of a mean of losses."""

    def result(self) -> Any:
        return ops.exp(super().result())


class _PerToken(BaseStep):
    """A batch is integers [n, length + 1]: each token but the first is to be predicted."""

    counts = "tokens"

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self.perplexity = Perplexity("perplexity")

    def loss(self, batch: tf.Tensor) -> tf.Tensor:
        tokens = tf.cast(batch, tf.int32)
        logits = self.model(tokens[:, :-1], training=self.training)
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(tokens[:, 1:], logits)
        valid = self.valid(batch)
        # Keras would take the mean of each row first, which counts short rows too much.
        self.perplexity.update_state(tf.reshape(losses, [-1]), tf.reshape(valid, [-1]))
        return tf.reduce_sum(losses * valid, axis=1)

    def count(self, batch: tf.Tensor) -> tf.Tensor:
        return tf.reduce_sum(self.valid(batch))

    def valid(self, batch: tf.Tensor) -> tf.Tensor:
        return tf.cast(batch[:, 1:] != ctl.data.text.PAD, tf.float32)


class Evaluation(_PerToken, ctl.EvalStep):
    """Evaluates as `LanguageModel` trains."""


class LanguageModel(_PerToken, ctl.TrainStep):
    """Trains on the mean loss of the valid tokens of the global batch."""

    eval_step = Evaluation


def make_model(vocabulary_size: int = 256) -> keras.Model:
    """The `gpt` that the flags describe."""
    sizes: Any = flags.FLAGS
    return gpt(sizes.context, sizes.width, sizes.blocks, vocabulary_size)


def gpt(context: int, width: int, blocks: int, vocabulary_size: int = 256) -> keras.Model:
    """From int [n, length] to float32 logits [n, length, vocabulary_size], for lengths up to
    ``context``. ``width`` is 32 for each head."""
    tokens = keras.Input([None], dtype="int32", name="tokens")
    places = ops.cumsum(ops.ones_like(tokens), axis=1)
    texts = ops.cumsum(ops.cast(ops.equal(tokens, ctl.data.text.PAD), "int32"), axis=1)
    earlier = ops.greater_equal(places[:, :, None], places[:, None, :])
    mask = ops.logical_and(earlier, ops.equal(texts[:, :, None], texts[:, None, :]))
    positions = ops.sum(ops.cast(mask, "int32"), axis=2) - 1
    x = layers.Embedding(vocabulary_size, width)(tokens)
    x += layers.Embedding(context, width)(positions)
    for _ in range(blocks):
        y = layers.LayerNormalization()(x)
        x += layers.MultiHeadAttention(width // 32, 32)(y, y, attention_mask=mask)
        y = layers.Dense(4 * width, "gelu")(layers.LayerNormalization()(x))
        x += layers.Dense(width)(y)
    x = layers.LayerNormalization()(x)
    logits = layers.Dense(vocabulary_size, dtype="float32")(x)
    return keras.Model(tokens, logits, name="gpt")


def datasets(
    global_batch_size: int,
    seed: int = 0,
    data_dir: str | None = None,
    tokenizer: ctl.data.Tokenizer | None = None,
) -> tuple[ctl.data.InMemory | ctl.data.text.Buckets, ctl.data.InMemory | ctl.data.text.Buckets]:
    """The text of ``data_dir``, or else the sources of Python's standard library, to train and to
    evaluate on."""
    context: Any = flags.FLAGS["context"].value
    options: dict[str, Any] = {"rows": flags.FLAGS["rows"].value, "tokenizer": tokenizer}
    options |= {"global_batch_size": global_batch_size, "seed": seed}
    if data_dir:
        return ctl.data.text.files(data_dir, context, **options)
    return ctl.data.text.python_sources(context, **options)
