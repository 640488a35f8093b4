"""Answers that an equal request of the same tenant may receive again, for a short time. Off by default.

An answer is kept if the installation has a retention time, the request permits it (``Generation.cache``), its
temperature is 0, and it has one choice and no idempotency key. An entry is an ended idempotency record in a
space of its own, with one chunk, encrypted and bounded like every other record. The cache never fails a
request: without an entry, or without the store, the request runs.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

import msgspec
import structlog

from services.core.errors import FairwayError
from services.core.generation import GenerationSpec, TokenLogprobs, Usage
from services.gateway.events import Accepted, Finished, RequestSink
from services.gateway.idempotency.record_codec import (
    End,
    Output,
    decode,
    encode,
    end_in,
    end_out,
    logprobs_in,
    logprobs_out,
)
from services.ports.idempotency import IdempotencyStore, Owned, RecordKey, RecordState
from services.runtime.telemetry.metrics import Counter, Metrics

log = structlog.get_logger()

MAX_ENTRY_BYTES: Final = 1024**2
# Tokens of an answer that may be kept.
_MAX_TOKENS: Final = 32_768
# A tenant's name has no slash: the space is that of cached answers.
CACHE_SPACE: Final = "/cache"
_FINGERPRINT: Final = "response"


@dataclass(frozen=True, slots=True)
class CachedAnswer:
    """The whole output of one choice and its end."""

    ids: Sequence[int]
    text: str
    logprobs: Sequence[TokenLogprobs]
    finished: Finished


def count_lookups(metrics: Metrics) -> Counter:
    return metrics.counter(
        "fairway_response_cache_lookups_total",
        "Requests that permit a cached answer, by outcome: hit, miss, failed",
        ("outcome",),
    )


class ResponseCache:
    """The entries of all tenants, each under a key that contains its tenant."""

    def __init__(
        self,
        store: IdempotencyStore,
        names_secret: bytes,
        owner: str,
        lookups: Counter,
        is_current: Callable[[], bool] = lambda: True,
    ) -> None:
        """``store`` deletes a record, with its log, when the retention time is over. While the view of the
        routes is not ``is_current``, a version may be withdrawn: nothing is found."""
        self._store = store
        self._secret = names_secret
        self._owner = owner
        self._lookups = lookups
        self._is_current = is_current

    async def find(self, tenant_id: str, spec: GenerationSpec) -> CachedAnswer | None:
        """Return the answer of an equal request of the tenant, if there is one."""
        if not self._is_current():
            self._lookups.add("miss")
            return None
        try:
            tail = await self._store.read(self._key(tenant_id, spec), 0, watch=False)
            entries = decode(tail.chunks[0]) if tail.state is RecordState.ENDED and tail.chunks else ()
        except FairwayError as error:
            log.info("response_cache.read_failed", reason=error.reason)
            self._lookups.add("failed")
            return None
        found = None
        match entries:
            case (Output() as output, End() as end):
                logprobs = logprobs_out(output.logprobs)
                found = CachedAnswer(output.ids, output.text, logprobs, end_out(end))
        self._lookups.add("miss" if found is None else "hit")
        return found

    async def put(self, tenant_id: str, spec: GenerationSpec, answer: CachedAnswer) -> None:
        """Keep an answer, if there is room and no other request has kept an equal one."""
        output = Output(0, 0, 0, answer.ids, answer.text, logprobs_in(answer.logprobs))
        chunk = encode([output, end_in(answer.finished)])
        if len(chunk) > MAX_ENTRY_BYTES:
            return
        try:
            claim = await self._store.claim(self._key(tenant_id, spec), _FINGERPRINT, self._owner)
            if isinstance(claim, Owned):
                await self._store.finish(claim.hold, chunk, None, Usage(0, 0))
        except FairwayError as error:
            log.info("response_cache.write_failed", reason=error.reason)

    def _key(self, tenant_id: str, spec: GenerationSpec) -> RecordKey:
        """Everything that decides a greedy answer."""
        decisive = (
            tenant_id,
            spec.model,
            spec.version_digest,
            list(spec.prompt.ids),
            replace(spec.sampling, seed=0),
            spec.limits,
            spec.continues_prompt,
            None if spec.safety is None else (spec.safety.default_digest, spec.safety.pack_digest),
        )
        digest = hmac.digest(
            self._secret, b"fairway response v1\0" + msgspec.msgpack.encode(decisive), "sha256"
        )
        return RecordKey(tenant_id + CACHE_SPACE, digest.hex()[:32])


class CollectedAnswer:
    """A sink that passes everything on and keeps the output of the only choice, up to a bound."""

    def __init__(self, sink: RequestSink) -> None:
        self._sink = sink
        self._ids: list[int] = []
        self._texts: list[str] = []
        self._logprobs: list[TokenLogprobs] = []
        self._fits = True

    def answer(self, finished: Finished) -> CachedAnswer | None:
        """Return the whole answer; None if it was too long to be kept."""
        if not self._fits:
            return None
        return CachedAnswer(self._ids, "".join(self._texts), self._logprobs, finished)

    def on_accepted(self, accepted: Accepted) -> None:
        self._sink.on_accepted(accepted)

    def on_tokens(
        self, choice: int, offset: int, ids: Sequence[int], text: str, logprobs: Sequence[TokenLogprobs]
    ) -> None:
        if self._fits:
            self._ids += ids
            self._texts.append(text)
            self._logprobs += logprobs
            self._fits = len(self._ids) <= _MAX_TOKENS
        self._sink.on_tokens(choice, offset, ids, text, logprobs)

    def on_finished(self, finished: Finished) -> None:
        self._sink.on_finished(finished)

    def on_failed(self, error: FairwayError) -> None:
        self._sink.on_failed(error)
