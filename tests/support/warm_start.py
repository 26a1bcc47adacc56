"""What every child of a zygote would do again, done once: importing this does it.

Nothing here runs an operation: TensorFlow would start threads, which a fork does not survive.
"""

from __future__ import annotations

import gc

import tensorflow_datasets as tfds

import ctl.data.streaming
import ctl.schedule.schedules  # noqa: F401

tfds.list_builders(with_community_datasets=False)  # imports hundreds of modules
gc.collect()
gc.freeze()  # a collection in a child would otherwise copy every page that it looks at
