"""From the process's configuration to a warmed engine. Torch is imported only where it is used."""

from __future__ import annotations

import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec
import structlog

from fairway.formats.config_fields import UnsupportedModel
from fairway.formats.decoder_config import ModelConfig, parse_config
from fairway.formats.probe import PROBE
from fairway.formats.rope_config import context_of
from fairway.formats.tokenizer_files import read_tokenizer_files
from services.core.generation import OutputLimits, Prompt, Sampling
from services.core.prefix import PREFIX_BLOCK_TOKENS
from services.ports.grammars import Grammars, TokenizerUnusable
from services.worker.engine.constrain.constraints import Constraints
from services.worker.engine.core import Engine
from services.worker.engine.execute.executor import (
    Adapters,
    Batch,
    Executor,
    Inline,
    PrefillChunk,
    WeightStore,
)
from services.worker.engine.execute.null_executor import NullAdapters, NullExecutor
from services.worker.engine.load.canary import is_exact, serves_adapters
from services.worker.engine.load.config import eos_ids, names_in, read_json, vocab_size_of
from services.worker.engine.load.memory_meter import MemoryMeter, meter_for
from services.worker.engine.plan.block_manager import BlockManager
from services.worker.engine.plan.planner import PlannerLimits
from services.worker.engine.prefix.cache import PrefixCache
from services.worker.engine.prefix.eviction import EvictionLimits
from services.worker.engine.sequence import MAX_LOGPROBS, ModelLimits, SequenceState, sequence_of
from services.worker.engine.speculation.draft_model import DraftModel
from services.worker.engine.speculation.speculator import PromptLookup, Proposer, Speculator
from services.worker.engine.unsupported import BadCheckpoint, BadEngineConfig, TooLittleMemory
from services.worker.engine_protocol import Capability, EngineConfig, Ready, Submit
from services.worker.policy.prefill import PrefillBudget
from services.worker.policy.speculation import SpeculationPolicy
from services.worker.step_page import StepPage

if TYPE_CHECKING:
    from services.worker.engine.execute.torch_executor import TorchExecutor

NULL_KV_BYTES_PER_TOKEN: Final = 4096
NULL_MAX_MODEL_LEN: Final = 32768
WARM_UP_TOKENS: Final = 32
MAX_KV_BLOCKS: Final = 1 << 24
MAX_PROPOSALS: Final = 64
GRAMMAR_NICENESS: Final = 10
CANARY_BUDGET: Final = 64  # tokens of a step, so that the canary's prompts are cut

# What every engine but vLLM's promises, and what a version with a probe adds.
_OWN: Final[tuple[Capability, ...]] = ("resize",)
_WITH_PROBE: Final[frozenset[Capability]] = frozenset({"probe"})

log = structlog.get_logger()

Report = Callable[[str, float], None]  # phase, done 0..1
MIB: Final = 1 << 20
PROFILED_BLOCKS: Final = 1  # size of the pool that the profiling step runs on
LEAST_CONTEXT: Final = 1024  # tokens; a pool that holds less is of no use
_LIMITS: Final = OutputLimits(max_tokens=1 << 20, min_tokens=1 << 20, stop_token_ids=(0,))
# Most pairs of queries and keys in a chunk that torch attends with: more take long on a CPU.
MOST_PAIRS: Final = 1 << 24


