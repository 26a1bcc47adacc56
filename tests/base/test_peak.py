"""Peaks of the machine are in the range of machines."""

from __future__ import annotations

import keras

from ctl.base import peak


def test_the_peak_is_above_what_one_product_reaches():
    peak.peak_flops.cache_clear()
    flops = peak.peak_flops("float32")
    assert 1e8 < flops < 1e15
    assert peak.peak_flops("float32") == flops  # is measured once
    assert keras.mixed_precision.dtype_policy().compute_dtype == "float32"


def test_a_copy_in_memory_is_between_a_disk_and_a_cache():
    assert 1e8 < peak.copied_bytes() < 1e13
