"""The settlement of a request with an idempotency key, which is part of its record's end."""

from __future__ import annotations

from collections.abc import Sequence

from services.core.generation import GenerationSpec
from services.gateway.idempotency.record_codec import Pin, degraded_in
from services.gateway.idempotency.types import Ending, KeyedPorts
from services.gateway.policy.degrade import Degradation
from services.ports.idempotency import Written


async def write_ending(ports: KeyedPorts, ending: Ending) -> Written:
    """Return once the record is ended or released, and the request settled, by its current owner.

    Raises StoreUnavailable; calling it again is safe.
    """
    write = ports.store.finish if ending.ended else ports.store.release
    written = await write(ending.hold, ending.chunk, ending.reservation, ending.usage)
    reservation = ending.reservation
    if reservation is not None and (
        written is Written.GONE or (reservation.local and written is not Written.FENCED)
    ):
        # Without a record it is settled like any other request; the local slot is not in the store. Tokens
        # that the store has charged are not charged again.
        await ports.limiter.settle(reservation, ending.usage)
    return written


def pin_of(spec: GenerationSpec, degradations: Sequence[Degradation], unix_s: float) -> Pin:
    """Return the record's acceptance of a request as it is served."""
    return Pin(
        request_id=spec.request_id,
        model=spec.model,
        version_digest=spec.version_digest,
        route_revision=spec.route_revision,
        seed=spec.sampling.seed,
        prompt_tokens=len(spec.prompt.ids),
        max_output_tokens=spec.limits.max_tokens,
        received_unix_us=int(unix_s * 1e6),
        degraded=degraded_in(degradations),
    )
