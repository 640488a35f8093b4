"""What gateways measure of a model's arms: service level indicators in sums that merge.

An arm is one version of a model that takes a part of its traffic. Requests of a session are not independent,
so the sums of an arm are kept by cluster: a hash of the session selects one of ``CLUSTERS``. Clusters are
independent of each other, whatever happens inside of one, and their number bounds the memory (Kohavi, Tang,
Xu: Trustworthy Online Controlled Experiments, 2020, chapter 18: buckets of the randomisation unit).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from msgspec import Struct

from services.core.estimates.finished import FinishedRequest
from services.core.estimates.sketch import Sketch
from services.core.estimates.traffic_shapes import TrafficShapes
from services.core.records import Priority

CLUSTERS: Final = 64
SKETCH_ERROR_RATIO: Final = 0.02
SKETCH_FLOOR_S: Final = 1e-4
_SKETCH_BUCKETS: Final = 512  # 0.1 ms to 80,000 s
_BITS: Final = 64  # bits of a cluster's count of sessions
PROMPT_SIZES: Final = 10


class ArmKey(Struct, frozen=True, gc=False):
    """One version of a deployment, of a model or of a safety pack."""

    model: str  # the deployment
    version_digest: str


class SliKey(Struct, frozen=True, gc=False):
    """Where a request is counted. ``zone`` is the gateway's."""

    arm: ArmKey
    tenant: str
    priority: Priority
    zone: str = ""


@dataclass(frozen=True, slots=True)
class GateWindow:
    """A step of a rollout: the requests whose arm it drew. Their sums are kept by cluster."""

    model: str
    step: str  # unique for the rollout and its step


def latency_sketch() -> Sketch:
    return Sketch(error_ratio=SKETCH_ERROR_RATIO, floor=SKETCH_FLOOR_S, max_buckets=_SKETCH_BUCKETS)


def session_hash(tenant: str, session_key: str) -> int:
    """Return 64 bits that are the same at every gateway."""
    data = f"{len(tenant)}:{tenant}{session_key}".encode()
    return int.from_bytes(hashlib.blake2b(data, digest_size=8, person=b"fairway-sli").digest())


def prompt_size(prompt_tokens: int) -> int:
    """Return the class of a prompt's length, 0 to ``PROMPT_SIZES`` - 1, by powers of 4."""
    return min(PROMPT_SIZES - 1, max(0, (prompt_tokens.bit_length() - 3) // 2))


def cluster_of(session: int) -> int:
    return session % CLUSTERS


@dataclass(slots=True)
class SliSums:
    """Counts of requests that ended. Everything adds up; ``merge`` keeps the counts of both."""

    # Requests that ended, without those that are the caller's mistake or that the client cancelled.
    requests: int = 0
    # Those that the platform failed before a first token, with what it refused for want of capacity.
    errors: int = 0
    # Errors and broken requests that killed their engine.
    poisoned: int = 0
    # Requests that sent a first token; ``broken`` counts those that the platform broke after it.
    started: int = 0
    broken: int = 0
    # Requests that finished, and their output tokens.
    finished: int = 0
    output_tokens: int = 0
    # Metered use of all requests, with those that failed: prompt and output tokens, device time.
    tokens: int = 0
    device_s: float = 0.0
    # Requests that a safety pack blocked, stopped or redacted, or as a shadow would have; and those flagged.
    interventions: int = 0
    flagged: int = 0
    # Seconds until the first token of each choice, by the size of the prompt, which mostly determines them.
    ttft: dict[int, Sketch] = field(default_factory=dict)
    # Seconds between tokens, weighted by token.
    itl: Sketch = field(default_factory=latency_sketch)
    # A bitmap of hashed sessions (linear counting: Whang, Vander-Zanden, Taylor 1990).
    session_bits: int = 0

    def note_session(self, session: int) -> None:
        self.session_bits |= 1 << (session // CLUSTERS % _BITS)

    def ttft_of(self, size: int) -> Sketch:
        """Return the sketch of prompts of that size."""
        found = self.ttft.get(size)
        if found is None:
            found = self.ttft[size] = latency_sketch()
        return found

    @property
    def sessions(self) -> float:
        """An estimate of the number of sessions of one cluster: within 15 % up to 100, at most 266."""
        free = _BITS - self.session_bits.bit_count()
        return _BITS * math.log(_BITS / max(free, 1))

    def merge(self, other: SliSums) -> None:
        self.requests += other.requests
        self.errors += other.errors
        self.poisoned += other.poisoned
        self.started += other.started
        self.broken += other.broken
        self.finished += other.finished
        self.output_tokens += other.output_tokens
        self.tokens += other.tokens
        self.device_s += other.device_s
        self.interventions += other.interventions
        self.flagged += other.flagged
        for size, sketch in other.ttft.items():
            self.ttft_of(size).merge(sketch)
        self.itl.merge(other.itl)
        self.session_bits |= other.session_bits


@dataclass(frozen=True, slots=True)
class ArmWindow:
    """What was measured of one arm in a ``GateWindow``, by cluster. Absent clusters are empty."""

    clusters: Mapping[int, SliSums] = field(default_factory=dict)

    @property
    def requests(self) -> int:
        return sum(sums.requests for sums in self.clusters.values())

    @property
    def sessions(self) -> int:
        return round(sum(sums.sessions for sums in self.clusters.values()))


@dataclass(frozen=True, slots=True)
class SliReceipt:
    """``last``: every report of the source up to it is counted. ``durable``: these outlive the leader."""

    last: int
    durable: int


@dataclass(frozen=True, slots=True)
class SliReport:
    """What one gateway measured since its last report. A window has arms by version digest; ``shapes`` are
    those of the requests that finished, by model."""

    cut_unix_s: float
    series: Mapping[SliKey, SliSums]
    windows: Mapping[GateWindow, Mapping[str, ArmWindow]]
    shapes: Mapping[str, TrafficShapes] = field(default_factory=dict)
    requests: Sequence[FinishedRequest] = ()  # the slowest and the failed ones
    sampled: Sequence[FinishedRequest] = ()  # drawn uniformly from all of each model
