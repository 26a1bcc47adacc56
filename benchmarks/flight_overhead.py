"""What does the flight recorder cost a step, with its marks, the watchdog's threads and the beats?

  python benchmarks/flight_overhead.py

Trains one replica in one process, in pairs of neighbouring blocks: one with the recorder, which
several workers have by default, and one without. Prints how much longer, in per cent, the step
takes with it in wall time and in processor time (of all threads): median and quartiles over the
pairs. The watchdog's threads run in both blocks; without the recorder they have nothing to watch.
As a control, blocks without it are compared with each other.
"""

from __future__ import annotations

import os
import statistics
import time

from absl import flags
from processes import machine, progress, write

from ctl import launch
from ctl.base import console
from ctl.flags.parsing import group, run_command

FLAGS = flags.FLAGS


def main() -> None:
    console.load_tensorflow()

    import keras
    import tensorflow as tf

    import ctl
    from ctl.control.flight import FlightRecorder
    from ctl.distributed.cluster import Cluster
    from ctl.distributed.watch import watchdog
    from ctl.phases.observer import NO_OBSERVER

    load = os.getloadavg()[0]
    keras.utils.set_random_seed(0)
    layers = [keras.Input([FLAGS.features])]
    layers += [keras.layers.Dense(FLAGS.features, "relu") for _ in range(FLAGS.layers)]
    model = keras.Sequential([*layers, keras.layers.Dense(10)])
    step = ctl.TrainStep(model, keras.optimizers.Adam(1e-4))
    batch = (
        tf.random.normal([FLAGS.global_batch_size, FLAGS.features]),
        tf.zeros([FLAGS.global_batch_size], tf.int64),
    )
    data = tf.data.Dataset.from_tensors(batch).cache().repeat()
    loop = ctl.Loop(step, data, steps_per_loop=FLAGS.steps)
    addresses = tuple(launch.cluster(2)["worker"])
    watchdog.start(Cluster(addresses, 0, "flight_overhead"))
    running = watchdog._watchdog
    flight = FlightRecorder(step)
    marks = step.observer

    def block(on: bool) -> tuple[float, float]:
        watchdog._watchdog = running if on else None
        step.observer, loop._flight = (marks, flight) if on else (NO_OBSERVER, None)
        wall, cpu = time.perf_counter(), time.process_time()
        loop.train(loop.global_step + FLAGS.steps, progress=False)
        return time.perf_counter() - wall, time.process_time() - cpu

    for on in (False, True) * 2:  # traces and warms up
        block(on)
    pairs: dict[str, list[tuple[float, float]]] = {"control": [], "flight": []}
    without = []
    for number in range(FLAGS.blocks):
        progress(f"block {number + 1} of {FLAGS.blocks}")
        for name, ratios in pairs.items():
            both = {}
            # The order alternates, so that neither kind always comes second.
            for second in (False, True) if number % 2 else (True, False):
                both[second] = block(second and name == "flight")
            without.append(both[False][0] / FLAGS.steps)
            ratios.append(tuple(b / a for a, b in zip(both[False], both[True], strict=True)))
    progress("")
    milliseconds = 1e3 * statistics.median(without)
    print(f"a step of {milliseconds:.2f} ms, {len(marks.stores[0].names)} marks")
    rows: dict[str, dict[str, list[float]]] = {}
    for name, ratios in pairs.items():
        rows[name] = {}
        for clock, values in zip(("wall", "processor"), zip(*ratios, strict=True), strict=True):
            low, median, high = (100 * (q - 1) for q in statistics.quantiles(values, n=4))
            rows[name][clock] = [low, median, high]
            print(f"{name:<8} {clock:<10} {median:+6.2f} %  (quartiles {low:+.2f} to {high:+.2f})")
    result = {"machine": machine(load), "milliseconds": milliseconds, "percent": rows}
    write(FLAGS.json, result)


if __name__ == "__main__":
    with group("Step"):
        flags.DEFINE_integer("features", 128, "Width of the layers.", lower_bound=1)
        flags.DEFINE_integer("layers", 6, "Hidden layers.", lower_bound=0)
        flags.DEFINE_integer("global_batch_size", 64, "Examples of a step.", lower_bound=1)
    with group("Measurement"):
        flags.DEFINE_integer("steps", 300, "Steps of a block, in one call.", lower_bound=1)
        flags.DEFINE_integer("blocks", 40, "Pairs of blocks.", lower_bound=4)
        flags.DEFINE_string("json", None, "File for the results.")
    run_command(main, __doc__)
