"""Checks of one line of `gpu.py`: are the devices used, and used rightly? On GPUs, or on logical
devices of the CPU.

echo '{"check": "equality"}' | python benchmarks/peers/device_checks.py --replicas=2

Each answer has ``ok`` and ``found``, lines for people.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from absl import flags
from lines import serve

from ctl.flags.parsing import group, run_command
from ctl.inspect.session import Inspection

with group("This peer"):
    _REPLICAS = flags.DEFINE_integer("replicas", 2, "devices that train together", lower_bound=1)
_BATCH = 61  # a prime: the shares of the replicas differ
_STEPS = 10
# Relative to the largest weight. Sums of another order differ by some units of float32.
_TOLERANCE = 1e-4


class Checks:
    """The checks, by the name of their method, on one strategy."""

    def __init__(self) -> None:
        import tensorflow as tf

        import ctl

        self.placement = ctl.make_strategy(
            "mirrored" if _REPLICAS.value > 1 else "auto",
            replicas=_REPLICAS.value,
            cross_device_ops="auto" if tf.config.list_physical_devices("GPU") else "ring",
        )
        # Products of TF32 have 10 bits: replicas that multiply other shapes would differ by them.
        tf.config.experimental.enable_tensor_float_32_execution(False)
        self.strategy = self.placement.strategy
        self.gpu = bool(tf.config.list_logical_devices("GPU"))
        kind = "GPU" if self.gpu else "CPU"
        self.devices = [d.name for d in tf.config.list_logical_devices(kind)][: _REPLICAS.value]

    def loop(self, strategy: Any, model: Callable[[], Any], data: tuple, **options: Any) -> Any:
        """A loop over ``strategy``. Equal arguments make equal initial weights and batches."""
        import keras
        import tensorflow as tf

        import ctl

        keras.utils.set_random_seed(1)
        dataset = tf.data.Dataset.from_tensor_slices(data).batch(_BATCH).repeat()
        with strategy.scope():
            step = ctl.TrainStep(model(), keras.optimizers.SGD(0.01, momentum=0.9), **options)
        return ctl.Loop(step, dataset, strategy=strategy)

    def difference(self, model: Callable[[], Any], data: tuple) -> tuple[float, bool]:
        """The largest difference of a weight after some steps on all devices and on the first one,
        relative to the largest of its variable; and whether a second run gives the same bits."""
        import tensorflow as tf

        one = tf.distribute.OneDeviceStrategy(self.devices[0])
        weights = []
        for strategy in (one, self.strategy, self.strategy):
            loop = self.loop(strategy, model, data)
            loop.train(_STEPS)
            weights.append([np.array(v) for v in loop.step.model.get_weights()])
        alone, together, again = weights
        pairs = zip(alone, together, strict=True)
        worst = max(float(np.abs(a - b).max() / np.abs(a).max()) for a, b in pairs)
        same = all(np.array_equal(a, b) for a, b in zip(together, again, strict=True))
        return worst, same

    def equality(self) -> tuple[bool, list[str]]:
        """All devices together train the weights of the first one."""
        import ctl

        data = random_images()
        ok, found = True, []
        for name in ("dense", "convnet"):
            worst, same = self.difference(
                lambda name=name: ctl.models.make_model(name, (28, 28, 1), 10), data
            )
            ok &= worst <= _TOLERANCE
            found.append(
                f"{name}: weights differ by {worst:.1e} of the largest (at most {_TOLERANCE:.0e}); "
                f"a second run gives {'the same' if same else 'other'} bits"
            )
        return ok, found

    def sparse(self) -> tuple[bool, list[str]]:
        """Rows of an embedding that several replicas look up, or one twice, get one update."""
        import keras

        random = np.random.default_rng(0)
        words = random.integers(50, size=(600, 8), dtype=np.int32), random.integers(10, size=600)

        def model() -> keras.Model:
            layers = [keras.layers.Embedding(50, 16), keras.layers.Flatten()]
            inputs = keras.Input([8], dtype="int32")
            return keras.Sequential([inputs, *layers, keras.layers.Dense(10)])

        worst, _ = self.difference(model, words)
        line = f"embedding: rows differ by {worst:.1e} of the largest (at most {_TOLERANCE:.0e})"
        return worst <= _TOLERANCE, [line]

    def dense_loop(self) -> Any:
        import ctl

        return self.loop(
            self.strategy,
            lambda: ctl.models.make_model("dense", (28, 28, 1), 10),
            random_images(),
            options=self.placement.options,
            bytes_per_pack=200_000,
        )

    def plan(self) -> tuple[bool, list[str]]:
        """On GPUs, NCCL sums the gradients."""
        found, ok, loop = [], True, self.dense_loop()
        for one in loop.plan().collectives:
            kind = f"{one.kind} {one.hint}".strip()
            ok &= not self.gpu or "nccl" in kind.lower()
            found.append(f"{one.name}: {kind} over {', '.join(one.devices)}")
        wanted = "NCCL is wanted" if self.gpu else "without GPUs, any is right"
        return ok and bool(found), [*found, wanted]

    def bytes(self) -> tuple[bool, list[str]]:
        """The packs have the bytes of the gradients, and one number for the examples."""
        loop = self.dense_loop()
        wanted = sum(4 * int(np.prod(v.shape)) for v in loop.step.model.trainable_variables)
        found = sum(one.bytes or 0 for one in loop.plan().collectives)
        return 0 <= found - wanted <= 64, [f"packs of {found:,} bytes, gradients of {wanted:,}"]

    def stamps(self) -> tuple[bool, list[str]]:
        """The profiler, on GPUs CUPTI, saw each all-reduce between the stamps around it."""
        from ctl.inspect.measure.profile import profiled

        loop = self.dense_loop()
        loop.train(60)
        with profiled() as traces, Inspection(loop, steps=20) as seen:
            loop.train(100)
        windows, ok, found = seen.windows, True, []
        for pack, times in profiler_times(traces, self.gpu).items():
            (window,) = windows
            names = [window.names.index(f"{what}{pack}") for what in ("ready", "done")]
            ready, done = (window.stamps[0, :, name] for name in names)
            inside, gap = between(ready, done, times)
            ok &= inside >= 0.9
            found.append(
                f"pack {pack}: {len(times)} all-reduces in the profile, {inside:.0%} of the steps "
                f"have one between their stamps; the stamp comes {1e6 * gap:.0f} µs after its end"
            )
        return ok and bool(found), found or ["the profile has no all-reduce"]


def random_images() -> tuple[np.ndarray, np.ndarray]:
    """Images float32 [600, 28, 28, 1] in [0, 1) and labels int64 [600]."""
    random = np.random.default_rng(0)
    return random.random((600, 28, 28, 1), np.float32), random.integers(10, size=600)


def profiler_times(traces: list[Any], gpu: bool) -> dict[int, np.ndarray]:
    """When the all-reduces of each pack began and ended on the first device, float64 [n, 2] seconds
    since the epoch. On GPUs, these are kernels of NCCL, whose names do not say the pack: that is
    read from the TensorFlow operation that CUPTI's events are annotated with."""
    from ctl.inspect.measure.profile import collectives, profile_began

    found: dict[int, list] = {}
    for space in traces:
        if not gpu:
            for (pack, replica), times in collectives(space).items():
                if replica == 0:
                    found.setdefault(pack, []).extend(times)
            continue
        began = profile_began(space)
        planes = sorted((p for p in space.planes if "/device:GPU:" in p.name), key=lambda p: p.name)
        for plane in planes[:1]:
            names = {key: metadata.name for key, metadata in plane.event_metadata.items()}
            for line in plane.lines:
                for event in line.events:
                    text = " ".join([names[event.metadata_id], *annotations(plane, event)])
                    if "nccl" not in text.lower():
                        continue
                    pack = int(text.partition("/pack")[2][:1] or 0) if "/pack" in text else 0
                    start = began + line.timestamp_ns * 1e-9 + event.offset_ps * 1e-12
                    end = start + event.duration_ps * 1e-12
                    found.setdefault(pack, []).append((start, end))
    return {pack: np.array(sorted(map(tuple, times))) for pack, times in sorted(found.items())}


