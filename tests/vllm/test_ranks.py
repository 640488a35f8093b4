"""Engines on several ranks: the same tokens, and what becomes of them when a rank is lost or hangs."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from safetensors.numpy import save_file

from bench.engines.checkpoints import random_tensors
from fairway.formats.decoder_config import parse_config
from fairway.formats.weights import SINGLE, expected_shapes
from services.runtime.clock import SystemClock
from services.runtime.process.shared_memory import SHARED, held_inodes, sweep
from services.runtime.supervisor import Supervisor
from services.worker.engine.process import EngineExitCode
from services.worker.engine_protocol import LoadAdapter
from services.worker.policy.engine_failures import ABANDON_STEPS
from services.worker.slots.engine_process import Crashed, EngineTimeouts, process_launcher
from tests.contract.engine.conftest import TINY, VLLM_PYTHON, Engine
from tests.support.adapters import ALL, write_adapter
from tests.support.engine_agent import Agent
from tests.support.waiting import until
from tests.vllm.conftest import LOAD_S, PROMPTS, Run, config_of, ranks_of, tokens

SOON_S = 2.0
LONG = 300


@pytest.mark.parametrize("sizes", [{"tensor_parallel": 2}, {"pipeline_parallel": 2}])
def test_ranks_give_the_tokens_of_one_and_leave_no_memory(start: Callable[..., Engine], sizes: Any) -> None:
    before = set(SHARED.iterdir())
    engine = start(**sizes)
    assert "exact" in engine.ready.capabilities
    assert tokens(engine) == tokens(start()) == tokens(start("torch"))
    assert len(ranks_of(engine.agent.process.pid)) == 2
    os.killpg(engine.agent.process.pid, signal.SIGKILL)
    engine.agent.exit_code()
    assert set(SHARED.iterdir()) <= before


def test_rows_wider_than_1024_are_exact_alone_too(start: Callable[..., Engine], tmp_path: Path) -> None:
    fields = json.loads((TINY / "config.json").read_text()) | {
        "hidden_size": 512,
        "intermediate_size": 1536,
        "num_hidden_layers": 2,
        "tie_word_embeddings": False,
    }
    weights = random_tensors(expected_shapes(parse_config(fields)))
    save_file(weights, tmp_path / SINGLE, metadata={"format": "pt"})
    (tmp_path / "config.json").write_text(json.dumps(fields))
    engine = start(model_dir=str(tmp_path))
    assert "exact" in engine.ready.capabilities
    assert tokens(engine) == tokens(start("torch", model_dir=str(tmp_path)))


@pytest.mark.parametrize("sizes", [{"tensor_parallel": 2}, {"pipeline_parallel": 2}])
@pytest.mark.parametrize("busy", [True, False])
def test_a_lost_rank_ends_the_engine_within_two_seconds(
    start: Callable[..., Engine], sizes: Any, busy: bool
) -> None:
    engine = start(**sizes)
    if busy:
        engine.submit(PROMPTS[0], 400)
        engine.step()
    os.kill(ranks_of(engine.agent.process.pid)[1].pid, signal.SIGKILL)
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


@pytest.mark.parametrize("is_loaded", [True, False])
async def test_ranks_end_with_the_process_that_started_them(tmp_path: Path, is_loaded: bool) -> None:
    before, began_s = set(os.listdir(SHARED)), time.time()
    agent = Agent(tmp_path, config_of(tensor_parallel=2), python=VLLM_PYTHON)
    try:
        if is_loaded:
            agent.ready()
        await until(lambda: len(ranks_of(agent.process.pid)) == 2, LOAD_S)
        ranks = ranks_of(agent.process.pid)
        agent.process.kill()
        await until(lambda: not any(runs(rank) for rank in ranks), SOON_S)
    finally:
        agent.close()
    sweep(began_s)
    held, _ = held_inodes(Path("/proc"), str(SHARED))
    assert {entry.name for entry in os.scandir(SHARED) if entry.inode() not in held} <= before


def runs(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    return False


@pytest.mark.timeout(900)
async def test_a_hung_rank_is_replaced_and_its_sequences_go_on(
    supervisor: Supervisor, vllm_dir: Path
) -> None:
    timeouts = EngineTimeouts()
    launch = process_launcher(SystemClock(), supervisor, timeouts, vllm_dir=vllm_dir)
    hung, next_ = (Run(launch, config_of(tensor_parallel=2)) for _ in range(2))
    for run in (hung, next_):
        await run.engine.start()
    for run in (hung, next_):
        await run.ready()
    hung.submit(LONG)
    await until(lambda: all(len(each) >= 3 for each in hung.tokens.values()))
    os.kill(ranks_of(hung.engine.pid)[1].pid, signal.SIGSTOP)
    stopped_s = time.monotonic()
    patience_s = max(timeouts.silence_s, 2 * ABANDON_STEPS * hung.full_step_s)
    await until(lambda: hung.exit is not None, patience_s + 30.0)
    assert time.monotonic() - stopped_s < patience_s + 5.0
    assert isinstance(hung.exit, Crashed)
    assert "no message for" in hung.exit.message
    assert not hung.finished
    resumed = await next_.outputs(next_.submit(LONG, list(hung.tokens.values())))
    assert resumed == await next_.outputs(next_.submit(LONG))
    await next_.engine.stop()


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
