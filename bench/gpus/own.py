"""The production engine (planner, executor, the device's attention) on random weights, in this process."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from bench.engines.load import Request
from bench.gpus.random_model import random_weights
from bench.gpus.roofline import Rates, Work
from fairway.formats.decoder_config import ModelConfig
from services.core.generation import OutputLimits, Prompt, Sampling
from services.worker.engine.core import Engine
from services.worker.engine.execute.executor import Executor
from services.worker.engine.load import torch_loading
from services.worker.engine.plan.block_manager import BlockManager
from services.worker.engine.plan.planner import PlannerLimits
from services.worker.engine.sequence import ModelLimits
from services.worker.engine_protocol import EngineConfig, Ready, Submit

_GREEDY: Final = Sampling(seed=0, temperature=0.0)
SETTLING_STEPS: Final = 4  # after the last prefill, that do not count


@dataclass(frozen=True, slots=True)
class StepTime:
    """A step as its caller sees it, and what it computed."""

    wall_s: float
    prefill_tokens: int
    decoded: int
    attended_tokens: int


@dataclass(slots=True)
class OwnEngine:
    """An executor and what it takes to put an engine around it, once for each measurement."""

    model: ModelConfig
    config: EngineConfig
    executor: Executor
    ready: Ready
    last_tokens: dict[int, list[int]] = field(default_factory=dict)

    def run(self, requests: Sequence[Request]) -> list[StepTime]:
        """Serve the requests, all at once, to their end; ``last_tokens`` are what they got.

        On a device each step but the first was submitted while the one before it was computed.
        """
        config, ready = self.config, self.ready
        engine = Engine(
            self.executor,
            blocks=BlockManager(ready.kv_blocks_total, ready.block_size),
            limits=PlannerLimits(config.token_budget, config.max_sequences),
            model=ModelLimits(ready.vocab_size, ready.max_model_len),
            eos_ids=frozenset(),
            clock=time.monotonic,
        )
        for handle, request in enumerate(requests):
            limits = OutputLimits(request.output_tokens, ignore_eos=True)
            engine.apply(Submit(handle, Prompt(request.prompt), _GREEDY, limits, limits.max_tokens))
        self.last_tokens = {handle: [] for handle in range(len(requests))}
        steps = []
        while engine.has_work:
            began_s = time.perf_counter()
            event = engine.step()
            wall_s = time.perf_counter() - began_s
            assert not event.errors, event.errors
            for handle, token in zip(event.handles, event.tokens, strict=True):
                self.last_tokens[handle].append(token)
            decoded = 0 if event.prefill_tokens else len(event.handles)
            steps.append(StepTime(wall_s, event.prefill_tokens, decoded, event.attended_tokens))
        produced = sum(map(len, self.last_tokens.values()))
        assert produced == sum(request.output_tokens for request in requests), "tokens are missing"
        return steps


def own_engine(fields: Mapping[str, Any], config: EngineConfig, *, max_model_len: int) -> OwnEngine:
    """Return an engine on random weights, its device warmed up by a run of its own."""
    model, weights = random_weights(fields, config)
    ready = Ready(
        kv_blocks_total=config.kv_blocks,
        block_size=config.block_size,
        max_model_len=max_model_len,
        vocab_size=model.vocab_size,
        kv_bytes_per_block=torch_loading.block_bytes(model, config),
        weight_bytes=weights.bytes,
    )
    own = OwnEngine(model, config, torch_loading.executor_of(model, weights, config, ready), ready)
    own.run([Request([1] * min(40, max_model_len - 4), 4)] * 2)
    return own


def decode_ratio(
    own: OwnEngine, work: Work, rates: Rates, *, prompt: Sequence[int], batch: int, output_tokens: int
) -> float:
    """Return the least time of a decode step over the measured one, the median over steps of a full batch."""
    steps = own.run([Request(list(prompt), output_tokens)] * batch)
    full = [step for step in steps if step.decoded == batch][SETTLING_STEPS:]
    return statistics.median(
        work.decode_s(rates, sequences=batch, attended_tokens=step.attended_tokens) / step.wall_s
        for step in full
    )


def prefill_ratio(
    own: OwnEngine, work: Work, rates: Rates, *, prompt: Sequence[int], prompts: int, rounds: int = 5
) -> float:
    """Return the least time of prefilling some prompts over the measured one, the median of rounds."""
    least_s = work.prefill_s(rates, prompts=prompts, prompt_tokens=len(prompt))
    ratios = []
    for number in range(rounds + 1):
        steps = own.run([Request(list(prompt), 1)] * prompts)
        if number:  # the first compiles and allocates memory
            ratios.append(least_s / sum(step.wall_s for step in steps))
    return statistics.median(ratios)


def tokens_per_s(own: OwnEngine, requests: Sequence[Request]) -> float:
    """Return output tokens per second of requests that arrive at once."""
    return sum(request.output_tokens for request in requests) / sum(step.wall_s for step in own.run(requests))
