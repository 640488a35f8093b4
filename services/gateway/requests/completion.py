"""A whole answer, assembled from its events."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass

from services.core.generation import TokenLogprobs
from services.gateway.events import Accepted, Event, Finished, Tokens


@dataclass(frozen=True, slots=True)
class Completion:
    """A whole answer: per choice its text, token ids and log probabilities."""

    accepted: Accepted
    texts: list[str]
    ids: list[list[int]]
    logprobs: list[list[TokenLogprobs]]
    finished: Finished


async def complete(stream: AsyncGenerator[Event, None]) -> Completion:
    """Return the whole answer of a stream, and close the stream."""
    # By choice, created on arrival: the number of choices is not validated yet.
    texts: defaultdict[int, list[str]] = defaultdict(list)
    ids: defaultdict[int, list[int]] = defaultdict(list)
    logprobs: defaultdict[int, list[TokenLogprobs]] = defaultdict(list)
    accepted: Accepted | None = None
    async with aclosing(stream) as events:
        async for event in events:
            if isinstance(event, Tokens):
                texts[event.choice].append(event.text)
                ids[event.choice].extend(event.ids)
                logprobs[event.choice].extend(event.logprobs)
            elif isinstance(event, Accepted):
                accepted = event
            elif isinstance(event, Finished):
                assert accepted is not None
                choices = range(len(event.choices))
                return Completion(
                    accepted,
                    ["".join(texts[choice]) for choice in choices],
                    [ids[choice] for choice in choices],
                    [logprobs[choice] for choice in choices],
                    event,
                )
    raise AssertionError("a stream ended without a terminal event")
