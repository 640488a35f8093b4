"""Tenants with habits, which a drill changes while they send, and what their clients measured."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass, field, fields
from typing import Final

from bench.overhead import quantile
from fairway.client import Client, FairwayError
from fairway.client.session import Session
from fairway.client.values import Accepted, Finished, Options, Priority, SessionOptions, StageClock

CHAT, SMALL, EMBED = "chat", "small", "embed"
MOST_OPEN: Final = 100  # requests of a tenant at once; more are not sent, and counted
WIDEST: Final = 1 << 12
STAGES: Final = tuple(one.name for one in fields(StageClock) if one.name.endswith("_s"))
TTFT_STAGES: Final = STAGES[: STAGES.index("prefill_s") + 1]
METRICS: Final = ("ttft", "itl", "total")


@dataclass(frozen=True, slots=True)
class Habits:
    """How one tenant uses a model. Ranges are (least, most), both included."""

    per_s: float = 0.0
    model: str = CHAT
    prompt_tokens: tuple[int, int] = (40, 80)
    shared_tokens: int = 0  # tokens at the start that all its prompts share
    output_tokens: tuple[int, int] = (8, 16)
    priority: Priority | None = None
    window_tokens: int = 512  # how far the server may be ahead of its readers
    read_pause_s: float = 0.0  # pause of a reader after each message
    rows: int = 1  # rows of one request of the model that embeds


@dataclass(frozen=True, slots=True)
class Sent:
    """One request that ended. Seconds; ``failure`` is empty for a complete answer."""

    tenant: str
    model: str
    began_unix_s: float
    ttft_s: float
    itl_s: float
    total_s: float
    stages_s: Mapping[str, float] = field(default_factory=dict)
    request_id: str = ""
    failure: str = ""

    def metric(self, name: str) -> float:
        return {"ttft": self.ttft_s, "itl": self.itl_s, "total": self.total_s}[name]


@dataclass(slots=True)
class Traffic:
    """Poisson arrivals of each tenant, whether or not earlier requests have ended."""

    gateways: Sequence[str]
    keys: Mapping[str, str]
    habits: dict[str, Habits]
    sent: list[Sent] = field(default_factory=list)
    dropped: Counter[str] = field(default_factory=Counter)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack, asyncio.TaskGroup() as group:
            tasks = []
            for number, (tenant, key) in enumerate(self.keys.items()):
                clients = [await stack.enter_async_context(Client(one, api_key=key)) for one in self.gateways]
                tasks.append(group.create_task(self._arrive(tenant, clients, random.Random(number), group)))
            try:
                yield
            finally:
                for task in tasks:
                    task.cancel()

    def between(self, from_s: float, to_s: float, *, model: str = CHAT) -> list[Sent]:
        """Return the complete answers to what was sent then, in Unix seconds."""
        return [
            one
            for one in self.sent
            if from_s <= one.began_unix_s < to_s and one.model == model and not one.failure
        ]

    async def _arrive(
        self, tenant: str, clients: Sequence[Client], rng: random.Random, group: asyncio.TaskGroup
    ) -> None:
        options = SessionOptions(window_tokens=self.habits[tenant].window_tokens)
        sessions = [client.session(options) for client in clients]
        turns, running = itertools.cycle(range(len(clients))), set[asyncio.Task[None]]()
        due_s = time.monotonic()
        while True:
            habits = self.habits[tenant]
            # A tenant that pauses is looked at again soon: its habits may change.
            gap_s = rng.expovariate(habits.per_s) if habits.per_s else 0.2
            due_s = max(due_s, time.monotonic() - 1.0) + gap_s
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))
            if not self.habits[tenant].per_s or not habits.per_s:
                continue
            if len(running) >= MOST_OPEN:
                self.dropped[tenant] += 1
                continue
            turn = next(turns)
            send = (
                self._embed(tenant, clients[turn], habits, rng)
                if habits.model == EMBED
                else self._stream(tenant, sessions[turn], habits, rng)
            )
            task = group.create_task(send)
            running.add(task)
            task.add_done_callback(running.discard)

    async def _stream(self, tenant: str, session: Session, habits: Habits, rng: random.Random) -> None:
        options = Options(
            max_output_tokens=rng.randint(*habits.output_tokens), ignore_eos=True, priority=habits.priority
        )
        prompt = prompt_of(habits, rng, tenant)
        began_s, request_id, finished, failure = time.time(), "", None, ""
        try:
            async with session.generate(
                habits.model, prompt, options, timeout_s=60, idempotency_key=""
            ) as stream:
                async for event in stream:
                    if isinstance(event, Accepted):
                        request_id = event.request_id
                    elif isinstance(event, Finished):
                        finished = event
                    elif habits.read_pause_s:
                        await asyncio.sleep(habits.read_pause_s)
        except FairwayError as error:
            failure = f"{error.reason}: {error.message}"
        if finished is None:
            failed = Sent(tenant, habits.model, began_s, 0.0, 0.0, 0.0, failure=failure or "no end")
            self.sent.append(failed)
            return
        stages = {name: value for name, value in asdict(finished.clock).items() if name in STAGES}
        gaps = max(1, finished.usage.output_tokens - 1)
        self.sent.append(
            Sent(
                tenant,
                habits.model,
                began_s,
                sum(stages[name] for name in TTFT_STAGES),
                stages["decode_s"] / gaps,
                sum(stages.values()),
                stages,
                request_id,
            )
        )

    async def _embed(self, tenant: str, client: Client, habits: Habits, rng: random.Random) -> None:
        rows = [prompt_of(habits, rng, tenant) for _ in range(habits.rows)]
        began_s, began_unix_s, failure = time.monotonic(), time.time(), ""
        try:
            await client.embed(EMBED, [[token % 10 + 3 for token in row] for row in rows], timeout_s=60)
        except FairwayError as error:
            failure = f"{error.reason}: {error.message}"
        took_s = time.monotonic() - began_s
        self.sent.append(Sent(tenant, EMBED, began_unix_s, took_s, 0.0, took_s, failure=failure))


def prompt_of(habits: Habits, rng: random.Random, tenant: str) -> list[int]:
    """Return token ids; those of the shared start are the tenant's own."""
    length = rng.randint(*habits.prompt_tokens)
    shared = random.Random(tenant)
    start = [shared.randrange(16, WIDEST) for _ in range(min(length, habits.shared_tokens))]
    return start + [rng.randrange(16, WIDEST) for _ in range(length - len(start))]


def summary(sent: Sequence[Sent], metric: str) -> dict[str, float]:
    """Return the quantiles of a metric, and the mean stages of the slowest twentieth."""
    if not sent:
        return {"requests": 0}
    values = [one.metric(metric) for one in sent]
    p95_s = quantile(values, 0.95)
    tail = [one for one in sent if one.metric(metric) >= p95_s and one.stages_s]
    stages = {name: round(sum(one.stages_s[name] for one in tail) / len(tail), 4) for name in STAGES if tail}
    quantiles = {"p50_s": round(quantile(values, 0.5), 4), "p95_s": round(p95_s, 4)}
    return {"requests": len(sent), **quantiles, **stages}
