"""Gradients that cross replicas in fewer bytes. What the compression loses on a replica stays
there, and is added to its next gradient (error feedback).

Error feedback is by Seide et al. 2014 (Interspeech); here it is that of Karimireddy et al. 2019
(arXiv:1901.09847), algorithm 2, on gradients instead of updates. ``int8`` has a scale for each 512
numbers, as QSGD (Alistarh et al. 2017, arXiv:1610.02132), but rounds to the nearest number.
``topk`` sends the numbers of largest magnitude (Alistarh et al. 2018, arXiv:1809.10505, algorithm
1); by default 1%, as Aji and Heafield 2017 (arXiv:1704.05021)::

    python -m ctl.train --model_dir=/tmp/int8 --step=ctl.recipes.compressed:Compressed \\
        --compressor=int8 --replicas=2

For d parameters, a replica gives this to the collective, instead of 4d bytes to an all-reduce:

- ``fp16``: 2d bytes to an all-reduce. It adds in float16, whose rounding has no error feedback.
- ``int8``: 1.01d bytes to a gather, since a sum of int8 would need more bits. Each replica receives
  the parts of all others, so it saves nothing over a float32 ring from 8 replicas on.
- ``topk``: 8 bytes, a number and its index, for each number kept, to a gather. It saves nothing
  over a float32 ring from ``1 / topk_share`` replicas on.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

import ctl
from ctl import UsageError

_BUCKET = 512  # numbers that share a scale


class Compressed(ctl.TrainStep):
    """Sums compressed gradients, with error feedback.

    Attributes:
        left: float32 [parameters], what this replica has not sent yet.
    """

    compressor: str = ctl.option("int8", "Compression method.", choices=["fp16", "int8", "topk"])
    topk_share: float = ctl.option(0.01, "Sent share, for topk.", lower_bound=0.0, upper_bound=1.0)

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self.size = sum(v.shape.num_elements() for v in self.model.trainable_variables)
        self.left = self.variable("left", [self.size], per_replica=True, on_resize="sum")

    @tf.autograph.experimental.do_not_convert
    def sum_gradients(self, gradients: list[tf.Tensor]) -> list[tf.Tensor]:
        flat = tf.concat([tf.reshape(tf.cast(g, tf.float32), [-1]) for g in gradients], axis=0)
        if flat.shape != self.left.shape:
            raise UsageError("Compressed needs gradients of exactly the variables of the model")
        whole = flat + self.left.read_value()
        context = tf.distribute.get_replica_context()
        if self.compressor == "fp16":
            most = tf.float16.max / context.num_replicas_in_sync  # so that their sum is finite
            half = tf.cast(tf.clip_by_value(whole, -most, most), tf.float16)
            sent = tf.cast(half, tf.float32)
            total = tf.cast(ctl.reduce.all_reduce([half], options=self.options)[0], tf.float32)
        else:
            int8 = self.compressor == "int8"
            decode = self.of_int8 if int8 else self.of_topk
            words = (self.to_int8 if int8 else self.to_topk)(whole)
            sent = decode(words)
            parts = context.all_gather(words[tf.newaxis], axis=0, options=self.options)
            parts = tf.unstack(parts, context.num_replicas_in_sync)
            total = tf.add_n([decode(part) for part in parts])  # in one order on all
        self.left.assign(whole - sent)
        totals = tf.split(total, [g.shape.num_elements() for g in gradients])
        return [
            tf.cast(tf.reshape(t, g.shape), g.dtype) for t, g in zip(totals, gradients, strict=True)
        ]

    # What is gathered is int32: TensorFlow has no gather of int8 between workers.

    def to_int8(self, whole: tf.Tensor) -> tf.Tensor:
        """int32 [buckets, 129]: four numbers in each, and the scale of the bucket."""
        buckets = tf.reshape(tf.pad(whole, [[0, -self.size % _BUCKET]]), [-1, _BUCKET])
        scale = tf.reduce_max(tf.abs(buckets), axis=1, keepdims=True) / 127.0
        numbers = tf.cast(tf.round(tf.math.divide_no_nan(buckets, scale)), tf.int8)
        words = tf.bitcast(tf.reshape(numbers, [-1, _BUCKET // 4, 4]), tf.int32)
        return tf.concat([words, tf.bitcast(scale, tf.int32)], axis=1)

    def of_int8(self, words: tf.Tensor) -> tf.Tensor:
        """float32 [parameters] of what `to_int8` returned."""
        numbers = tf.reshape(tf.bitcast(words[:, :-1], tf.int8), [-1, _BUCKET])
        scale = tf.bitcast(words[:, -1:], tf.float32)
        return tf.reshape(tf.cast(numbers, tf.float32) * scale, [-1])[: self.size]

    def to_topk(self, whole: tf.Tensor) -> tf.Tensor:
        """int32 [2, kept]: numbers, and their indices."""
        kept = max(1, round(self.topk_share * self.size))
        where = tf.math.top_k(tf.abs(whole), kept).indices
        return tf.stack([tf.bitcast(tf.gather(whole, where), tf.int32), where])

    def of_topk(self, words: tf.Tensor) -> tf.Tensor:
        """float32 [parameters] of what `to_topk` returned; 0 elsewhere."""
        where = words[1][:, tf.newaxis]
        return tf.scatter_nd(where, tf.bitcast(words[0], tf.float32), [self.size])
