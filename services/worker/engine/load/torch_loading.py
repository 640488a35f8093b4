"""The part of loading that needs torch: operators, weights, KV pool, decoder."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final

import structlog
import torch
from safetensors import safe_open

from fairway.formats.decoder_config import ModelConfig, parse_config
from fairway.formats.probe import PROBE, require_probe
from fairway.formats.weights import BadWeights, decoder_layout
from services.runtime.process.folders import cache_folder, keep_newest, name_folder
from services.worker.engine.cuda import backend as cuda_backend
from services.worker.engine.execute.adapters import AdapterSet
from services.worker.engine.execute.attention import Attention, TorchAttention
from services.worker.engine.execute.kv_cache import KvCache, kv_shape
from services.worker.engine.execute.model import Decoder, Weights, load_weights
from services.worker.engine.execute.operators import Operators, TorchOperators
from services.worker.engine.execute.probe import SafetyProbe
from services.worker.engine.execute.rope import Rope
from services.worker.engine.execute.torch_executor import Forward, HeldWeights, TorchExecutor
from services.worker.engine.load.config import names_in, read_json, read_part
from services.worker.engine.load.weights import Checkpoint, tensor_of
from services.worker.engine.native import prebuilt
from services.worker.engine.native.attention import NativeAttention, NativeKvCache
from services.worker.engine.native.build import BuildFailed, Toolchain, build, make_private
from services.worker.engine.native.check import wrong
from services.worker.engine.native.library import SUFFIX, Library, loaded_openmp
from services.worker.engine.native.operators import NativeOperators
from services.worker.engine.sample.sampler import torch_rule_out
from services.worker.engine.unsupported import BadCheckpoint, BadEngineConfig
from services.worker.engine_protocol import EngineConfig, Ready

MAX_KERNEL_BYTES: Final = 512 * 1024 * 1024
KERNELS_UNUSED_S: Final = 24 * 3600.0  # another engine may be reading what is younger
KERNELS_VARIABLE: Final = "TRITON_CACHE_DIR"


def keep_kernels_in(folder: Path) -> None:
    """Triton keeps kernels below ``folder``, unless the environment names a place: the newest
    ``MAX_KERNEL_BYTES``.

    Where others can write to the folder or replace it, Triton's own choice stays. Call it before the first.
    """
    kernels = folder / "triton"
    try:
        make_private(kernels)
        keep_newest(kernels, MAX_KERNEL_BYTES, unused_s=KERNELS_UNUSED_S)
    except (BuildFailed, OSError) as error:
        log.warning("kernels.cache_not_used", reason=str(error))
    else:
        name_folder(KERNELS_VARIABLE, kernels)


def load_library(cache: Path, dtype: torch.dtype, *, beforehand: Path = prebuilt.FOLDER) -> Library:
    """Return the operators for the data type, compiled beforehand or now. Raises BuildFailed."""
    if dtype not in SUFFIX:
        raise BuildFailed(f"there are no operators for {dtype}")
    openmp = loaded_openmp()
    try:
        if (found := prebuilt.find(beforehand, openmp)) is not None:
            return _tried(found, dtype)
    except BuildFailed as error:
        log.warning("operators.prebuilt_refused", reason=str(error))
    return _tried(build(cache, Toolchain(openmp=openmp)), dtype)


def _tried(path: Path, dtype: torch.dtype) -> Library:
    try:
        library = Library(path, dtype)
    except (OSError, AttributeError) as error:
        raise BuildFailed(f"{path.name} cannot be loaded: {error}") from error
    if names := wrong(library, dtype):
        raise BuildFailed(f"{path.name} computes wrongly: {', '.join(names)}")
    return library


DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16}

log = structlog.get_logger()


def block_bytes(model: ModelConfig, config: EngineConfig) -> int:
    """Return the bytes of one KV block."""
    return kv_shape(model, block_size=config.block_size, dtype=DTYPES[config.dtype]).block_bytes


def load_weights_of(
    model: ModelConfig, model_dir: Path, config: EngineConfig, report: Callable[[str, float], None]
) -> Weights:
    """Return the weights on the configured device. Raises BadCheckpoint, BadEngineConfig.

    ``report`` receives the phases "operators", which may compile for some time, and "weights".
    """
    if config.threads:
        torch.set_num_threads(config.threads)
    device = device_of(config.device)
    if device.type == "cuda" and config.operators_cache:
        keep_kernels_in(Path(config.operators_cache))
    with torch.inference_mode(), Checkpoint(model_dir, decoder_layout(model)) as checkpoint:
        report("operators", 0.0)
        operators = operators_of(model, config, device)
        report("operators", 1.0)
        return _read(model, checkpoint, config, operators, lambda ratio: report("weights", ratio))


def _read(
    model: ModelConfig,
    checkpoint: Checkpoint,
    config: EngineConfig,
    operators: Operators,
    progress: Callable[[float], None],
) -> Weights:
    """Return the weights of an open checkpoint, packed by the operators."""
    return load_weights(
        model,
        checkpoint,
        dtype=DTYPES[config.dtype],
        device=device_of(config.device),
        operators=operators,
        progress=progress,
    )


class ReplaceableWeights:
    """The weights of one model on one device. Nothing but decoders refers to what is ``loaded``."""

    def __init__(self, model: ModelConfig, config: EngineConfig, loaded: Weights) -> None:
        self._model = model
        self._config = config
        self._loaded: Weights | None = loaded
        self.operators = loaded.operators

    @property
    def loaded(self) -> Weights:
        assert self._loaded is not None, "a replacement failed"
        return self._loaded

    def check(self, folder: Path) -> None:
        """See ``WeightStore.check_weights``."""
        if parse_config(read_json(folder / "config.json")) != self._model:
            raise BadCheckpoint("config.json describes another model than the one that is loaded")
        with Checkpoint(folder, decoder_layout(self._model)):
            pass

    def load(self, folder: Path, report: Callable[[float], None]) -> None:
        """Free the weights and load those of the folder. After an exception there are none."""
        self._loaded = None
        with torch.inference_mode(), Checkpoint(folder, decoder_layout(self._model)) as checkpoint:
            self._loaded = _read(self._model, checkpoint, self._config, self.operators, report)


def load_probe(model: ModelConfig, model_dir: Path, config: EngineConfig) -> SafetyProbe | None:
    """Return the version's probe on the configured device, None without one. Raises BadCheckpoint."""
    try:
        categories = require_probe(names_in(model_dir), partial(read_part, model_dir), model.hidden_size)
    except BadWeights as error:
        raise BadCheckpoint(str(error)) from error
    if not categories:
        return None
    device = device_of(config.device)
    with torch.inference_mode(), safe_open(model_dir / PROBE, framework="pt", device="cpu") as file:
        weight, bias = (tensor_of(file, name, torch.float32).to(device) for name in ("weight", "bias"))
    reductions = cuda_backend.reductions_of(config, has_kernels=cuda_backend.has_kernels(device))
    return SafetyProbe(weight, bias, reductions)


