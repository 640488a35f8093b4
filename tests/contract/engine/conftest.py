"""Engines as processes: ours, the one without a model, and vLLM's where ``FAIRWAY_VLLM_PYTHON`` names it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, Final

import pytest
from msgspec import structs

from services.worker.engine_protocol import EngineConfig, Ready, SampledLogprobs, Stepped, Submit
from tests.support.engine_agent import ROOT, Agent
from tests.support.submits import make_submit

VLLM_PYTHON: Final = os.environ.get("FAIRWAY_VLLM_PYTHON", "")
EXECUTORS: Final = ("torch", "null", *(["vllm"] if VLLM_PYTHON else []))
TINY: Final = ROOT / "models" / "tiny" / "checkpoint"


@dataclass
class Output:
    """What became of one sequence."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[SampledLogprobs] = field(default_factory=list)
    scores: list[SampledLogprobs] = field(default_factory=list)
    finish: str = ""
    error: str = ""
    cached: int = 0
    embedding: bytes = b""


class Engine:
    """A process that is ready, with commands and outputs by sequence."""

    def __init__(self, agent: Agent) -> None:
        self.agent = agent
        self.ready: Ready = agent.ready()
        self.handles = count()
        self.outputs: dict[int, Output] = {}
        self.steps: list[Stepped] = []

    def submit(self, ids: Sequence[int], tokens: int = 8, **options: Any) -> int:
        """Submit a sequence; return its handle."""
        handle = next(self.handles)
        fields = {
            name: options.pop(name)
            for name in ("embed", "scored_tokens", "apart_tokens", "adapter", "probe")
            if name in options
        }
        credit = options.pop("credit", tokens)
        command = make_submit(
            handle,
            ids,
            credit,
            options.pop("produced", ()),
            **{"max_tokens": tokens, "ignore_eos": True, "seed": 7} | options,
        )
        self.send(structs.replace(command, **fields))
        return handle

    def send(self, *commands: Any) -> None:
        for command in commands:
            if isinstance(command, Submit):
                self.outputs[command.handle] = Output()
            self.agent.send(command)

    def step(self) -> Stepped:
        """Return the next step, its outputs noted."""
        (step,) = self.agent.until(lambda _: True)
        self.steps.append(step)
        for handle, token in zip(step.handles, step.tokens, strict=True):
            self.outputs[handle].tokens.append(token)
        for handle, entries in step.logprobs.items():
            self.outputs[handle].logprobs += entries
        for handle, entries in step.prompt_logprobs.items():
            self.outputs[handle].scores += entries
        for handle, cached in step.cached.items():
            self.outputs[handle].cached = cached
        for handle, vector in step.embeddings.items():
            self.outputs[handle].embedding = vector
        for handle, reason in step.finished.items():
            self.outputs[handle].finish = reason
            self.outputs[handle].error = step.errors.get(handle, "")
        return step

    def until(self, done: Callable[[], bool]) -> None:
        while not done():
            self.step()

    def run(self, *handles: int) -> list[Output]:
        """Return the outputs of these sequences once all have ended."""
        self.until(lambda: all(self.outputs[handle].finish for handle in handles))
        return [self.outputs[handle] for handle in handles]

    def alone(self, ids: Sequence[int], tokens: int = 8, **options: Any) -> Output:
        return self.run(self.submit(ids, tokens, **options))[0]


StartEngine = Callable[..., Engine]


@pytest.fixture(scope="package", params=EXECUTORS)
def executor(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="package")
def start_engine(executor: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[StartEngine]:
    """Start a process of the executor's; it ends with the tests unless it ends before."""
    agents: list[Agent] = []

    def run(model_dir: Path = TINY, *, poisoned: bool = False, **options: Any) -> Engine:
        defaults: dict[str, Any] = {"threads": 1, "block_size": 32, "kv_blocks": 64, "token_budget": 96}
        defaults |= {"max_sequences": 16, "memory_bytes": 1 << 30, "max_model_len": 512, "null_step_s": 0.003}
        config = EngineConfig("", str(model_dir), executor=executor, **(defaults | options))  # type: ignore[arg-type]
        python = VLLM_PYTHON if executor == "vllm" else sys.executable
        agents.append(Agent(tmp_path_factory.mktemp("engine"), config, python=python, poisoned=poisoned))
        return Engine(agents[-1])

    yield run
    for agent in agents:
        agent.close()


@pytest.fixture(scope="package")
def engine(start_engine: StartEngine) -> Engine:
    """One that the tests share: each ends its sequences."""
    return start_engine()
