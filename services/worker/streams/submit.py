"""Conversion of a start into the engine's ``Submit`` command."""

from __future__ import annotations

from services.worker import engine_protocol as wire
from services.worker.streams.live_sequence import WorkerSequence


def submit_command(sequence: WorkerSequence) -> wire.Submit:
    """Return the engine's command for a start."""
    spec = sequence.spec
    generation = spec.generation
    return wire.Submit(
        handle=sequence.number,
        prompt=generation.prompt,
        sampling=generation.sampling,
        limits=generation.limits,
        credit_limit=sequence.credit_limit,
        choice=spec.choice,
        produced_ids=spec.produced_ids,
        priority=-generation.priority.rank,
        request_id=generation.request_id,
        apart_tokens=spec.apart_tokens,
        embed=spec.embed,
        scored_tokens=spec.scored_tokens,
    )
