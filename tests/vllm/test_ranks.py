"""Engines on several ranks: the same tokens, and what becomes of them when a rank is lost."""

from __future__ import annotations

import os
import random
import signal
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from services.worker.engine.process import EngineExitCode
from services.worker.engine_protocol import EngineConfig, LoadAdapter
from tests.contract.engine.conftest import TINY, VLLM_PYTHON, Engine
from tests.support.adapters import ALL, write_adapter
from tests.support.engine_agent import Agent

DRAWN = random.Random(8)
PROMPTS = [[DRAWN.randrange(10, 4000) for _ in range(size)] for size in (5, 33, 100, 140)]
SHARED = Path("/dev/shm")
SOON_S = 2.0


@pytest.fixture
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Engine]]:
    agents: list[Agent] = []

    def run(executor: str = "vllm", **options: Any) -> Engine:
        defaults: dict[str, Any] = {"threads": 1, "block_size": 32, "kv_blocks": 64, "token_budget": 96}
        defaults |= {"max_sequences": 16, "memory_bytes": 2 << 30, "max_model_len": 512}
        config = EngineConfig("", str(TINY), executor=executor, **(defaults | options))  # type: ignore[arg-type]
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


def ranks_of(engine: Engine) -> list[psutil.Process]:
    family = psutil.Process(engine.agent.process.pid).children(recursive=True)
    return [each for each in family if "Worker" in " ".join(each.cmdline())]


@pytest.mark.parametrize("sizes", [{"tensor_parallel": 2}, {"pipeline_parallel": 2}])
def test_ranks_give_the_tokens_of_one_and_leave_no_memory(start: Callable[..., Engine], sizes: Any) -> None:
    before = set(SHARED.iterdir())
    engine = start(**sizes)
    assert "exact" in engine.ready.capabilities
    assert tokens(engine) == tokens(start()) == tokens(start("torch"))
    assert len(ranks_of(engine)) == 2
    os.killpg(engine.agent.process.pid, signal.SIGKILL)
    engine.agent.exit_code()
    assert set(SHARED.iterdir()) <= before


@pytest.mark.parametrize("sizes", [{"tensor_parallel": 2}, {"pipeline_parallel": 2}])
@pytest.mark.parametrize("busy", [True, False])
def test_a_lost_rank_ends_the_engine_within_two_seconds(
    start: Callable[..., Engine], sizes: Any, busy: bool
) -> None:
    engine = start(**sizes)
    if busy:
        engine.submit(PROMPTS[0], 400)
        engine.step()
    os.kill(ranks_of(engine)[1].pid, signal.SIGKILL)
    killed_s = time.monotonic()
    with pytest.raises(struct.error):  # the end of the stream
        while True:
            engine.agent.receive()
    assert engine.agent.exit_code() == EngineExitCode.STEP_FAILED
    assert time.monotonic() - killed_s < SOON_S


def test_bfloat16_is_served_and_promised_as_less(start: Callable[..., Engine]) -> None:
    engine = start(dtype="bfloat16")
    assert "exact" not in engine.ready.capabilities
    assert all(len(output) == 16 for output in tokens(engine))


@pytest.mark.parametrize("sizes", [{"tensor_parallel": 2}, {"pipeline_parallel": 2}])
def test_adapters_on_ranks_are_those_of_one(start: Callable[..., Engine], tmp_path: Path, sizes: Any) -> None:
    folders = [
        write_adapter(tmp_path / str(rank), TINY, seed=rank, rank=rank, targets=targets, lora_alpha=0.8)
        for rank, targets in ((4, ALL), (1, ("v_proj", "up_proj", "o_proj")))
    ]
    found = []
    for engine in (start(**sizes), start("torch")):
        assert "adapters" in engine.ready.capabilities
        engine.send(*(LoadAdapter(number, str(folder)) for number, folder in enumerate(folders, 1)))
        handles = [
            engine.submit(prompt, 12, seed=place, logprobs=2, adapter=(place + turn) % 3)
            for turn in range(3)
            for place, prompt in enumerate(PROMPTS)
        ]
        found.append(engine.run(*handles))
    assert [output.tokens for output in found[0]] == [output.tokens for output in found[1]]
    for mine, theirs in zip(*found, strict=True):
        for one, other in zip(mine.logprobs, theirs.logprobs, strict=True):
            assert one.sampled == pytest.approx(other.sampled, abs=2e-4)
