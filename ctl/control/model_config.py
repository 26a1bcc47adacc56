"""Settings of the layers and the loss of a step that change its results, but neither its variables
nor its all-reduces, such as an activation.

They come from Keras's ``get_config``, without settings that do not matter after training has begun
(initializers, seeds), and without the numbers in Keras's names. The connections of layers are read
from the graph of the model, because the config of a whole model takes three times as long.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import json
import marshal
import math
import os
import types
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from ctl.distributed import replicas
from ctl.step import TrainStep

_MOST_CHARACTERS = 60  # of a value; a hash stands for a longer one
_SCALARS = bool, int, float, str

# Keras numbers names. The variables already hold the effect of a seed.
_LEFT_OUT = "name", "seed"

# Which kernels compute. XLA's flags are left out: most choose where it writes.
_ENVIRONMENT = "TF_ENABLE_ONEDNN_OPTS", "NVIDIA_TF32_OVERRIDE", "TF_DETERMINISTIC_OPS"

# Left out of a model's config, because `model_config` has the settings of each layer.
_OF_WHOLE_MODELS = "layers", "input_layers", "output_layers", "build_input_shape"


def global_settings() -> dict[str, Any]:
    """Returns the settings of this process that change the numbers of a step and stand in no layer:
    those of Keras, which ``~/.keras/keras.json`` may set on one machine alone, and of TensorFlow's
    kernels. JSON values by name."""
    environment = {f"the environment's {name}": os.environ.get(name, "") for name in _ENVIRONMENT}
    return {
        "keras.config.floatx()": keras.config.floatx(),
        "keras.config.epsilon()": keras.config.epsilon(),
        "keras.config.image_data_format()": keras.config.image_data_format(),
        "TensorFloat-32": tf.config.experimental.tensor_float_32_execution_enabled(),
        **environment,
    }


def model_config(step: TrainStep) -> dict[str, dict[str, Any]]:
    """Returns the settings of each layer and of the loss of a built ``step``: JSON values by name,
    in one dictionary per layer (``layer dense``). The second layer of a name is ``layer dense#2``,
    whatever number Keras gave it. Settings that are None are left out."""
    # Keras lists layers from the last to the first.
    layers = [
        one for one in replicas.layers_of(step.tracked.layer) if one is not step.tracked.layer
    ]
    layers.reverse()
    graphs = [layer for layer in layers if hasattr(layer, "_nodes_by_depth")]  # private, see below
    parts = [*layers, *(operation for graph in graphs for operation in graph.operations)]
    configs: dict[str, dict[str, Any]] = {"the loss": settings_of(step.loss_fn)}
    named = replicas.numbered({id(part): part for part in parts}.values())
    names = {id(part): name for name, part in named}
    configs |= {f"layer {name}": settings_of(part) for name, part in named}
    for layer in layers:
        if isinstance(layer, keras.Sequential):
            order = [names[id(one)] for one in layer.layers]
            configs[f"layer {names[id(layer)]}"]["layers"] = order
    for graph in graphs:
        for name, inputs in _connections(graph, names).items():
            configs[f"layer {name}"].setdefault("inputs", []).extend(inputs)
    return {name: _short(settings) for name, settings in configs.items()}


def settings_of(part: Any) -> dict[str, Any]:
    """Returns the settings, without the name, of a layer, graph operation, loss or optimizer."""
    if hasattr(part, "__qualname__"):
        return {"function": part.__qualname__}
    if isinstance(part, functools.partial):
        return {**settings_of(part.func), "arguments": _plain([*part.args, part.keywords])}
    kind = type(part)
    config: dict[str, Any] = {}
    if not isinstance(part, keras.Model) or not kind.__module__.startswith("keras."):
        try:
            config = part.get_config()
            if isinstance(part, keras.Model) and isinstance(config.get("layers"), list):
                config = {n: v for n, v in config.items() if n not in _OF_WHOLE_MODELS}
            config = dict(_plain(config))
        except Exception:  # no get_config, or the user's fails or returns no mapping
            attributes = {n: v for n, v in vars(part).items() if isinstance(v, _SCALARS)}
            config = _plain({n: v for n, v in attributes.items() if n[0] != "_" and n != "built"})
    if isinstance(part, keras.layers.InputLayer):
        config["batch_shape"] = config["batch_shape"][1:]  # in a Sequential, of its first call
    return {**config, "class": kind.__qualname__}


def _connections(graph: Any, names: Mapping[int, str]) -> dict[str, list[Any]]:
    """Returns the arguments of each operation of a functional model, by its name; and the inputs
    and outputs of the model, by the model's name."""
    made: dict[int, str] = {}  # the origin of each symbolic tensor, by its id
    inputs: dict[str, list[Any]] = {}
    # Private: the calls of the graph, by their distance from its outputs.
    for depth in sorted(graph._nodes_by_depth, reverse=True):
        for node in graph._nodes_by_depth[depth]:
            name = names[id(node.operation)]
            calls = inputs.setdefault(name, [])
            args, kwargs = node.arguments.args, _plain(node.arguments.kwargs, made)
            calls.append(_plain([*args, *([kwargs] if kwargs else [])], made))
            for number, output in enumerate(node.outputs):
                first = len(calls) == 1 and len(node.outputs) == 1
                made[id(output)] = name if first else f"{name} call {len(calls)} output {number}"
    inputs[names[id(graph)]] = [_plain([graph.inputs, graph.outputs], made)]
    return inputs


def _plain(value: Any, made: Mapping[int, str] = types.MappingProxyType({})) -> Any:
    """Returns ``value`` as JSON, equal in all processes: no addresses, paths or order of sets."""
    if id(value) in made:
        return made[id(value)]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if value is None or isinstance(value, _SCALARS):
        return value
    if isinstance(value, list | tuple):
        return [_plain(one, made) for one in value]
    if isinstance(value, set | frozenset):
        return sorted((_plain(one) for one in value), key=repr)
    if isinstance(value, np.ndarray | np.generic):
        return _plain(value.tolist())
    if isinstance(value, types.CodeType):
        return [value.co_code.hex(), list(value.co_names), _plain(value.co_consts)]
    if isinstance(value, Mapping):
        return _plain_mapping(value, made)
    if hasattr(value, "__qualname__"):
        return value.__qualname__
    if isinstance(value, functools.partial) or hasattr(value, "get_config"):
        return settings_of(value)
    return type(value).__qualname__


def _plain_mapping(value: Mapping[Any, Any], made: Mapping[int, str]) -> Any:
    if value.keys() == {"code", "defaults", "closure"}:  # a lambda, whose code has a path
        value = {**value, "code": marshal.loads(base64.b64decode(value["code"]))}
    if isinstance(config := value.get("config"), Mapping) and "class_name" in value:
        if value["class_name"].endswith("Policy") and "name" in config:  # a dtype
            return config["name"]
        return {value["class_name"]: _plain(config)}
    kept = {str(name): one for name, one in value.items() if one is not None}
    return {
        name: _plain(one, made)
        for name, one in kept.items()
        if name not in _LEFT_OUT and not name.endswith("initializer")
    }


def _short(settings: dict[str, Any]) -> dict[str, Any]:
    """``settings``, with a hash for each long value."""
    texts = {name: json.dumps(value, sort_keys=True) for name, value in settings.items()}
    return {
        name: value
        if len(texts[name]) <= _MOST_CHARACTERS
        else hashlib.sha256(texts[name].encode()).hexdigest()[:12]
        for name, value in settings.items()
    }
