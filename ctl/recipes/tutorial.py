"""TensorFlow's tutorial "Distributed training with Keras" with a loop of ctl in place of ``fit``.

A script in cells, for Jupyter and editors: ``python -m ctl.recipes.tutorial`` runs all of them. It
follows https://www.tensorflow.org/tutorials/distribute/keras, section by section.
"""

import os
import pathlib
import tempfile

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "2"  # TensorFlow says less

import keras
import tensorflow as tf

import ctl

tf.get_logger().setLevel("WARNING")
keras.utils.set_random_seed(1)

# %% [markdown]
# ## Define the distribution strategy
# On a machine without GPUs, two replicas are two logical devices of the CPU. This comes first,
# because it may cut the CPU into devices.

# %%
placement = ctl.make_strategy("mirrored", replicas=2)
strategy = placement.strategy
print("Number of devices:", strategy.num_replicas_in_sync)

# %% [markdown]
# ## Set up the input pipeline
# The batch size is that of the global batch. Use `"mnist"` to download the dataset of the tutorial;
# the one here comes with ctl. Images stay uint8 until the step scales them on the device.

# %%
BATCH_SIZE_PER_REPLICA = 64
BATCH_SIZE = BATCH_SIZE_PER_REPLICA * strategy.num_replicas_in_sync
DATASET = "fashion_mnist_mini"
train_dataset = ctl.data.load(DATASET, global_batch_size=BATCH_SIZE)
eval_dataset = ctl.data.load(DATASET, global_batch_size=BATCH_SIZE, training=False)
STEPS_PER_EPOCH = train_dataset.num_examples // BATCH_SIZE
print(train_dataset.description)

# %% [markdown]
# ## Create the model and the steps
# What has variables is created in the scope of the strategy: model, optimizer, metrics, steps.


# %%
def accuracy() -> keras.metrics.Metric:
    return keras.metrics.SparseCategoricalAccuracy("accuracy")


with strategy.scope():
    model = keras.Sequential(
        [
            keras.Input((28, 28, 1)),
            keras.layers.Conv2D(32, 3, activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Flatten(),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dense(10),
        ]
    )
    step = ctl.TrainStep(
        model,
        keras.optimizers.Adam(),
        metrics=[accuracy()],
        options=placement.options,
    )
    eval_step = ctl.EvalStep(model, metrics=[accuracy()])

# %% [markdown]
# ## Learning rate, TensorBoard, checkpoints
# A schedule is a function of the step. A log writes to TensorBoard and to this page.

# %%
EPOCHS = 2
run = pathlib.Path(tempfile.mkdtemp(prefix="ctl-tutorial-"))
schedule = ctl.schedule.Piecewise([STEPS_PER_EPOCH], [1e-3, 1e-4])
log = ctl.actions.Log(ctl.logs.TensorBoard(run))
checkpoints = ctl.CheckpointManager(run / "checkpoints")


def show(where: str, results: dict[str, float]) -> None:
    print(f"{where}:", ", ".join(f"{name} {value:.3f}" for name, value in results.items()))


# %% [markdown]
# ## Train and evaluate
# Each evaluation follows a checkpoint. After an interruption, `restore` continues with the next
# batch, bit for bit.

# %%
loop = ctl.Loop(
    step,
    train_dataset,
    strategy=strategy,
    schedule=schedule,
    evaluator=ctl.Evaluator(eval_step, eval_dataset, strategy=strategy),
    checkpoints=checkpoints,
    actions=[ctl.Every(log, steps=20)],
    eval_actions=[log.evaluated, lambda number, results: show(f"step {number}", results)],
)
loop.restore()
trained = loop.train_and_evaluate(EPOCHS * STEPS_PER_EPOCH, evaluate_every=STEPS_PER_EPOCH)
checkpoints.close()
log.close()
print(f"python -m tensorboard.main --logdir={run}")

# %% [markdown]
# ## Save the model, and load it without and with the scope
# A model that is loaded in the scope is evaluated on both replicas.

# %%
model.save(run / "model.keras")
alone = ctl.EvalStep(keras.saving.load_model(run / "model.keras"), metrics=[accuracy()])
show("loaded without the scope", ctl.Evaluator(alone, eval_dataset).run())

# %%
with strategy.scope():
    both = ctl.EvalStep(keras.saving.load_model(run / "model.keras"), metrics=[accuracy()])
show("loaded in the scope", ctl.Evaluator(both, eval_dataset, strategy=strategy).run())
