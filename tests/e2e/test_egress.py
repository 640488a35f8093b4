"""Egress rates on a whole installation: an operator's commands, and the times at which tokens arrive."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from fairway.v1 import common_pb2
from fairway.v1 import inference_pb2 as pb
from tests.support.command_line import CommandLine
from tests.support.stack import Stack, metadata

HANG_S = 60.0
TOKENS = 45
RATE = 6
EARLY_S = 5.0


@dataclass
class Stream:
    """What a client received, and when, in seconds after it asked."""

    ids: list[int] = field(default_factory=list)
    text: str = ""
    at_s: list[float] = field(default_factory=list)


@dataclass
class Customers:
    """A tenant with rates and one without, each with a key."""

    stack: Stack
    cli: CommandLine
    paced: str
    free: str

    async def show(self) -> Any:
        return (await asyncio.to_thread(self.cli, "tenants", "show", "paced", "-o", "json")).json

    async def set(self, **rates: int) -> None:
        options = [[f"--{name.replace('_', '-')}", str(rate)] for name, rate in rates.items()]
        parts = [part for option in options for part in option]
        await asyncio.to_thread(self.cli, "tenants", "update", "paced", *parts)

    async def ask(self, secret: str, *, seed: int = 1) -> Stream:
        generation = pb.Generation(
            model=self.stack.model,
            prompt="The tide",
            max_output_tokens=TOKENS,
            min_output_tokens=TOKENS,
            sampling=common_pb2.Sampling(temperature=1, seed=seed),
        )
        found, began_s = Stream(), time.monotonic()
        async with self.stack.inference() as stub, asyncio.timeout(HANG_S):
            request = pb.GenerateRequest(generation=generation)
            async for event in stub.Generate(request, metadata=metadata(secret)):
                found.ids += event.chunk.ids
                found.text += event.chunk.text
                found.at_s += [time.monotonic() - began_s] * len(event.chunk.ids)
        assert len(found.ids) == TOKENS
        return found


@pytest.fixture
def customers(stack: Stack) -> Iterator[Customers]:
    cli, secrets = CommandLine(stack.state), []
    for name in ("paced", "free"):
        cli("tenants", "create", name)
        secrets.append(cli("keys", "create", f"{name}-key", "--tenant", name).out.strip())
    yield Customers(stack, cli, *secrets)
    for name in ("paced", "free"):
        cli("keys", "revoke", f"{name}-key", "--yes")
        cli("tenants", "delete", name, "--yes")


async def until_paced(customers: Customers, least_s: float) -> Stream:
    """Ask until the rate is observed: gateways follow the operator's changes within moments."""
    deadline_s = time.monotonic() + HANG_S
    while (found := await customers.ask(customers.paced)).at_s[-1] < least_s:
        assert time.monotonic() < deadline_s, found.at_s
    return found


async def test_a_stream_arrives_at_its_rate_with_the_same_text_and_others_at_full_speed(
    customers: Customers,
) -> None:
    await customers.ask(customers.free)
    undisturbed = await customers.ask(customers.free)
    await customers.set(stream_tokens_per_second=RATE)
    assert (await customers.show())["stream_tokens_per_second"] == RATE
    least_s = (TOKENS - RATE - 1) / RATE
    await until_paced(customers, least_s)
    asked = (
        asyncio.create_task(customers.ask(customers.paced)),
        asyncio.create_task(customers.ask(customers.paced)),
    )
    beside = await customers.ask(customers.free)
    assert (beside.ids, beside.text) == (undisturbed.ids, undisturbed.text)
    for paced in await asyncio.gather(*asked):
        assert (paced.ids, paced.text) == (undisturbed.ids, undisturbed.text)
        assert all(at < RATE * at_s + RATE + 1 for at, at_s in enumerate(paced.at_s)), paced.at_s
        assert least_s <= paced.at_s[-1] < least_s + 20, paced.at_s
        assert beside.at_s[-1] < paced.at_s[-1]


async def test_the_streams_of_a_tenant_share_its_rate_until_it_is_removed(customers: Customers) -> None:
    await customers.set(egress_tokens_per_second=RATE)
    undisturbed = await until_paced(customers, (TOKENS - RATE - 1) / RATE)
    began_s = time.monotonic()
    asked = [asyncio.create_task(customers.ask(customers.paced)) for _ in range(4)]
    await asyncio.sleep(EARLY_S)
    assert not any(one.done() for one in asked), "they need 180 tokens, and 5 s bring 37 at most"
    await customers.set(egress_tokens_per_second=0)
    found = await asyncio.gather(*asked)
    assert [one.ids for one in found] == [undisturbed.ids] * 4
    assert time.monotonic() - began_s < 20, "the rest did not wait"
    early = [sum(at_s < EARLY_S for at_s in one.at_s) for one in found]
    assert sum(early) <= RATE * (EARLY_S + 1) + 1
    assert max(early) - min(early) <= 8
