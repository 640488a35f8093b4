"""What several test modules of the engine share: engines without a device, random checkpoints, the oracle."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from services.worker.engine.core import Engine
from services.worker.engine.execute.executor import Batch, Executor, Inline, Runner, Samples
from services.worker.engine.plan.block_manager import BlockManager
from services.worker.engine.plan.planner import PlannerLimits
from services.worker.engine.sequence import ModelLimits
from services.worker.engine.speculation.speculator import Speculator
from services.worker.engine_protocol import EngineConfig, SampledLogprobs, Submit
from tests.support.engine_agent import Agent
from tests.support.submits import make_submit

os.environ.setdefault("HF_HUB_OFFLINE", "1")

UNLIMITED = 1 << 30
MAX_STEPS = 5000


@dataclass
class CheckingExecutor:
    """Emits ``token_of(handle, position)`` and checks each batch against a model of the KV pool.

    ``slots`` maps a KV slot to what was last written there; before a token is computed, every earlier
    position of its sequence must still be found in that sequence's blocks.
    """

    token_budget: int
    block_size: int
    token_of: Callable[[int, int], int] = lambda handle, position: (handle * 31 + position) % 97
    slots: dict[int, tuple[int, int, int]] = field(default_factory=dict)
    prefilled: int = 0
    errors: dict[int, str] = field(default_factory=dict)  # by handle
    memory_blocks: int = UNLIMITED  # for which there is memory

    def run(self, batch: Batch) -> Samples:
        proposed = sum(map(len, batch.proposals.values()))
        assert len(batch.decodes) + proposed + batch.prefill_tokens <= self.token_budget
        assert batch.decodes or batch.prefills
        self.prefilled += batch.prefill_tokens
        spans = [
            (s, len(s.tokens) - 1, [*s.tokens, *batch.proposals.get(index, ())])
            for index, s in enumerate(batch.decodes)
        ]
        spans += [(c.sequence, c.start, [*c.sequence.tokens[: c.end]]) for c in batch.prefills]
        assert len({id(s) for s, _, _ in spans}) == len(spans), "a sequence is twice in one batch"
        for sequence, start, text in spans:
            end = len(text)
            assert sequence.computed == start < end <= sequence.capacity
            is_run = all(b == a + 1 for a, b in zip(sequence.blocks, sequence.blocks[1:], strict=False))
            assert sequence.contiguous == is_run
            for position in range(end):
                slot = sequence.blocks[position // self.block_size] * self.block_size
                slot += position % self.block_size
                entry = (sequence.handle, position, text[position])
                if position >= start:
                    self.slots[slot] = entry
                assert self.slots[slot] == entry, "KV of another sequence"
        sampled = batch.sampled
        tokens = [
            self.token_of(s.handle, s.output_tokens + ahead)
            for s, ahead in zip(sampled, _ahead(batch), strict=True)
        ]
        errors = {row: self.errors[s.handle] for row, s in enumerate(sampled) if s.handle in self.errors}
        logprobs = {
            row: SampledLogprobs(-0.5, [], [])
            for row, s in enumerate(sampled)
            if s.sampling.logprobs is not None
        }
        return Samples(tokens, logprobs, errors)

    def resize(self, blocks: int) -> None:
        """What was beyond the end is gone."""
        if blocks > self.memory_blocks:
            raise MemoryError
        self.slots = {slot: entry for slot, entry in self.slots.items() if slot < blocks * self.block_size}


def _ahead(batch: Batch) -> list[int]:
    """Return how many proposals each sampling row takes for output."""
    rows: list[int] = []
    for index in range(len(batch.decodes)):
        rows += range(len(batch.proposals.get(index, ())) + 1)
    return rows + [0] * (len(batch.sampled) - len(rows))


@dataclass
class Bench:
    """An engine over a CheckingExecutor, and what came out of it."""

    engine: Engine
    executor: CheckingExecutor
    launch: Any  # the Executor around it
    preemptions: int = 0
    tokens: dict[int, list[int]] = field(default_factory=dict)
    finished: dict[int, str] = field(default_factory=dict)
    errors: dict[int, str] = field(default_factory=dict)

    def step(self) -> Any:
        event = self.engine.step()
        self.engine.check_integrity()
        self.preemptions = event.preemptions
        for handle, token in zip(event.handles, event.tokens, strict=True):
            assert handle not in self.finished, "a token after the end"
            self.tokens.setdefault(handle, []).append(token)
        for handle in event.finished:
            assert handle not in self.finished, "finished twice"
        self.finished |= event.finished
        self.errors |= event.errors
        return event

    def run(self) -> None:
        for _ in range(MAX_STEPS):
            if not self.engine.has_work:
                return
            self.step()
        raise AssertionError("the engine does not come to an end")


@pytest.fixture
def make_bench() -> Callable[..., Bench]:
    """Build a Bench. ``max_model_len`` is what the pool holds unless told."""

    def make(
        *,
        blocks: int = 32,
        block_size: int = 4,
        token_budget: int = 16,
        max_sequences: int = 4,
        vocab_size: int = 97,
        max_model_len: int | None = None,
        eos_ids: frozenset[int] = frozenset(),
        speculation: Speculator | None = None,
        clock: Callable[[], float] = lambda: 0.0,
        launch: Callable[[Runner], Executor] = Inline,
    ) -> Bench:
        executor = CheckingExecutor(token_budget, block_size)
        launched = launch(executor)
        engine = Engine(
            launched,
            blocks=BlockManager(blocks, block_size),
            limits=PlannerLimits(token_budget, max_sequences),
            model=ModelLimits(vocab_size, max_model_len or blocks * block_size),
            eos_ids=eos_ids,
            clock=clock,
            speculation=speculation,
        )
        return Bench(engine, executor, launched)

    return make


@pytest.fixture
def submit() -> Callable[..., Submit]:
    """Build a greedy Submit with unlimited credit; keywords go to Sampling."""

    def make(
        handle: int,
        prompt: Sequence[int],
        max_tokens: int = 4,
        *,
        credit: int = UNLIMITED,
        produced: Sequence[int] = (),
        priority: int = 0,
        **sampling: Any,
    ) -> Submit:
        options = {"seed": handle, "temperature": 0.0, "max_tokens": max_tokens} | sampling
        return make_submit(handle, list(prompt), credit, list(produced), priority=priority, **options)

    return make


@pytest.fixture(scope="session")
def save_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[Any, Path]]:
    """Write a random checkpoint of a family with transformers; return its model and folder."""
    import torch
    import transformers

    torch.set_num_threads(1)

    def save(family: str, *, seed: int = 0, **overrides: Any) -> tuple[Any, Path]:
        torch.manual_seed(seed)
        fields = {
            "vocab_size": 101,
            "hidden_size": 48,
            "intermediate_size": 40,
            "num_hidden_layers": 3,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "max_position_embeddings": 128,
            "eos_token_id": None,
        } | overrides
        config = getattr(transformers, f"{family}Config")(**fields)
        model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("norm.weight"):
                    parameter.normal_(1.0, 0.3)  # ones would hide a forgotten norm
                else:
                    parameter.normal_(0.0, 0.25)  # zero biases would hide a forgotten bias
        folder = tmp_path_factory.mktemp(family)
        model.save_pretrained(folder)
        return model, folder

    return save


@pytest.fixture(scope="session")
def operators_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the compiled operators are: where installations of this user keep them, compiled once."""
    from tests.support import compiled

    return compiled.operators(tmp_path_factory.getbasetemp())


