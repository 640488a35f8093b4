"""A whole engine on the kernels, its decode steps padded and replayed, against the plain torch backend."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from typing import Any

import msgspec
import pytest
import torch

from bench.engines.load import Request
from bench.gpus.attention import prefill_s, whole_prompts
from bench.gpus.own import OwnEngine, own_engine
from bench.gpus.random_model import SHAPES, random_weights
from services.worker.engine.core import Engine
from services.worker.engine.cuda.attention import TritonAttention
from services.worker.engine.cuda.exact import ExactOperators, TritonReductions
from services.worker.engine.cuda.graphs import Graph, GraphedDecoder, batch_sizes
from services.worker.engine.cuda.operators import TritonOperators
from services.worker.engine.cuda.plan import Cutting, Padding
from services.worker.engine.execute.executor import Inline
from services.worker.engine.execute.kv_cache import KvCache, kv_shape
from services.worker.engine.execute.model import Decoder
from services.worker.engine.execute.rope import Rope
from services.worker.engine.execute.torch_executor import TorchExecutor
from services.worker.engine.load.torch_loading import DTYPES
from services.worker.engine.plan.block_manager import BlockManager
from services.worker.engine.plan.planner import PlannerLimits
from services.worker.engine.sample.sampler import Reductions, TorchReductions
from services.worker.engine.sequence import ModelLimits
from services.worker.engine.speculation.speculator import PromptLookup, Speculator
from services.worker.engine_protocol import EngineConfig
from services.worker.policy.speculation import SpeculationPolicy
from tests.support.engine_oracle import Arrival, Run

pytestmark = pytest.mark.timeout(900)

CPU = torch.device("cpu")
FIELDS = {
    **SHAPES["tiny"],
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "hidden_size": 72,  # several tiles of a product, the last not whole
    "intermediate_size": 136,
}
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


class Watched(TritonReductions):
    """Notes which of the reductions the sampler asks for."""

    def __init__(self) -> None:
        self.asked: set[str] = set()

    def __getattribute__(self, name: str) -> Any:
        if name in ("log_softmax", "sums", "running_sums", "greatest"):
            self.asked.add(name)
        return super().__getattribute__(name)


def runner_of(config: EngineConfig, cutting: Cutting, reductions: Reductions) -> TorchExecutor:
    """Return what computes on CUDA devices, in the mode that ``cutting`` is of."""
    model, _ = random_weights(FIELDS, CONFIG)
    kind, dtype = ExactOperators if cutting.exact else TritonOperators, DTYPES[config.dtype]
    model, weights = random_weights(FIELDS, config, kind(kv_heads=model.kv_heads, eps=model.norm_eps))
    blocks = config.kv_blocks
    cache = KvCache(kv_shape(model, block_size=config.block_size, dtype=dtype), blocks + 1, CPU)
    padding = Padding(batch_sizes(config.max_sequences), blocks * config.block_size, blocks + 8)
    attention = TritonAttention(cache, windows=model.windows, device=CPU, cutting=cutting, padding=padding)
    rope = Rope(model.rope, max_model_len=MAX_MODEL_LEN, dtype=dtype, device=CPU)
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
    return TorchExecutor(graphed, attention, cache, reductions)


@pytest.mark.parametrize("exact", [False, True])
def test_an_engine_on_the_kernels_produces_the_tokens_of_the_plain_one(exact: bool) -> None:
    """Prompts in chunks beside decodes, batches that grow and shrink, too few blocks for all at once."""
    torch.set_num_threads(1)
    own = own_engine(FIELDS, CONFIG, max_model_len=MAX_MODEL_LEN)
    requests = [Request([5 + n] * 3 + list(range(4, 4 + 11 * n)), 3 + n) for n in range(4)]
    own.run(requests)
    cutting = Cutting(tile=16, rows=16, pieces=2, exact=exact, exact_tokens=16)
    kernels = OwnEngine(own.model, CONFIG, runner_of(CONFIG, cutting, TorchReductions()), own.ready)
    kernels.run(requests)
    assert kernels.last_tokens == own.last_tokens


VICTIM = Arrival(  # says 7 so often that it is proposed
    0,
    tuple([5, 6, 7, 7] * 4),
    10,
    {"temperature": 0.9, "top_p": 0.9, "frequency_penalty": 0.1, "logit_bias": {7: 8.0}, "logprobs": 3},
    seed=77,
)
OTHERS = (
    Arrival(0, tuple(range(10, 31)), 5, {"temperature": 1.0, "logit_bias": {7: 1e6}, "logprobs": 5}),
    Arrival(0, tuple([9, 9, 4] * 3), 12),
    Arrival(1, tuple([5, 6, 7, 8] * 5), 9, {"temperature": 1.3, "top_k": 5}),
    Arrival(3, tuple(range(40, 57)), 6),
)


def engine_of(config: EngineConfig, reductions: Reductions) -> Engine:
    """Return an engine in mode "exact", whose clock ticks: proposals always pay."""
    cutting = Cutting(tile=16, rows=16, pieces=2, exact=True, exact_tokens=16)
    ticks = count()
    return Engine(
        Inline(runner_of(config, cutting, reductions)),
        blocks=BlockManager(config.kv_blocks, config.block_size),
        limits=PlannerLimits(config.token_budget, config.max_sequences),
        model=ModelLimits(FIELDS["vocab_size"], MAX_MODEL_LEN),
        eos_ids=frozenset(),
        clock=lambda: float(next(ticks)),
        speculation=Speculator(
            PromptLookup(max_sequences=config.max_sequences),
            SpeculationPolicy(most_tokens=4),
            clock=lambda: 0.0,
        ),
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_in_mode_exact_no_neighbour_changes_a_bit(dtype: Any) -> None:
    """Alone in a roomy engine, and with few blocks: chunks, padding, proposals, preemption, used seats."""
    torch.set_num_threads(1)
    roomy = msgspec.structs.replace(CONFIG, dtype=dtype, mode="exact", kv_blocks=40, token_budget=40)
    alone = Run(engine_of(roomy, TritonReductions()), (VICTIM,)).to_end()
    short = msgspec.structs.replace(roomy, kv_blocks=10, token_budget=11, max_sequences=3)
    reductions = Watched()
    company = Run(engine_of(short, reductions), (*OTHERS, replace(VICTIM, step=2))).to_end()
    assert company.tokens[len(OTHERS)] == alone.tokens[0]
    assert company.logprobs[len(OTHERS)] == alone.logprobs[0]
    names = ("preemptions", "mixed steps", "accepted")
    assert min(company.counts[name] for name in names) > 0, company.counts
    assert reductions.asked == {"log_softmax", "sums", "running_sums", "greatest"}


def test_the_benchmark_of_prefills_runs() -> None:
    model, _ = random_weights(FIELDS, CONFIG)
    began_s = time.perf_counter()
    taken_s = prefill_s(model, CPU, Cutting(16, 16, 2), spans=whole_prompts(2, 12, 4), block_size=4)
    assert 0 < taken_s < time.perf_counter() - began_s
