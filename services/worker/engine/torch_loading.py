"""The part of loading that needs torch: weights, KV pool, decoder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

import torch

from services.worker.engine.attention import TorchAttention
from services.worker.engine.config import ModelConfig
from services.worker.engine.executor import Executor
from services.worker.engine.kv_cache import KvCache, kv_shape
from services.worker.engine.model import Decoder, Weights, load_weights
from services.worker.engine.rope import Rope
from services.worker.engine.torch_executor import TorchExecutor
from services.worker.engine.unsupported import BadEngineConfig
from services.worker.engine.weights import Checkpoint
from services.worker.engine_protocol import EngineConfig, Ready

DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def block_bytes(model: ModelConfig, config: EngineConfig) -> int:
    """Return the bytes of one KV block."""
    return kv_shape(model, block_size=config.block_size, dtype=DTYPES[config.dtype]).block_bytes


def load_weights_of(
    model: ModelConfig, model_dir: Path, config: EngineConfig, progress: Callable[[float], None]
) -> Weights:
    """Return the weights on the configured device. Raises BadCheckpoint, BadEngineConfig."""
    if config.threads:
        torch.set_num_threads(config.threads)
    device = _device(config)
    with torch.inference_mode(), Checkpoint(model_dir, model) as checkpoint:
        return load_weights(model, checkpoint, dtype=DTYPES[config.dtype], device=device, progress=progress)


def executor_of(model: ModelConfig, weights: Weights, config: EngineConfig, ready: Ready) -> Executor:
    """Return the executor with its KV pool allocated."""
    device, dtype = _device(config), DTYPES[config.dtype]
    with torch.inference_mode():
        cache = KvCache(
            kv_shape(model, block_size=ready.block_size, dtype=dtype), ready.kv_blocks_total, device
        )
        attention = TorchAttention(cache, windows=model.windows, device=device)
        rope = Rope(model.rope, max_model_len=ready.max_model_len, dtype=dtype, device=device)
    decoder = Decoder(model, weights, rope=rope, attention=attention)
    return TorchExecutor(decoder, attention, block_size=ready.block_size)


def _device(config: EngineConfig) -> torch.device:
    try:
        device = torch.device(config.device)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise BadEngineConfig(f"device {config.device} is not usable") from error
    return device