def executor_of(
    model: ModelConfig,
    weights: Weights,
    config: EngineConfig,
    ready: Ready,
    *,
    blocks: int | None = None,
    probe: SafetyProbe | None = None,
) -> TorchExecutor:
    """Return the executor with ``blocks`` of its KV pool allocated, or all; it may grow to all."""
    device, dtype = device_of(config.device), DTYPES[config.dtype]
    has_kernels = cuda_backend.has_kernels(device)
    operators, held = weights.operators, ReplaceableWeights(model, config, weights)
    del weights  # what is replaced must have no other holder
    with torch.inference_mode():
        rope = Rope(model.rope, max_model_len=ready.max_model_len, dtype=dtype, device=device)
        first = ready.kv_blocks_total if blocks is None else blocks
        cache = _pool(model, operators, config, ready, blocks=first, has_kernels=has_kernels)

    # A graph would have to be captured for each adapter: CUDA's kernels serve none.
    adapters = None if device.type != "cpu" else AdapterSet(model, operators, dtype)

    def build(warm: bool) -> tuple[Forward, Attention]:
        with torch.inference_mode():
            attention = _attention(model, operators, config, cache, has_kernels=has_kernels)
            decoder: Forward = Decoder(model, held.loaded, rope=rope, attention=attention, adapters=adapters)
            if has_kernels:
                keeps = probe is not None
                decoder = cuda_backend.graphed(
                    decoder, attention, model, config, device, warm=warm, keeps_hidden=keeps
                )
        return decoder, attention

    return TorchExecutor(
        *build(True),
        cache,
        cuda_backend.reductions_of(config, has_kernels=has_kernels),
        rule_out=operators.rule_out if isinstance(operators, NativeOperators) else torch_rule_out,
        rebuild=build,
        runs_ahead=device.type == "cuda",
        adapters=adapters,
        probe=probe,
        weights=HeldWeights(held.check, held.load),
    )


