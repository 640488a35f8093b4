"""From the process's configuration to a warmed engine. Torch is imported only where it is used."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec

from services.worker.engine.block_manager import BlockManager
from services.worker.engine.config import ModelConfig, eos_ids, parse_config, read_json, vocab_size_of
from services.worker.engine.core import Engine
from services.worker.engine.executor import Executor
from services.worker.engine.null_executor import NullExecutor
from services.worker.engine.planner import PlannerLimits
from services.worker.engine.unsupported import BadEngineConfig, positive_int
from services.worker.engine.validation import ModelLimits
from services.worker.engine_protocol import EngineConfig, Ready, Sampling, Submit
from services.worker.policy.prefill_budget import PrefillBudget

NULL_KV_BYTES_PER_TOKEN: Final = 4096
NULL_MAX_MODEL_LEN: Final = 32768
WARM_UP_TOKENS: Final = 32
MAX_KV_BLOCKS: Final = 1 << 24

Report = Callable[[str, float], None]  # phase, done 0..1


def load(config: EngineConfig, report: Report) -> tuple[Engine, Ready]:
    """Return an engine that has run a prefill and a decode. Raises LoadError where a retry would not help."""
    try:
        limits = PlannerLimits(config.token_budget, config.max_sequences, config.max_long_prefills)
    except ValueError as error:
        raise BadEngineConfig(str(error)) from error
    if not 0.0 <= config.itl_target_s < 3600.0:
        raise BadEngineConfig(f"itl_target_s {config.itl_target_s} is no time for a step")
    if config.block_size < 1 or config.kv_blocks < 0 or config.max_model_len < 0 or config.threads < 0:
        raise BadEngineConfig("block_size, kv_blocks, max_model_len and threads are counts")
    executor, ready, stop_ids = (
        _load_null(config) if config.executor == "null" else _load_torch(config, report)
    )
    report("warm_up", 0.0)
    full_step_s = _warm_up(_engine(executor, ready, limits, stop_ids), config.token_budget)
    report("warm_up", 1.0)
    budget = _budget(config, full_step_s)
    engine = _engine(executor, ready, limits, stop_ids, budget)
    return engine, msgspec.structs.replace(ready, full_step_s=full_step_s)


def _budget(config: EngineConfig, full_step_s: float) -> PrefillBudget | None:
    if not config.itl_target_s:
        return None
    return PrefillBudget(config.itl_target_s, most_tokens=config.token_budget, full_step_s=full_step_s)


def _engine(
    executor: Executor,
    ready: Ready,
    limits: PlannerLimits,
    stop_ids: frozenset[int],
    budget: PrefillBudget | None = None,
) -> Engine:
    return Engine(
        executor,
        blocks=BlockManager(ready.kv_blocks_total, ready.block_size),
        limits=limits,
        model=ModelLimits(ready.vocab_size, ready.max_model_len),
        eos_ids=stop_ids,
        clock=time.monotonic,
        budget=budget,
    )


def _warm_up(engine: Engine, token_budget: int) -> float:
    """Run a prefill and a decode, twice: the first request does not pay for what is set up lazily.

    Returns the seconds that a prefill of the whole budget takes, by the measure of the second time.
    """
    longest = engine.max_model_len
    prompt = [0] * max(1, min(WARM_UP_TOKENS, longest - 2))
    tokens = min(2, longest - len(prompt))
    if tokens < 1:
        raise BadEngineConfig(f"a context of {longest} tokens has no room for a prompt and an answer")
    sampling = Sampling(seed=0, max_tokens=tokens, ignore_eos=True)
    longest_s = 0.0
    for number in range(2):
        engine.apply(Submit(number, prompt, sampling, credit_limit=tokens))
        longest_s = 0.0
        while engine.has_work:
            began_s = time.monotonic()
            engine.step()
            longest_s = max(longest_s, time.monotonic() - began_s)
    return longest_s * max(1.0, token_budget / len(prompt))


def _load_null(config: EngineConfig) -> tuple[Executor, Ready, frozenset[int]]:
    model_dir = Path(config.model_dir)
    fields = read_json(model_dir / "config.json") if (model_dir / "config.json").exists() else {}
    vocab_size = vocab_size_of(fields)
    stop_ids = eos_ids(model_dir, fields, vocab_size)
    longest = config.max_model_len or (
        positive_int(fields, "max_position_embeddings")
        if "max_position_embeddings" in fields
        else NULL_MAX_MODEL_LEN
    )
    ready = _ready(config, vocab_size, longest, config.block_size * NULL_KV_BYTES_PER_TOKEN, weight_bytes=0)
    executor = NullExecutor(
        vocab_size=vocab_size,
        eos_ids=stop_ids,
        step_s=config.null_step_s,
        clock=time.monotonic,
        sleep=time.sleep,
    )
    return executor, ready, stop_ids


def _load_torch(config: EngineConfig, report: Report) -> tuple[Executor, Ready, frozenset[int]]:
    model_dir = Path(config.model_dir)
    fields = read_json(model_dir / "config.json")
    model = parse_config(fields)
    stop_ids = eos_ids(model_dir, fields, model.vocab_size)
    longest = _longest(config, model)
    report("import", 0.0)
    from services.worker.engine import torch_loading  # seconds; a null engine and a refusal need none of it

    report("import", 1.0)
    block_bytes = torch_loading.block_bytes(model, config)
    weights = torch_loading.load_weights_of(model, model_dir, config, lambda ratio: report("weights", ratio))
    ready = _ready(config, model.vocab_size, longest, block_bytes, weight_bytes=weights.bytes)
    executor = torch_loading.executor_of(model, weights, config, ready)
    return executor, ready, stop_ids


def _longest(config: EngineConfig, model: ModelConfig) -> int:
    if config.max_model_len > model.max_context:
        raise BadEngineConfig(f"max_model_len {config.max_model_len} exceeds the model's {model.max_context}")
    return config.max_model_len or model.max_position_embeddings


def _ready(
    config: EngineConfig, vocab_size: int, longest: int, block_bytes: int, *, weight_bytes: int
) -> Ready:
    """Return what the agent is told; a context that the KV pool cannot hold is not promised."""
    blocks = config.kv_blocks or config.kv_memory_bytes // block_bytes
    if not 0 < blocks <= MAX_KV_BLOCKS:
        raise BadEngineConfig(
            f"{config.kv_memory_bytes} bytes make {blocks} KV blocks of {block_bytes} bytes"
        )
    return Ready(
        kv_blocks_total=blocks,
        block_size=config.block_size,
        max_model_len=min(longest, blocks * config.block_size),
        vocab_size=vocab_size,
        kv_bytes_per_block=block_bytes,
        weight_bytes=weight_bytes,
    )
