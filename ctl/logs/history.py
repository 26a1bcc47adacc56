"""The history of a loop: what it has trained and evaluated, for programs and notebooks."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from ctl.base import curves
from ctl.base.actions import Status
from ctl.base.foreign_names import OF_HISTORY, missing_attribute
from ctl.errors import UsageError
from ctl.logs.runs import Run

_MOST = 1000  # points; where there are twice as many, two become one
_FEW = 0.1  # of the most examples of a point, see `History.plot`
_SECONDS, _SHARE = 1.0, 0.01  # between two reads of the metrics; of the time that these take


class Picture(str):
    """An SVG document, which a notebook draws."""

    def _repr_svg_(self) -> str:
        return str(self)


@dataclasses.dataclass
class _Point:
    """The steps of a call, or of several."""

    step: int = 0
    total: float = 0.0  # the sum of the losses of all examples
    examples: float = 0.0
    scalars: dict[str, float] = dataclasses.field(default_factory=dict)
    calls: int = 1

    def joined(self, later: _Point) -> _Point:
        total, examples = self.total + later.total, self.examples + later.examples
        scalars, calls = self.scalars | later.scalars, self.calls + later.calls
        return _Point(later.step, total, examples, scalars, calls)


class History:
    """What a loop has trained and evaluated in this process. A notebook draws it.

    Args:
        latest: returns the scalars that were read since the last call, else an empty dict.
        reads: whether to read them about once a second otherwise. Must be False with more than one
            worker, where a read is a collective.

    Attributes:
        evaluations: results of evaluations by name, by step; of each step, the first.
    """

    def __init__(
        self,
        latest: Callable[[], Mapping[str, float]],
        *,
        reads: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.evaluations: dict[int, dict[str, float]] = {}
        self._latest, self._reads, self._clock = latest, reads, clock
        self._due = -math.inf
        self._points: list[_Point] = []
        self._open = _Point()
        self._calls = 1  # of a point
        self._epochs: list[tuple[int, dict[str, float]]] = []  # the step at the end, and scalars

    if not TYPE_CHECKING:  # which would take any name then

        def __getattr__(self, name: str) -> Any:
            raise missing_attribute(self, name, OF_HISTORY)

    @property
    def steps(self) -> list[int]:
        """The steps at which calls of the loop ended, at most 2000 of them."""
        return [point.step for point in self._points]

    @property
    def scalars(self) -> dict[str, list[float]]:
        """Values by name, one for each of `steps`. ``loss`` is the mean over the examples since the
        step before. Others are those of `ctl.actions.Status.scalars`: of the epoch so far, unless a
        `ctl.actions.Log` ends windows; NaN where nobody has read them. At the end of an epoch they
        are read."""
        columns = [self._row(point) for point in self._points]
        names = dict.fromkeys(name for column in columns for name in column)
        return {name: [column.get(name, math.nan) for column in columns] for name in names}

    @property
    def epochs(self) -> dict[str, list[float]]:
        """Values by name, one for each epoch, as ``fit(...).history`` of Keras has them: means over
        the epoch, and results of the last evaluation in it as ``val_loss``; NaN without one.

        Epochs are those of the data, in a training that is given in ``epochs`` or has
        ``callbacks``; in another, what is trained between two evaluations. Without evaluations, it
        has none. The part of an epoch that a training begins or ends with has an entry, too.
        """
        names = dict.fromkeys(name for _, scalars in self._epochs for name in scalars)
        return {name: [each.get(name, math.nan) for _, each in self._epochs] for name in names}

    def to_pandas(self) -> Any:
        """A ``pandas.DataFrame``: a row for each step, a column for each scalar; results of
        evaluations as ``eval loss``. Raises `UsageError` without pandas."""
        try:
            import pandas
        except ImportError:
            raise UsageError("to_pandas() needs pandas: pip install 'ctl[notebook]'") from None
        rows = {point.step: self._row(point) for point in self._points}
        for step, results in self.evaluations.items():
            named = {f"eval {name}": value for name, value in results.items()}
            rows[step] = rows.get(step, {}) | named
        frame = pandas.DataFrame.from_dict(rows, orient="index").sort_index()
        return frame.rename_axis("step")

    def plot(self) -> Picture:
        """Draws each scalar over the steps, as an SVG document: a string that a notebook shows as a
        picture. Faint: training. Strong, with points: evaluation. The short calls with which a
        training begins are drawn as one with the call after them. Raises `UsageError` before the
        first step."""
        train = {point.step: self._row(point) for point in self._drawn()}
        evaluations = dict(sorted(self.evaluations.items()))
        run = Run("", {}, {"train": train, "eval": evaluations}, None)
        names = dict.fromkeys(
            name for row in [*train.values(), *evaluations.values()] for name in row
        )
        charts = {name: run.curves(name) for name in names if not name.endswith("_per_second")}
        for name in [name for name in charts if name.startswith("learning_rate")]:
            if len({rate for _, rate in charts[name][0].points}) == 1:
                del charts[name]
        if not any(curve.points for chart in charts.values() for curve in chart):
            raise UsageError("there is nothing to plot yet: call train() first")
        return Picture(curves.picture(charts, f"{' and '.join(charts)} over the steps"))

    def _drawn(self) -> list[_Point]:
        """The points, of which those of few examples are a part of the next: the loss of the single
        batches of the first calls, also after a resume, would be far from that of the others."""
        most = max((point.examples for point in self._points), default=0.0)
        drawn: list[_Point] = []
        for point in self._points:
            if drawn and drawn[-1].examples < _FEW * most:
                point = dataclasses.replace(drawn.pop(), scalars={}).joined(point)
            drawn.append(point)
        return drawn

    def __repr__(self) -> str:
        steps = self._points[-1].step if self._points else 0
        return f"<History of {steps} steps and {len(self.evaluations)} evaluations>"

    def _repr_svg_(self) -> str | None:
        try:
            return str(self.plot())
        except UsageError:  # there is nothing to draw
            return None

    # For the loop -------------------------------------------------------------------------------

    def add(self, loss: float, examples: float) -> None:
        """Adds the mean ``loss`` of the ``examples`` of a call."""
        self._open.total += loss * examples
        self._open.examples += examples

    def __call__(self, status: Status) -> None:
        """Ends the point of a call, as an action that comes after all others."""
        began = self._clock()
        if status.final or (self._reads and began >= self._due and not self._latest()):
            status.scalars()
            now = self._clock()
            self._due = now + max(_SECONDS, (now - began) / _SHARE)
        self._open.step, self._open.scalars = status.step, dict(self._latest())
        point, self._open = self._open, _Point()
        last = self._points[-1] if self._points else None
        # An action that ends the training gives a second status of a step.
        if last and (last.calls < self._calls or last.step == point.step):
            point = self._points.pop().joined(point)
        self._points.append(point)
        if len(self._points) >= 2 * _MOST:
            pairs = zip(self._points[::2], self._points[1::2], strict=True)
            self._points = [one.joined(other) for one, other in pairs]
            self._calls *= 2

    def add_epoch(self, step: int, scalars: Mapping[str, float]) -> None:
        """Adds the scalars of an epoch that ended at ``step``."""
        self._epochs.append((step, dict(scalars)))

    def evaluated(self, step: int, results: Mapping[str, float]) -> None:
        """Adds the results of an evaluation. Those of the training stay: after
        `Loop.restore_best_weights`, a test may evaluate the same step on other data."""
        self.evaluations.setdefault(step, dict(results))

    def best(self, metric: str, mode: str) -> tuple[int, float] | None:
        """The step and the value of the best evaluation in this process, by ``mode`` (``"max"`` or
        ``"min"``); of equals, the first. None if none has a finite ``metric``."""
        sign = -1.0 if mode == "max" else 1.0
        values = {step: results.get(metric, math.nan) for step, results in self.evaluations.items()}
        finite = [(sign * value, step) for step, value in values.items() if math.isfinite(value)]
        return (min(finite)[1], sign * min(finite)[0]) if finite else None

    def rewind(self, step: int) -> None:
        """Forgets what came after ``step``, which was restored."""
        self._points = [point for point in self._points if point.step <= step]
        self.evaluations = {at: each for at, each in self.evaluations.items() if at <= step}
        self._epochs = [(at, each) for at, each in self._epochs if at <= step]
        self._open = _Point()

    @staticmethod
    def _row(point: _Point) -> dict[str, float]:
        loss = {"loss": point.total / point.examples} if point.examples else {}
        return point.scalars | loss
