"""The process over a real Unix socket: loading, streaming, and every way it ends."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from msgspec import structs

from services.core.generation import Prompt
from services.core.prefix import prefix_chain
from services.worker.engine.process import HEARTBEAT_S, AgentConnection, EngineExitCode, step_until_stopped
from services.worker.engine_protocol import (
    LENGTH_PREFIX,
    Cancel,
    Credit,
    EngineConfig,
    EngineHeartbeat,
    LoadFailed,
    Progress,
    Ready,
    SampledLogprobs,
    Shutdown,
    encode,
)
from tests.support.engine_agent import PATIENCE_S, ROOT, Agent
from tests.support.submits import make_submit


def test_a_null_engine_streams_and_shuts_down(start: Any, submit: Any) -> None:
    agent = start()
    assert agent.ready().vocab_size == 1000
    for handle in range(12):
        agent.send(submit(handle, [1, 2, 3], 5))
    tokens: dict[int, list[int]] = {}
    finished: dict[int, str] = {}
    previous = 0
    while len(finished) < 12:
        (event,) = agent.until(lambda _: True)
        assert event.step == previous + 1
        previous = event.step
        finished |= event.finished
        for handle, token in zip(event.handles, event.tokens, strict=True):
            tokens.setdefault(handle, []).append(token)
    assert all(len(made) == 5 for made in tokens.values())
    assert set(finished.values()) == {"length"}
    agent.send(Shutdown())
    assert agent.exit_code() == EngineExitCode.DONE


def test_a_null_engine_keeps_its_pace(start: Any, submit: Any) -> None:
    agent = start(null_step_s=0.01)
    agent.ready()
    started_s = time.monotonic()
    agent.send(submit(0, [1], 100))
    agent.until(lambda step: 0 in step.finished)
    assert 0.95 < time.monotonic() - started_s < PATIENCE_S


def test_credit_holds_a_stream_and_lets_it_go(start: Any, submit: Any) -> None:
    agent = start()
    agent.ready()
    agent.send(submit(0, [1], 9, credit=3))
    assert len([token for step in agent.until(lambda step: step.step == 3) for token in step.tokens]) == 3
    beat = agent.receive()  # nothing to step: the loop says that it lives
    assert isinstance(beat, EngineHeartbeat)
    assert (beat.running, beat.waiting, beat.kv_blocks_used) == (1, 0, 1)
    agent.send(Credit([0], [9]))
    steps = agent.until(lambda step: 0 in step.finished)
    assert sum(len(step.tokens) for step in steps) == 6


def test_a_cancel_frees_kv_within_a_step(start: Any, submit: Any) -> None:
    agent = start(null_step_s=0.2)
    agent.ready()
    agent.send(submit(0, [1] * 40, 100))
    agent.send(submit(1, [1], 100))
    steps = agent.until(lambda step: sorted(step.handles) == [0, 1])
    # The sequence that arrives with the cancellation shows from which step on the engine has it.
    agent.channel.sendall(encode(submit(2, [1], 100)) + encode(Cancel([0])))
    steps += agent.until(lambda step: 2 in step.handles and 0 not in step.handles)
    assert sum({0, 2} <= set(step.handles) for step in steps) <= 1
    before, after = steps[-2:]
    assert (after.running, sorted(after.handles)) == (2, [1, 2])
    # The prompt had ten blocks; each of the other two may have taken one.
    assert after.kv_blocks_used <= before.kv_blocks_used - 10 + 2


def test_an_error_of_one_sequence_leaves_the_others(start: Any, submit: Any) -> None:
    agent = start()
    agent.ready()
    agent.send(submit(0, [1], 30))
    agent.send(submit(1, [5000], 4))
    agent.send(submit(2, [1], 4, logit_bias={5000: 1.0}))
    finished: dict[int, str] = {}
    errors: dict[int, str] = {}
    while len(finished) < 3:
        (event,) = agent.until(lambda _: True)
        finished |= event.finished
        errors |= event.errors
    assert finished == {0: "length", 1: "error", 2: "error"}
    assert "prompt_ids" in errors[1]
    assert "logit_bias" in errors[2]


def test_an_idle_engine_beats_and_does_not_spin(start: Any) -> None:
    began_s = time.monotonic()
    agent = start()
    agent.ready()
    beats = [agent.receive() for _ in range(2)]
    before = cpu_s(agent.process.pid)
    beats.append(agent.receive())
    assert all(isinstance(beat, EngineHeartbeat) for beat in beats)
    assert len(beats) <= (time.monotonic() - began_s) / HEARTBEAT_S + 1
    assert cpu_s(agent.process.pid) - before < 0.2


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100


@pytest.mark.parametrize("busy", [False, True])
def test_it_ends_with_its_agent(start: Any, submit: Any, busy: bool) -> None:
    agent = start(kv_blocks=40_000, max_model_len=32_000)
    agent.ready()
    if busy:  # its sends fill the socket and block
        for handle in range(8):
            agent.send(submit(handle, [1], 19_000))
        time.sleep(0.5)
    agent.hang_up()
    assert agent.exit_code() == EngineExitCode.ORPHANED


def test_it_ends_with_its_agent_while_it_loads(start: Any, save_model: Any) -> None:
    _, folder = save_model("Llama")
    agent = start(folder)
    assert isinstance(agent.receive(), Progress)
    started_s = time.monotonic()
    agent.hang_up()
    assert agent.exit_code() in (EngineExitCode.ORPHANED, -signal.SIGKILL)
    assert time.monotonic() - started_s < 10.0


def test_it_ends_with_the_process_that_started_it(tmp_path: Path) -> None:
    """The socket stays open in this test, so only the death of the parent can end it."""
    server = socket.socket(socket.AF_UNIX)
    server.bind(str(tmp_path / "s"))
    server.listen(1)
    server.settimeout(PATIENCE_S)
    config = EngineConfig(socket_path=str(tmp_path / "s"), model_dir=str(tmp_path), executor="null")
    script = (
        "import subprocess, sys, time\n"
        "command = [sys.executable, '-m', 'services.worker.engine.process', '--config', sys.argv[1]]\n"
        "child = subprocess.Popen(command)\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    command = [sys.executable, "-c", script, msgspec.json.encode(config).decode()]
    parent = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert parent.stdout is not None
    with server, parent.stdout:
        child = int(parent.stdout.readline())
        channel, _ = server.accept()
        with channel:
            channel.settimeout(PATIENCE_S)
            channel.recv(1)  # it runs
            parent.kill()
            parent.wait()
            deadline_s = time.monotonic() + 10
            while is_alive(child) and time.monotonic() < deadline_s:
                time.sleep(0.02)
            assert not is_alive(child)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize(
    "raw",
    [
        LENGTH_PREFIX.pack(3) + b"abc",
        LENGTH_PREFIX.pack(1 << 31) + b"abc",
        LENGTH_PREFIX.pack(0),
        LENGTH_PREFIX.pack(5) + msgspec.msgpack.encode("abcd"),
        encode(Ready(1, 1, 1, 1, 1, 1)),  # an event is no command
        LENGTH_PREFIX.pack(100_000) + b"\x91" * 100_000,  # nested beyond any stack
    ],
)
def test_a_malformed_command_ends_it(start: Any, raw: bytes) -> None:
    agent = start()
    agent.ready()
    agent.channel.sendall(raw)
    assert agent.exit_code() == EngineExitCode.BAD_INPUT
    assert "command.refused" in agent.log.read_text()


class NoMemory(socket.socket):
    """A connection whose next command is larger than the memory that is left."""

    def makefile(self, *arguments: Any, **more: Any) -> Any:
        raise MemoryError


def test_a_command_without_memory_for_it_ends_it() -> None:
    """Otherwise the process would go on without ever receiving another one."""
    refused: list[Exception] = []
    ended = threading.Event()

    def refuse(error: Exception) -> None:
        refused.append(error)
        ended.set()

    with NoMemory() as channel:
        AgentConnection(channel, on_end=lambda _: None, on_malformed=refuse)
        assert ended.wait(PATIENCE_S)
    assert isinstance(refused[0], MemoryError)


def test_a_handle_that_is_live_ends_it(start: Any, submit: Any) -> None:
    agent = start(null_step_s=0.05)
    agent.ready()
    agent.send(submit(0, [1], 50))
    agent.send(submit(0, [1], 50))
    assert agent.exit_code() == EngineExitCode.BAD_INPUT


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (RuntimeError("device assert"), EngineExitCode.STEP_FAILED),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), EngineExitCode.STEP_FAILED),
        (MemoryError(), EngineExitCode.OUT_OF_MEMORY),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), EngineExitCode.OUT_OF_MEMORY),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), EngineExitCode.OUT_OF_MEMORY),
    ],
)
def test_an_executor_that_fails_ends_it(
    make_bench: Any, submit: Any, error: Exception, code: EngineExitCode
) -> None:
    """Whatever the executor raises is fatal: the agent restarts the process and isolates the request."""

    def fail(handle: int, position: int) -> int:
        raise error

    bench = make_bench()
    bench.executor.token_of = fail
    ours, theirs = socket.socketpair()
    ended = threading.Event()
    with ours, theirs:
        connection = AgentConnection(ours, on_end=lambda _: ended.set(), on_malformed=lambda error: None)
        theirs.sendall(encode(submit(0, [1])))
        assert step_until_stopped(bench.engine, connection) == code
        theirs.close()
        assert ended.wait(PATIENCE_S)


@pytest.mark.parametrize("config", ["{", "{}", '{"socket_path": "s", "model_dir": "m", "unknown": 1}'])
def test_a_configuration_that_cannot_be_read_ends_it(config: str) -> None:
    command = [sys.executable, "-m", "services.worker.engine.process", "--config", config]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == EngineExitCode.BAD_INPUT
    assert b"config.refused" in done.stderr


def test_a_model_that_is_not_served_fails_to_load(start: Any, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["GPT2LMHeadModel"]}))
    agent = start(tmp_path)
    event = agent.receive()
    assert isinstance(event, LoadFailed)
    assert event.reason == "unsupported_model"
    assert "GPT2LMHeadModel" in event.message
    assert agent.exit_code() == EngineExitCode.LOAD_FAILED


def test_a_torch_engine_streams(
    start: Any, submit: Any, save_model: Any, load_engine: Any, drive: Any
) -> None:
    """The same tokens as the same engine in this process; the log says nothing of prompt or output."""
    _, folder = save_model("Llama")
    submits = [
        submit(handle, range(3, 9 + handle), 8, temperature=handle % 2, ignore_eos=True)
        for handle in range(6)
    ]
    expected = drive(load_engine(folder), submits).tokens
    agent = start(folder)
    ready = agent.ready()
    assert (ready.kv_blocks_total, ready.block_size, ready.vocab_size, ready.max_model_len) == (
        64,
        4,
        101,
        128,
    )
    assert ready.kv_bytes_per_block == 2 * 3 * 2 * 8 * 4 * 4
    assert ready.weight_bytes == (folder / "model.safetensors").stat().st_size // 4 * 4 - header_bytes(folder)
    for one in submits:
        agent.send(one)
    tokens: dict[int, list[int]] = {}
    finished: dict[int, str] = {}
    while len(finished) < len(submits):
        (event,) = agent.until(lambda _: True)
        finished |= event.finished
        for handle, token in zip(event.handles, event.tokens, strict=True):
            tokens.setdefault(handle, []).append(token)
    assert tokens == expected
    again = check_prefix_is_found(agent, submit)
    agent.send(Shutdown())
    assert agent.exit_code() == EngineExitCode.DONE
    events = [json.loads(line)["event"] for line in agent.log.read_text().splitlines()]
    taken = ["sequence.taken"] * (len(submits) + again)
    assert events == ["operators.loaded", "model.loaded", *taken, "engine.stopped"]


def check_prefix_is_found(agent: Agent, submit: Any) -> int:
    """The same prompt twice: the second time from the cache, and the same tokens. Return how many it sent."""
    prompt = [3 + place % 90 for place in range(70)]
    names = prefix_chain(5, prompt)
    heard: list[tuple[int, list[int], list[int]]] = []
    for handle in (100, 101):
        one = submit(handle, prompt, 8)
        agent.send(msgspec.structs.replace(one, prompt=Prompt(prompt, names, 5)))
        steps = agent.until(lambda step, handle=handle: handle in step.finished)  # type: ignore[misc]
        tokens = [token for step in steps for token in step.tokens]
        heard.append((steps[0].cached[handle], tokens, [n for step in steps for n in step.prefix_added]))
    assert [cached for cached, _, _ in heard] == [0, 68]
    assert heard[0][1] == heard[1][1]
    assert (heard[0][2], heard[1][2]) == (list(names), [])
    return len(heard)


def header_bytes(folder: Path) -> int:
    with (folder / "model.safetensors").open("rb") as file:
        return 8 + int.from_bytes(file.read(8), "little")


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_stream_goes_on_in_another_process_to_the_last_bit(
    start: Callable[..., Agent], save_model: Callable[..., Any], temperature: float
) -> None:
    """The other has other threads, blocks, chunks and company; it computes again what the first had."""
    _, folder = save_model("Llama")
    prompt = [3 + place % 90 for place in range(50)]
    command = make_submit(
        1, prompt, 1 << 30, seed=7, temperature=temperature, logprobs=5, max_tokens=40, ignore_eos=True
    )
    first = start(folder, threads=1, block_size=4, token_budget=16)
    first.ready()
    first.send(command)
    tokens, logprobs = _output(first, 1)
    second = start(folder, threads=2, block_size=16, token_budget=96)
    second.ready()
    for handle in range(2, 6):
        noise = make_submit(
            handle,
            [handle] * 9 * handle,
            1 << 30,
            seed=handle,
            temperature=1.2,
            max_tokens=60,
            ignore_eos=True,
        )
        second.send(noise)
    second.send(structs.replace(command, produced_ids=tokens[:17]))
    assert _output(second, 1) == (tokens[17:], logprobs[17:])


def _output(agent: Agent, handle: int) -> tuple[list[int], list[SampledLogprobs]]:
    """Return the tokens and log-probabilities of one sequence, once it has ended by its length."""
    steps = agent.until(lambda step: handle in step.finished)
    assert steps[-1].finished[handle] == "length", steps[-1].errors
    pairs = ((mine, token) for step in steps for mine, token in zip(step.handles, step.tokens, strict=True))
    logprobs = [entry for step in steps for entry in step.logprobs.get(handle, [])]
    return [token for mine, token in pairs if mine == handle], logprobs
