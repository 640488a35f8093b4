"""The part of loading that needs torch: operators, weights, KV pool, decoder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

import structlog
import torch

from services.runtime.folders import cache_folder
from services.worker.engine.attention import Attention, TorchAttention
from services.worker.engine.config import ModelConfig
from services.worker.engine.cuda import backend as cuda_backend
from services.worker.engine.kv_cache import KvCache, KvPool, kv_shape
from services.worker.engine.model import Decoder, Weights, load_weights
from services.worker.engine.native.attention import NativeAttention, NativeKvCache
from services.worker.engine.native.build import BuildFailed
from services.worker.engine.native.loading import load_library
from services.worker.engine.native.operators import NativeOperators
from services.worker.engine.operators import Operators, TorchOperators
from services.worker.engine.rope import Rope
from services.worker.engine.torch_executor import Forward, TorchExecutor
from services.worker.engine.unsupported import BadEngineConfig
from services.worker.engine.weights import Checkpoint
from services.worker.engine_protocol import EngineConfig, Ready

DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16}

log = structlog.get_logger()


def block_bytes(model: ModelConfig, config: EngineConfig) -> int:
    """Return the bytes of one KV block."""
    return kv_shape(model, block_size=config.block_size, dtype=DTYPES[config.dtype]).block_bytes


def load_weights_of(
    model: ModelConfig, model_dir: Path, config: EngineConfig, report: Callable[[str, float], None]
) -> Weights:
    """Return the weights on the configured device. Raises BadCheckpoint, BadEngineConfig.

    ``report`` is told the phases "operators", which may compile for some time, and "weights".
    """
    if config.threads:
        torch.set_num_threads(config.threads)
    device = _device(config)
    with torch.inference_mode(), Checkpoint(model_dir, model) as checkpoint:
        report("operators", 0.0)
        operators = operators_of(model, config, device)
        report("operators", 1.0)
        return load_weights(
            model,
            checkpoint,
            dtype=DTYPES[config.dtype],
            device=device,
            operators=operators,
            progress=lambda ratio: report("weights", ratio),
        )


def executor_of(model: ModelConfig, weights: Weights, config: EngineConfig, ready: Ready) -> TorchExecutor:
    """Return the executor with its KV pool allocated."""
    device, dtype = _device(config), DTYPES[config.dtype]
    with torch.inference_mode():
        attention, cache = _attention(model, weights.operators, config, ready)
        rope = Rope(model.rope, max_model_len=ready.max_model_len, dtype=dtype, device=device)
        decoder: Forward = Decoder(model, weights, rope=rope, attention=attention)
        if cuda_backend.has_kernels(device):
            decoder = cuda_backend.graphed(decoder, attention, model, config, device)
    return TorchExecutor(decoder, attention, cache)


def operators_of(model: ModelConfig, config: EngineConfig, device: torch.device) -> Operators:
    """Return C++ operators on a CPU, fused ones on CUDA, where they can be had. Raises BadEngineConfig."""
    if config.operators == "auto" and cuda_backend.has_kernels(device):
        return cuda_backend.fused_operators(model)
    fallback = TorchOperators(kv_heads=model.kv_heads, eps=model.norm_eps)
    if config.operators == "torch" or (config.operators == "auto" and device.type != "cpu"):
        return fallback
    dtype = DTYPES[config.dtype]
    try:
        if device.type != "cpu":
            raise BuildFailed(f"they are for the CPU, not for {device}")
        library = load_library(_operators_folder(config), dtype)
    except BuildFailed as error:
        if config.operators == "native":
            raise BadEngineConfig(f"no native operators: {error}") from error
        log.warning("operators.not_built", reason=str(error))
        return fallback
    threads = torch.get_num_threads()
    log.info("operators.loaded", threads=threads, mode=config.mode)
    # Where processors multiply bfloat16 matrices, torch's linears are the faster ones.
    linears = fallback if config.mode == "free" and dtype is torch.bfloat16 else None
    return NativeOperators(
        library, kv_heads=model.kv_heads, eps=model.norm_eps, threads=threads, linears=linears
    )


def _operators_folder(config: EngineConfig) -> Path:
    """Return where compiled operators are. Raises BuildFailed where nothing names a folder of the user."""
    if config.operators_cache:
        return Path(config.operators_cache)
    try:
        return cache_folder() / "fairway"
    except RuntimeError as error:  # no HOME, and the user is in no passwd file
        raise BuildFailed(f"operators_cache is empty, and there is no cache folder: {error}") from error


def _attention(
    model: ModelConfig, operators: Operators, config: EngineConfig, ready: Ready
) -> tuple[Attention, KvPool]:
    """Return the backend that goes with the operators, and its pool."""
    shape = kv_shape(model, block_size=ready.block_size, dtype=DTYPES[config.dtype])
    if isinstance(operators, NativeOperators):
        pool = NativeKvCache(shape, ready.kv_blocks_total)
        native = NativeAttention(
            operators.library, pool, windows=model.windows, threads=torch.get_num_threads()
        )
        return native, pool
    device = _device(config)
    if cuda_backend.has_kernels(device):
        return cuda_backend.paged_attention(model, shape, config, ready, device)
    cache = KvCache(shape, ready.kv_blocks_total, device)
    return TorchAttention(cache, windows=model.windows, device=device), cache


def _device(config: EngineConfig) -> torch.device:
    try:
        device = torch.device(config.device)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise BadEngineConfig(f"device {config.device} is not usable") from error
    return device
