"""Builds strategy, data, model, optimizer, step and loop from the flags.

Shared by `ctl.train`, `ctl.evaluate` and `ctl.inspect`. Importing this module loads no TensorFlow.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from absl import logging
from absl.flags import FLAGS, FlagValues

from ctl.base import console, stores
from ctl.base.names import (
    CLASSES,
    NUMBERS,
    OPTIMIZERS,
    UNKNOWN,
    is_function_name,
    is_path,
    loss_of,
    paths_by_name,
)
from ctl.base.remote import StorePath, located
from ctl.base.stores import is_url
from ctl.distributed import cluster
from ctl.distributed.watch import watchdog
from ctl.errors import UsageError
from ctl.flags import config, defaults, groups, training
from ctl.flags.durations import steps_from
from ctl.flags.parsing import AUTO, grouped_flags

if TYPE_CHECKING:
    import keras

    from ctl.control.evaluator import Evaluator
    from ctl.data import Dataset, DatasetInfo, Files, InMemory, Splits, Streaming
    from ctl.distributed.strategy import Placement
    from ctl.loop import Loop
    from ctl.phases.base_step import EvalStep


_SHOWN = 20  # weights of classes in the log


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
        flags: of which all that was made; `make_loop` makes the rest of them.
        found: what files of the user's hold, see `ctl.data.Files.schema`; empty for other data.
    """

    placement: Placement
    train: Any
    evaluation: Any
    test: Any
    total_steps: int
    steps_per_epoch: float | None
    others: dict[str, Any]
    flags: FlagValues
    found: dict[str, Any]

    def every(self, name: str) -> int:
        """The flag ``name``, a duration, in steps: at least one.

        Raises:
            UsageError: it counts epochs, and their length is unknown.
        """
        duration: Any = self.flags[name].value
        return max(1, steps_from(f"--{name}", duration, self.steps_per_epoch))

    @property
    def evaluate_every(self) -> int | str:
        """How often to evaluate, see `ctl.Loop.train_and_evaluate`. Raises `UsageError` if it
        counts epochs, and their length is unknown."""
        if self.steps_per_epoch is None and not self.flags["evaluate_every"].present:
            return self.total_steps
        self.every("evaluate_every")
        return self.flags.evaluate_every


def prepare(flags: FlagValues = FLAGS) -> Prepared:
    """Makes the strategy, sets seed and precision, and loads the data, all from ``flags``.

    Call it before TensorFlow runs any operation.

    Raises:
        UsageError: a flag is not usable with the others or with the data.
    """
    import keras

    from ctl import data
    from ctl.data import epochs
    from ctl.jobs import named
    from ctl.phases.labels import warn_of_scale

    placement = _place(flags)
    console.run_first_operation()
    keras.utils.set_random_seed(flags.seed)
    keras.mixed_precision.set_dtype_policy(flags.precision)
    logging.info("strategy: %s", placement.description)
    # What is wrong is said before data are loaded.
    named.check_calls(named.step_class(flags.step), flags.model, flags.loss, flags.metrics)
    named.check_metrics(flags.metrics)
    test, others, files = None, {}, None
    with watchdog.host("loading the data"):
        if is_function_name(flags.dataset):
            train, evaluation = _own_data(flags)
        else:
            files = open_files(flags) if is_path(flags.dataset) else None
            splits = _splits(flags, files)
            train = load_data(flags, splits.train, training=True, files=files)
            evaluation = load_data(flags, splits.evaluation, training=False, files=files)
            if splits.test:
                test = load_data(flags, splits.test, training=False, files=files)
        for which in flags.also_evaluate:
            name, at, split = which.rpartition("@")
            others[which] = load_data(
                flags, split, training=False, name=name if at else None, files=files
            )
        if flags.augment is not None:
            train = data.Augmented(train, flags.augment, seed=flags.seed)
    _show(files)
    logging.info("training data: %s", train.description)
    if loss_of(flags.loss) in (NUMBERS, UNKNOWN) and not train.info.num_classes:
        warn_of_scale(train)
    for data_to_evaluate in (evaluation, *others.values()):
        logging.info("evaluation data: %s", data_to_evaluate.description)
    if flags.keep_best:
        where, _, metric = flags.best_metric.rpartition("/")
        where = where or evaluation.info.split or evaluation.info.name
        logging.info("the best checkpoints are those with the best %s on %s", metric, where)
    if test:
        logging.info("test data, for the end: %s", test.description)
    steps_per_epoch = epochs.steps_per_epoch(train)
    total_steps = flags.train_steps
    if total_steps is None:
        if steps_per_epoch is None:
            raise UsageError(
                f"--dataset={flags.dataset}: the number of examples is unknown, so epochs cannot "
                f"be counted: give --train_steps{' instead of --epochs' if flags.epochs else ''}"
            )
        total_steps = max(1, epochs.end_of(flags.epochs or defaults.EPOCHS, steps_per_epoch))
    found = files.schema if files else {}
    return Prepared(
        placement, train, evaluation, test, total_steps, steps_per_epoch, others, flags, found
    )


