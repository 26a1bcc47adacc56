"""Random changes of training images that depend on nothing but the run's seed and the example.

The seed of an example is a function of (the run's seed, the epoch, the index of the example). So
neither a resume nor the number of replicas or workers changes an image, and every epoch has others.
Where there are no epochs, as in a mixture or a `tf.data.Dataset` of the user's own, it is a
function of the position in all batches. The changes are exact, see `ctl.data.pixels`.

mixup and CutMix mix each example with its neighbour in the order of the training, which is another
permutation in each epoch: positions 0 and 1 in all batches, 2 and 3, and so on.

`Augmented` makes them on the replica, from uint8 to uint8, before `ctl.TrainStep.preprocess`.
"""

from __future__ import annotations

import functools
import math
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from ctl.data import pixels
from ctl.data.dataset import Dataset
from ctl.data.in_memory import InMemory
from ctl.data.pixels import ONE
from ctl.distributed import local_batch
from ctl.errors import UsageError
from ctl.flags.augmentation import parse

# The operations of RandAugment (Cubuk et al. 2020, arXiv:1909.13719, section 3).
RAND_AUGMENT = (
    *("identity", "autocontrast", "equalize", "rotate", "solarize", "color", "posterize"),
    *("contrast", "brightness", "sharpness", "shear_x", "shear_y", "translate_x", "translate_y"),
)
_LARGEST = 30.0  # magnitude
# Of splitmix64: Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators".
_GAMMA, _FACTORS = 0x9E3779B97F4A7C15, (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)


class Augmented:
    """A dataset whose images change at random in every epoch.

    Attributes:
        dataset: the same without changes. All that is not defined here is its.
    """

    def __init__(self, dataset: Dataset, operations: str, *, seed: int = 0):
        """Wraps ``dataset``.

        Args:
            dataset: to train on. Its batches are ``(images, labels, ...)``, images uint8 [n,
                height, width, channels]. mixup and CutMix need ``(images, classes)``, and make
                of the classes, integers [n], their probabilities, float32 [n, classes].
            operations: in this order, as ``--augment`` has them: ``"crop:4,flip,color:0.2"``.
            seed: of the run.

        Raises:
            UsageError: an operation is unknown, the size of a batch is unknown, there are no
                images, or the examples of a batch are not in pairs that can be mixed.
        """
        if dataset.global_batch_size is None:
            raise UsageError(
                "data to augment need a known global batch size: give batches of one size "
                "(drop_remainder=True)"
            )
        self.dataset = dataset
        self.operations = operations
        self.description = f"{dataset.description}, augmented: {operations}"
        self._parsed = parse(operations)
        self._seed = seed
        # What has `shares` gives ``(keys, batch)``, see `ctl.data.dataset.Dataset`.
        self._has_keys = hasattr(dataset, "shares")
        arrays = getattr(dataset, "arrays", None)
        if arrays is not None:
            _check_images(arrays)
        self._mixes = ", ".join(name for name, _ in self._parsed if name in _MIXING)
        if self._mixes:
            self._check_pairs(1)
            spec = None if self._has_keys else tf.nest.flatten(dataset.batches().element_spec)[0]
            if spec is not None and not spec.shape[:1].is_fully_defined():
                raise UsageError(
                    f"{self._mixes} mixes pairs of examples, but the last batch may be smaller: "
                    "give batches of one size (drop_remainder=True)"
                )

    def __getattr__(self, name: str) -> Any:
        if name == "dataset":  # while a copy is made
            raise AttributeError(name)
        return getattr(self.dataset, name)

    def batches(self, start_step: int = 0) -> tf.data.Dataset:
        """See `Dataset.batches`. An element is ``(numbers, element of the dataset)``; the numbers,
        int64 [global_batch_size], are those of `example_seeds`."""
        size, batches = self.dataset.global_batch_size, self.dataset.batches(start_step)
        if self._has_keys:
            return batches
        count = self.dataset.num_examples if type(self.dataset) is InMemory else None

        def numbered(step: tf.Tensor, element: Any) -> tuple[tf.Tensor, Any]:
            positions = step * size + tf.range(tf.cast(local_batch.rows(element), tf.int64))
            return positions if count is None else positions // count * count + element, element

        steps = tf.data.Dataset.counter(start_step)
        numbers = tf.data.Dataset.zip(steps, batches).map(numbered)
        return numbers.prefetch(1).with_options(batches.options())

    def on_replica(self, element: Any, resident: Any) -> Any:
        """See `Dataset.on_replica`."""
        numbers, inner = element
        if self._has_keys:  # int64 [n, 2]: epoch, index
            numbers, inner = numbers[:, 0] * self.dataset.num_examples + numbers[:, 1], element
        images, *rest = _check_images(self.dataset.on_replica(inner, resident))
        if self._mixes:
            rest = [self._probabilities(*rest)]
        seeds = example_seeds(self._seed, numbers)
        for number, (name, arguments) in enumerate(self._parsed):
            own = fold_in(seeds, number)
            if name in _MIXING:
                images, rest[0] = _MIXING[name](images, rest[0], own, *arguments)
            else:
                images = _FUNCTIONS[name](images, own, *arguments)
        return (images, *rest)

    def _probabilities(self, labels: tf.Tensor, *more: Any) -> tf.Tensor:
        """float32 [n, classes] of integers [n], after the checks of what can be mixed."""
        self._check_pairs(tf.distribute.get_strategy().num_replicas_in_sync)
        classes = self.dataset.info.num_classes
        is_class = isinstance(labels, tf.Tensor) and labels.dtype.is_integer
        if more or not is_class or labels.shape.rank != 1 or not classes:
            raise UsageError(
                f"{self._mixes} of --augment takes batches (images, classes), integers [n] of a "
                "known number of classes: for other labels give --step=ctl.recipes.mixup:Mixup or "
                "CutMix"
            )
        return tf.one_hot(labels, classes)

    def _check_pairs(self, replicas: int) -> None:
        size: Any = self.dataset.global_batch_size
        if size % (2 * replicas):
            raise UsageError(
                f"{self._mixes} mixes pairs of examples, so the global batch size must be a "
                f"multiple of {2 * replicas}, not {size}"
            )

    def fingerprint(self) -> dict[str, Any]:
        """See `Dataset.fingerprint`."""
        return {**self.dataset.fingerprint(), "augment": self.operations}


