"""What a classifier gets wrong: accuracy of each class, confusion matrix, worst examples.

For `ctl.evaluate --report`: as a table on the terminal, as a page, and as JSON.
"""

from __future__ import annotations

import base64
import dataclasses
import heapq
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from ctl.base import svg
from ctl.base.svg import escape
from ctl.data.dataset import Dataset
from ctl.distributed import local_batch
from ctl.errors import UsageError
from ctl.inspect import predictions
from ctl.inspect.show.document import STYLE, document, html_table
from ctl.phases.base_step import BaseStep
from ctl.phases.losses import gives_logits, is_binary, is_one_hot, takes_logits

WORST = 48  # examples
_WIDEST_NAME = 16
LARGEST = 100  # classes of a matrix that is drawn
_NUMBERED = 25  # classes of a matrix whose cells have numbers; it fits narrow pages
_WIDTH = 1036  # of a larger one, that of the page; on a narrow one, it scrolls in its own box
_LONGEST_LABEL = 240  # pixels
_NO_CLASSES = (
    "--report needs a classifier, with integer labels [n] and outputs [n, classes], or a binary "
    "loss, one output and labels of 0 and 1: leave it out"
)
_LEVELS = 7  # of the colours, see `ctl.inspect.show.document`

_STYLE = (
    STYLE
    + ".right { fill: none; stroke: var(--soft) }\n"
    + ".wide svg.matrix { width: auto; min-width: 0 }\n"
    + ".wide svg.small-matrix { max-width: 100% }\n"
    + ".matrix text.tiny { font-size: 8px }\n"
    + ".classes th { white-space: normal }\n"
    + ".classes td { white-space: normal; overflow-wrap: anywhere }\n"
    + ".worst { display: grid; gap: 14px; padding: 0; list-style: none; "
    + "grid-template-columns: repeat(auto-fill, minmax(132px, 1fr)) }\n"
    + ".worst li { padding: 8px; border: 1px solid var(--rule); border-radius: 6px; "
    + "font-size: 12px; line-height: 1.4; overflow-wrap: anywhere }\n"
    + ".worst img { display: block; width: 112px; max-width: 100%; margin-bottom: 6px; "
    + "image-rendering: pixelated }\n"
    + ".worst span { color: var(--soft) }\n"
    + "@media (max-width: 600px) { main { padding: 16px 14px 40px } }\n"
)


@dataclasses.dataclass(frozen=True)
class Example:
    """An example with a high loss.

    Attributes:
        number: its place in the data, from 0.
        label, predicted: classes.
        probability: that the model gives to ``predicted``.
        loss: the cross entropy, or what the step computes.
        png: the image; None if the features are none.
    """

    number: int
    label: int
    predicted: int
    probability: float
    loss: float
    png: bytes | None = dataclasses.field(repr=False, compare=False)


@dataclasses.dataclass(frozen=True)
class Report:
    """What `collect` returns.

    Attributes:
        classes: their names.
        confusion: int64 [classes, classes]: examples by label and prediction.
        worst: the examples with the highest loss, in descending order; NaN is the highest.
    """

    classes: Sequence[str]
    confusion: np.ndarray
    worst: Sequence[Example]

    @property
    def accuracies(self) -> list[float | None]:
        """The recall of each class, the share of its examples that is predicted right; None without
        examples."""
        counts = self.confusion.sum(axis=1)
        right = self.confusion.diagonal()
        return [float(r / n) if n else None for r, n in zip(right, counts, strict=True)]

    def confused(self, label: int) -> int | None:
        """The class that examples of ``label`` are most often taken for; None if for no other."""
        others = self.confusion[label].copy()
        others[label] = 0
        return int(others.argmax()) if others.any() else None

    def to_json(self) -> dict[str, Any]:
        """Everything except the pictures, as JSON values."""
        worst = [dataclasses.asdict(dataclasses.replace(one, png=None)) for one in self.worst]
        return {
            "schema": 1,
            "classes": [*self.classes],
            "accuracies": self.accuracies,
            "confusion": self.confusion.tolist(),
            "worst": [{n: v for n, v in one.items() if n != "png"} for one in worst],
        }