def annotations(plane: Any, event: Any) -> list[str]:
    """The texts of an event, among them the operation that started the kernel."""
    texts = []
    for stat in event.stats:
        texts.append(stat.str_value)
        if stat.ref_value:
            texts.append(plane.stat_metadata[stat.ref_value].name)
    return texts


def between(ready: np.ndarray, done: np.ndarray, times: np.ndarray) -> tuple[float, float]:
    """The share of the steps with an interval of ``times`` between their stamps, and the median
    seconds from its end to the stamp ``done``."""
    gaps = []
    for first, last in zip(ready, done, strict=True):
        inside = (times[:, 0] >= first) & (times[:, 1] <= last)
        if inside.any():
            gaps.append(last - times[inside, 1].max())
    return len(gaps) / max(1, len(ready)), float(np.median(gaps)) if gaps else float("nan")


def build() -> tuple[dict[str, Any], Any]:
    checks = Checks()

    def reply(check: str) -> dict[str, Any]:
        ok, found = getattr(checks, check)()
        return {"ok": bool(ok), "found": found}

    import tensorflow as tf

    about = {"gpu": checks.gpu, "devices": checks.devices, "tensorflow": tf.__version__}
    if checks.gpu:
        gpus = tf.config.list_physical_devices("GPU")
        about["names"] = [
            tf.config.experimental.get_device_details(g).get("device_name", "?") for g in gpus
        ]
    return about, reply


if __name__ == "__main__":
    run_command(lambda: serve(build), __doc__)
