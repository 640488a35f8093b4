"""A plain multi-layer perceptron from a described list of layers.

    {"architectures": ["Mlp"], "input_size": 256,
     "layers": [{"size": 1024, "activation": "relu"}, {"size": 16, "activation": "none"}]}

Its tensors are ``layers.0.weight`` [size, input], ``layers.0.bias`` [size], and so on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from fairway.formats.config_fields import UnsupportedModel, positive_int
from fairway.formats.fixed_cost.encoder_config import ACTIVATIONS

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
