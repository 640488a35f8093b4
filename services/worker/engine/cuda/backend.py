"""Which parts compute on a CUDA device, by what the device and the installation have.

Triton kernels need Triton, which torch's CUDA builds bring along, and a device with bfloat16 arithmetic.
Graphs need a rotary embedding that is a table: dynamic NTK and LongRoPE look at lengths on the host.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Final

import structlog
import torch

from fairway.formats.decoder_config import ModelConfig
from services.worker.engine.cuda.graphs import CudaCapture, GraphedDecoder, batch_sizes
from services.worker.engine.cuda.plan import Cutting, Padding, cutting_for
from services.worker.engine.cuda.varlen_prefill import takes_block_tables
from services.worker.engine.execute.attention import Attention
from services.worker.engine.execute.kv_cache import KvCache, KvShape
from services.worker.engine.execute.operators import Operators
from services.worker.engine.execute.torch_executor import Forward
from services.worker.engine.sample.sampler import Reductions, TorchReductions
from services.worker.engine_protocol import EngineConfig

if TYPE_CHECKING:  # importing it imports Triton
    from services.worker.engine.cuda.attention import TritonAttention

log = structlog.get_logger()

CAPABILITY: Final = (8, 0)  # Ampere
PADDING_BLOCKS: Final = 1  # blocks that no planner gives away, because rows of padding write there


def has_kernels(device: torch.device) -> bool:
    """Whether the Triton kernels run on this device."""
    if device.type != "cuda" or find_spec("triton") is None:
        return False
    return torch.cuda.get_device_capability(device) >= CAPABILITY and _launches(device)


def _launches(device: torch.device) -> bool:
    """Whether a kernel of ours compiles here, which takes a C compiler on the host, and computes."""
    from services.worker.engine.cuda.operators import TritonOperators

    try:
        width = 16
        gated = TritonOperators(kv_heads=1, eps=1e-6).gated(
            [torch.ones(2 * width, width, device=device)], None
        )
        found = gated(torch.ones(1, width, device=device)).cpu()
    except Exception as error:  # whatever Triton, its compiler or the driver raise: torch computes then
        log.warning("kernels.not_used", reason=f"{type(error).__name__}: {error}"[:500])
        return False
    expected = torch.nn.functional.silu(torch.full((1, width), float(width))) * width
    return bool(torch.allclose(found, expected, rtol=1e-3))


def fused_operators(model: ModelConfig, config: EngineConfig) -> Operators:
    """Return Triton's operators: all of them in mode "exact", else those between cuBLAS's products."""
    from services.worker.engine.cuda.exact import ExactOperators
    from services.worker.engine.cuda.operators import TritonOperators

    kind = ExactOperators if config.mode == "exact" else TritonOperators
    return kind(kv_heads=model.kv_heads, eps=model.norm_eps)


def reductions_of(config: EngineConfig, *, has_kernels: bool) -> Reductions:
    """Return what the sampler sums rows with."""
    if config.mode != "exact" or not has_kernels:
        return TorchReductions()
    from services.worker.engine.cuda.exact import TritonReductions

    return TritonReductions()


def cutting_of(shape: KvShape, device: torch.device, *, exact: bool) -> Cutting:
    """Return how attention is cut for this device."""
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    return cutting_for(
        shape.dtype.itemsize, shape.head_dim, kv_heads=shape.kv_heads, processors=processors, exact=exact
    )


def paged_attention(
    model: ModelConfig, cache: KvCache, config: EngineConfig, device: torch.device
) -> TritonAttention:
    """Return the backend over a pool of its present size, with PADDING_BLOCKS after those of the planner."""
    from services.worker.engine.cuda.attention import TritonAttention

    shape, blocks = cache.shape, cache.blocks
    cutting = cutting_of(shape, device, exact=config.mode == "exact")
    padding = Padding(
        batch_sizes(config.max_sequences),
        scratch_slot=blocks * shape.block_size,
        table_entries=blocks + config.max_sequences,
    )
    return TritonAttention(
        cache,
        windows=model.windows,
        device=device,
        cutting=cutting,
        padding=padding,
        torch_prefills=not cutting.exact and takes_block_tables(model, device, shape.block_size, shape.dtype),
    )


def graphed(
    decoder: Forward,
    attention: Attention,
    model: ModelConfig,
    config: EngineConfig,
    device: torch.device,
    *,
    warm: bool,
    keeps_hidden: bool,
) -> Forward:
    """Return the decoder, with graphs where it supports them; ``warm`` captures all batch sizes at once.
    ``keeps_hidden``: steps whose hidden states are requested have graphs too."""
    from services.worker.engine.cuda.attention import TritonAttention

    if model.rope.depends_on_length or not isinstance(attention, TritonAttention):
        return decoder
    result = GraphedDecoder(
        decoder,
        attention,
        sizes=batch_sizes(config.max_sequences),
        vocab_size=model.vocab_size,
        device=device,
        capture=CudaCapture(),
        hidden_size=model.hidden_size if keeps_hidden else 0,
    )
    if warm:
        result.warm_up()
    return result
