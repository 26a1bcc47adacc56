"""Datasets: examples, their order, and where they are kept. See `ctl.data.dataset`."""

from ctl.base.remote import StorePath
from ctl.data import text
from ctl.data.adapters import PyDatasetBatches, as_dataset
from ctl.data.augment import Augmented
from ctl.data.dataset import Dataset, DatasetInfo
from ctl.data.files import Files
from ctl.data.global_batches import GlobalBatches
from ctl.data.in_memory import InMemory
from ctl.data.load import Splits, load, load_columns, selection_splits, synthetic
from ctl.data.mixture import Mixture, StreamedMixture, mix
from ctl.data.streaming import Streaming
from ctl.data.tokenizer import Tokenizer

__all__ = [
    "Augmented",
    "Dataset",
    "DatasetInfo",
    "Files",
    "GlobalBatches",
    "InMemory",
    "Mixture",
    "PyDatasetBatches",
    "Splits",
    "StorePath",
    "StreamedMixture",
    "Streaming",
    "Tokenizer",
    "as_dataset",
    "load",
    "load_columns",
    "mix",
    "selection_splits",
    "synthetic",
    "text",
]