def _own_data(flags: FlagValues) -> tuple[Dataset, Dataset]:
    """What the function returns that ``--dataset`` names: data to train and to evaluate on."""
    from ctl import data
    from ctl.jobs import named

    tokenizer = data.Tokenizer(flags.tokenizer) if flags.tokenizer else None
    if tokenizer:
        size = tokenizer.vocabulary_size
        logging.info("tokenizer: %s, %d tokens with that of padding", tokenizer.path, size)
    return named.datasets(
        flags.dataset,
        global_batch_size=flags.global_batch_size,
        seed=flags.seed,
        data_dir=_data_dir(flags),
        tokenizer=tokenizer,
    )


def _data_dir(flags: FlagValues) -> str | StorePath | None:
    """``--data_dir``; of a store, with the cache."""
    path = flags.data_dir
    return StorePath(path, flags.data_cache) if path and is_url(path) else path


def open_files(
    flags: FlagValues,
    path: str | None = None,
    found: Mapping[str, Any] | None = None,
    needs_labels: bool = True,
) -> Files:
    """Opens the file or the folder that ``--dataset`` names, or ``path``.

    Args:
        flags: of a command.
        path: of other data.
        found: what the training data of the model hold, if these are others.
        needs_labels: see `ctl.data.Files`.
    """
    from ctl import data

    begun = {} if found else _found_before(flags)
    takes = loss_of(flags.loss)
    if takes == UNKNOWN and begun.get("classes"):
        takes = CLASSES  # earlier versions took whole numbers as classes for a loss of one's own
    return data.Files(
        located(path or flags.dataset, flags.data_cache),
        image_shape=groups.image_shape_from(flags.image_shape) or _shape_of(begun),
        features=flags.features or _features_with_index(begun),
        labels=flags.labels,
        loss_of=takes,
        schema=found,
        record_schema=flags.record_schema,
        missing=flags.missing,
        needs_labels=needs_labels,
    )


def _found_before(flags: FlagValues) -> dict[str, Any]:
    """What the run that resumes found in its files; nothing if the run is new."""
    with contextlib.suppress(stores.NothingThere):
        if flags.model_dir:
            return config.found(stores.local(flags.model_dir))
    return {}


def _features_with_index(found: Mapping[str, Any]) -> list[str] | None:
    """The features of the run that resumes, if an index of pandas is one of them, which earlier
    versions did not leave out."""
    from ctl.data.tables import INDEX

    stored = found.get("features")
    names = stored if isinstance(stored, list) else []
    names = [name for name in names if isinstance(name, str)]
    return names if any(map(INDEX.fullmatch, names)) else None


def _shape_of(found: Mapping[str, Any]) -> tuple[int, int, int] | None:
    """The shape of the images of the run that resumes; earlier versions looked at other ones."""
    shape = found.get("image_shape")
    if not isinstance(shape, list) or [*map(type, shape)] != [int, int, int]:
        return None
    return (*shape,)


def _show(files: Files | None) -> None:
    for line in files.table() if files else ():
        logging.info("%s", line)


def _splits(flags: FlagValues, files: Files | None) -> Splits:
    """The splits that the flags ask for."""
    from ctl import data
    from ctl.data.load import check_apart

    given = data.Splits(flags.train_split, flags.eval_split)
    if files:
        splits = files.splits(given, select=bool(flags.keep_best))
        held_out = splits.test or splits.evaluation or ""
        if "[" in held_out and not flags.eval_split:
            logging.info(
                "%s has no part for the test: %s is held out, drawn at random with a fixed seed",
                *(flags.dataset, held_out),
            )
        return splits
    if flags.dataset == "synthetic":
        return given
    if flags.train_split or flags.eval_split:
        check_apart(flags.dataset, given, _data_dir(flags), download=flags.download)
    if not flags.keep_best or flags.eval_split:
        return given
    splits = data.selection_splits(flags.dataset, _data_dir(flags), download=flags.download)
    if splits.train == "train":
        if "validation" in (flags.train_split or ""):
            raise UsageError(
                f"--keep_best selects on validation, which --train_split={flags.train_split} "
                "trains on: name other data with --eval_split"
            )
        return splits._replace(train=flags.train_split)
    if flags.train_split:
        raise UsageError(
            f"--keep_best selects on a part of train that --train_split={flags.train_split} leaves "
            "out: name this part with --eval_split"
        )
    return splits


