"""Two workers: two processes train one model together, on this machine or on two.

    python -m ctl.examples.two_workers

Started alone, it starts two workers of itself. To train on two machines, start it on each with a
``TF_CONFIG``, see the page of `ctl.cluster`. The first worker prints an accuracy of 0.818.
"""

import os
import sys

import keras

import ctl

BATCH, STEPS = 64, 200


def make_loop(placement: ctl.strategy.Placement) -> ctl.Loop:
    """The same as with one worker. Each computes on its half of every global batch."""
    with placement.strategy.scope():
        model = ctl.models.make_model("dense", (28, 28, 1), 10)
        step = ctl.TrainStep(model, "adam", clip_norm=1.0, options=placement.options)
        eval_step = ctl.EvalStep(model, metrics=["accuracy"])
    test = ctl.data.load(global_batch_size=500, training=False)
    return ctl.Loop(
        step,
        ctl.data.load(global_batch_size=BATCH),
        strategy=placement.strategy,
        evaluator=ctl.Evaluator(eval_step, test, strategy=placement.strategy),
    )


def work() -> None:
    """What each worker runs. All make the same calls; the first, the chief, prints and saves."""
    cluster = ctl.cluster.resolve()
    placement = ctl.strategy.make_multi_worker(cluster)  # before TensorFlow runs an operation
    keras.utils.set_random_seed(1)
    loop = make_loop(placement)
    results = loop.train_and_evaluate(STEPS, evaluate_every=STEPS)
    if cluster.is_chief:
        print(placement.description)
        print(f"step {loop.global_step}: accuracy {results['accuracy']:.3f}")
    ctl.workers.leave_together(placement.strategy)


def main() -> None:
    if "TF_CONFIG" not in os.environ:
        command = [sys.executable, "-m", "ctl.examples.two_workers"]
        sys.exit(ctl.launch.launch(command, workers=2))
    work()


if __name__ == "__main__":
    main()
