"""Learning-rate range test: which rates a model can train with (Smith 2017, arXiv:1506.01186,
section 3.3).

The rate rises by the same factor at each step, until the loss explodes. Take a rate at which the
loss still falls, such as the one of the steepest descent. The flags of `ctl.train` for model, data,
optimizer, step and devices apply::

    python -m ctl.recipes.lr_range --model=convnet --optimizer=adam --plot=/tmp/range.svg
"""

from __future__ import annotations

import contextlib
import math

from absl import flags

import ctl
from ctl import DivergedError, UsageError, actions

FLAGS = flags.FLAGS
flags.disclaim_key_flags()

_MOMENTUM = 0.9  # of the smoothed loss
_EXPLODED = 4.0  # times the lowest smoothed loss
_STEPS = 10
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 640, 360, 60, 620, 40, 310
_STYLE = (
    "text{font:12px sans-serif;fill:#444}.x{text-anchor:middle}.y{text-anchor:end}rect{fill:#fff}"
    ".grid{stroke:#ddd}.best{stroke:#c60}.curve{fill:none;stroke:#06c;stroke-width:2}"
)


class Range:
    """An action for each step that notes rates and losses, and stops when the loss explodes.

    Attributes:
        points: rate, and loss as an exponential moving average that is corrected for its start.
        ended_by: what the loop says.
    """

    ended_by = "a loss that has exploded"

    def __init__(self) -> None:
        self.points: list[tuple[float, float]] = []
        self._average = 0.0

    def __call__(self, status: actions.Status) -> None:
        scalars = status.scalars()
        status.reset()
        self._average = _MOMENTUM * self._average + (1.0 - _MOMENTUM) * scalars["loss"]
        loss = self._average / (1.0 - _MOMENTUM ** (len(self.points) + 1))
        self.points.append((scalars["learning_rate"], loss))
        if loss > _EXPLODED * min(loss for _, loss in self.points):
            status.stop()

    def steepest(self) -> float:
        """The rate at which the loss falls fastest, over ten steps, after ten that are too few for
        an average."""
        pairs = zip(self.points[_STEPS:], self.points[2 * _STEPS :], strict=False)
        falls = [(after - before, math.sqrt(low * high)) for (low, before), (high, after) in pairs]
        return min(falls)[1]


def draw(points: list[tuple[float, float]], best: float) -> str:
    """An SVG document: the loss over the rate, on a logarithmic axis, and the rate ``best``."""
    svg = ctl.logs.svg
    low, high = (math.log10(points[end][0]) for end in (0, -1))
    ceiling = 1.2 * points[0][1]

    def place(rate: float, loss: float = 0.0) -> tuple[float, float]:
        across = (math.log10(rate) - low) / (high - low)
        return LEFT + (RIGHT - LEFT) * across, BOTTOM - (BOTTOM - TOP) * min(loss / ceiling, 1.0)

    parts = [f'<rect width="{WIDTH}" height="{HEIGHT}"/>']
    for tick in svg.ticks(ceiling):
        y = place(points[0][0], tick)[1]
        parts += [
            svg.line(LEFT, y, RIGHT, y),
            svg.text(LEFT - 8, y + 4, f"{tick:g}", "y"),
        ]
    for power in range(math.ceil(low - 1e-9), math.floor(high + 1e-9) + 1):
        x = place(10.0**power)[0]
        parts += [
            svg.line(x, TOP, x, BOTTOM),
            svg.text(x, BOTTOM + 18, f"1e{power}", "x"),
        ]
    x = place(best)[0]
    parts += [
        svg.line(x, TOP, x, BOTTOM, "best"),
        svg.text(x, TOP - 8, f"{best:.1e}", "x"),
    ]
    parts.append(svg.text((LEFT + RIGHT) / 2, BOTTOM + 38, "learning rate", "x"))
    parts.append(svg.text(LEFT, 20, "loss, smoothed"))
    ends = (place(*point) for point in points)
    parts.append(
        svg.path([f"{'L' if i else 'M'}{x:.1f} {y:.1f}" for i, (x, y) in enumerate(ends)], "curve")
    )
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}">'
    return "\n".join([head, f"<style>{_STYLE}</style>", *parts, "</svg>\n"])


def main() -> None:
    """Runs the test, prints a table and the rate of the steepest descent, and draws them.

    Raises:
        UsageError: a flag is given that the test sets, or the loss explodes from the start.
        CheckpointError: the picture cannot be written.
    """
    rising = {
        "schedule": "exponential",
        "learning_rate": FLAGS.lowest,
        "decay_rate": FLAGS.highest / FLAGS.lowest,
        "decay_steps": str(FLAGS.range_steps),
        "train_steps": FLAGS.range_steps,
        "steps_per_loop": 1,
    }
    for name, value in rising.items():
        if FLAGS[name].present:
            raise UsageError(f"--{name} is set by the range test: leave it out")
        FLAGS[name].value = value
    ctl.logs.console.log_to_terminal()
    ctl.logs.console.load_tensorflow()
    seen, loop = Range(), ctl.jobs.make_loop(ctl.jobs.prepare())
    loop.actions.append(seen)
    with contextlib.suppress(DivergedError):  # as it should, in the end
        loop.train(FLAGS.range_steps)
    if len(seen.points) <= 2 * _STEPS:
        raise UsageError(f"the loss explodes from the start: lower --lowest={FLAGS.lowest:g}")
    for rate, loss in seen.points[:: max(1, len(seen.points) // 16)]:
        print(f"{rate:>10.2e}  {loss:.4f}")
    print(f"steepest descent at --learning_rate={seen.steepest():.1e}")
    if FLAGS.plot:
        ctl.logs.console.write_file("plot", FLAGS.plot, draw(seen.points, seen.steepest()))


def run() -> None:
    """The command line."""
    ctl.flags.training.define_flags(model_dir_required=False)
    with ctl.flags.group("Range"):
        flags.DEFINE_float("lowest", 1e-6, "Learning rate of the first step.", lower_bound=1e-12)
        flags.DEFINE_float("highest", 10.0, "Learning rate of the last step.", lower_bound=1e-12)
        flags.DEFINE_integer("range_steps", 200, "Number of steps between the two.", lower_bound=30)
        flags.DEFINE_string("plot", None, "SVG file to write: the losses.")
    ctl.flags.check_flags(["lowest", "highest"], _check)
    ctl.flags.run_command(main, f"\n{__doc__}")


def _check(lowest: float, highest: float) -> None:
    if not lowest < highest:
        raise UsageError(f"--lowest={lowest:g} must be below --highest={highest:g}")


if __name__ == "__main__":
    run()
