"""The model that a folder declares, if it answers a request with one forward pass."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any, Final

from fairway.formats.config_fields import UnsupportedModel
from fairway.formats.fixed_cost.encoder_config import ARCHITECTURES as ENCODERS
from fairway.formats.fixed_cost.encoder_config import EncoderConfig, parse_encoder
from fairway.formats.fixed_cost.image_config import (
    RESNET,
    VIT,
    ResNetConfig,
    VitConfig,
    parse_resnet,
    parse_vit,
)
from fairway.formats.fixed_cost.mlp_config import MLP, MlpConfig, parse_mlp
from fairway.formats.fixed_cost.pooling import max_tokens, pooled, require_case

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