def _place(flags: FlagValues) -> Placement:
    """Makes the strategy. TensorFlow must not have run any operation before."""
    from ctl.distributed.strategy import make_multi_worker, make_parameter_server, make_strategy
    from ctl.distributed.workers import check_agreement

    if flags.strategy == "parameter_server":
        return make_parameter_server(
            cluster.resolve_tasks(),
            startup_timeout=flags.startup_timeout,
            worker_timeout=flags.worker_timeout,
        )
    if flags.strategy != "multi_worker":
        return make_strategy(
            flags.strategy,
            replicas=flags.replicas,
            cross_device_ops=flags.cross_device_ops,
            tpu=flags.tpu,
        )
    placement = make_multi_worker(
        cluster.resolve(flags.workers, flags.worker_index),
        communication=flags.communication,
        collective_timeout=flags.collective_timeout,
        startup_timeout=flags.startup_timeout,
        record_dir=stores.local(flags.model_dir) / "inspect" if flags.model_dir else None,
    )
    # All others must be equal on each.
    of_a_worker = {"worker_index", "data_dir", "data_cache", "download"}
    of_the_job = [name for name in grouped_flags() if name not in of_a_worker]
    check_agreement(placement.strategy, {f"--{name}": flags[name].value for name in of_the_job})
    return placement


def load_evaluation_data(
    flags: FlagValues, found: Mapping[str, Any], needs_labels: bool = True
) -> tuple[Dataset, Files | None]:
    """Loads the data to evaluate on that the ``flags`` of `ctl.evaluate` describe.

    ``found`` is what the training data of the run hold. Of other files, all is evaluated, unless
    they have a part for it. Returns the data, and of files, what they are a split of.
    """
    if is_function_name(flags.dataset):
        return _own_data(flags)[1], None
    if not is_path(flags.dataset):
        return load_data(flags, flags.eval_split, training=False), None
    files = open_files(flags, found=found, needs_labels=needs_labels)
    others = bool(found) and found.get("path") != flags.dataset
    split = flags.eval_split or files.evaluation(whole=others)
    dataset = load_data(flags, split, training=False, files=files)
    _show(files)
    return dataset, files


def load_data(
    flags: FlagValues,
    split: str | None,
    *,
    training: bool,
    name: str | None = None,
    files: Files | None = None,
) -> InMemory | Streaming:
    """Loads a split of the dataset ``name``, by default that of ``flags``, to train or to evaluate.

    ``split`` is None for the default, see `ctl.data.load`. Synthetic data have no splits. ``files``
    are those of ``--dataset``, if it names some.
    """
    from ctl import data

    shape = groups.image_shape_from(flags.image_shape)
    order: dict[str, Any] = {
        "global_batch_size": flags.global_batch_size,
        "seed": flags.seed,
        "training": training,
    }
    if flags.dataset == "synthetic":
        return data.synthetic(
            shape or defaults.SYNTHETIC_SHAPE, flags.num_classes, flags.num_examples, **order
        )
    order |= {
        "resident_limit_mib": flags.resident_limit_mib,
        "shuffle_block": flags.shuffle_block,
        "on_bad_record": flags.on_bad_record,
    }
    if files and name and is_path(name):
        files = open_files(flags, name, files.schema)
    if files and (not name or is_path(name)):
        return files.load(split or "train", oversample=flags.oversample, **order)
    of_tfds: dict[str, Any] = order | {
        "split": split,
        "data_dir": _data_dir(flags),
        "download": flags.download,
    }
    if flags.features:
        return data.load_columns(name or flags.dataset, flags.features, flags.labels, **of_tfds)
    return data.load(name or flags.dataset, image_shape=shape, **of_tfds)


def check_classes(flags: FlagValues, dataset: Dataset) -> None:
    """Raises `UsageError` if the number of classes of ``dataset`` is unknown, unless it is data of
    the user's own, or has columns of the user's choice, which need not have classes."""
    own = is_function_name(flags.dataset) or flags.features
    if dataset.info.num_classes is dataset.info.num_outputs is None and not own:
        raise UsageError(
            f"{dataset.description}: the number of classes is unknown, and counting it needs the "
            "data in memory: raise --resident_limit_mib"
        )


