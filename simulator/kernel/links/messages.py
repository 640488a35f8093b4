"""Messages between the simulated links: those of ``fairway.v1`` as plain values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from services.core.fleet import ReportSnapshot
from services.core.generation import PlaceSpec, StartSpec


@dataclass(frozen=True, slots=True)
class ConnectHello:
    """A gateway opens its stream at the scheduler."""

    gateway_id: str
    zone: str


@dataclass(frozen=True, slots=True)
class ReportHello:
    """A worker opens its stream at the scheduler."""


@dataclass(frozen=True, slots=True)
class Leads:
    """A scheduler's first message on a gateway's stream."""

    epoch: int


@dataclass(frozen=True, slots=True)
class Places:
    """``places``: (placement id, spec with what is left of its queue time)."""

    places: Sequence[tuple[int, PlaceSpec]]
    cancelled: Sequence[int]


@dataclass(frozen=True, slots=True)
class NumberedReport:
    number: int
    snapshot: ReportSnapshot


@dataclass(frozen=True, slots=True)
class Execute:
    """A gateway's message to a worker; to be read in the order of the fields."""

    cancels: Sequence[int]
    starts: Sequence[tuple[int, StartSpec]]
    credit_handles: Sequence[int]
    credit_tokens: Sequence[int]


@dataclass(frozen=True, slots=True)
class Beat:
    """A worker is alive and has nothing to report."""
