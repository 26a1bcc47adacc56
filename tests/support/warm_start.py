"""What every child of a zygote would do again, done once: importing this does it.

Nothing here runs an operation: TensorFlow would start threads, which a fork does not survive.
"""

from __future__ import annotations

import gc

import tensorflow_datasets as tfds
from tensorflow.python.autograph.core import converter
from tensorflow.python.autograph.impl import api

import ctl.data.streaming
import ctl.schedule.schedules  # noqa: F401
from ctl.control.evaluator import Evaluator
from ctl.loop import Steps

# AutoGraph keeps what it has made of a function.
requested = converter.ConversionOptions(recursive=True, user_requested=True, optional_features=())
for function in (Steps.run, Evaluator._eval_steps):
    api._TRANSPILER.transform(function.python_function, converter.ProgramContext(requested))

tfds.list_builders(with_community_datasets=False)  # imports hundreds of modules
gc.collect()
gc.freeze()  # a collection in a child would otherwise copy every page that it looks at
