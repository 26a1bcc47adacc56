"""Augmentation of one image in Python integers, as references of the same bits."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import tensorflow as tf

from ctl.data import augment

MASK = 2**64 - 1


def splitmix(state: int, count: int) -> list[int]:
    """The first ``count`` outputs of splitmix64."""
    found = []
    for _ in range(count):
        state = (state + 0x9E3779B97F4A7C15) & MASK
        z = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
        found.append(z ^ (z >> 31))
    return found


def draws(seed: int, count: int) -> list[float]:
    return [value / 2**24 for value in (bits >> 40 for bits in splitmix(seed, count))]


def nearest(value: Fraction) -> int:
    return math.floor(value + Fraction(1, 2))


def mixed(value: int, other: int, factor: float) -> int:
    part = Fraction(round(factor * 4096), 4096)
    return min(255, max(0, nearest(part * value + (1 - part) * other)))


def gray(pixel) -> int:
    if len(pixel) == 1:
        return int(pixel[0])
    return (19595 * int(pixel[0]) + 38470 * int(pixel[1]) + 7471 * int(pixel[2]) + 2**15) >> 16


def gray_image(image: np.ndarray) -> np.ndarray:
    values = [[[gray(pixel)] * len(pixel) for pixel in row] for row in image]
    return np.array(values, np.uint8)


def with_factor(image: np.ndarray, others: np.ndarray, factor: float) -> np.ndarray:
    pairs = zip(image.ravel().tolist(), others.ravel().tolist(), strict=True)
    values = [mixed(value, other, factor) for value, other in pairs]
    return np.array(values, np.uint8).reshape(image.shape)


def mean_image(image: np.ndarray) -> np.ndarray:
    values = [gray(pixel) for row in image for pixel in row]
    return np.full_like(image, nearest(Fraction(sum(values), len(values))))


def smooth(image: np.ndarray) -> np.ndarray:
    result = image.copy()
    for y in range(1, image.shape[0] - 1):
        for x in range(1, image.shape[1] - 1):
            for c in range(image.shape[2]):
                around = image[y - 1 : y + 2, x - 1 : x + 2, c]
                total = int(around.sum(dtype=int)) + 4 * int(image[y, x, c])
                result[y, x, c] = nearest(Fraction(total, 13))
    return result


def moved(image: np.ndarray, where) -> np.ndarray:
    """Each pixel is that at ``where(x, y)`` from the centre, the nearest one."""
    result = np.zeros_like(image)
    height, width = image.shape[:2]
    middle_y, middle_x = Fraction(height - 1, 2), Fraction(width - 1, 2)
    for y in range(height):
        for x in range(width):
            from_x, from_y = where(x - middle_x, y - middle_y)
            source_x, source_y = nearest(from_x + middle_x), nearest(from_y + middle_y)
            if 0 <= source_x < width and 0 <= source_y < height:
                result[y, x] = image[source_y, source_x]
    return result


def by_channel(image: np.ndarray, function) -> np.ndarray:
    channels = [function(image[..., c].ravel().tolist()) for c in range(image.shape[2])]
    return np.stack([np.reshape(c, image.shape[:2]) for c in channels], -1).astype(np.uint8)


def autocontrast(values: list[int]) -> list[int]:
    low, high = min(values), max(values)
    return [(v - low) * 255 // (high - low) for v in values] if high > low else values


def equalize(values: list[int]) -> list[int]:
    step = sum(v != max(values) for v in values) // 255
    if not step:
        return values
    below = {v: sum(other < v for other in values) for v in set(values)}
    return [min(255, (below[v] + step // 2) // step) for v in values]


def rounded(value: float) -> Fraction:
    return Fraction(round(value * 4096), 4096)


def one_of_randaugment(image: np.ndarray, name: str, sign: int, magnitude: float) -> np.ndarray:
    part = magnitude / 30
    shear = rounded(sign * 0.3 * part)
    cosine = rounded(math.cos(math.radians(30 * part)))
    sine = rounded(sign * math.sin(math.radians(30 * part)))
    height, width = image.shape[:2]
    along_x, along_y = (sign * round(150 / 331 * part * size) for size in (width, height))
    factor = 1 + sign * 0.9 * part
    threshold, bits = round(256 * (1 - part)), 8 - round(4 * part)
    return {
        "identity": lambda: image,
        "autocontrast": lambda: by_channel(image, autocontrast),
        "equalize": lambda: by_channel(image, equalize),
        "rotate": lambda: moved(image, lambda x, y: (cosine * x + sine * y, cosine * y - sine * x)),
        "shear_x": lambda: moved(image, lambda x, y: (x + shear * y, y)),
        "shear_y": lambda: moved(image, lambda x, y: (x, y + shear * x)),
        "translate_x": lambda: moved(image, lambda x, y: (x + along_x, y)),
        "translate_y": lambda: moved(image, lambda x, y: (x, y + along_y)),
        "solarize": lambda: np.where(image < threshold, image, 255 - image),
        "posterize": lambda: image >> (8 - bits) << (8 - bits),
        "color": lambda: with_factor(image, gray_image(image), factor),
        "contrast": lambda: with_factor(image, mean_image(image), factor),
        "brightness": lambda: with_factor(image, np.zeros_like(image), factor),
        "sharpness": lambda: with_factor(image, smooth(image), factor),
    }[name]()


def crop(image: np.ndarray, seed: int, around: int) -> np.ndarray:
    y, x = (math.floor(draw * (2 * around + 1)) for draw in draws(seed, 2))
    padded = np.pad(image, [(around, around), (around, around), (0, 0)])
    return padded[y : y + image.shape[0], x : x + image.shape[1]]


def flip(image: np.ndarray, seed: int) -> np.ndarray:
    return image[:, ::-1] if draws(seed, 1)[0] < 0.5 else image


def color(image: np.ndarray, seed: int, strength: float) -> np.ndarray:
    factors = [1 + round((2 * draw - 1) * strength * 4096) / 4096 for draw in draws(seed, 3)]
    for factor, others in zip(factors, (np.zeros_like, mean_image, gray_image), strict=True):
        image = with_factor(image, others(image), factor)
    return image


def randaugment(image: np.ndarray, seed: int, layers: int, magnitude: float) -> np.ndarray:
    for layer in range(layers):
        place, sign = draws(int(augment.fold_in(tf.constant([seed], tf.uint64), layer)[0]), 2)
        name = augment.RAND_AUGMENT[math.floor(place * 14)]
        image = one_of_randaugment(image, name, -1 if sign < 0.5 else 1, magnitude)
    return image


REFERENCE = {"crop": crop, "flip": flip, "color": color, "randaugment": randaugment}
