"""What a run of the drills must show. Pure: judges what was measured."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

MAX_GAP_S: Final = 1.0
# The same while thousands of clients use the processors of the roles; what is aimed at is MAX_GAP_S.
CROWD_GAP_S: Final = 2.0
# The aim is 64; runs on two shared cores reach 61 to 72.
MAX_GROWTH_MIB: Final = 80.0
# A role whose probes fail for this long is on the way to being killed by its supervisor.
MAX_SILENCE_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class Counted:
    """Requests and output tokens of one tenant."""

    requests: int = 0
    tokens: int = 0

    def __add__(self, other: Counted) -> Counted:
        return Counted(self.requests + other.requests, self.tokens + other.tokens)

    def __sub__(self, other: Counted) -> Counted:
        return Counted(self.requests - other.requests, self.tokens - other.tokens)


@dataclass(slots=True)
class Found:
    """What an attacker reports of its attack."""

    did: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    # How many requests a tenant got above its limits.
    exceeded: int = 0
    # Why the attack cannot be run on this machine.
    skipped: str = ""
    # By tenant: requests that the gateway accepted, and tokens of those that finished.
    accepted: dict[str, tuple[int, int]] = field(default_factory=dict)

    def add(self, other: Found) -> None:
        self.did += other.did
        self.wrong += other.wrong
        self.exceeded += other.exceeded
        self.skipped = self.skipped or other.skipped
        for tenant, (requests, tokens) in other.accepted.items():
            self.accept(tenant, requests, tokens)

    def accept(self, tenant: str, requests: int, tokens: int = 0) -> None:
        before = self.accepted.get(tenant, (0, 0))
        self.accepted[tenant] = (before[0] + requests, before[1] + tokens)


@dataclass(slots=True)
class Row:
    """The result of one attack. ``silences``: longest time without a good answer to a probe, s by target.

    A ``max_gap_s`` above the common one is the row's own bound; such a gap is no figure of the run.
    """

    name: str
    found: Found
    took_s: float = 0.0
    canaries: int = 0
    failed: Sequence[str] = ()
    gap_s: float = 0.0
    gap_by: str = ""
    max_gap_s: float = MAX_GAP_S
    growth_mib: float = 0.0
    silences: Mapping[str, float] = field(default_factory=dict)
    lost_roles: Sequence[str] = ()

    @property
    def problems(self) -> list[str]:
        """Everything that must not be, one finding each."""
        found = [f"roles lost: {name}" for name in self.lost_roles]
        found += [f"canary failed: {why}" for why in self.failed]
        if self.gap_s > self.max_gap_s:
            found.append(f"a canary waited {self.gap_s:.2f} s for an event ({self.gap_by})")
        if self.found.exceeded:
            found.append(f"{self.found.exceeded} requests above a limit")
        silent = [target for target, silence_s in self.silences.items() if silence_s > MAX_SILENCE_S]
        if silent:
            longest_s = max(self.silences.values())
            found.append(f"no probe was answered for up to {longest_s:.1f} s: {', '.join(silent)}")
        if self.found.skipped:
            found.append(f"not run: {self.found.skipped}")
        return found + self.found.wrong

    @property
    def passed(self) -> bool:
        return not self.problems


@dataclass(slots=True)
class Total:
    """What is measured over several attacks. ``growths``: MiB by process, after the rest."""

    rows: list[Row] = field(default_factory=list)
    growths: dict[str, float] = field(default_factory=dict)
    lost: list[str] = field(default_factory=list)

    @property
    def figures(self) -> dict[str, float]:
        gaps = [row.gap_s for row in self.rows if row.max_gap_s <= MAX_GAP_S]
        crowds = [row.gap_s for row in self.rows if row.max_gap_s == CROWD_GAP_S]
        return {
            "attacks": sum(not row.found.skipped for row in self.rows),
            "roles_lost": sum(len(row.lost_roles) for row in self.rows),
            "canary_failed": sum(len(row.failed) for row in self.rows),
            "canary_worst_gap_s": round(max(gaps, default=0.0), 3),
            "crowd_worst_gap_s": round(max(crowds, default=0.0), 3),
            "rss_growth_mib": round(max(self.growths.values(), default=0.0), 1),
            "limits_exceeded": sum(row.found.exceeded for row in self.rows),
            "settlements_lost": len(self.lost),
        }

    @property
    def passed(self) -> bool:
        """Whether every attack was run, did no harm, and left nothing behind."""
        growth = max(self.growths.values(), default=0.0)
        canaries = sum(row.canaries for row in self.rows)
        return (
            bool(self.rows)
            and canaries > 0
            and all(row.passed for row in self.rows)
            and growth <= MAX_GROWTH_MIB
            and not self.lost
        )


def missing_settlements(seen: Mapping[str, Counted], settled: Mapping[str, Counted]) -> list[str]:
    """Return one finding for each request that a client saw accepted and that no tenant was charged for.

    A tenant whose requests were all charged, but with fewer tokens than were delivered, lost one.
    """
    found = []
    for tenant, client in seen.items():
        server = settled.get(tenant, Counted())
        found += [f"{tenant}: an accepted request was not settled"] * (client.requests - server.requests)
        if server.requests >= client.requests and server.tokens < client.tokens:
            found.append(f"{tenant}: {client.tokens} tokens delivered, {server.tokens} settled")
    return found


def line(row: Row) -> str:
    """Return an attack's result in one line."""
    if row.found.skipped:
        return f"{row.name:<24} NOT RUN: {row.found.skipped}"
    state = "ok    " if row.passed else "FAILED"
    return (
        f"{row.name:<24} {state} {row.took_s:>5.1f} s  {row.canaries:>4} canaries {len(row.failed):>3} failed"
        f"  gap {row.gap_s:>5.2f} s  silence {max(row.silences.values(), default=0.0):>4.1f} s"
        f"  growth {row.growth_mib:>6.1f} MiB  exceeded {row.found.exceeded}"
    )


def result(total: Total) -> str:
    """Return the last line of a run."""
    return f"RESULT {json.dumps(total.figures)}"
