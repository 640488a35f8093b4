"""What is written behind a run, and what is not any more."""

from __future__ import annotations

import pytest

from services.core.errors import IntegrityError
from services.core.generation import GenerationSpec, OutputLimits, Prompt, Sampling, StageClock, Usage
from services.gateway.events import Finished
from services.gateway.idempotency.followers import FollowerBroadcast
from services.gateway.idempotency.ownership import RecordOwnership
from services.gateway.idempotency.record_codec import encode, end_in, terms_of
from services.gateway.idempotency.record_reader import RecordReader
from services.gateway.idempotency.telemetry import KeyedTelemetry
from services.gateway.idempotency.types import KeyedLimits, KeyedPorts
from services.ports.idempotency import Hold, Owned, RecordKey, Written
from services.runtime.clock import SystemClock
from services.runtime.telemetry.metrics import Metrics
from simulator.stores.idempotency import MemoryIdempotency
from simulator.stores.limiter import MemoryLimiter

CLOCK = SystemClock()
LIMITER = MemoryLimiter(CLOCK)
PORTS = KeyedPorts(
    store=MemoryIdempotency(CLOCK, LIMITER),
    limiter=LIMITER,
    clock=CLOCK,
    telemetry=KeyedTelemetry(Metrics()),
    new_incident=lambda: "inc_1",
    names_secret=b"n" * 32,
    owner="g",
    window_tokens=16,
    limits=KeyedLimits(renew_s=3600.0),
)


def ownership_of(broadcast: FollowerBroadcast) -> RecordOwnership:
    return RecordOwnership(
        Hold(RecordKey("acme", "0" * 32), "g", 1), PORTS, RecordReader(broadcast), lambda: None
    )


def test_the_last_piece_waits_for_what_follows_it() -> None:
    ownership = ownership_of(FollowerBroadcast(16, lambda follower, withdrawn: None))
    ownership.on_tokens(0, 0, [1, 2], "a", ())
    assert not ownership.due(CLOCK.monotonic_s())
    ownership.on_tokens(0, 2, [3], "b", ())
    assert ownership.due(CLOCK.monotonic_s())
    _, pieces = ownership.begin_write()
    assert [list(piece.ids) for piece in pieces[0]] == [[1, 2]]
    assert not ownership.due(CLOCK.monotonic_s()), "one write at a time"
    ownership.end_write(pieces, None)
    assert ownership.due(CLOCK.monotonic_s()), "what was not answered is written again"
    ownership.begin_write()
    ownership.end_write(pieces, Written.KEPT)
    assert not ownership.due(CLOCK.monotonic_s())


async def test_nothing_is_written_behind_a_run_that_ended() -> None:
    ownership = ownership_of(FollowerBroadcast(16, lambda follower, withdrawn: None))
    ownership.on_tokens(0, 0, [1], "a", ())
    ownership.on_tokens(0, 1, [2], "b", ())
    assert ownership.due(CLOCK.monotonic_s())
    await ownership.close()
    assert not ownership.due(CLOCK.monotonic_s())


async def test_an_acceptance_by_another_version_replaces_the_first() -> None:
    """A retry elsewhere resumes the version that was resolved last."""
    claim = await PORTS.store.claim(RecordKey("acme", "1" * 32), "body", "g")
    assert isinstance(claim, Owned)
    broadcast = FollowerBroadcast(16, lambda follower, withdrawn: None)
    ownership = RecordOwnership(claim.hold, PORTS, RecordReader(broadcast), lambda: None)
    for digest in ("sha256:x", "sha256:y"):
        spec = GenerationSpec("req_1", "m", digest, 3, Prompt([1]), Sampling(7), OutputLimits(8))
        await ownership.accept(terms_of(spec, (), 1.0))
    read = FollowerBroadcast(16, lambda follower, withdrawn: None)
    tail = await PORTS.store.read(claim.hold.key, 0, watch=False)
    RecordReader(read).take(tail.chunks)
    assert read.terms is not None
    assert read.terms.version_digest == "sha256:y"


def test_a_record_without_a_beginning_is_no_answer() -> None:
    reader = RecordReader(FollowerBroadcast(16, lambda follower, withdrawn: None))
    end = end_in(Finished((), Usage(1, 1), StageClock(received_unix_us=0)))
    with pytest.raises(IntegrityError):
        reader.take([encode([end])])
