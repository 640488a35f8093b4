"""A whole engine on the kernels, its decode steps padded and replayed, against the plain torch backend."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch

from bench.engines.load import Request
from bench.gpus.attention import prefill_s, whole_prompts
from bench.gpus.own import OwnEngine, own_engine
from bench.gpus.random_model import random_weights
from bench.gpus.shapes import SHAPES
from services.worker.engine.cuda.attention import TritonAttention
from services.worker.engine.cuda.graphs import Graph, GraphedDecoder, batch_sizes
from services.worker.engine.cuda.operators import TritonOperators
from services.worker.engine.cuda.plan import Cutting, Padding
from services.worker.engine.kv_cache import KvCache, kv_shape
from services.worker.engine.model import Decoder
from services.worker.engine.rope import Rope
from services.worker.engine.torch_executor import TorchExecutor
from services.worker.engine_protocol import EngineConfig

pytestmark = pytest.mark.timeout(900)

CPU = torch.device("cpu")
FIELDS = {**SHAPES["tiny"], "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
CONFIG = EngineConfig(
    socket_path="",
    model_dir="",
    operators="torch",
    block_size=4,
    kv_blocks=24,
    token_budget=24,
    max_sequences=4,
    prefix_cache=False,
)
MAX_MODEL_LEN = 64


class Replay:
    """Runs again what was captured, on the same buffers."""

    def __init__(self, run: Callable[[], None]) -> None:
        self.replay = run


def capture(run: Callable[[], None]) -> Graph:
    run()
    return Replay(run)


def on_kernels(own: OwnEngine, cutting: Cutting) -> OwnEngine:
    """Return the same engine with the backend that CUDA devices have."""
    operators = TritonOperators(kv_heads=own.model.kv_heads, eps=own.model.norm_eps)
    model, weights = random_weights(FIELDS, CONFIG, operators)
    blocks = CONFIG.kv_blocks
    cache = KvCache(kv_shape(model, block_size=CONFIG.block_size, dtype=torch.float32), blocks + 1, CPU)
    padding = Padding(batch_sizes(CONFIG.max_sequences), blocks * CONFIG.block_size, blocks + 8)
    attention = TritonAttention(cache, windows=model.windows, device=CPU, cutting=cutting, padding=padding)
    rope = Rope(model.rope, max_model_len=MAX_MODEL_LEN, dtype=torch.float32, device=CPU)
    graphed = GraphedDecoder(
        Decoder(model, weights, rope=rope, attention=attention),
        attention,
        sizes=padding.batch_sizes,
        vocab_size=model.vocab_size,
        device=CPU,
        capture=capture,
    )
    with torch.inference_mode():
        graphed.warm_up()
    runner = TorchExecutor(graphed, attention, cache)
    return OwnEngine(model, CONFIG, runner, own.ready)


@pytest.mark.parametrize("exact", [False, True])
def test_an_engine_on_the_kernels_produces_the_tokens_of_the_plain_one(exact: bool) -> None:
    """Prompts in chunks beside decodes, batches that grow and shrink, too few blocks for all at once."""
    torch.set_num_threads(1)
    own = own_engine(FIELDS, CONFIG, max_model_len=MAX_MODEL_LEN)
    requests = [Request([5 + n] * 3 + list(range(4, 4 + 11 * n)), 3 + n) for n in range(4)]
    own.run(requests)
    cutting = Cutting(tile=16, rows=16, pieces=2, exact=exact, exact_tokens=16)
    kernels = on_kernels(own, cutting)
    kernels.run(requests)
    assert kernels.last_tokens == own.last_tokens


def test_the_benchmark_of_prefills_runs() -> None:
    model, _ = random_weights(FIELDS, CONFIG)
    began_s = time.perf_counter()
    taken_s = prefill_s(model, CPU, Cutting(16, 16, 2), spans=whole_prompts(2, 12, 4), block_size=4)
    assert 0 < taken_s < time.perf_counter() - began_s