def _check_images(batch: Any) -> Any:
    """Returns ``batch``. Raises `UsageError` unless its first part are images."""
    pair = isinstance(batch, tuple | list) and len(batch) > 1
    images: Any = batch[0] if pair else np.zeros(())
    shape: Any = getattr(images, "shape", ())
    fits = len(shape) == 4 and shape[-1] in (1, 3) and min(shape[1:3]) >= 3
    if not (fits and images.dtype == np.uint8):
        raise UsageError(
            "only batches (images, labels) can be augmented, with images uint8 [n, height, width, "
            "1 or 3] of 3 x 3 pixels or more"
        )
    return batch


# Seeds --------------------------------------------------------------------------------------------


def example_seeds(seed: int, numbers: tf.Tensor) -> tf.Tensor:
    """Seeds uint64 [n] of examples in a run with ``seed``, by their ``numbers``, integers [n]: the
    epoch times the number of examples, plus the index of the example."""
    run = _mixed(tf.constant(seed + _GAMMA, tf.uint64))
    return _mixed(run + (tf.cast(numbers, tf.uint64) + 1) * _GAMMA)


def fold_in(seeds: tf.Tensor, number: int) -> tf.Tensor:
    """Other seeds uint64 [n], for the use ``number``."""
    salt = zlib.crc32(b"%d" % number)
    return _mixed(tf.bitwise.bitwise_xor(seeds, tf.constant(salt, tf.uint64)))


def uniform(seeds: tf.Tensor, count: int) -> tf.Tensor:
    """``count`` random numbers in [0, 1) for each of ``seeds`` [n], float32 [n, count]: the upper
    24 bits of what splitmix64 gives in a row."""
    # An array, because TensorFlow makes floats of a list of such integers.
    states = np.array([(index + 1) * _GAMMA % 2**64 for index in range(count)], np.uint64)
    bits = _mixed(seeds[:, tf.newaxis] + states)
    return tf.cast(tf.cast(_shifted(bits, 40), tf.int32), tf.float32) * 2.0**-24


def integers(uniforms: tf.Tensor, count: int) -> tf.Tensor:
    """Integers from 0 to ``count`` - 1 of numbers in [0, 1), float32."""
    return tf.minimum(tf.floor(uniforms * float(count)), count - 1.0)


def _mixed(state: tf.Tensor) -> tf.Tensor:
    for shift, factor in zip((30, 27), _FACTORS, strict=True):
        state = tf.bitwise.bitwise_xor(state, _shifted(state, shift)) * factor
    return tf.bitwise.bitwise_xor(state, _shifted(state, 31))


def _shifted(state: tf.Tensor, bits: int) -> tf.Tensor:
    return tf.bitwise.right_shift(state, tf.constant(bits, tf.uint64))


# Operations: (images uint8 [n, height, width, channels], seeds uint64 [n], ...) -> such images ----


def crop(images: tf.Tensor, seeds: tf.Tensor, pixels_around: int) -> tf.Tensor:
    """Crops of the size of the images, from images with ``pixels_around`` of zeros around them."""
    moves = integers(uniform(seeds, 2), 2 * pixels_around + 1) - pixels_around
    y, x = tf.unstack(moves[:, tf.newaxis, tf.newaxis], axis=-1)
    rows = tf.range(images.shape[1], dtype=tf.float32)[:, tf.newaxis] + y
    columns = tf.range(images.shape[2], dtype=tf.float32) + x
    return _bytes(pixels.pick(_floats(images), rows, columns))


