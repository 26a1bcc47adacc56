"""Builds strategy, data, model, optimizer, step and loop from the flags.

Shared by `ctl.train`, `ctl.evaluate` and `ctl.inspect`. Importing this module loads no TensorFlow.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from absl import flags, logging

from ctl.base import console
from ctl.base.names import OPTIMIZERS, is_function_name
from ctl.distributed import cluster
from ctl.distributed.watch import watchdog
from ctl.errors import UsageError
from ctl.flags import defaults, groups, training
from ctl.flags.parsing import AUTO, grouped_flags

if TYPE_CHECKING:
    import keras

    from ctl.control.evaluator import Evaluator
    from ctl.data import Dataset, InMemory, Splits, Streaming
    from ctl.distributed.strategy import Placement
    from ctl.loop import Loop
    from ctl.phases.base_step import EvalStep

FLAGS = flags.FLAGS


class Prepared(NamedTuple):
    """What `make_loop` makes a loop of.

    Attributes:
        placement: the strategy, see `ctl.distributed.strategy`.
        train: the training data, a dataset of `ctl.data`.
        evaluation: the data to evaluate on while training.
        test: the data to evaluate on at the end; None if ``evaluation`` is that.
        total_steps: length of the training in global batches.
        steps_per_epoch: may be fractional; None if the number of examples is unknown.
        others: more data to evaluate on while training, by name.
    """

    placement: Placement
    train: Any
    evaluation: Any
    test: Any
    total_steps: int
    steps_per_epoch: float | None
    others: dict[str, Any]


def prepare() -> Prepared:
    """Makes the strategy, sets seed and precision, and loads the data, all from the flags.

    Call it before TensorFlow runs any operation.

    Raises:
        UsageError: a flag is not usable with the others or with the data.
    """
    import keras

    from ctl import data
    from ctl.jobs import named

    placement = _place()
    console.run_first_operation()
    keras.utils.set_random_seed(FLAGS.seed)
    keras.mixed_precision.set_dtype_policy(FLAGS.precision)
    logging.info("strategy: %s", placement.description)
    # What is wrong is said before data are loaded.
    named.check_calls(named.step_class(FLAGS.step), FLAGS.model, FLAGS.loss, FLAGS.metrics)
    named.check_metrics(FLAGS.metrics)
    test, others = None, {}
    with watchdog.host("loading the data"):
        if is_function_name(FLAGS.dataset):
            train, evaluation = _own_data()
        else:
            splits = _splits()
            train = load_data(splits.train, training=True)
            evaluation = load_data(splits.evaluation, training=False)
            test = load_data(splits.test, training=False) if splits.test else None
        for which in FLAGS.also_evaluate:
            name, at, split = which.rpartition("@")
            others[which] = load_data(split, training=False, name=name if at else None)
        if FLAGS.augment is not None:
            train = data.Augmented(train, FLAGS.augment, seed=FLAGS.seed)
    logging.info("training data: %s", train.description)
    for data_to_evaluate in (evaluation, *others.values()):
        logging.info("evaluation data: %s", data_to_evaluate.description)
    if FLAGS.keep_best:
        where, _, metric = FLAGS.best_metric.rpartition("/")
        where = where or evaluation.info.split or evaluation.info.name
        logging.info("the best checkpoints are those with the best %s on %s", metric, where)
    if test:
        logging.info("test data, for the end: %s", test.description)
    steps_per_epoch = None
    if train.num_examples and train.global_batch_size:
        steps_per_epoch = train.num_examples / train.global_batch_size
    total_steps = FLAGS.train_steps or _steps_of(FLAGS.epochs or defaults.EPOCHS, steps_per_epoch)
    return Prepared(placement, train, evaluation, test, total_steps, steps_per_epoch, others)


def _steps_of(epochs: float, steps_per_epoch: float | None) -> int:
    if steps_per_epoch is None:
        raise UsageError(
            f"--dataset={FLAGS.dataset}: the number of examples is unknown, so epochs cannot be "
            "counted: give --train_steps"
        )
    return max(1, math.ceil(epochs * steps_per_epoch - 1e-6))


def _own_data() -> tuple[Dataset, Dataset]:
    """What the function returns that ``--dataset`` names: data to train and to evaluate on."""
    from ctl.jobs import named

    return named.datasets(
        FLAGS.dataset,
        global_batch_size=FLAGS.global_batch_size,
        seed=FLAGS.seed,
        data_dir=FLAGS.data_dir,
    )


def _splits() -> Splits:
    """The splits that the flags ask for."""
    from ctl import data

    given = data.Splits(FLAGS.train_split, FLAGS.eval_split)
    if not FLAGS.keep_best or FLAGS.eval_split or FLAGS.dataset == "synthetic":
        return given
    splits = data.selection_splits(FLAGS.dataset, FLAGS.data_dir, download=FLAGS.download)
    if splits.train == "train":
        if "validation" in (FLAGS.train_split or ""):
            raise UsageError(
                f"--keep_best selects on validation, which --train_split={FLAGS.train_split} "
                "trains on: name other data with --eval_split"
            )
        return splits._replace(train=FLAGS.train_split)
    if FLAGS.train_split:
        raise UsageError(
            f"--keep_best selects on a part of train that --train_split={FLAGS.train_split} leaves "
            "out: name this part with --eval_split"
        )
    return splits


def _place() -> Placement:
    """Makes the strategy. TensorFlow must not have run any operation before."""
    from ctl.distributed.strategy import make_multi_worker, make_parameter_server, make_strategy
    from ctl.distributed.workers import check_agreement

    if FLAGS.strategy == "parameter_server":
        return make_parameter_server(
            cluster.resolve_tasks(),
            startup_timeout=FLAGS.startup_timeout,
            worker_timeout=FLAGS.worker_timeout,
        )
    if FLAGS.strategy != "multi_worker":
        return make_strategy(
            FLAGS.strategy,
            replicas=FLAGS.replicas,
            cross_device_ops=FLAGS.cross_device_ops,
            tpu=FLAGS.tpu,
        )
    placement = make_multi_worker(
        cluster.resolve(FLAGS.workers, FLAGS.worker_index),
        communication=FLAGS.communication,
        collective_timeout=FLAGS.collective_timeout,
        startup_timeout=FLAGS.startup_timeout,
        record_dir=Path(FLAGS.model_dir) / "inspect" if FLAGS.model_dir else None,
    )
    check_agreement(placement.strategy, _flags_of_the_job())
    return placement


def _flags_of_the_job() -> dict[str, Any]:
    """The flags that must be equal on every worker."""
    mine = {"worker_index", "data_dir", "download"}
    return {f"--{name}": FLAGS[name].value for name in grouped_flags() if name not in mine}


def load_evaluation_data() -> Dataset:
    """Loads the data to evaluate on that the flags of `ctl.evaluate` describe."""
    if is_function_name(FLAGS.dataset):
        return _own_data()[1]
    return load_data(FLAGS.eval_split, training=False)


def load_data(
    split: str | None, *, training: bool, name: str | None = None
) -> InMemory | Streaming:
    """Loads a split of the dataset ``name``, by default that of the flags, to train or to evaluate.

    ``split`` is None for the default, see `ctl.data.load`. Synthetic data have no splits.
    """
    from ctl import data

    shape = groups.image_shape_from(FLAGS.image_shape)
    order: dict[str, Any] = {
        "global_batch_size": FLAGS.global_batch_size,
        "seed": FLAGS.seed,
        "training": training,
    }
    if FLAGS.dataset == "synthetic":
        return data.synthetic(
            shape or defaults.SYNTHETIC_SHAPE, FLAGS.num_classes, FLAGS.num_examples, **order
        )
    of_tfds: dict[str, Any] = order | {
        "split": split,
        "data_dir": FLAGS.data_dir,
        "download": FLAGS.download,
        "resident_limit_mib": FLAGS.resident_limit_mib,
        "shuffle_block": FLAGS.shuffle_block,
        "on_bad_record": FLAGS.on_bad_record,
    }
    if FLAGS.features:
        return data.load_columns(name or FLAGS.dataset, FLAGS.features, FLAGS.labels, **of_tfds)
    return data.load(name or FLAGS.dataset, image_shape=shape, **of_tfds)


def check_classes(dataset: Dataset) -> None:
    """Raises `UsageError` if the number of classes of ``dataset`` is unknown, unless it is data of
    the user's own, or has columns of the user's choice, which need not have classes."""
    own = is_function_name(FLAGS.dataset) or FLAGS.features
    if dataset.info.num_classes is None and not own:
        raise UsageError(
            f"{dataset.description}: it does not say how many classes it has, and its labels are "
            "counted only where it fits into memory: raise --resident_limit_mib"
        )


def make_eval_step(model: keras.Model) -> EvalStep:
    """Makes the evaluation step that ``--step``, ``--loss`` and ``--metrics`` describe."""
    from ctl.jobs import named

    kind = named.step_class(FLAGS.step).eval_step
    metrics = named.make_metrics(FLAGS.metrics, FLAGS.loss, kind)
    return kind(model, named.loss_function(FLAGS.loss), metrics)


def make_loop(prepared: Prepared, checkpoints: Any = None) -> Loop:
    """Makes model, optimizer, step and loop, in the strategy's scope.

    Args:
        prepared: see `prepare`.
        checkpoints: a `ctl.checkpoint.CheckpointManager`, or None.

    Raises:
        UsageError: the model, the step, the optimizer, the schedule, the metrics or the number of
            classes is not usable.
    """
    from ctl.control import source_hash
    from ctl.control.evaluator import Evaluator
    from ctl.distributed.workers import check_agreement
    from ctl.jobs import named
    from ctl.jobs.models import make_model
    from ctl.loop import Loop
    from ctl.phases.losses import cross_entropy
    from ctl.schedule.patience import EarlyStopping
    from ctl.schedule.schedules import make_schedule

    placement, train, evaluation, _, total_steps, steps_per_epoch, others = prepared
    schedule = make_schedule(
        total_steps=total_steps,
        steps_per_epoch=steps_per_epoch,
        global_batch_size=train.global_batch_size,
        **groups.schedule_arguments(),
    )

    check_classes(train)

    def model_of_the_data() -> keras.Model:
        return make_model(FLAGS.model, train.info.image_shape, train.info.num_classes)

    smoothed = functools.partial(cross_entropy, smoothing=FLAGS.label_smoothing)
    step_class = named.step_class(FLAGS.step)
    resumes = checkpoints is not None and checkpoints.latest() is not None
    with placement.strategy.scope(), watchdog.host("building the model"):
        model = model_of_the_data()
        given = {} if resumes or not FLAGS.init_from else load_weights(model)
        freeze(model, FLAGS.freeze)
        step = step_class(
            model,
            make_optimizer(FLAGS.optimizer, FLAGS.momentum, FLAGS.weight_decay),
            smoothed if FLAGS.label_smoothing else named.loss_function(FLAGS.loss),
            metrics=named.make_metrics(FLAGS.metrics, FLAGS.loss, step_class),
            clip_norm=FLAGS.clip_norm,
            accumulate_steps=FLAGS.accumulate_steps,
            ema_decay=FLAGS.ema_decay,
            loss_scale=FLAGS.precision == "mixed_float16",
            on_nan=FLAGS.on_nan,
            log_norms="norms" in FLAGS.log_also,
            bytes_per_pack=0 if FLAGS.bytes_per_pack == AUTO else FLAGS.bytes_per_pack,
            options=placement.options,
            jit_compile={"on": True, "off": False}.get(FLAGS.jit_compile),  # else by rule
            jit_update=False if placement.heartbeats else None,  # XLA works within one process
            random_seed=FLAGS.seed,
        )
        eval_step = make_eval_step(model)
    if given and FLAGS.strategy == "multi_worker":
        facts = {path: source_hash.hash_of([value.tobytes()]) for path, value in given.items()}
        check_agreement(placement.strategy, {f"--init_from: {p}": f for p, f in facts.items()})
    eval_actions = []
    if FLAGS.early_stop:
        patience = training.parse_early_stop(FLAGS.early_stop, FLAGS.best_mode, FLAGS.best_metric)
        eval_actions.append(EarlyStopping(*patience))
    options = {
        "strategy": placement.strategy,
        "schedule": schedule,
        "checkpoints": checkpoints,
        "steps_per_loop": FLAGS.steps_per_loop or None,
        "eval_actions": eval_actions,
    }
    if placement.heartbeats:
        from ctl.jobs.parameter_server import CopyEvaluator, ParameterServerLoop

        copied = make_eval_step(model_of_the_data())
        evaluator: Evaluator = CopyEvaluator(model, copied, evaluation, others=others)
        return ParameterServerLoop(
            step,
            train,
            heartbeats=placement.heartbeats,
            timeout=FLAGS.collective_timeout,
            evaluator=evaluator,
            **options,
        )
    evaluator = Evaluator(eval_step, evaluation, strategy=placement.strategy, others=others)
    return Loop(step, train, evaluator=evaluator, **options)


def load_weights(model: keras.Model) -> dict[str, Any]:
    """Gives ``model`` the weights of ``--init_from``, see `ctl.checkpoint.load_weights`."""
    from ctl.checkpoint import weights

    given = weights.load_weights(model, FLAGS.init_from, FLAGS.reinit or ())
    fresh = f"; {','.join(FLAGS.reinit)} start anew" if FLAGS.reinit else ""
    logging.info("%d weights are those of %s%s", len(given), FLAGS.init_from, fresh)
    return given


def freeze(model: keras.Model, patterns: Sequence[str] | None) -> None:
    """Freezes layers of ``model``, see `ctl.freezing.freeze`."""
    from ctl.phases import freezing

    if patterns:
        frozen = freezing.freeze(model, patterns)
        logging.info("frozen: %d of %d weights", len(frozen), len(model.weights))


def make_optimizer(
    name: str, momentum: float, weight_decay: float | None
) -> keras.optimizers.Optimizer:
    """Makes a Keras optimizer. The schedule sets its learning rate.

    Args:
        name: a key of `ctl.base.names.OPTIMIZERS`.
        momentum: used by "momentum" and "nesterov".
        weight_decay: decoupled, times the learning rate; None for the default of Keras.
    """
    import keras

    options: dict[str, Any] = {} if weight_decay is None else {"weight_decay": weight_decay}
    if name in ("momentum", "nesterov"):
        options |= {"momentum": momentum, "nesterov": name == "nesterov"}
    return getattr(keras.optimizers, OPTIMIZERS[name])(**options)