def model_of(flags: FlagValues, info: DatasetInfo) -> keras.Model:
    """Makes the model that ``--model`` names, for data with this ``info``."""
    from ctl.jobs.models import make_model

    outputs = info.num_classes or info.num_outputs
    sizes: dict[str, Any] = {name: flags[name].value for name in groups.OF_DLRM}
    return make_model(
        *(flags.model, info.image_shape, outputs),
        *(info.mean, info.deviation, info.vocabulary_size),
        groups.dlrm_sizes(**sizes),
    )


def make_eval_step(flags: FlagValues, model: keras.Model) -> EvalStep:
    """Makes the evaluation step that ``--step``, ``--loss`` and ``--metrics`` describe."""
    from ctl.jobs import named
    from ctl.phases.checks import fits_default_evaluation

    step = named.step_class(flags.step)
    kind = step.eval_step
    # An accuracy of what is no logits means nothing, as in the training.
    of_outputs = kind if fits_default_evaluation(step) else step
    loss = named.loss_function(flags.loss, model)
    metrics = named.make_metrics(flags.metrics, loss, of_outputs)
    evaluates = kind(model, loss, metrics)
    evaluates.weighting = flags.weighting  # a class of the user's need not take it
    return evaluates


def class_weights(flags: FlagValues, prepared: Prepared) -> dict[int, float] | None:
    """The weights of classes in the training that ``--class_weight`` names.

    With ``balanced``, examples / (classes x examples of the class): each class has the same sum.
    Classes without examples are not counted.

    Raises:
        UsageError: the examples of each class are not known.
    """
    class_names = prepared.train.info.class_names
    if flags.class_weight != groups.BALANCED:
        given = groups.class_weight_from(flags.class_weight, class_names)
        _show_weights(given or {}, class_names)
        return given
    import numpy as np

    from ctl.data import Augmented, InMemory
    from ctl.data.order import are_classes

    train = prepared.train.dataset if isinstance(prepared.train, Augmented) else prepared.train
    counts = prepared.found.get("examples", {}).get(train.info.split)
    if not isinstance(counts, list):
        arrays = train.arrays if isinstance(train, InMemory) else ()
        labels: Any = arrays[1] if isinstance(arrays, tuple) and len(arrays) > 1 else None
        if not isinstance(train, InMemory):
            raise UsageError(
                "--class_weight=balanced counts the classes of files of your own or of data in "
                "memory: raise --resident_limit_mib, or give weights such as 0:1,1:5"
            )
        if not isinstance(labels, np.ndarray) or not are_classes(labels):
            raise UsageError(
                "--class_weight=balanced counts classes, integers [n] or 0 and 1, and the labels "
                "of the data are none: leave it out"
            )
        counts = np.bincount(labels.ravel().astype(np.int64)).tolist()
    there = {label: count for label, count in enumerate(counts) if count}
    weights = {label: sum(counts) / (len(there) * count) for label, count in there.items()}
    _show_weights(weights, class_names)
    return weights


def _show_weights(weights: Mapping[int, float], class_names: Sequence[str]) -> None:
    """Says the weights of classes by their names."""
    known = dict(enumerate(class_names))
    shown = [f"{known.get(label, label)}: {weight:.3g}" for label, weight in weights.items()]
    if shown:
        said = ", ".join(shown[:_SHOWN])
        logging.info("class weights: %s%s", said, ", …" if len(shown) > _SHOWN else "")


