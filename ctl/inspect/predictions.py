"""What a model predicts for each example of a dataset, in its order, as a table.

For `ctl.evaluate --predictions`.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from ctl.base.models import Models
from ctl.data.dataset import Dataset, on_replica
from ctl.data.feed import open_batches, waiting_for
from ctl.distributed import local_batch
from ctl.errors import UsageError
from ctl.phases import losses
from ctl.phases.base_step import BaseStep


def of_batches(
    dataset: Dataset, strategy: tf.distribute.Strategy, of_batch: Callable[[Any], Any]
) -> Iterator[list[np.ndarray]]:
    """Yields what ``of_batch`` makes of each global batch, in the order of the examples.

    Args:
        dataset: of an evaluation; it is read once.
        strategy: on whose replicas ``of_batch`` runs.
        of_batch: returns a list of tensors with one row per example of a replica's part.
    """
    resident = dataset.resident(strategy)
    iterator = open_batches(dataset, strategy)

    @tf.function
    def batch_of(iterator: Any, resident: Any) -> Any:
        return strategy.run(of_replica, args=(next(iterator), resident))

    def of_replica(element: Any, resident: Any) -> Any:
        with waiting_for(element):
            return of_batch(on_replica(dataset, element, resident))

    size, first = dataset.num_examples, 0
    while size is None or first < size:
        try:
            with local_batch.translate_graph_checks():
                parts = batch_of(iterator, resident)
        except tf.errors.OutOfRangeError:
            return
        columns = [
            np.concatenate([part.numpy() for part in strategy.experimental_local_results(column)])
            for column in parts
        ]
        yield columns
        first += len(columns[0])


def collect(step: BaseStep, dataset: Dataset, strategy: tf.distribute.Strategy) -> np.ndarray:
    """The outputs for each example of ``dataset``, float32 [N, outputs]; probabilities, if the
    loss of ``step`` takes logits. Labels are not read.

    Raises:
        UsageError: there are several models, or outputs are not [n] or [n, outputs].
    """
    if isinstance(step.model, Models):
        raise UsageError("--predictions is for one model, and the step has several: leave it out")
    activation = activation_of(step)

    def outputs_of(batch: Any) -> list[tf.Tensor]:
        computed, _ = local_batch.pad_empty(batch)
        features = local_batch.unpack(computed)[0]
        outputs = step.model(step.preprocess(features), training=False)
        if not isinstance(outputs, tf.Tensor) or outputs.shape.rank not in (1, 2):
            raise UsageError(
                "--predictions needs a model with outputs of shape [n, outputs]: leave it out"
            )
        outputs = tf.cast(outputs, tf.float32)[: local_batch.rows(batch)]
        outputs = outputs[:, tf.newaxis] if outputs.shape.rank == 1 else outputs
        return [activation(outputs)]

    return np.concatenate([part for (part,) in of_batches(dataset, strategy, outputs_of)])


def activation_of(step: BaseStep) -> Callable[[tf.Tensor], tf.Tensor]:
    """What makes probabilities of the outputs."""
    takes_logits = losses.takes_logits(step.loss_fn)
    if not takes_logits or losses.gives_logits(step.model) is False:
        return tf.identity
    is_softmax = losses.is_one_hot(step.loss_fn) or losses.is_sparse(step.loss_fn)
    return tf.nn.softmax if is_softmax else tf.sigmoid


def table(
    step: BaseStep,
    outputs: np.ndarray,
    classes: Sequence[str],
    labels: Sequence[str],
    named: tuple[str, Sequence[str]],
) -> str:
    """``outputs`` as CSV, one line per example after that of the names.

    Args:
        step: whose loss says what ``outputs`` are.
        outputs: of `collect`.
        classes: names of classes, in the order of the labels; they may be unknown.
        labels: the columns of labels in the training data; they may be unknown.
        named: what examples are called, and the name of each.

    Returns:
        Of a cross entropy of classes, or of one output with two, the most likely class and its
        probability; else each output, as a number.
    """
    count = outputs.shape[1]
    loss = step.loss_fn
    is_softmax = losses.is_one_hot(loss) or losses.is_sparse(loss)
    is_class = losses.takes_logits(loss) is not None and (is_softmax or count == 1)
    rows: Any
    if is_class:
        columns = [labels[0] if len(labels) == 1 else "class", "probability"]
        if count == 1:
            outputs = np.concatenate([1 - outputs, outputs], axis=1)
        chosen = outputs.argmax(axis=1)
        classes = [*classes, *map(str, range(len(classes), outputs.shape[1]))]
        rows = [(classes[one], row[one]) for one, row in zip(chosen, outputs, strict=True)]
    else:
        several = [f"output{number}" for number in range(count)] if count > 1 else ["prediction"]
        columns = [*labels] if len(labels) == count else several
        rows = outputs
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    kind, names = named
    writer.writerow([kind, *columns])
    writer.writerows([name, *row] for name, row in zip(names, rows, strict=True))
    return text.getvalue()
