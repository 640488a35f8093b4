"""Readers that stay away hold no slot: the first token of another tenant comes as if they were not there."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from statistics import median

import pytest

from fairway.client import Client, ClientOptions, Options, SessionOptions, Tokens
from tests.support.command_line import CommandLine
from tests.support.stack import Stack

pytestmark = pytest.mark.timeout(300)
SLOTS = 16
STALLED = 5 * SLOTS  # more than may be without a slot: the longest parked are ended
LOOKS = 7
FLOOD_S = 5.0  # until those that can begin have; shorter than a reader is waited for
WORST_S = 5.0
SLACK_S = 0.3  # of a machine that has other work; a slot that a stalled reader holds costs seconds


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory, installations: None) -> Iterator[Stack]:
    state: Path = tmp_path_factory.mktemp("stalled") / "state"
    settings = {"FAIRWAY_MAX_SEQUENCES": str(SLOTS), "FAIRWAY_SHEDDING": "false"}
    with Stack.started(state, workers=1, replicas=1, settings=settings) as running:
        yield running


@pytest.fixture(scope="module")
def keys(stack: Stack) -> dict[str, str]:
    """A key of each of two tenants."""
    cli = CommandLine(stack.state)
    found: dict[str, str] = {}
    for name in ("flood", "canary"):
        cli("tenants", "create", name, "--max-concurrency", "1000", "--requests-per-minute", "100000")
        found[name] = cli("keys", "create", name, "--tenant", name, "-o", "json").json["secret"]
    time.sleep(1.0)  # a key is known to the gateways a moment after it was made
    return found


async def first_token(stream: AsyncIterator[object]) -> None:
    """Read to the first token, and no further."""
    async for event in stream:
        if isinstance(event, Tokens):
            return


async def ttft_s(client: Client, model: str) -> tuple[float, float]:
    """Return the median and the longest time until the first token of a few requests, one after the other."""
    taken: list[float] = []
    for number in range(LOOKS):
        began_s = time.monotonic()
        async with client.generate(model, f"Canary {number}", Options(max_output_tokens=4)) as stream:
            async for event in stream:
                if isinstance(event, Tokens):
                    taken.append(time.monotonic() - began_s)
                    break
    return median(taken), max(taken)


@pytest.mark.parametrize("window_tokens", [1, 2])
async def test_stalled_readers_cost_another_tenant_nothing(
    stack: Stack, keys: dict[str, str], window_tokens: int
) -> None:
    options = ClientOptions(connect_timeout_s=30, idempotency=False)
    endpoints = stack.endpoints["gateways"]
    async with (
        Client(endpoints, api_key=keys["canary"], options=options) as canary,
        Client(endpoints, api_key=keys["flood"], options=options) as flood,
    ):
        await ttft_s(canary, stack.model)  # what is set up at the first request
        alone_s, _ = await ttft_s(canary, stack.model)
        session_options = SessionOptions(max_concurrency=STALLED, window_tokens=window_tokens)
        async with flood.session(session_options) as session:
            long = Options(max_output_tokens=200, ignore_eos=True)
            streams = [session.generate(stack.model, f"Flood {n}", long) for n in range(STALLED)]
            begun = [asyncio.ensure_future(first_token(stream)) for stream in streams]
            await asyncio.sleep(FLOOD_S)
            beside_s, worst_s = await ttft_s(canary, stack.model)
            came = [each for each in begun if each.done() and not each.exception()]
            for each in begun:
                each.cancel()
            await asyncio.gather(*begun, return_exceptions=True)
    print(f"alone {alone_s * 1e3:.1f} ms, beside {len(came)} stalled readers {beside_s * 1e3:.1f} ms")
    assert len(came) >= 4 * SLOTS, "stalled readers keep each other from their first token"
    assert worst_s <= WORST_S
    assert beside_s <= 2 * alone_s + SLACK_S