def largest_batches(config: EngineConfig, ready: Ready, *, contexts_at_once: int) -> Iterator[Batch]:
    """Yield batches that take as much memory as any within the limits, each row with every sampling feature.

    They have as many tokens as the budget, and as many sampling rows as there are sequences; with
    speculation, as many as proposals make. Where attention holds memory that grows with the contexts of
    ``contexts_at_once`` sequences, so many decodes, and a chunk, stand at the end of a context.
    """
    sampling = _costliest(ready.vocab_size)
    rows, sequences, longest = config.token_budget, config.max_sequences, max(1, ready.max_model_len - 1)
    shares = [min(longest, rows // sequences + (place < rows % sequences)) for place in range(sequences)]
    yield Batch([], [PrefillChunk(_sequence(size, sampling, config), 0, size) for size in shares])
    spare = rows - sequences
    most = min(config.max_proposals, longest - 1)
    counts = [min(most, spare // sequences + (place < spare % sequences)) for place in range(sequences)]
    if config.speculation != "off" and any(counts):
        decodes = [_sequence(1, sampling, config, spare=count) for count in counts]
        yield Batch(decodes, [], {place: [0] * count for place, count in enumerate(counts) if count})
    if contexts_at_once:
        count = min(sequences, contexts_at_once)
        yield Batch([_sequence(longest, sampling, config) for _ in range(count)], [])
    if contexts_at_once and longest > rows:
        whole = _sequence(longest, sampling, config)
        chunk = rows if contexts_at_once > 1 else max(1, min(rows, MOST_PAIRS // longest))
        yield Batch([], [PrefillChunk(whole, longest - chunk, longest)])


def sized(config: EngineConfig, ready: Ready, working_bytes: int) -> Ready:
    """Return what is left for KV, of a pool that may have ``ready.kv_blocks_total`` blocks at most.

    Raises TooLittleMemory if that is less than LEAST_CONTEXT tokens, or than the whole of a smaller pool.
    """
    working_bytes = max(0, math.ceil(working_bytes / MIB)) * MIB
    most, block_bytes = ready.kv_blocks_total, ready.kv_bytes_per_block
    blocks, left = most, 0
    if config.memory_bytes:
        left = config.memory_bytes - ready.weight_bytes - working_bytes
        blocks = min(most, max(0, left) // block_bytes)
    least = min(most, -(-min(ready.max_model_len, LEAST_CONTEXT) // config.block_size))
    if blocks < least:
        raise TooLittleMemory(
            f"of {_mib(config.memory_bytes)} MiB weights take {_mib(ready.weight_bytes)} and working memory "
            f"{_mib(working_bytes)}, which leaves {max(0, left) // MIB} for KV; {least * config.block_size} "
            f"tokens take {_mib(least * block_bytes)}. Give the worker more memory, or lower token_budget or "
            "max_sequences",
            weight_bytes=ready.weight_bytes,
            working_bytes=working_bytes,
            kv_bytes=least * block_bytes,
        )
    return msgspec.structs.replace(
        ready,
        kv_blocks_total=blocks,
        max_model_len=min(ready.max_model_len, blocks * config.block_size),
        working_bytes=working_bytes,
    )


def _costliest(vocab_size: int) -> Sampling:
    """Return sampling with everything that a row may ask for."""
    return Sampling(
        seed=0,
        top_p=0.99,
        top_k=max(1, vocab_size - 1),
        min_p=0.001,
        presence_penalty=0.1,
        frequency_penalty=0.1,
        repetition_penalty=1.1,
        logit_bias=((0, 1.0),),
        logprobs=min(MAX_LOGPROBS, vocab_size),
        prompt_logprobs=min(MAX_LOGPROBS, vocab_size),
    )


def _sequence(tokens: int, sampling: Sampling, config: EngineConfig, *, spare: int = 0) -> SequenceState:
    """Return a sequence with all but the last token computed, or nothing; half of it is output."""
    prompt = max(1, tokens // 2)
    produced = [0] * (tokens - prompt)
    submit = Submit(0, Prompt([0] * prompt), sampling, _LIMITS, 1 << 30, produced_ids=produced, probe=True)
    sequence = sequence_of(submit, arrival=0, eos_ids=frozenset())
    sequence.blocks = [0] * -(-(tokens + spare) // config.block_size)
    sequence.capacity = len(sequence.blocks) * config.block_size
    sequence.contiguous = len(sequence.blocks) == 1
    return sequence


def _mib(size_bytes: int) -> int:
    return math.ceil(size_bytes / MIB)


def import_engine() -> None:
    """Import what an engine on torch needs, without a configuration."""
    from services.adapters import grammars
    from services.worker.engine.load import torch_loading

    del grammars, torch_loading


def load(
    config: EngineConfig, report: Report, *, around: Callable[[Executor], Executor] | None = None
) -> tuple[Engine, Ready]:
    """Return an engine that has run a prefill and a decode. Raises LoadError where a retry would not help.

    ``around`` returns the executor that the engine uses, around the loaded one.
    """
    limits = _checked(config)
    executor, ready, stop_ids, draft, adapters, weights = _loaded(config, report)
    if around is not None:
        executor = around(executor)
    report("warm_up", 0.0)
    full_step_s = _warm_up(_engine(executor, ready, limits, stop_ids), config.token_budget)
    report("warm_up", 1.0)
    report("canary", 0.0)
    budget_tokens = min(CANARY_BUDGET, limits.token_budget)
    cutting = PlannerLimits(budget_tokens, min(limits.max_sequences, budget_tokens))
    fresh = partial(_engine, executor, ready, cutting, stop_ids, adapters=adapters)
    promised = _promised(config, fresh, ready)
    if adapters is not None and _serves_adapters(config, fresh, ready, promised):
        promised |= {"adapters"}
    report("canary", 1.0)
    budget = _budget(config, full_step_s)
    cache = _prefix_cache(config, ready)
    speculation = _speculation(config, draft)
    page = StepPage.open(Path(config.step_page_path), config.max_sequences) if config.step_page_path else None
    constraints = _constraints(config, ready, stop_ids)
    engine = _engine(
        executor,
        ready,
        limits,
        stop_ids,
        budget,
        speculation,
        cache,
        page,
        constraints,
        adapters if "adapters" in promised else None,
        weights,
    )
    return engine, msgspec.structs.replace(ready, full_step_s=full_step_s, capabilities=promised)


def _checked(config: EngineConfig) -> PlannerLimits:
    """Return the limits of a configuration that is consistent. Raises BadEngineConfig."""
    try:
        limits = PlannerLimits(config.token_budget, config.max_sequences, config.max_long_prefills)
    except ValueError as error:
        raise BadEngineConfig(str(error)) from error
    if not 0.0 <= config.itl_target_s < 3600.0:
        raise BadEngineConfig(f"itl_target_s {config.itl_target_s} is no time for a step")
    counts = (config.kv_blocks, config.max_model_len, config.threads, config.memory_bytes)
    if config.block_size < 1 or min(counts) < 0:
        raise BadEngineConfig("block_size, kv_blocks, max_model_len, threads and memory_bytes are counts")
    if not 0.0 < config.cache_domain_ratio <= 1.0:
        raise BadEngineConfig(f"cache_domain_ratio {config.cache_domain_ratio} is no share")
    if not 1 <= config.max_proposals <= MAX_PROPOSALS:
        raise BadEngineConfig(f"max_proposals {config.max_proposals} is not within 1 to {MAX_PROPOSALS}")
    if (config.speculation == "draft") != bool(config.draft_model_dir):
        raise BadEngineConfig("draft_model_dir belongs to speculation 'draft', and that needs it")
    if config.draft_model_dir and config.executor == "null":
        raise BadEngineConfig("a null engine has no draft")
    if config.draft_model_dir and config.executor == "vllm":
        raise BadEngineConfig("vLLM's workers verify no draft")
    if config.executor != "vllm" and max(config.tensor_parallel, config.pipeline_parallel) > 1:
        raise BadEngineConfig(
            "only vLLM's workers share a model: tensor_parallel and pipeline_parallel are its own"
        )
    return limits


def _loaded(
    config: EngineConfig, report: Report
) -> tuple[Executor, Ready, frozenset[int], DraftModel | None, Adapters | None, WeightStore | None]:
    match config.executor:
        case "null":
            return (*_load_null(config), None, NullAdapters(), None)
        case "vllm":
            executor, ready, stop_ids, adapters, weights = _load_vllm(config, report)
            return executor, ready, stop_ids, None, adapters, weights
        case _:
            own, ready, stop_ids, draft = _load_measured(config, report)
            return own, ready, stop_ids, draft, own.adapters, own


def _load_vllm(
    config: EngineConfig, report: Report
) -> tuple[Executor, Ready, frozenset[int], Adapters | None, WeightStore | None]:
    report("import", 0.0)
    from services.worker.engines.vllm.loading import load_vllm

    report("import", 1.0)
    return load_vllm(config, report)


def _promised(config: EngineConfig, fresh: Callable[[], Engine], ready: Ready) -> frozenset[Capability]:
    """Return what the engine may promise: exactness is claimed by the configuration and shown by a canary."""
    promised = {*ready.capabilities, *(() if config.executor == "vllm" else _OWN)}
    on_cpu = config.device.partition(":")[0] == "cpu"
    claims = config.mode == "exact" or (config.mode == "auto" and on_cpu)
    if config.executor == "vllm":
        claims = claims and on_cpu and config.dtype == "float32"
    if config.executor == "null" or (claims and is_exact(fresh, ready.vocab_size)):
        promised.add("exact")
    elif claims:
        log.warning("canary.not_exact", executor=config.executor, dtype=config.dtype)
    return frozenset(promised)


def _serves_adapters(
    config: EngineConfig, fresh: Callable[[], Engine], ready: Ready, promised: frozenset[Capability]
) -> bool:
    """Return whether adapters are computed and change nothing else, as a canary shows."""
    if config.executor == "null":
        return True
    served = serves_adapters(fresh(), ready.vocab_size, _model_of(config), exact="exact" in promised)
    if not served:
        log.warning("canary.no_adapters", executor=config.executor, dtype=config.dtype)
    return served


def _budget(config: EngineConfig, full_step_s: float) -> PrefillBudget | None:
    if not config.itl_target_s:
        return None
    return PrefillBudget(config.itl_target_s, most_tokens=config.token_budget, full_step_s=full_step_s)


def _speculation(config: EngineConfig, draft: DraftModel | None) -> Speculator | None:
    """Return who proposes tokens. vLLM's workers verify none, whoever wished for it."""
    if config.speculation == "off" or config.executor == "vllm":
        return None
    proposer: Proposer = PromptLookup(max_sequences=config.max_sequences) if draft is None else draft
    policy = SpeculationPolicy(most_tokens=config.max_proposals)
    return Speculator(proposer, policy, clock=time.monotonic)


def _load_measured(
    config: EngineConfig, report: Report
) -> tuple[TorchExecutor, Ready, frozenset[int], DraftModel | None]:
    """Load the model and its draft, run the largest steps, and give them the pool that is left."""
    with meter_for(config.device) as meter:
        executor, most, stop_ids = _load_torch(config, report, meter)
        runners = [(executor, config, most)]
        if config.draft_model_dir:
            runners.append(_load_draft(config, most, report, meter))
        report("profile", 0.0)
        for runner, limits, model in runners:
            for batch in largest_batches(limits, model, contexts_at_once=runner.contexts_at_once):
                meter.run(partial(runner.run, batch))
        weight_bytes = sum(model.weight_bytes for _, _, model in runners)
        moving_bytes = sum(runner.moving_bytes(most.kv_blocks_total) for runner, _, _ in runners)
        most = msgspec.structs.replace(most, weight_bytes=weight_bytes)
        profiled_bytes = weight_bytes + PROFILED_BLOCKS * most.kv_bytes_per_block
        ready = sized(config, most, meter.peak_bytes - profiled_bytes + moving_bytes)
        for runner, _, _ in runners:
            runner.resize(ready.kv_blocks_total, warm=True)
        report("profile", 1.0)
    return executor, ready, stop_ids, _draft(config, ready, runners[1:])


def _load_draft(
    config: EngineConfig, ready: Ready, report: Report, meter: MemoryMeter
) -> tuple[TorchExecutor, EngineConfig, Ready]:
    """Return the checkpoint in ``draft_model_dir``, which may have as many KV blocks as the model."""
    draft = msgspec.structs.replace(
        config,
        model_dir=config.draft_model_dir,
        draft_model_dir="",
        speculation="off",
        kv_blocks=ready.kv_blocks_total,
        max_model_len=0,
    )
    try:
        runner, found, _ = _load_torch(draft, report, meter)
    except BadCheckpoint as error:
        raise BadCheckpoint(f"the draft model: {error}") from error
    return runner, draft, found


def _draft(
    config: EngineConfig, ready: Ready, loaded: Sequence[tuple[TorchExecutor, EngineConfig, Ready]]
) -> DraftModel | None:
    """Return the proposer on a draft that was loaded, with the model's number of KV blocks."""
    for runner, _, found in loaded:
        return DraftModel(
            runner,
            blocks=BlockManager(ready.kv_blocks_total, found.block_size),
            max_model_len=found.max_model_len,
            token_budget=config.token_budget,
        )
    return None


def _engine(
    executor: Executor,
    ready: Ready,
    limits: PlannerLimits,
    stop_ids: frozenset[int],
    budget: PrefillBudget | None = None,
    speculation: Speculator | None = None,
    cache: PrefixCache | None = None,
    page: StepPage | None = None,
    constraints: Constraints | None = None,
    adapters: Adapters | None = None,
    weights: WeightStore | None = None,
) -> Engine:
    return Engine(
        executor,
        blocks=cache if cache is not None else _blocks(ready),
        limits=limits,
        model=ModelLimits(ready.vocab_size, ready.max_model_len),
        eos_ids=stop_ids,
        clock=time.monotonic,
        budget=budget,
        reuse=cache,
        speculation=speculation,
        page=page,
        constraints=constraints,
        adapters=adapters,
        weights=weights,
        has_probe="probe" in ready.capabilities,
    )


def _constraints(config: EngineConfig, ready: Ready, stop_ids: frozenset[int]) -> Constraints:
    """Return who compiles constraints, with threads that start at the first one.

    Compilations and slow masks have a lower priority than the steps and the masks, which a step waits for.
    """
    return Constraints(
        _grammars(config, ready, stop_ids),
        compiling=ThreadPoolExecutor(1, "grammars", initializer=_at_low_priority),
        masking=ThreadPoolExecutor(1, "masks"),
        slow_masking=ThreadPoolExecutor(1, "slow-masks", initializer=_at_low_priority),
    )


def _grammars(config: EngineConfig, ready: Ready, stop_ids: frozenset[int]) -> Grammars | TokenizerUnusable:
    """Return the grammars. To open them later would delay steps: it holds the interpreter's lock."""
    from services.adapters.grammars import grammars_of

    folder = Path(config.model_dir)
    try:
        files = read_tokenizer_files(names_in(folder), lambda name: (folder / name).read_bytes())
        source = files.tokenizer.decode()
    except (OSError, ValueError, UnsupportedModel) as error:
        return TokenizerUnusable(f"tokenizer.json is not there or malformed: {type(error).__name__}")
    try:
        return grammars_of(source, eos_ids=sorted(stop_ids), vocab_size=ready.vocab_size)
    except TokenizerUnusable as unusable:
        return unusable


def _at_low_priority() -> None:
    """Lower the priority of the calling thread, on systems where a thread has its own."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), GRAMMAR_NICENESS)


def _blocks(ready: Ready) -> BlockManager:
    """Return the pool, which never gets smaller than what one sequence may need."""
    longest = -(-ready.max_model_len // ready.block_size)
    return BlockManager(ready.kv_blocks_total, ready.block_size, least_blocks=longest)


def _prefix_cache(config: EngineConfig, ready: Ready) -> PrefixCache | None:
    if not config.prefix_cache or PREFIX_BLOCK_TOKENS % ready.block_size:
        return None
    if config.executor == "null":
        return PrefixCache(_blocks(ready), EvictionLimits(config.cache_domain_ratio))
    try:
        model = _model_of(config)
    except UnsupportedModel:  # a family of another engine, whose attention is taken to cost as usual
        return PrefixCache(_blocks(ready), EvictionLimits(config.cache_domain_ratio))
    if model.rope.depends_on_length:
        return None  # the KV of a prefix is not that of the same prefix of a longer prompt
    return PrefixCache(_blocks(ready), EvictionLimits(config.cache_domain_ratio, model.attention_half_tokens))


def _model_of(config: EngineConfig) -> ModelConfig:
    return parse_config(read_json(Path(config.model_dir) / "config.json"))


def _warm_up(engine: Engine, token_budget: int) -> float:
    """Run a prefill and a decode, twice: the first request does not pay for what is set up lazily.

    Returns the seconds that a prefill of the whole budget takes, by the measure of the second time.
    """
    longest = engine.max_model_len
    prompt = [0] * max(1, min(WARM_UP_TOKENS, longest - 2))
    tokens = min(2, longest - len(prompt))
    if tokens < 1:
        raise BadEngineConfig(f"a context of {longest} tokens has no room for a prompt and an answer")
    limits = OutputLimits(tokens, ignore_eos=True)
    longest_s = 0.0
    for number in range(2):
        engine.apply(Submit(number, Prompt(prompt), Sampling(seed=0), limits, credit_limit=tokens))
        longest_s = 0.0
        while engine.has_work:
            began_s = time.monotonic()
            if "not_finite" in engine.step().finished.values():
                raise BadCheckpoint("the logits are not finite in the warm-up: the weights are at fault")
            longest_s = max(longest_s, time.monotonic() - began_s)
    return longest_s * max(1.0, token_budget / len(prompt))


def _load_null(config: EngineConfig) -> tuple[Executor, Ready, frozenset[int]]:
    model_dir = Path(config.model_dir)
    fields = read_json(model_dir / "config.json") if (model_dir / "config.json").exists() else {}
    vocab_size = vocab_size_of(fields)
    stop_ids = eos_ids(model_dir, fields, vocab_size)
    longest = config.max_model_len or (
        context_of(fields) if "max_position_embeddings" in fields else NULL_MAX_MODEL_LEN
    )
    ready = _ready(config, vocab_size, longest, config.block_size * NULL_KV_BYTES_PER_TOKEN, weight_bytes=0)
    if (model_dir / PROBE).exists():
        ready = msgspec.structs.replace(ready, capabilities=_WITH_PROBE)
    executor = NullExecutor(
        vocab_size=vocab_size,
        eos_ids=stop_ids,
        step_s=config.null_step_s,
        clock=time.monotonic,
        sleep=time.sleep,
    )
    return Inline(executor), ready, stop_ids


def _load_torch(
    config: EngineConfig, report: Report, meter: MemoryMeter | None = None
) -> tuple[TorchExecutor, Ready, frozenset[int]]:
    """Return the executor with its whole pool, or with PROFILED_BLOCKS of it if it is metered."""
    model_dir = Path(config.model_dir)
    fields = read_json(model_dir / "config.json")
    model = parse_config(fields)
    stop_ids = eos_ids(model_dir, fields, model.vocab_size)
    longest = _longest(config, model)
    report("import", 0.0)
    from services.worker.engine.load import torch_loading

    report("import", 1.0)
    block_bytes = torch_loading.block_bytes(model, config)
    if config.draft_model_dir:  # a block of the pool is one of the draft's as well
        block_bytes += torch_loading.block_bytes(_draft_of(config, model), config)
    torch_loading.device_of(config.device)
    if meter is not None:
        meter.begin()
    weights = torch_loading.load_weights_of(model, model_dir, config, report)
    probe = torch_loading.load_probe(model, model_dir, config)
    ready = _ready(config, model.vocab_size, longest, block_bytes, weight_bytes=weights.bytes)
    ready = msgspec.structs.replace(ready, flops_per_token=model.flops_per_token)
    if probe is not None:
        ready = msgspec.structs.replace(ready, capabilities=_WITH_PROBE)
    blocks = ready.kv_blocks_total if meter is None else PROFILED_BLOCKS
    executor = torch_loading.executor_of(model, weights, config, ready, blocks=blocks, probe=probe)
    return executor, ready, stop_ids


def _draft_of(config: EngineConfig, model: ModelConfig) -> ModelConfig:
    """Return the draft's shape. Raises UnsupportedModel, BadEngineConfig where it has other tokens."""
    try:
        draft = parse_config(read_json(Path(config.draft_model_dir) / "config.json"))
    except UnsupportedModel as error:
        raise UnsupportedModel(f"the draft model's {error.field}", error.value) from error
    if draft.vocab_size != model.vocab_size:
        raise BadEngineConfig(
            f"the draft model's vocabulary of {draft.vocab_size} is not the model's {model.vocab_size}"
        )
    return draft


def _longest(config: EngineConfig, model: ModelConfig) -> int:
    if config.max_model_len > model.max_context:
        raise BadEngineConfig(f"max_model_len {config.max_model_len} exceeds the model's {model.max_context}")
    return config.max_model_len or model.max_context


def _ready(
    config: EngineConfig, vocab_size: int, longest: int, block_bytes: int, *, weight_bytes: int
) -> Ready:
    """Return the event for the agent; its context length is at most what the KV pool holds."""
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
