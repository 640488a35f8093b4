"""How long an engine step takes, how much KV a device holds, and how long its weights take to load.

    step_s = base_s
           + max(weight_read_s, prefill_tokens * prefill_token_s + decodes * decode_sequence_s)
           + attended_tokens * attended_token_s
           + prefill_attended_tokens * prefill_attended_token_s

The linear layers of a step compute all of its rows in one pass over the weights, so reading and computing
overlap and the longer of the two counts (the roofline of Williams et al., CACM 2009): that is why prefill
tokens in a step with few decodes cost next to nothing (Sarathi-Serve, OSDI'24). Attention runs in
kernels of its own between them, so its time adds up: decodes read the KV of every token that they attend to,
and a prefill chunk computes with all that stands before it. Launching and sampling are the base.
With ``weight_read_s`` 0 the model is linear, which is the form that a fit yields.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import msgspec


@dataclass(frozen=True, slots=True)
class CostModel:
    """Seconds per unit of work, and sizes in bytes."""

    name: str
    base_s: float
    prefill_token_s: float
    decode_sequence_s: float
    # Per token of KV that a step's decodes read.
    attended_token_s: float = 0.0
    # 0: the model is linear.
    weight_read_s: float = 0.0
    # Per token before a prefill token, summed over the prefill tokens.
    prefill_attended_token_s: float = 0.0
    kv_bytes_per_token: int = 131_072
    kv_memory_bytes: int = 8 * 1024**3
    weight_bytes: int = 0
    # Loading takes start_s and the weights at this rate.
    load_bytes_per_s: float = 2e9
    start_s: float = 5.0

    def __post_init__(self) -> None:
        times = (
            self.base_s,
            self.prefill_token_s,
            self.decode_sequence_s,
            self.attended_token_s,
            self.weight_read_s,
            self.prefill_attended_token_s,
            self.start_s,
        )
        # Written so that NaN fails.
        if not all(0.0 <= time_s < 3600.0 for time_s in times) or self.base_s + self.weight_read_s <= 0.0:
            raise ValueError(f"cost model {self.name}: times are from 0 to 3600 s, and a step takes some")
        if min(self.kv_bytes_per_token, self.kv_memory_bytes) < 1 or self.weight_bytes < 0:
            raise ValueError(f"cost model {self.name}: sizes are positive")
        if not self.load_bytes_per_s > 0.0:
            raise ValueError(f"cost model {self.name}: weights load at more than 0 bytes per second")

    def step_s(
        self, prefill_tokens: int, decodes: int, attended_tokens: int, prefill_attended_tokens: int = 0
    ) -> float:
        """Return the seconds of one step."""
        linear_s = prefill_tokens * self.prefill_token_s + decodes * self.decode_sequence_s
        return (
            self.base_s
            + (linear_s if linear_s > self.weight_read_s else self.weight_read_s)
            + attended_tokens * self.attended_token_s
            + prefill_attended_tokens * self.prefill_attended_token_s
        )

    def prefill_s(self, tokens: int, *, chunk_tokens: int = 2048) -> float:
        """Return the seconds of a prompt alone on the device, in chunks."""
        total_s = 0.0
        for start in range(0, tokens, chunk_tokens):
            end = min(tokens, start + chunk_tokens)
            total_s += self.step_s(end - start, 0, 0, span_tokens(start, end))
        return total_s

    def kv_blocks(self, block_size: int) -> int:
        """Return how many blocks of ``block_size`` tokens fit into its memory with the weights."""
        return self.kv_memory_bytes // (block_size * self.kv_bytes_per_token)

    @property
    def load_s(self) -> float:
        """Seconds from the start of an engine process until it is ready."""
        return self.start_s + self.weight_bytes / self.load_bytes_per_s


def slowed(model: CostModel, ratio: float) -> CostModel:
    """Return the model with steps that take ``ratio`` times as long."""
    return replace(
        model,
        base_s=model.base_s * ratio,
        prefill_token_s=model.prefill_token_s * ratio,
        decode_sequence_s=model.decode_sequence_s * ratio,
        attended_token_s=model.attended_token_s * ratio,
        weight_read_s=model.weight_read_s * ratio,
        prefill_attended_token_s=model.prefill_attended_token_s * ratio,
    )


def span_tokens(start: int, end: int) -> int:
    """Return the sum over positions ``start`` to ``end`` of the tokens before each."""
    return (start + end - 1) * (end - start) // 2


# --- presets -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DevicePeaks:
    """Published peak figures: dense bf16 operations per second, bytes per second of memory, bytes."""

    flops_per_s: float
    memory_bytes_per_s: float
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A decoder in bf16. ``parameters`` without the input embedding, which a step only looks up."""

    parameters: float
    embedding_parameters: float
    layers: int
    heads: int
    kv_heads: int
    head_dim: int

    @property
    def weight_bytes(self) -> int:
        return int(2 * (self.parameters + self.embedding_parameters))

    @property
    def kv_bytes_per_token(self) -> int:
        """Keys and values of every layer, two bytes each."""
        return 2 * 2 * self.layers * self.kv_heads * self.head_dim