def collect(
    step: BaseStep, dataset: Dataset, strategy: tf.distribute.Strategy, worst: int = WORST
) -> Report:
    """Reads ``dataset`` once; the same on any number of replicas. Leaves out examples of weight 0.

    Args:
        step: an evaluation step of a classifier, as that of an `ctl.Evaluator`.
        dataset: of an evaluation, in its order.
        strategy: that ``step`` was made for.
        worst: number of examples to keep.

    Raises:
        UsageError: labels are no classes, or outputs are not [n, classes] or, of a binary loss,
            [n, 1].
    """

    def examples_of(batch: Any) -> Any:
        computed, _ = local_batch.pad_empty(batch)
        losses = step.loss(computed)
        outputs = losses[1] if isinstance(losses, tuple) else None
        features, labels, weights = local_batch.unpack(batch)
        is_image = isinstance(features, tf.Tensor) and features.shape.rank == 4
        rows = local_batch.rows(batch)
        labels, probabilities = _of_classes(step, labels, outputs)
        probabilities = probabilities[:rows]
        weights = tf.ones([rows]) if weights is None else tf.reshape(weights, [rows])
        return (
            tf.cast(labels, tf.int64),
            tf.argmax(probabilities, axis=-1),
            tf.reduce_max(probabilities, axis=-1),
            tf.cast(losses[0], tf.float32)[:rows],
            weights != 0,
            features if is_image else tf.zeros([rows]),
        )

    confusion: np.ndarray | None = None
    kept: list[tuple[Any, ...]] = []  # rank, number, values, features
    first = 0
    for columns in predictions.of_batches(dataset, strategy, examples_of):
        labels, predicted, probabilities, losses, counted, features = columns
        if labels.min() < 0:
            raise UsageError(_NO_CLASSES)
        if confusion is None:
            classes = _classes(step, dataset, int(max(labels.max(), predicted.max())) + 1)
            confusion = np.zeros([len(classes)] * 2, np.int64)
        np.add.at(confusion, (labels[counted], predicted[counted]), 1)
        ranks = np.where(np.isnan(losses), -np.inf, -losses)  # NaN is the worst
        for row in np.argsort(ranks, kind="stable")[: worst + int((~counted).sum())]:
            if counted[row]:
                about = labels[row], predicted[row], probabilities[row], losses[row]
                kept.append((ranks[row], first + int(row), about, features[row].copy()))
        kept = heapq.nsmallest(worst, kept)  # of equal losses, the first example stays
        first += len(labels)
    if confusion is None:
        raise UsageError("the evaluation dataset holds no valid examples")
    examples = []
    for _, number, (label, guess, probability, loss), image in kept:
        png = _png(image) if image.ndim == 3 else None
        values = int(label), int(guess), float(probability), float(loss)
        examples.append(Example(number, *values, png))
    return Report(classes, confusion, examples)


def _of_classes(step: BaseStep, labels: Any, outputs: Any) -> tuple[tf.Tensor, tf.Tensor]:
    """The class of each label, -1 for none, and the probabilities of the classes, float32 [n,
    classes]. Of a binary loss, one output is that of the second of two classes."""
    tensors = all(isinstance(each, tf.Tensor) for each in (labels, outputs))
    ranks = (labels.shape.rank, outputs.shape.rank) if tensors else ()
    if ranks in ((1, 2), (2, 2)) and outputs.shape[1] == 1 and is_binary(step.loss_fn):
        second = predictions.activation_of(step)(tf.cast(outputs, tf.float32))
        labels = tf.cast(tf.reshape(labels, [-1]), tf.float32)
        labels = tf.where((labels == 0) | (labels == 1), labels, -1)  # smoothed, maybe
        return labels, tf.concat([1 - second, second], axis=1)
    if ranks == (2, 2) and is_one_hot(step.loss_fn):
        labels, ranks = tf.argmax(labels, axis=-1), (1, 2)
    if ranks != (1, 2) or outputs.shape[1] == 1 or not labels.dtype.is_integer:
        raise UsageError(_NO_CLASSES)
    outputs = tf.cast(outputs, tf.float32)
    if takes_logits(step.loss_fn) is False or gives_logits(step.model) is False:
        return labels, outputs
    return labels, tf.nn.softmax(outputs)


def _classes(step: BaseStep, dataset: Dataset, seen: int) -> list[str]:
    count = max(seen, dataset.info.num_classes or 0)
    named = list(dataset.info.class_names[:count])
    return [*named, *map(str, range(len(named), count))]


def _png(image: np.ndarray) -> bytes:
    """An image [height, width, channels] as PNG. Values that are not uint8 are scaled."""
    if image.dtype != np.uint8:
        image = np.nan_to_num(image, posinf=0.0, neginf=0.0)
        low, high = float(image.min()), float(image.max())
        low, high = (0.0, 1.0) if low >= 0.0 and high <= 1.0 else (low, max(high, low + 1e-6))
        image = ((image.astype(np.float32) - low) * (255.0 / (high - low))).round().astype(np.uint8)
    if image.shape[-1] not in (1, 3, 4):
        image = image[..., :1]
    return tf.io.encode_png(image).numpy()


def _rows(report: Report, names: Sequence[str]) -> Iterator[tuple[str, int, str, str]]:
    """Of each class: name, examples, accuracy, and what it is most often taken for."""
    for label, (name, accuracy) in enumerate(zip(names, report.accuracies, strict=True)):
        other = report.confused(label)
        taken = "" if other is None else f"{names[other]} ({report.confusion[label, other]})"
        shown = "" if accuracy is None else f"{accuracy:.4f}"
        yield name, int(report.confusion[label].sum()), shown, taken