def operators_of(model: ModelConfig, config: EngineConfig, device: torch.device) -> Operators:
    """Return C++ operators on a CPU, fused ones on CUDA, where they can be had. Raises BadEngineConfig."""
    if config.operators == "auto" and cuda_backend.has_kernels(device):
        return cuda_backend.fused_operators(model, config)
    fallback = TorchOperators(kv_heads=model.kv_heads, eps=model.norm_eps)
    if config.mode == "exact" and (config.operators == "torch" or device.type != "cpu"):
        raise BadEngineConfig(f"torch's operators on {device} cannot promise mode 'exact'; 'auto' takes them")
    if config.operators == "torch" or (config.operators == "auto" and device.type != "cpu"):
        return fallback
    dtype = DTYPES[config.dtype]
    try:
        if device.type != "cpu":
            raise BuildFailed(f"they are for the CPU, not for {device}")
        library = load_library(_operators_folder(config), dtype)
    except BuildFailed as error:
        if config.operators == "native" or config.mode == "exact":
            raise BadEngineConfig(f"no native operators: {error}") from error
        log.warning("operators.not_built", reason=str(error))
        return fallback
    threads = torch.get_num_threads()
    log.info("operators.loaded", library=library.name, threads=threads, mode=config.mode)
    # torch's linears are faster on processors that multiply bfloat16 matrices.
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


def _pool(
    model: ModelConfig,
    operators: Operators,
    config: EngineConfig,
    ready: Ready,
    *,
    blocks: int,
    has_kernels: bool,
) -> NativeKvCache | KvCache:
    """Return the pool as the backend that goes with the operators reads it."""
    shape = kv_shape(model, block_size=ready.block_size, dtype=DTYPES[config.dtype])
    most = ready.kv_blocks_total
    if isinstance(operators, NativeOperators):
        return NativeKvCache(shape, blocks, most_blocks=most)
    spare = cuda_backend.PADDING_BLOCKS if has_kernels else 0
    return KvCache(shape, blocks, device_of(config.device), most_blocks=most, spare_blocks=spare)


def _attention(
    model: ModelConfig,
    operators: Operators,
    config: EngineConfig,
    cache: NativeKvCache | KvCache,
    *,
    has_kernels: bool,
) -> Attention:
    """Return the backend that goes with the operators, over its pool of the present size."""
    if isinstance(cache, NativeKvCache):
        assert isinstance(operators, NativeOperators), "the pool is theirs"
        threads = torch.get_num_threads()
        return NativeAttention(operators.library, cache, windows=model.windows, threads=threads)
    device = device_of(config.device)
    if has_kernels:
        return cuda_backend.paged_attention(model, cache, config, device)
    return TorchAttention(cache, windows=model.windows, device=device)


def device_of(name: str) -> torch.device:
    """Return the device of this name, which computes. Raises BadEngineConfig."""
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise BadEngineConfig(f"device {name} is not usable") from error
    return device
