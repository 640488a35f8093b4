"""A real engine process under a bound on its memory: it preempts and lives, and gives memory back."""

from __future__ import annotations

import re
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from services.worker.engine_protocol import LoadFailed, Progress, Resize, Resized, Stepped, Submit
from tests.support.engine_agent import ROOT, Agent
from tests.support.submits import make_submit

TINY = ROOT / "models" / "tiny" / "checkpoint"
MIB = 2**20
SEQUENCES = 32
LIMITS: dict[str, Any] = {
    "kv_blocks": 0,
    "block_size": 16,
    "token_budget": 128,
    "max_sequences": SEQUENCES,
    "kv_memory_bytes": 128 * MIB,
    "prefix_cache": False,
}
Start = Callable[..., Agent]


def status_bytes(agent: Agent, name: str) -> int:
    text = Path(f"/proc/{agent.process.pid}/status").read_text()
    found = re.search(rf"^{name}:\s*(\d+) kB$", text, re.MULTILINE)
    assert found is not None, f"no {name}"
    return int(found[1]) * 1024


def ask(handle: int, output_tokens: int, produced: list[int]) -> Submit:
    """A request for all that costs memory."""
    return make_submit(
        handle,
        [5 + handle] * 24,
        1 << 30,
        produced,
        seed=handle,
        top_p=0.99,
        top_k=4095,
        frequency_penalty=0.1,
        repetition_penalty=1.1,
        logprobs=20,
        max_tokens=output_tokens,
        ignore_eos=True,
    )


def run_all(agent: Agent, output_tokens: int) -> tuple[dict[int, list[int]], int]:
    """Run SEQUENCES requests to their ends, as an agent does; return the tokens, and the preemptions."""
    tokens: dict[int, list[int]] = {handle: [] for handle in range(SEQUENCES)}
    origin = {handle: handle for handle in tokens}
    for handle in tokens:
        agent.send(ask(handle, output_tokens, []))
    left, preemptions = set(tokens), 0
    while left:
        event = agent.receive()
        if not isinstance(event, Stepped):
            continue
        preemptions = event.preemptions
        for handle, token in zip(event.handles, event.tokens, strict=True):
            tokens[origin[handle]].append(token)
        for handle, reason in event.finished.items():
            first = origin[handle]
            if reason == "preempted":
                again = len(origin)
                origin[again] = first
                agent.send(ask_again(again, first, output_tokens, tokens[first]))
            else:
                assert reason == "length", event.errors
                left.remove(first)
    return tokens, preemptions


def ask_again(handle: int, first: int, output_tokens: int, produced: list[int]) -> Submit:
    before = ask(first, output_tokens, produced)
    return structs.replace(before, handle=handle, produced_ids=list(produced))


def test_pressure_leads_to_preemption_and_not_to_death(start: Start) -> None:
    """Beyond what it had when it was ready no more memory can be had than a step takes.

    The bound counts addresses of data, those of the pool and of the allocator's reserve among them, so it is
    harder than one on what is resident.
    """
    agent = start(TINY, memory_bytes=60 * MIB, **LIMITS)
    ready = agent.ready()
    kv_bytes = ready.kv_blocks_total * ready.kv_bytes_per_block
    assert ready.weight_bytes + ready.working_bytes + kv_bytes <= 60 * MIB
    assert kv_bytes > 60 * MIB - ready.weight_bytes - ready.working_bytes - ready.kv_bytes_per_block
    began = status_bytes(agent, "RssAnon")
    bound = status_bytes(agent, "VmData") + ready.working_bytes
    resource.prlimit(agent.process.pid, resource.RLIMIT_DATA, (bound, bound))
    Path(f"/proc/{agent.process.pid}/clear_refs").write_text("5")
    held_tokens = ready.kv_blocks_total * ready.block_size
    tokens, preemptions = run_all(agent, held_tokens * 3 // 2 // SEQUENCES)
    assert all(len(each) == held_tokens * 3 // 2 // SEQUENCES for each in tokens.values())
    assert preemptions > 0, "the pool was large enough"
    peak = status_bytes(agent, "VmHWM") - status_bytes(agent, "RssFile")
    assert peak - began <= kv_bytes + ready.working_bytes
    check_memory_comes_back(agent, ready.kv_blocks_total, ready.kv_bytes_per_block)
    tokens, _ = run_all(agent, 8)
    assert all(len(each) == 8 for each in tokens.values())
    assert agent.process.poll() is None


def check_memory_comes_back(agent: Agent, blocks: int, block_bytes: int) -> None:
    """All of the pool was written; what is beyond its new end is the system's again before it is told."""
    before = status_bytes(agent, "RssAnon")
    agent.send(Resize(blocks // 2))
    while not isinstance(event := agent.receive(), Resized):
        pass
    assert event.kv_blocks_total == blocks // 2
    given = before - status_bytes(agent, "RssAnon")
    assert given >= 0.9 * (blocks - blocks // 2) * block_bytes


@pytest.mark.parametrize("memory_mib", [23, 8])
def test_what_leaves_no_room_for_kv_is_told_with_its_figures(start: Start, memory_mib: int) -> None:
    agent = start(TINY, memory_bytes=memory_mib * MIB, **LIMITS)
    while isinstance(event := agent.receive(), Progress):
        pass
    assert isinstance(event, LoadFailed)
    assert event.reason == "does_not_fit"
    assert event.message.startswith(f"of {memory_mib} MiB weights take 21 and working memory ")
    assert "1024 tokens take 6." in event.message
    assert (event.weight_bytes, event.kv_bytes) == (21_902_336, 64 * 16 * 6144)
    assert event.working_bytes > 0