def table(report: Report) -> list[str]:
    """The lines of a table of the classes and, if it fits 80 columns, of the confusion matrix."""
    names = [name[:_WIDEST_NAME] for name in report.classes]
    wide = max(5, *map(len, names))
    lines = [f"{'class':<{wide}}  examples  accuracy  most often taken for"]
    for name, count, accuracy, taken in _rows(report, names):
        lines.append(f"{name:<{wide}}  {count:>8}  {accuracy:>8}  {taken}".rstrip())
    cell = max(4, len(str(report.confusion.max()))) + 1
    if wide + cell * len(names) <= 80:
        numbers = itertools.chain([f"{'':<{wide}}"], (f"{n:>{cell}}" for n in range(len(names))))
        lines += ["", "rows: labels; columns: predictions, in the same order", "".join(numbers)]
        for name, row in zip(names, report.confusion, strict=True):
            lines.append(f"{name:<{wide}}" + "".join(f"{value:>{cell}}" for value in row))
    return lines


def make_page(report: Report, title: str, scores: Sequence[str]) -> str:
    """The page as HTML. ``title`` says what was evaluated; ``scores`` are ``accuracy 0.91`` and the
    like."""
    columns = ("class", "examples", "accuracy", "most often taken for")
    classes = html_table(columns, [*_rows(report, report.classes)])
    figures = "".join(f"<li>{escape(score)}</li>" for score in scores)
    body = [
        f"<h1>{escape(title)}</h1>",
        f'<ul class="figures">{figures}</ul>',
        f'<section class="classes"><h2>Classes</h2>{classes}</section>',
    ]
    if len(report.classes) <= LARGEST:
        body.append(
            '<section><h2>Confusion matrix</h2><p class="lead">A row for each label, a column for '
            "each prediction. The colour is the share of the row; correct ones have a frame.</p>"
            f'<div class="wide">{draw(report)}</div></section>'
        )
    body.append(
        '<section><h2>Worst examples</h2><p class="lead">Those with the highest loss, with their '
        f'place in the data. Wrong labels are often among them.</p><ul class="worst">'
        f"{_worst(report)}</ul></section>"
    )
    return document(escape(title), _STYLE, body, images=True)


def draw(report: Report) -> str:
    """The confusion matrix as an SVG element: as large as its labels and numbers need."""
    count = len(report.classes)
    numbered = count <= _NUMBERED
    pixel, tiny = (12.0, "") if numbered else (8.0, " tiny")
    longest = max(svg.text_width(name, pixel) for name in report.classes)
    left = top = min(_LONGEST_LABEL, longest) + 14
    digits = svg.text_width(str(report.confusion.max()))
    cell = max(30.0, digits + 8) if numbered else min(30.0, (_WIDTH - left) / count)
    width, height = left + cell * count + 2, top + cell * count + 2
    parts = []
    for label, name in enumerate(report.classes):
        y = top + label * cell
        shown = svg.shorten(name, _LONGEST_LABEL, pixel)
        middle = (label + 0.5) * cell + pixel / 3
        parts.append(svg.text(left - 6, top + middle, shown, f"y{tiny}"))
        place = f"translate({svg.number(left + middle)} {svg.number(top - 6)}) rotate(-90)"
        parts.append(f'<g transform="{place}">{svg.text(0, 0, shown, tiny.strip())}</g>')
        total = max(1, int(report.confusion[label].sum()))
        for predicted, value in enumerate(report.confusion[label].tolist()):
            x = left + predicted * cell
            # A few mistakes in a hundred have a colour already.
            level = min(_LEVELS - 1, round((_LEVELS - 1) * (value / total) ** 0.5))
            about = f"{name} taken for {report.classes[predicted]}: {value} of {total}"
            parts.append(svg.rect(x, y, cell - 1, cell - 1, f"h{level}", about))
            if value and numbered:
                parts.append(svg.text(x + cell / 2, y + cell / 2 + 4, value, f"x n{level}"))
            if label == predicted:
                parts.append(svg.rect(x, y, cell - 1, cell - 1, "right"))
    kind = "matrix small-matrix" if numbered else "matrix"
    box = f'viewBox="0 0 {svg.number(width)} {svg.number(height)}" width="{svg.number(width)}"'
    return (
        f'<svg class="{kind}" {box} role="img"><title>Confusion matrix</title>'
        f"{''.join(parts)}</svg>"
    )


def _worst(report: Report) -> str:
    items = []
    for one in report.worst:
        picture = ""
        if one.png:
            data = base64.b64encode(one.png).decode()
            picture = f'<img src="data:image/png;base64,{data}" alt="example {one.number}"/>'
        items.append(
            f"<li>{picture}<b>{escape(report.classes[one.label])}</b><br/>taken for "
            f"{escape(report.classes[one.predicted])} ({100 * one.probability:.0f} %)<br/>"
            f"<span>loss {one.loss:.2f}, example {one.number}</span></li>"
        )
    return "".join(items)
