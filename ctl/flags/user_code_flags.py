"""The flags of model, step, loss and metrics: a name that ctl knows, or code of the user's own."""

from __future__ import annotations

from absl import flags

from ctl.base import names
from ctl.errors import UsageError
from ctl.flags.parsing import check_flags, define_path, group

flags.disclaim_key_flags()  # They belong to the command that calls a group.


def define_model_flags() -> None:
    """Defines the flags of the model, see `ctl.models.make_model`; of the weights that it starts
    from (`ctl.checkpoint.load_weights`), and of what does not train (`ctl.freezing.freeze`)."""
    with group("Model"):
        flags.DEFINE_string(
            "model",
            "convnet",
            f"{', '.join(names.MODELS)}, or package.module:function for your own: called with "
            "(image_shape, num_classes), returns a Keras model that outputs logits. A function "
            "without parameters may return any Keras model, for any data.",
        )
        define_path(
            "init_from",
            None,
            "Initial weights: a checkpoint, a run (its last checkpoint), or a .keras file. The "
            "optimizer and the step count start anew. A run that resumes ignores this flag.",
        )
        flags.DEFINE_list(
            "reinit", None, "Names of layers for which --init_from is ignored, such as a new head."
        )
        flags.DEFINE_list(
            "freeze",
            None,
            "Layers that are not trained, by patterns of their names: conv*,block1_*. They have "
            "no gradient and no optimizer slots.",
        )
    check_flags(["model"], lambda model: names.check_model_name(model))
    check_flags(["init_from", "reinit"], _check_start)


def _check_start(init_from: str | None, reinit: list[str] | None) -> None:
    if reinit and not init_from:
        raise UsageError("--reinit has no effect without --init_from: every layer starts anew")


def define_code_flags() -> None:
    """Defines the flags of step, loss and metrics, see `ctl.jobs.named`."""
    with group("Step, loss and metrics"):
        flags.DEFINE_string(
            "step",
            None,
            "package.module:MyStep, a subclass of ctl.TrainStep with the same arguments. "
            "Evaluation uses its attribute eval_step, a subclass of ctl.EvalStep. The module, and "
            "those of the other flags, may define flags of their own (absl.flags.DEFINE_float, "
            "…): give them on the same command line.",
        )
        flags.DEFINE_string(
            "loss",
            "cross_entropy",
            f"{', '.join(names.LOSSES)}, or package.module:function for your own: called with "
            "(labels, outputs), returns the loss of each example, [n]. The two cross entropies "
            "take logits. A step with its own loss() need not use it.",
        )
        flags.DEFINE_string(
            "metrics",
            None,
            "Names of Keras metrics, e.g. accuracy,sparse_top_k_categorical_accuracy; or "
            "package.module:function for your own: called without arguments, returns a list of "
            "Keras metrics. They are updated with (labels, outputs) (default: accuracy with the "
            "cross entropies, unless the step has its own loss(); otherwise none).",
        )
    check_flags(["step", "loss", "metrics"], _check)


def _check(step: str | None, loss: str, metrics: str | None) -> None:
    if step is not None and not names.is_function_name(step):
        raise UsageError(f"--step={step} is not package.module:MyStep, a subclass of ctl.TrainStep")
    names.check_code_name("loss", loss, names.LOSSES)
    if metrics and ":" in metrics and not names.is_function_name(metrics):
        raise UsageError(f"--metrics={metrics} is not NAME,NAME,… or package.module:function")