def flip(images: tf.Tensor, seeds: tf.Tensor) -> tf.Tensor:
    """Mirrors each image left to right with probability 1/2."""
    flips = uniform(seeds, 1)[:, tf.newaxis, tf.newaxis] < 0.5
    return tf.where(flips, tf.reverse(images, [2]), images)


def color(images: tf.Tensor, seeds: tf.Tensor, strength: float) -> tf.Tensor:
    """Other brightness, contrast and saturation, in this order. Each difference (to black, to the
    mean gray, to the gray pixel) is multiplied by 1 - ``strength`` to 1 + ``strength``."""
    draws = 2.0 * uniform(seeds, 3) - 1.0
    factors = tf.round(draws * (strength * ONE)) + ONE
    brightness, contrast, saturation = tf.unstack(factors[:, tf.newaxis, tf.newaxis], axis=-1)
    changed = pixels.blend(_floats(images), 0.0, brightness[..., tf.newaxis])
    changed = pixels.blend(changed, pixels.mean_gray(changed), contrast[..., tf.newaxis])
    changed = pixels.blend(changed, pixels.gray(changed), saturation[..., tf.newaxis])
    return _bytes(changed)


def rand_augment(images: tf.Tensor, seeds: tf.Tensor, layers: int, magnitude: float) -> tf.Tensor:
    """RandAugment: ``layers`` times one of `RAND_AUGMENT`, all with the same magnitude.

    At 30, the largest magnitude, images are rotated by 30 degrees, sheared by 0.3 or moved by 150 /
    331 of their size; values from 0 are inverted, 4 bits are left, and color, contrast, brightness
    and sharpness are multiplied by 0.1 or 1.9 (Cubuk et al. 2019, arXiv:1805.09501, table 6). Half
    of the images get the opposite direction. Pixels from outside are 0.
    """
    matrices, factors, tables = _at_magnitude(magnitude, images.shape[1:3])
    changed = _floats(images)
    for layer in range(layers):
        draws = uniform(fold_in(seeds, layer), 2)
        drawn = tf.cast(integers(draws[:, 0], len(RAND_AUGMENT)), tf.int32)
        sign = tf.cast(draws[:, 1] < 0.5, tf.int32)
        row = 2 * drawn + sign

        def is_one(name: str, drawn: tf.Tensor = drawn) -> tf.Tensor:
            return tf.reshape(drawn == RAND_AUGMENT.index(name), [-1, 1, 1, 1])

        changed = pixels.transform(changed, tf.gather(matrices, row))
        factor = tf.reshape(tf.gather(factors, row), [-1, 1, 1, 1])
        gray = pixels.mean_gray(changed)
        others = tf.where(is_one("contrast"), gray, tf.zeros_like(gray))  # brightness: black
        others = tf.where(is_one("color"), pixels.gray(changed), others)
        others = tf.where(is_one("sharpness"), pixels.smooth(changed), others)
        table = tf.gather(tables, row)[:, tf.newaxis]
        table = tf.where(is_one("autocontrast")[..., 0], pixels.autocontrast(changed), table)
        table = tf.where(is_one("equalize")[..., 0], pixels.equalize(changed), table)
        changed = pixels.blend(pixels.look_up(changed, table), others, factor)
    return _bytes(changed)


# Operations on pairs: (images, labels float32 [n, classes], seeds, alpha) -> images and labels.
# Examples 2k and 2k + 1 are a pair.


def mixup(
    images: tf.Tensor, labels: tf.Tensor, seeds: tf.Tensor, alpha: float
) -> tuple[tf.Tensor, tf.Tensor]:
    """mixup (Zhang et al. 2018, arXiv:1710.09412): each image is blended with the other of its
    pair, and so are the labels. Its share is drawn from Beta(alpha, alpha), in steps of 1 / `ONE`.
    """
    shares = tf.gather(_beta_quantiles(alpha), _places(seeds))
    first = _floats(images)
    blended = pixels.blend(first, _others(first), tf.reshape(shares, [-1, 1, 1, 1]))
    return _bytes(blended), _mixed_labels(labels, shares)


