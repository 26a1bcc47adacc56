"""A worker that trains with each way to communicate, on request of `low_communication.py`."""

from __future__ import annotations

import functools
import pathlib
import sys
import time
from typing import Any

from absl import flags
from lines import serve

from ctl.distributed import cluster
from ctl.flags.parsing import group, run_command

with group("What is trained"):
    _MODEL = flags.DEFINE_string("model", "dense", "as in ctl.train")
    _BATCH = flags.DEFINE_integer("batch", 128, "examples of all replicas")

_FEATURES, _CLASSES = (28, 28, 1), 10
_SENT = pathlib.Path("/sys/class/net/card/statistics/tx_bytes")  # of `shaped`


class Trained:
    """Trains with every method. Each has its own loop, made at the first request."""

    def __init__(self, placement: Any):
        self.placement = placement

    def run(self, step: str, options: dict[str, Any], steps: int) -> dict[str, Any]:
        """Trains ``steps`` steps with the class ``step`` (module:name) and its ``options``.

        Returns:
            ``seconds``; ``sent``: bytes that left the network card, headers included; None without
            a card of `shaped`.
        """
        loop = self._loop(step, tuple(options.items()))
        before, start = _sent(), time.perf_counter()
        loop.train(loop.global_step + steps, progress=False)
        seconds = time.perf_counter() - start
        return {"seconds": seconds, "sent": None if before is None else _sent() - before}

    def plan(self, step: str, options: dict[str, Any]) -> dict[str, Any]:
        """The plan of a step, as JSON."""
        return self._loop(step, tuple(options.items())).plan().to_json()

    @functools.lru_cache  # noqa: B019 - one object in the process
    def _loop(self, step: str, options: tuple[tuple[str, Any], ...]) -> Any:
        import keras

        import ctl
        from ctl.flags.imports import find

        keras.utils.set_random_seed(1)
        with self.placement.strategy.scope():
            made = find("step", step)(
                getattr(ctl.models, _MODEL.value)(_FEATURES, _CLASSES),
                keras.optimizers.Adam(1e-3),
                options=self.placement.options,
                **dict(options),
            )
        dataset = ctl.data.synthetic(_FEATURES, _CLASSES, global_batch_size=_BATCH.value)
        strategy = self.placement.strategy
        return ctl.Loop(made, dataset, strategy=strategy, steps_per_loop=sys.maxsize)


def _sent() -> int | None:
    return int(_SENT.read_text()) if _SENT.exists() else None


def build() -> tuple[dict[str, Any], Any]:
    from ctl.distributed.strategy import make_multi_worker

    placement = make_multi_worker(cluster.resolve(None, None), startup_timeout=60.0)
    trained = Trained(placement)

    def reply(what: str, **request: Any) -> dict[str, Any]:
        return getattr(trained, what)(**request)

    return {"device": placement.description}, reply


if __name__ == "__main__":
    run_command(lambda: serve(build), sys.modules["__main__"].__doc__)