@pytest.fixture(scope="session")
def load_engine(operators_cache: Path) -> Callable[..., Engine]:
    """Load a checkpoint into an engine as the process does."""
    from services.worker.engine.load.loading import load

    def build(folder: Path, **overrides: Any) -> Engine:
        options: dict[str, Any] = {
            "block_size": 4,
            "kv_blocks": 256,
            "token_budget": 64,
            "max_sequences": 8,
            "threads": 1,
        }
        options |= {"operators_cache": str(operators_cache)} | overrides
        config = EngineConfig(socket_path="", model_dir=str(folder), **options)
        return load(config, lambda phase, ratio: None)[0]

    return build


@dataclass
class Outcome:
    tokens: dict[int, list[int]] = field(default_factory=dict)
    finished: dict[int, str] = field(default_factory=dict)
    logprobs: dict[int, list[SampledLogprobs]] = field(default_factory=dict)
    prefill_tokens: int = 0
    resumes: int = 0


@pytest.fixture(scope="session")
def drive() -> Callable[..., Outcome]:
    """Run submits to their end; one that is handed back is resumed under a new handle, as an agent does."""

    def run(engine: Engine, submits: Sequence[Submit]) -> Outcome:
        outcome = Outcome()
        origin = {s.handle: s for s in submits}  # live handle -> the first submit
        for s in submits:
            outcome.tokens[s.handle] = list(s.produced_ids)
            engine.apply(s)
        for _ in range(MAX_STEPS):
            if not engine.has_work:
                return outcome
            event = engine.step()
            engine.check_integrity()
            outcome.prefill_tokens += event.prefill_tokens
            for handle, token in zip(event.handles, event.tokens, strict=True):
                outcome.tokens[origin[handle].handle].append(token)
            for handle, entries in event.logprobs.items():
                outcome.logprobs.setdefault(origin[handle].handle, []).extend(entries)
            for handle, reason in event.finished.items():
                first = origin[handle]
                if reason == "preempted":
                    outcome.resumes += 1
                    again = 1_000_000 + outcome.resumes
                    origin[again] = first
                    produced = outcome.tokens[first.handle]
                    restarted = structs.replace(
                        first, handle=again, credit_limit=UNLIMITED, produced_ids=list(produced), priority=0
                    )
                    engine.apply(restarted)
                else:
                    outcome.finished[first.handle] = reason
        raise AssertionError("the engine does not come to an end")

    return run


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Agent]]:
    """Start an engine process: a null one unless told."""
    agents: list[Agent] = []

    def run(model_dir: Path | None = None, **options: Any) -> Agent:
        folder = tmp_path / f"agent{len(agents)}"
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({"vocab_size": 1000, "eos_token_id": 2}))
        defaults: dict[str, Any] = {"executor": "null" if model_dir is None else "torch", "kv_blocks": 64}
        defaults |= {"threads": 1, "block_size": 4, "token_budget": 32, "max_sequences": 8}
        config = EngineConfig(socket_path="", model_dir=str(model_dir or folder), **(defaults | options))
        agents.append(Agent(folder, config))
        return agents[-1]

    yield run
    for agent in agents:
        agent.close()
