"""The flags of TFDS datasets that are not images with a class: which columns to train on."""

from __future__ import annotations

from absl import flags

from ctl.base.names import is_function_name
from ctl.errors import UsageError
from ctl.flags.parsing import check_flags

flags.disclaim_key_flags()  # They belong to the command that calls a group.


def define_column_flags() -> None:
    """Defines ``--features`` and ``--labels``, see `ctl.data.load_columns`."""
    flags.DEFINE_list(
        "features",
        None,
        "Names of the features of a TFDS dataset to train on, for a table, e.g. age,fare. a/b is "
        "part b of feature a. Several form a dict (default: an image).",
    )
    flags.DEFINE_list("labels", None, "Names of the features to predict, with --features.")
    check_flags(["features", "labels", "dataset", "image_shape"], _check)


def _check(
    features: list[str] | None, labels: list[str] | None, dataset: str, image_shape: str | None
) -> None:
    if not features and not labels:
        return
    if not features or not labels:
        raise UsageError("--features and --labels belong together: give both")
    if dataset == "synthetic" or is_function_name(dataset):
        raise UsageError(f"--features has no effect with --dataset={dataset}")
    if image_shape is not None:
        raise UsageError("--image_shape has no effect with --features: they are taken as they are")
