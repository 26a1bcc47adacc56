"""Several models by name as one model of Keras, the ``model`` of a step that was given a dict; the
layers of a model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

import keras

from ctl.base.names import check_name
from ctl.errors import UsageError


class Models(keras.Model):
    """Models by name: ``models["generator"]`` is one of them.

    Its variables and layers are those of all, in the order of the names, whatever order the dict
    had. It computes nothing itself.

    Args:
        models: built models. A name is one that a Python variable could have.

    Raises:
        UsageError: there are no models, a name cannot be used, or a model is not built.
    """

    def __init__(self, models: Mapping[str, keras.Model]):
        for name, one in models.items():
            if not isinstance(name, str) or not name.isidentifier():
                raise UsageError(f"model {name!r}: its name must be a word of letters, such as 'g'")
            if not isinstance(one, keras.Layer):
                raise UsageError(f"model {name!r} is a {type(one).__name__}: give a keras.Model")
            if not one.built:
                raise UsageError(
                    f"model {name!r} is not built: give it a keras.Input, or call it on a batch"
                )
        if not models:
            raise UsageError("model is an empty dict: give models by name")
        super().__init__(name="_".join(sorted(models)))
        self._parts = {name: models[name] for name in sorted(models)}
        self.built = True

    def __getitem__(self, name: str) -> keras.Model:
        """The model ``name``. Raises `UsageError` if there is none."""
        check_name("model", name, self._parts)
        return self._parts[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    def keys(self) -> list[str]:
        """The names, sorted."""
        return list(self._parts)

    def items(self) -> list[tuple[str, keras.Model]]:
        """Each name with its model, sorted."""
        return list(self._parts.items())

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise UsageError(
            f"step.model holds the models {', '.join(self)}: call one of them, such as "
            f"step.model[{self.keys()[0]!r}]"
        )

    def save(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuses: there is no file of several models."""
        raise UsageError(
            f"step.model holds the models {', '.join(self)}: save each, such as "
            f"step.model[{self.keys()[0]!r}], or all with ctl.checkpoint.export_model"
        )

    export = save


def as_model(model: Any) -> Any:
    """``model``, or the `Models` of a dict."""
    return Models(model) if isinstance(model, Mapping) else model


def by_name(model: Any) -> dict[str, Any]:
    """The models of `Models` by name; any other model by the name ``""``."""
    return dict(model.items()) if isinstance(model, Models) else {"": model}


def split(
    model: Any, groups: Mapping[str, list[Any]], of: Mapping[str, Sequence[Any]]
) -> dict[str, list[Any]]:
    """Splits groups of a state by model: those of `Models` get ``model_g`` for ``model``.

    Args:
        model: of the step. If it is a single one, ``groups`` are returned as they are.
        groups: lists of what is saved, by the name of the group.
        of: for each group to split, the variables of the models that its elements stand for.
    """
    result: dict[str, list[Any]] = {}
    for group, saved in groups.items():
        if group not in of or not isinstance(model, Models):
            result[group] = saved
            continue
        saved_for = dict(zip(map(id, of[group]), saved, strict=True))
        for name, one in model.items():
            places = [id(v) for v in one.variables]
            result[f"{group}_{name}"] = [saved_for[p] for p in places if p in saved_for]
    return result


def layers_of(model: keras.Model) -> list[keras.Layer]:
    """All layers of ``model``, nested ones included."""
    return list(model._flatten_layers())  # Keras has no public way into nested layers