# Sources, dense figures without structured sparsity: NVIDIA A10 datasheet (125 TFLOPS, 600 GB/s, 24 GB);
# A100 80GB SXM datasheet (312 TFLOPS, 2,039 GB/s); H100 SXM datasheet (989 TFLOPS, 3.35 TB/s, 80 GB);
# H200 SXM datasheet (989 TFLOPS, 4.8 TB/s, 141 GB).
DEVICES: Final = {
    "a10": DevicePeaks(125e12, 600e9, 24 * 10**9),
    "a100": DevicePeaks(312e12, 2039e9, 80 * 10**9),
    "h100": DevicePeaks(989e12, 3350e9, 80 * 10**9),
    "h200": DevicePeaks(989e12, 4800e9, 141 * 10**9),
}

# Shapes of the models' own config.json.
LLAMA_3_8B: Final = ModelShape(7.50e9, 0.525e9, layers=32, heads=32, kv_heads=8, head_dim=128)
LLAMA_3_70B: Final = ModelShape(69.5e9, 1.05e9, layers=80, heads=64, kv_heads=8, head_dim=128)

# What kernels reach of the peaks. 0.6 and 0.8 put the A100 within 20 % of the published rates of a 7B model
# (TensorRT-LLM v0.6.1 performance.md; LMDeploy benchmark a100_fp16.md), which tests/sim/engine holds them to.
COMPUTE_EFFICIENCY: Final = 0.6
ATTENTION_EFFICIENCY: Final = 0.35  # efficiency of causal chunks with a long context
MEMORY_EFFICIENCY: Final = 0.8
MEMORY_UTILISATION: Final = 0.9  # the rest is the allocator's and other processes'
ACTIVATION_BYTES: Final = 2 * 10**9
BASE_S: Final = 0.002  # launches, sampling, the plan
TENSOR_PARALLEL_EFFICIENCY: Final = 0.85  # the share left after all-reduces over NVLink
LOAD_BYTES_PER_S: Final = 2e9  # local NVMe to the device
START_S: Final = 10.0  # process, imports, graph capture


def derive(name: str, device: DevicePeaks, shape: ModelShape, *, devices: int = 1) -> CostModel:
    """Return the cost model of a decoder on ``devices`` of one kind in tensor parallel.

    Raises ValueError if the weights leave no memory for KV.
    """
    share = devices * (TENSOR_PARALLEL_EFFICIENCY if devices > 1 else 1.0)
    flops_per_s = device.flops_per_s * share
    bytes_per_s = device.memory_bytes_per_s * MEMORY_EFFICIENCY * share
    row_s = 2 * shape.parameters / (flops_per_s * COMPUTE_EFFICIENCY)
    attention_flops = 4 * shape.layers * shape.heads * shape.head_dim  # scores and values, a token attended
    memory = int(devices * (device.memory_bytes * MEMORY_UTILISATION - ACTIVATION_BYTES))
    return CostModel(
        name=name,
        base_s=BASE_S,
        prefill_token_s=row_s,
        decode_sequence_s=row_s,
        attended_token_s=shape.kv_bytes_per_token / bytes_per_s,
        weight_read_s=2 * shape.parameters / bytes_per_s,
        prefill_attended_token_s=attention_flops / (flops_per_s * ATTENTION_EFFICIENCY),
        kv_bytes_per_token=shape.kv_bytes_per_token,
        kv_memory_bytes=memory - shape.weight_bytes,
        weight_bytes=shape.weight_bytes,
        load_bytes_per_s=LOAD_BYTES_PER_S,
        start_s=START_S,
    )


# The bundled model (models/tiny) in float32 on one thread of a server CPU, fitted to 26 phases of steps by
# the thread's own time: half of the phases are predicted to within 5 %, nine of ten to within 11 %.
TINY_CPU: Final = CostModel(
    name="tiny-cpu",
    base_s=2.9e-3,
    prefill_token_s=105e-6,
    decode_sequence_s=232e-6,
    attended_token_s=0.65e-6,
    kv_bytes_per_token=6144,
    kv_memory_bytes=256 * 1024**2,
    weight_bytes=21_902_336,
    start_s=2.0,
)

PRESETS: Final = {
    **{name: derive(name, device, LLAMA_3_8B) for name, device in DEVICES.items()},
    "h100x4-70b": derive("h100x4-70b", DEVICES["h100"], LLAMA_3_70B, devices=4),
    "tiny-cpu": TINY_CPU,
}


# --- files -------------------------------------------------------------------------------------------


def encode(model: CostModel) -> bytes:
    """Return the model as indented JSON."""
    return msgspec.json.format(msgspec.json.encode(model), indent=2) + b"\n"


def decode(text: bytes) -> CostModel:
    """Return the model in a JSON text. Raises ValueError."""
    try:
        return msgspec.json.decode(text, type=CostModel)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(f"no cost model: {error}") from error