def make_loop(prepared: Prepared, checkpoints: Any = None) -> Loop:
    """Makes model, optimizer, step and loop, in the strategy's scope.

    Args:
        prepared: see `prepare`; its flags decide.
        checkpoints: a `ctl.checkpoint.CheckpointManager`, or None.

    Raises:
        UsageError: the model, the step, the optimizer, the schedule, the metrics or the number of
            classes is not usable.
    """
    from ctl.control import source_hash
    from ctl.control.evaluator import Evaluator
    from ctl.distributed.workers import check_agreement
    from ctl.jobs import named
    from ctl.loop import Loop
    from ctl.phases.losses import cross_entropy
    from ctl.phases.uninitialized import uninitialized_tables
    from ctl.schedule.patience import EarlyStopping
    from ctl.schedule.schedules import make_schedule

    placement, train, flags = prepared.placement, prepared.train, prepared.flags
    evaluation, others = prepared.evaluation, prepared.others
    schedule = make_schedule(
        total_steps=prepared.total_steps,
        steps_per_epoch=prepared.steps_per_epoch,
        global_batch_size=train.global_batch_size,
        **groups.schedule_arguments(flags),
    )

    check_classes(flags, train)

    smoothed = functools.partial(cross_entropy, smoothing=flags.label_smoothing)
    step_class = named.step_class(flags.step)
    resumes = checkpoints is not None and checkpoints.latest() is not None
    with placement.strategy.scope(), watchdog.host("building the model"):
        with uninitialized_tables():
            model = model_of(flags, train.info)
        given = {} if resumes or not flags.init_from else load_weights(flags, model)
        freeze(model, flags.freeze)
        loss = smoothed if flags.label_smoothing else named.loss_function(flags.loss, model)
        step = step_class(
            model,
            make_optimizer(flags.optimizer, flags.momentum, flags.weight_decay),
            loss,
            metrics=named.make_metrics(flags.metrics, loss, step_class),
            weighting=flags.weighting,
            class_weight=class_weights(flags, prepared),
            clip_norm=flags.clip_norm,
            accumulate_steps=flags.accumulate_steps,
            ema_decay=flags.ema_decay,
            loss_scale=flags.precision == "mixed_float16",
            on_nan=flags.on_nan,
            log_norms="norms" in flags.log_also,
            bytes_per_pack=0 if flags.bytes_per_pack == AUTO else flags.bytes_per_pack,
            options=placement.options,
            jit_compile={"on": True, "off": False}.get(flags.jit_compile),  # else by rule
            sparse_rows=flags.sparse_rows,
            embedding_plan=flags.embedding_plan,
            random_seed=flags.seed,
        )
        eval_step = make_eval_step(flags, model)
    if given and flags.strategy == "multi_worker":
        facts = {path: source_hash.hash_of([value.tobytes()]) for path, value in given.items()}
        check_agreement(placement.strategy, {f"--init_from: {p}": f for p, f in facts.items()})
    eval_actions = []
    if flags.early_stop:
        patience = training.parse_early_stop(flags.early_stop, flags.best_mode, flags.best_metric)
        eval_actions.append(EarlyStopping(*patience))
    options = {
        "strategy": placement.strategy,
        "schedule": schedule,
        "checkpoints": checkpoints,
        "steps_per_loop": flags.steps_per_loop or None,
        "eval_actions": eval_actions,
    }
    if placement.heartbeats:
        from ctl.jobs.parameter_server import CopyEvaluator, ParameterServerLoop

        copied = make_eval_step(flags, model_of(flags, train.info))
        evaluator: Evaluator = CopyEvaluator(model, copied, evaluation, others=others)
        return ParameterServerLoop(
            step,
            train,
            heartbeats=placement.heartbeats,
            timeout=flags.collective_timeout,
            evaluator=evaluator,
            **options,
        )
    evaluator = Evaluator(eval_step, evaluation, strategy=placement.strategy, others=others)
    return Loop(step, train, evaluator=evaluator, **options)


def load_weights(flags: FlagValues, model: keras.Model) -> dict[str, Any]:
    """Gives ``model`` the weights of ``--init_from``, see `ctl.checkpoint.load_weights`."""
    from ctl.checkpoint import weights

    paths = paths_by_name(flags.init_from)
    given = weights.load_weights(model, paths.get("", paths), flags.reinit or ())
    fresh = f"; {','.join(flags.reinit)} start anew" if flags.reinit else ""
    logging.info("%d weights are those of %s%s", len(given), flags.init_from, fresh)
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
        weight_decay: decoupled, times the learning rate; None for the default of Keras. Muon has a
            second one, of the weights that it trains as Adam does: it is the same.

    Raises:
        UsageError: the installed Keras does not have this optimizer.
    """
    import keras

    kind = getattr(keras.optimizers, OPTIMIZERS[name], None)
    if kind is None:
        raise UsageError(f"--optimizer={name} needs a later Keras than {keras.__version__}")
    options: dict[str, Any] = {} if weight_decay is None else {"weight_decay": weight_decay}
    if name in ("momentum", "nesterov"):
        options |= {"momentum": momentum, "nesterov": name == "nesterov"}
    if name == "muon" and weight_decay is not None:
        options["adam_weight_decay"] = weight_decay
    return kind(**options)
