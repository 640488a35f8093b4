"""The model that a folder declares, if it answers a request with one forward pass.

A plain multi-layer perceptron is a described list of layers:

    {"architectures": ["Mlp"], "input_size": 256,
     "layers": [{"size": 1024, "activation": "relu"}, {"size": 16, "activation": "none"}]}

Its tensors are ``layers.0.weight`` [size, input], ``layers.0.bias`` [size], and so on.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from fairway.formats.config_fields import UnsupportedModel, positive_int
from fairway.formats.fixed_cost.encoder_config import ACTIVATIONS, EncoderConfig, parse_encoder
from fairway.formats.fixed_cost.encoder_config import ARCHITECTURES as ENCODERS
from fairway.formats.fixed_cost.image_config import (
    RESNET,
    VIT,
    ResNetConfig,
    VitConfig,
    parse_resnet,
    parse_vit,
)
from fairway.formats.fixed_cost.pooling import max_tokens, pooled, require_case

MLP: Final = "Mlp"
MAX_MLP_LAYERS: Final = 256
MAX_WIDTH: Final = 1 << 20
LINEAR: Final = "none"  # a layer without an activation
_FIELDS: Final = frozenset(("architectures", "model_type", "input_size", "layers"))
_LAYER_FIELDS: Final = frozenset(("size", "activation"))


@dataclass(frozen=True, slots=True)
class MlpLayer:
    size: int
    activation: str


@dataclass(frozen=True, slots=True)
class MlpConfig:
    input_size: int
    layers: tuple[MlpLayer, ...]


def parse_mlp(fields: Mapping[str, Any]) -> MlpConfig:
    """Return the layers. Raises UnsupportedModel; a field that is not described is an error too."""
    if unknown := sorted(fields.keys() - _FIELDS):
        raise UnsupportedModel(unknown[0], fields[unknown[0]])
    if fields.get("model_type", "mlp") != "mlp":
        raise UnsupportedModel("model_type", fields["model_type"])
    layers = fields.get("layers")
    if not isinstance(layers, list) or not 0 < len(layers) <= MAX_MLP_LAYERS:
        raise UnsupportedModel("layers", "missing" if layers is None else layers)
    parsed = tuple(_layer(index, layer) for index, layer in enumerate(layers))
    return MlpConfig(positive_int(fields, "input_size", most=MAX_WIDTH), parsed)


def _layer(index: int, layer: Any) -> MlpLayer:
    where = f"layers[{index}]"
    if not isinstance(layer, dict):
        raise UnsupportedModel(where, layer)
    if unknown := sorted(layer.keys() - _LAYER_FIELDS):
        raise UnsupportedModel(f"{where}.{unknown[0]}", layer[unknown[0]])
    activation = layer.get("activation", LINEAR)
    if activation != LINEAR and activation not in ACTIVATIONS:
        raise UnsupportedModel(f"{where}.activation", activation)
    try:
        return MlpLayer(positive_int(layer, "size", most=MAX_WIDTH), activation)
    except UnsupportedModel as refused:
        raise UnsupportedModel(f"{where}.{refused.field}", refused.value) from refused


FixedCostConfig = EncoderConfig | ResNetConfig | VitConfig | MlpConfig

CONFIG: Final = "config.json"
_OTHERS: Final[Mapping[str, Callable[[Mapping[str, Any]], FixedCostConfig]]] = {
    RESNET: parse_resnet,
    VIT: parse_vit,
    MLP: parse_mlp,
}


def is_fixed_cost(fields: Mapping[str, Any]) -> bool:
    """Whether a ``config.json`` declares one architecture that is served as a fixed-cost model."""
    names = fields.get("architectures")
    return (
        isinstance(names, list)
        and len(names) == 1
        and isinstance(names[0], str)
        and (names[0] in ENCODERS or names[0] in _OTHERS)
    )


def parse_fixed_cost(names: Collection[str], read: Callable[[str], bytes]) -> FixedCostConfig:
    """Return the model that the files of these names declare.

    ``read`` returns a small file; its errors are passed on. Raises UnsupportedModel with the file, the field
    and its value.
    """

    def value_of(name: str) -> Any:
        try:
            return json.loads(read(name))
        except (ValueError, RecursionError) as error:
            raise UnsupportedModel(name, "not JSON") from error

    fields = value_of(CONFIG) if CONFIG in names else None
    if not isinstance(fields, dict):
        raise UnsupportedModel(CONFIG, "missing" if fields is None else type(fields).__name__)
    try:
        if not is_fixed_cost(fields):
            raise UnsupportedModel("architectures", fields.get("architectures"))
        (architecture,) = fields["architectures"]
        if architecture in _OTHERS:
            return _OTHERS[architecture](fields)
        config = parse_encoder(fields)
    except UnsupportedModel as refused:
        raise UnsupportedModel(f"{CONFIG}: {refused.field}", refused.value) from refused
    if config.head == "embedding":
        config = pooled(config, names, value_of)
    else:
        require_case(names, value_of)
    return replace(config, max_tokens=max_tokens(config.max_positions, names, value_of))
