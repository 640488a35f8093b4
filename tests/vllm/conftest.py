"""Engines of vLLM: with a plain agent, and with the worker's own, which follows and replaces them."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_asyncio

from fairway.engines.environment import Installed, mark
from services.runtime.clock import SystemClock
from services.runtime.supervisor import Supervisor
from services.worker.engine_protocol import EngineConfig, Ready, Stepped
from services.worker.slots.engine_process import EngineEvents, EngineExit, EngineLauncher, RunningEngine
from tests.contract.engine.conftest import TINY, VLLM_PYTHON, Engine
from tests.support.engine_agent import Agent
from tests.support.submits import make_submit
from tests.support.waiting import until

DRAWN = random.Random(8)
PROMPTS = [[DRAWN.randrange(10, 4000) for _ in range(size)] for size in (5, 33, 100, 140)]
LOAD_S = 200.0


def config_of(executor: str = "vllm", **options: Any) -> EngineConfig:
    defaults: dict[str, Any] = {"threads": 1, "block_size": 32, "kv_blocks": 64, "token_budget": 96}
    defaults |= {"model_dir": str(TINY), "max_sequences": 16, "memory_bytes": 2 << 30, "max_model_len": 512}
    return EngineConfig("", executor=executor, **(defaults | options))  # type: ignore[arg-type]


@pytest.fixture
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Engine]]:
    agents: list[Agent] = []

    def run(executor: str = "vllm", **options: Any) -> Engine:
        config = config_of(executor, **options)
        agents.append(Agent(tmp_path_factory.mktemp("engine"), config, python=VLLM_PYTHON))
        return Engine(agents[-1])

    yield run
    for agent in agents:
        agent.close()


def tokens(engine: Engine) -> list[list[int]]:
    handles = [
        engine.submit(prompt, 16, seed=place, temperature=float(place % 2), logprobs=2, presence_penalty=0.5)
        for place, prompt in enumerate(PROMPTS)
    ]
    return [output.tokens for output in engine.run(*handles)]


@pytest.fixture(scope="session")
def vllm_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment as installed, whose interpreter is the tests'."""
    folder = tmp_path_factory.mktemp("vllm")
    (folder / "bin").mkdir()
    python = folder / "bin" / "python"
    python.write_text(f'#!/bin/sh\nexec {VLLM_PYTHON} "$@"\n')
    python.chmod(0o755)
    mark(folder, Installed("vllm", "0", "cpu", ""))
    return folder


class Run:
    """One run of an engine under the worker's agent, and the tokens that it gave."""

    def __init__(self, launch: EngineLauncher, config: EngineConfig) -> None:
        self.tokens: dict[int, list[int]] = {}
        self.finished: set[int] = set()
        self.is_ready = False
        self.full_step_s = 0.0
        self.exit: EngineExit | None = None
        events = EngineEvents(on_ready=self._ready, on_stepped=self._stepped, on_exit=self._exited)
        self.engine: RunningEngine = launch(config, events)

    async def ready(self) -> None:
        await until(lambda: self.is_ready or self.exit is not None, LOAD_S)
        assert self.exit is None, self.exit

    def submit(self, tokens: int = 16, produced: Sequence[list[int]] = ()) -> list[int]:
        """Submit the prompts as ``tokens`` does, after what an earlier run has ``produced``.

        Return their handles.
        """
        handles = [len(self.tokens) + place for place in range(len(PROMPTS))]
        for place, (handle, prompt) in enumerate(zip(handles, PROMPTS, strict=True)):
            self.tokens[handle] = list(produced[place]) if produced else []
            command = make_submit(
                handle,
                prompt,
                tokens,
                self.tokens[handle][:],
                max_tokens=tokens,
                ignore_eos=True,
                seed=place,
                temperature=float(place % 2),
                logprobs=2,
                presence_penalty=0.5,
            )
            self.engine.send(command)
        return handles

    async def outputs(self, handles: list[int]) -> list[list[int]]:
        await until(lambda: self.finished.issuperset(handles), LOAD_S)
        return [self.tokens[handle] for handle in handles]

    def _ready(self, event: Ready) -> None:
        self.is_ready, self.full_step_s = True, event.full_step_s

    def _stepped(self, event: Stepped) -> None:
        for handle, token in zip(event.handles, event.tokens, strict=True):
            self.tokens[handle].append(token)
        self.finished |= event.finished.keys()

    def _exited(self, exit_: EngineExit) -> None:
        self.exit = exit_


@pytest_asyncio.fixture
async def supervisor() -> AsyncIterator[Supervisor]:
    found = Supervisor(SystemClock())
    yield found
    await found.close()
    assert found.healthy, found.failures


def ranks_of(pid: int) -> list[psutil.Process]:
    family = psutil.Process(pid).children(recursive=True)
    return [each for each in family if "Worker" in " ".join(each.cmdline())]