def cutmix(
    images: tf.Tensor, labels: tf.Tensor, seeds: tf.Tensor, alpha: float
) -> tuple[tf.Tensor, tf.Tensor]:
    """CutMix (Yun et al. 2019, arXiv:1905.04899): a rectangle of each image is that of the other of
    its pair. Its part of the image is drawn from Beta(alpha, alpha). It ends at the border, so it
    may be smaller; the labels are mixed by its area, in steps of 1 / `ONE`."""
    draws = uniform(seeds, 3)
    sides = np.sqrt(1.0 - _beta_quantiles(alpha).astype(np.float64) / ONE)
    inside, size = [], 1
    for axis, length in enumerate(images.shape[1:3]):
        half = tf.gather(np.float32(np.floor(length * sides) // 2), _places(seeds))
        centre = integers(draws[:, axis + 1], length)
        offsets = tf.range(length, dtype=tf.float32) - centre[:, tf.newaxis]
        inside.append((-half[:, tf.newaxis] <= offsets) & (offsets < half[:, tf.newaxis]))
        size *= length
    rows, columns = inside
    cut = rows[:, :, tf.newaxis, tf.newaxis] & columns[:, tf.newaxis, :, tf.newaxis]
    area = tf.reduce_sum(tf.cast(cut, tf.float64), axis=[1, 2, 3])
    part = tf.floor((4.0 * ONE * area + 2.0 * size + 1.0) / (4.0 * size))
    shares = ONE - tf.cast(part, tf.float32)
    return tf.where(cut, _others(images), images), _mixed_labels(labels, shares)


@functools.cache
def _beta_quantiles(alpha: float) -> np.ndarray:
    """Quantiles of Beta(alpha, alpha), float32 [`ONE`], rounded, in units of 1 / `ONE`."""
    with tf.init_scope():
        middles = tf.constant((np.arange(ONE) + 0.5) / ONE)
        alphas = tf.fill(middles.shape, tf.constant(alpha, tf.float64))
        below = tf.math.betainc(alphas, alphas, middles)
    return np.searchsorted(below.numpy(), middles.numpy()).astype(np.float32)


def _places(seeds: tf.Tensor) -> tf.Tensor:
    """int32 [n]: a random place in a table of `ONE` entries."""
    return tf.cast(integers(uniform(seeds, 1)[:, 0], int(ONE)), tf.int32)


def _others(tensor: tf.Tensor) -> tf.Tensor:
    """[n, ...]: of each example, the other of its pair."""
    pairs = tf.reshape(tensor, [-1, 2, *tensor.shape[1:]])
    return tf.reshape(tf.reverse(pairs, [1]), [-1, *tensor.shape[1:]])


def _mixed_labels(labels: tf.Tensor, shares: tf.Tensor) -> tf.Tensor:
    """``labels`` with their ``shares`` [n] in units of 1 / `ONE`, and the rest of the others."""
    part = shares[:, tf.newaxis] / ONE
    return part * labels + (1.0 - part) * _others(labels)


def _at_magnitude(
    magnitude: float, size: Sequence[int]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """For each operation and its opposite: matrices [28, 6] for `pixels.transform`, factors [28]
    for `pixels.blend`, and tables [28, 256] for `pixels.look_up`; most leave an image as it is."""
    part, count = magnitude / _LARGEST, 2 * len(RAND_AUGMENT)
    matrices = np.tile(np.array([ONE, 0, 0, 0, ONE, 0], np.float32), [count, 1])
    factors = np.full([count], ONE, np.float32)
    tables = np.tile(np.arange(256, dtype=np.float32), [count, 1])
    for sign in (0, 1):
        of = {name: 2 * index + sign for index, name in enumerate(RAND_AUGMENT)}
        way = 1.0 - 2.0 * sign
        angle = math.radians(way * 30.0 * part)
        matrices[of["rotate"], [0, 1, 3, 4]] = [
            round(value * ONE)
            for value in (math.cos(angle), math.sin(angle), -math.sin(angle), math.cos(angle))
        ]
        matrices[of["shear_x"], 1] = round(way * 0.3 * part * ONE)
        matrices[of["shear_y"], 3] = round(way * 0.3 * part * ONE)
        matrices[of["translate_x"], 2] = way * round(150 / 331 * part * size[1]) * ONE
        matrices[of["translate_y"], 5] = way * round(150 / 331 * part * size[0]) * ONE
        for name in ("color", "contrast", "brightness", "sharpness"):
            factors[of[name]] = round(ONE * (1.0 + way * 0.9 * part))
        values = np.arange(256)
        tables[of["solarize"]] = np.where(values < round(256 * (1 - part)), values, 255 - values)
        tables[of["posterize"]] = values & -(1 << round(4 * part))
    return matrices, factors, tables


def _floats(images: tf.Tensor) -> tf.Tensor:
    return tf.cast(images, tf.float32)


def _bytes(images: tf.Tensor) -> tf.Tensor:
    return tf.cast(images, tf.uint8)


_FUNCTIONS: dict[str, Any] = {
    "crop": crop,
    "flip": flip,
    "color": color,
    "randaugment": rand_augment,
}
_MIXING: dict[str, Any] = {"mixup": mixup, "cutmix": cutmix}
