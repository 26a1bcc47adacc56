"""Changes of images with other parameters for each image, the same bits on every device.

Images are float32 [n, height, width, channels] here, and every value of every computation is an
integer below 2**24 or a quotient that is rounded down at once, half a unit away from the next one.
float32 has these exactly. So the order of operations does not matter, nor how a device or XLA fuses
them, nor how examples are split over replicas. GPUs have no kernels for int32.
"""

from __future__ import annotations

import tensorflow as tf

ONE = 4096.0  # the factor and the coefficient 1: they are whole numbers of 1/4096


def blend(images: tf.Tensor, others: tf.Tensor | float, factors: tf.Tensor) -> tf.Tensor:
    """``factors`` parts of ``images`` and the rest of ``others``, rounded and cut to [0, 255].

    Args:
        images, others: of shapes that broadcast.
        factors: in units of 1 / `ONE`, at most 2 * `ONE`; they broadcast, too. Above `ONE`, the
            difference to ``others`` grows.
    """
    sums = factors * images + (ONE - factors) * others
    return tf.clip_by_value(tf.floor((sums + ONE / 2) / ONE), 0.0, 255.0)


def gray(images: tf.Tensor) -> tf.Tensor:
    """The luma of ITU-R BT.601, float32 [n, height, width, 1]."""
    if images.shape[-1] == 1:
        return images
    red, green, blue = tf.split(images, 3, axis=-1)
    return tf.floor((19595.0 * red + 38470.0 * green + 7471.0 * blue + 32768.0) / 65536.0)


def mean_gray(images: tf.Tensor) -> tf.Tensor:
    """The mean of `gray`, rounded, float32 [n, 1, 1, 1]."""
    rows = tf.cast(tf.reduce_sum(gray(images), axis=2), tf.float64)  # large images have large sums
    sums = tf.reduce_sum(rows, axis=[1, 2], keepdims=True)[..., tf.newaxis]
    size = tf.cast(tf.shape(images)[1] * tf.shape(images)[2], tf.float64)
    return tf.cast(tf.floor((4.0 * sums + 2.0 * size + 1.0) / (4.0 * size)), tf.float32)


def smooth(images: tf.Tensor) -> tf.Tensor:
    """The mean of 3 x 3 pixels, in which the pixel itself counts 5 times; at the border, itself."""
    rows = images[:, :-2] + images[:, 1:-1] + images[:, 2:]
    sums = rows[:, :, :-2] + rows[:, :, 1:-1] + rows[:, :, 2:] + 4.0 * images[:, 1:-1, 1:-1]
    inner = tf.floor((2.0 * sums + 13.0) / 26.0)
    edges = [[0, 0], [1, 1], [1, 1], [0, 0]]
    is_inner = tf.pad(tf.ones_like(inner), edges) > 0.0
    return tf.where(is_inner, tf.pad(inner, edges), images)


def pick(images: tf.Tensor, rows: tf.Tensor, columns: tf.Tensor) -> tf.Tensor:
    """Pixel (``rows``, ``columns``) of each image for each pixel of the result; 0 outside.

    Args:
        images: [n, height, width, channels].
        rows, columns: float32 integers, of shapes that broadcast to [n, height, width].
    """
    height, width, channels = images.shape[1:]
    inside = (rows >= 0.0) & (rows < height) & (columns >= 0.0) & (columns < width)
    places = tf.cast(tf.where(inside, rows * float(width) + columns, 0.0), tf.int32)
    flat = tf.reshape(images, [-1, height * width, channels])
    picked = tf.gather(flat, tf.reshape(places, [-1, height * width]), axis=1, batch_dims=1)
    picked = tf.reshape(picked, [-1, height, width, channels])
    return tf.where(inside[..., tf.newaxis], picked, 0.0)


def transform(images: tf.Tensor, matrices: tf.Tensor) -> tf.Tensor:
    """An affine map about the centre: each pixel is the nearest one to where it comes from.

    Args:
        images: of at most 1000 x 1000 pixels; beyond, sums are rounded.
        matrices: [n, 6], in units of 1 / `ONE`: the pixel at (x, y) from the centre comes from
            (m0 x + m1 y + m2, m3 x + m4 y + m5).
    """
    height, width = images.shape[1:3]
    # Twice the distance from the centre is an integer.
    x = 2.0 * tf.range(width, dtype=tf.float32) - (width - 1.0)
    y = 2.0 * tf.range(height, dtype=tf.float32)[:, tf.newaxis] - (height - 1.0)
    m = tf.unstack(matrices[:, tf.newaxis, tf.newaxis], axis=-1)
    columns = tf.floor((m[0] * x + m[1] * y + 2.0 * m[2] + width * ONE) / (2.0 * ONE))
    rows = tf.floor((m[3] * x + m[4] * y + 2.0 * m[5] + height * ONE) / (2.0 * ONE))
    return pick(images, rows, columns)


def look_up(images: tf.Tensor, tables: tf.Tensor) -> tf.Tensor:
    """The value that ``tables`` [n, channels, 256] have for each value of each channel."""
    channels = images.shape[-1]
    places = tf.cast(images + 256.0 * tf.range(channels, dtype=tf.float32), tf.int32)
    flat = tf.reshape(places, [-1, places.shape[1] * places.shape[2] * channels])
    values = tf.gather(tf.reshape(tables, [-1, channels * 256]), flat, axis=1, batch_dims=1)
    return tf.reshape(values, [-1, *images.shape[1:]])


def autocontrast(images: tf.Tensor) -> tf.Tensor:
    """Tables for `look_up` that make the darkest value of each channel 0 and the lightest 255."""
    low = tf.reduce_min(images, axis=[1, 2])[..., tf.newaxis]
    spread = tf.reduce_max(images, axis=[1, 2])[..., tf.newaxis] - low
    values = tf.range(256, dtype=tf.float32)
    wide = _quotient((values - low) * 255.0, tf.maximum(spread, 1.0))
    return tf.where(spread > 0.0, tf.clip_by_value(wide, 0.0, 255.0), values)


def equalize(images: tf.Tensor) -> tf.Tensor:
    """Tables for `look_up` that make the values of each channel equally frequent.

    With the pixels below a value and half a step, divided by the step: the pixels without those of
    the highest value / 255. A channel whose step is 0 stays as it is.
    """
    channels, values = images.shape[-1], tf.range(256, dtype=tf.float32)
    count = tf.shape(images)[0]
    first = tf.reshape(tf.range(count * channels), [-1, 1, 1, channels]) * 256
    places = tf.cast(images, tf.int32) + first
    pixels = tf.math.unsorted_segment_sum(
        tf.ones_like(images), places, num_segments=count * channels * 256
    )
    pixels = tf.reshape(pixels, [-1, channels, 256])
    highest = tf.reduce_max(tf.where(pixels > 0.0, values, 0.0), axis=-1, keepdims=True)
    of_highest = tf.reduce_sum(tf.where(values == highest, pixels, 0.0), axis=-1, keepdims=True)
    size = float(images.shape[1] * images.shape[2])
    step = _quotient(size - of_highest, tf.constant(255.0))
    below = tf.cumsum(pixels, axis=-1, exclusive=True)
    table = _quotient(below + tf.floor(step / 2.0), tf.maximum(step, 1.0))
    return tf.where(step > 0.0, tf.minimum(table, 255.0), values)


def _quotient(dividend: tf.Tensor, divisor: tf.Tensor) -> tf.Tensor:
    """The quotient of integers, rounded down."""
    return tf.floor((2.0 * dividend + 1.0) / (2.0 * divisor))
