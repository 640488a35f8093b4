"""From a version's folder to a model that has run once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np
import torch

from fairway.formats.fixed_cost.config import FixedCostConfig, parse_fixed_cost
from fairway.formats.fixed_cost.encoder_config import EncoderConfig
from fairway.formats.fixed_cost.image_config import ResNetConfig, VitConfig
from fairway.formats.fixed_cost.layouts import layout_of
from services.core.fixed_cost.signature import TensorSpec
from services.worker.batcher.models.blocks import TensorSource
from services.worker.batcher.models.mlp import MlpModel
from services.worker.batcher.models.model import FixedCostModel
from services.worker.batcher.models.resnet import ResNetModel
from services.worker.batcher.models.rows import DTYPES, Padded, Row
from services.worker.batcher.models.text import TokenModel
from services.worker.batcher.models.vit import VitModel
from services.worker.engine.load.config import read_part
from services.worker.engine.load.torch_loading import DTYPES as COMPUTED_IN
from services.worker.engine.load.torch_loading import device_of
from services.worker.engine.load.weights import Checkpoint
from services.worker.engine.unsupported import BadCheckpoint

AnyModel = TokenModel | VitModel | ResNetModel | MlpModel
WARM_UP_WIDTH: Final = 32  # padded width of the warm-up's row of one token


def load_model(model_dir: Path, *, device: str = "cpu", dtype: str = "float32") -> FixedCostModel:
    """Return the model that the folder declares, after one run. Raises LoadError, UnsupportedModel.

    ``dtype``: "float32" or "bfloat16".
    """
    config = declared_in(model_dir)
    where, loaded_bytes = device_of(device), 0
    with torch.inference_mode(), Checkpoint(model_dir, layout_of(config)) as checkpoint:

        def tensor(name: str) -> torch.Tensor:
            nonlocal loaded_bytes
            found = checkpoint.tensor(name, dtype=COMPUTED_IN[dtype]).to(where)
            loaded_bytes += found.nbytes
            return found

        model = _model_of(config, tensor, where)
    model.facts = replace(model.facts, dtype=dtype, weight_bytes=loaded_bytes)
    outputs = model.run(Padded([row_of_zeros(model.facts.inputs)], WARM_UP_WIDTH))
    if not all(np.isfinite(values).all() for values in outputs[0].values()):
        raise BadCheckpoint("the outputs are not finite in the warm-up: the weights are at fault")
    return model


def declared_in(model_dir: Path) -> FixedCostConfig:
    """Return the model that the folder declares. Raises UnsupportedModel."""
    names = sorted(path.relative_to(model_dir).as_posix() for path in model_dir.rglob("*"))
    return parse_fixed_cost(names, partial(read_part, model_dir))


def _model_of(config: FixedCostConfig, tensor: TensorSource, device: torch.device) -> AnyModel:
    match config:
        case EncoderConfig():
            return TokenModel(config, tensor, device=device)
        case ResNetConfig():
            return ResNetModel(config, tensor, device=device)
        case VitConfig():
            return VitModel(config, tensor, device=device)
        case _:
            return MlpModel(config, tensor, device=device)


def row_of_zeros(specs: Sequence[TensorSpec], length: int = 1) -> Row:
    """Return a row of zeros; a length of 1 fits any model."""
    return {spec.name: np.zeros(spec.shape_of(length), DTYPES[spec.datatype]) for spec in specs}
