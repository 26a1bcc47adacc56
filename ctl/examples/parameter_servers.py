"""Parameter servers: workers that do not wait for each other, and servers that hold the weights.

    python -m ctl.examples.parameter_servers

Started alone, it starts a coordinator, two workers and a server of itself. The coordinator prints
an accuracy of 0.82 or 0.83: who comes first differs from run to run.
"""

import os
import sys
from typing import Any

import keras

import ctl

BATCH, STEPS = 64, 400


def make_model() -> keras.Model:
    return ctl.models.make_model("dense", (28, 28, 1), 10)


def make_loop(placement: Any) -> ctl.Loop:
    """A free worker takes the next global batch, and adds its update to the weights."""
    with placement.strategy.scope():
        model = make_model()
        step = ctl.TrainStep(model, "adam", clip_norm=1.0)
    # The coordinator evaluates a copy of the model, made outside of the scope.
    test = ctl.data.load(global_batch_size=500, training=False)
    eval_step = ctl.EvalStep(make_model(), metrics=["accuracy"])
    return ctl.jobs.ParameterServerLoop(
        step,
        ctl.data.load(global_batch_size=BATCH),
        strategy=placement.strategy,
        heartbeats=placement.heartbeats,
        evaluator=ctl.jobs.CopyEvaluator(model, eval_step, test),
    )


def coordinate(tasks: ctl.cluster.Tasks) -> None:
    """Trains and evaluates; at the end, or after an error, tells the other tasks to end."""
    placement: Any = ctl.strategy.make_parameter_server(tasks)
    with placement.heartbeats:
        keras.utils.set_random_seed(1)
        loop = make_loop(placement)
        results = loop.train_and_evaluate(STEPS, evaluate_every=STEPS)
    print(placement.description)
    print(f"step {loop.global_step}: accuracy {results['accuracy']:.3f}")


def main() -> None:
    if "TF_CONFIG" not in os.environ:
        command = [sys.executable, "-m", "ctl.examples.parameter_servers"]
        sys.exit(ctl.launch.launch(command, workers=2, ps=1))
    tasks = ctl.cluster.resolve_tasks()
    if tasks.is_coordinator:
        coordinate(tasks)
    else:
        ctl.jobs.serve(tasks)


if __name__ == "__main__":
    main()
