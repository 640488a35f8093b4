"""Steady traffic from a seed: mixed streams at a set rate, with cancels and slow readers."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import grpc

from fairway.v1 import inference_pb2 as pb
from fairway.v1 import inference_pb2_grpc
from services.core.errors import Overloaded
from services.rpc.status import from_rpc_error
from services.runtime.clock import SystemClock
from tests.chaos.checker import Reference
from tests.chaos.outcome import End, Outcome
from tests.support.stack import metadata

SPECS: Final = 24
CLIENT_TIMEOUT_S: Final = 75.0
MOVES: Final = 60
MOVE_PAUSE_S: Final = 0.25
SLOW_PAUSE_S: Final = 1.5
_OPTIONS: Final = (
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 500),
    ("grpc.enable_http_proxy", 0),
)
now_s = SystemClock().monotonic_s


@dataclass(frozen=True, slots=True)
class Spec:
    """One of the generations that the traffic is made of."""

    number: int
    tokens: int

    @property
    def greedy(self) -> bool:
        return self.number % 2 == 1

    def generation(self, model: str, tokens: int | None = None) -> pb.Generation:
        generation = pb.Generation(
            model=model,
            prompt=f"class Queue{self.number}:\n    def push_{self.number}(self, item):\n",
            max_output_tokens=tokens or self.tokens,
            ignore_eos=True,
        )
        generation.sampling.seed = self.number
        generation.sampling.temperature = 0.0 if self.greedy else 0.7
        return generation


def make_specs() -> tuple[Spec, ...]:
    """The same for every seed, so that one undisturbed run serves all drills. Three short to two long."""
    rng = random.Random(0)
    return tuple(
        Spec(number, rng.randint(200, 380) if number % 5 in (0, 2) else rng.randint(8, 40))
        for number in range(SPECS)
    )


class Client:
    """Sends requests to gateways; one that is refused before it was accepted goes to another gateway.

    One that is shed before anything of its output comes back when it was told to, as OpenAI's libraries do.
    """

    def __init__(self, gateways: Mapping[str, str], model: str, *, timeout_s: float) -> None:
        """``gateways``: address by name. A request is given up after ``timeout_s``."""
        self.names = tuple(gateways)
        self.timeout_s = timeout_s
        self.model = model
        self._channels = {
            name: grpc.aio.insecure_channel(address, options=_OPTIONS) for name, address in gateways.items()
        }
        self._stubs = {
            name: inference_pb2_grpc.InferenceServiceStub(channel) for name, channel in self._channels.items()
        }
        self._numbers = itertools.count()

    async def close(self) -> None:
        for channel in self._channels.values():
            await channel.close()

    def stub(self, gateway: str) -> inference_pb2_grpc.InferenceServiceAsyncStub:
        return self._stubs[gateway]

    async def run(
        self,
        spec: Spec,
        key: str,
        *,
        gateway: str,
        seen: Callable[[Outcome], None] = lambda outcome: None,
        cancel_at: int | None = None,
        slow: bool = False,
        timeout_s: float | None = None,
    ) -> Outcome:
        """Return what became of one request. ``seen`` hears of it at once."""
        outcome = Outcome(next(self._numbers), spec.number, gateway, now_s(), slow=slow)
        seen(outcome)
        heard = _Heard(outcome)
        deadline_s = outcome.began_s + (timeout_s or self.timeout_s)
        while True:
            call = self._stubs[outcome.gateway].Generate(
                pb.GenerateRequest(generation=spec.generation(self.model)),
                metadata=metadata(key),
                timeout=max(deadline_s - now_s(), 0.001),
            )
            try:
                async for event in call:
                    heard.event(event)
                    if cancel_at is not None and len(outcome.ids) >= cancel_at and outcome.end is None:
                        call.cancel()
                        outcome.end = End.CANCELLED
                        break
                    if slow and event.HasField("chunk") and len(outcome.ids) < 8:
                        await asyncio.sleep(SLOW_PAUSE_S)
                if outcome.end is None:
                    outcome.end = End.TRUNCATED
            except grpc.aio.AioRpcError as error:
                if self._moved(outcome, error, deadline_s):
                    await asyncio.sleep(MOVE_PAUSE_S)
                    continue
                if (pause_s := _deferred(outcome, error, deadline_s)) is not None:
                    await asyncio.sleep(pause_s)
                    heard.told()
                    continue
                _note_error(outcome, error)
            finally:
                call.cancel()
            heard.ended()
            return outcome

    def _moved(self, outcome: Outcome, error: grpc.aio.AioRpcError, deadline_s: float) -> bool:
        """Whether the request goes to the next gateway: it was not accepted, and the gateway is away."""
        if outcome.accepted_s is not None or outcome.end is not None:
            return False
        reason = _reason(error)
        away = error.code() is grpc.StatusCode.UNAVAILABLE and reason in ("", "DRAINING")
        if not away or outcome.moves >= MOVES or now_s() + MOVE_PAUSE_S > deadline_s:
            return False
        outcome.moves += 1
        place = self.names.index(outcome.gateway)
        outcome.gateway = self.names[(place + 1) % len(self.names)]
        return True


class _Heard:
    """Fills an outcome in, event by event."""

    def __init__(self, outcome: Outcome) -> None:
        self._outcome = outcome
        self._last_s = outcome.began_s

    def event(self, event: pb.GenerateResponse) -> None:
        outcome = self._outcome
        if event.HasField("heartbeat"):
            return
        self._mark()
        if event.HasField("accepted"):
            outcome.accepted_s = now_s()
            outcome.request_id = event.accepted.request_id
        elif event.HasField("chunk"):
            outcome.take(event.chunk.offset, event.chunk.ids, event.chunk.text)
        elif outcome.end is End.FINISHED:
            outcome.problems.append("two terminal events")
        else:
            outcome.end = End.FINISHED
            outcome.resumes = event.finished.resumes
            if event.finished.usage.output_tokens != len(outcome.ids):
                outcome.problems.append(
                    f"{event.finished.usage.output_tokens} tokens counted, {len(outcome.ids)} received"
                )

    def told(self) -> None:
        """The client waited for as long as it was told to: that was no silence."""
        self._last_s = now_s()

    def ended(self) -> None:
        self._mark()
        self._outcome.ended_s = self._last_s

    def _mark(self) -> None:
        at_s = now_s()
        self._outcome.silence_s = max(self._outcome.silence_s, at_s - self._last_s)
        self._last_s = at_s


def _deferred(outcome: Outcome, error: grpc.aio.AioRpcError, deadline_s: float) -> float | None:
    """Return after how long the request is to be sent again, seconds; None if it is not."""
    told = from_rpc_error(error)
    if (
        told.reason != Overloaded.reason
        or told.retry_after_s is None
        or outcome.ids
        or outcome.end is not None
    ):
        return None
    if now_s() + told.retry_after_s > deadline_s:
        return None
    outcome.deferrals += 1
    outcome.accepted_s = None
    return told.retry_after_s


def _reason(error: grpc.aio.AioRpcError) -> str:
    """Return the server's reason, "" when the status is the transport's own."""
    found = from_rpc_error(error)
    return "" if found.message.startswith("the peer ended the call with ") else found.reason


def _note_error(outcome: Outcome, error: grpc.aio.AioRpcError) -> None:
    outcome.reason = _reason(error) or error.code().name
    outcome.message = error.details() or ""
    if outcome.end is not None:
        outcome.problems.append(f"an error after the terminal event: {outcome.reason}")
    elif _reason(error):
        outcome.end = End.ERROR
    elif error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
        outcome.end = End.HANGING
    else:
        outcome.end = End.TRANSPORT


class Traffic:
    """Requests at a steady rate from ``start`` to ``stop``; what they are follows from the seed alone."""

    def __init__(
        self, client: Client, specs: Sequence[Spec], key: str, *, seed: int, rate_per_s: float
    ) -> None:
        self._client = client
        self._specs = specs
        self._key = key
        self._rng = random.Random(seed)
        self._period_s = 1.0 / rate_per_s
        self._task: asyncio.Task[None] | None = None
        self._running: set[asyncio.Task[Outcome]] = set()
        self.outcomes: list[Outcome] = []

    def start(self) -> None:
        self._task = asyncio.create_task(self._send())

    @property
    def streaming(self) -> int:
        """How many requests have tokens and are not at their end."""
        return sum(1 for outcome in self.outcomes if outcome.ids and outcome.end is None)

    async def stop(self) -> None:
        """Send nothing more and return when every request ended, each within its client's time."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait((self._task,))
        if self._running:
            await asyncio.wait(self._running, timeout=self._client.timeout_s + 15)
        for task in self._running:
            if not task.done():
                task.cancel()

    async def _send(self) -> None:
        loop = asyncio.get_running_loop()
        due_s = loop.time()
        gateways = itertools.cycle(self._client.names)
        while True:
            spec = self._rng.choice(self._specs)
            kind = self._rng.random()
            task = asyncio.create_task(
                self._client.run(
                    spec,
                    self._key,
                    gateway=next(gateways),
                    seen=self.outcomes.append,
                    cancel_at=self._rng.randint(1, spec.tokens) if kind < 0.12 else None,
                    slow=kind > 0.94,
                )
            )
            self._running.add(task)
            due_s += self._period_s
            await asyncio.sleep(max(0.0, due_s - loop.time()))


async def references(client: Client, specs: Sequence[Spec], key: str) -> dict[int, Reference]:
    """Return the undisturbed run of every spec. Raises RuntimeError when one does not finish."""
    found = {}
    for start in range(0, len(specs), 8):
        batch = specs[start : start + 8]
        runs = [client.run(spec, key, gateway=client.names[0]) for spec in batch]
        for spec, outcome in zip(batch, await asyncio.gather(*runs), strict=True):
            if outcome.end is not End.FINISHED or len(outcome.ids) != spec.tokens:
                raise RuntimeError(f"spec {spec.number} ended with {outcome}")
            found[spec.number] = Reference(tuple(outcome.ids), outcome.text, spec.greedy)
    return found
