"""What must hold after every drill. Pure: judges recorded outcomes and observed state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tests.chaos.outcome import End, Outcome


@dataclass(frozen=True, slots=True)
class Allowance:
    """What a drill's fault excuses.

    ``gateways``: their connections may break, since the fault is theirs. ``reasons``: errors that an accepted
    request may end with. ``silence_s``: the longest time that a client may hear nothing.
    """

    silence_s: float
    gateways: frozenset[str] = frozenset()
    reasons: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Reference:
    """An undisturbed run of one spec."""

    ids: tuple[int, ...]
    text: str
    greedy: bool


@dataclass(slots=True)
class Verdict:
    """What was found; ``parted`` are the outcomes whose tokens differ from the undisturbed run."""

    lost: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    parted: list[Outcome] = field(default_factory=list)
    longest_silence_s: float = 0.0

    @property
    def violations(self) -> list[str]:
        return self.lost + self.wrong


def judge(outcomes: Sequence[Outcome], references: Mapping[int, Reference], allowance: Allowance) -> Verdict:
    """Return every violation among the outcomes of one drill."""
    verdict = Verdict()
    for outcome in outcomes:
        loss = _loss(outcome, allowance)
        if loss:
            verdict.lost.append(f"{_name(outcome)}: {loss}")
        verdict.wrong += [f"{_name(outcome)}: {problem}" for problem in outcome.problems]
        excused = outcome.gateway in allowance.gateways and outcome.end is not End.FINISHED
        if not outcome.slow and not excused:
            verdict.longest_silence_s = max(verdict.longest_silence_s, outcome.silence_s)
            if outcome.silence_s > allowance.silence_s:
                verdict.wrong.append(
                    f"{_name(outcome)}: {outcome.silence_s:.1f} s without an event;"
                    f" {allowance.silence_s:g} s are allowed"
                )
        if not outcome.problems and not same(outcome, references[outcome.spec]):
            verdict.parted.append(outcome)
        if outcome.end is End.FINISHED and len(outcome.ids) != len(references[outcome.spec].ids):
            verdict.wrong.append(
                f"{_name(outcome)}: {len(outcome.ids)} tokens, the undisturbed run has"
                f" {len(references[outcome.spec].ids)}"
            )
    return verdict


def _loss(outcome: Outcome, allowance: Allowance) -> str:
    """Return why a request counts as lost, "" when it does not."""
    excused = outcome.gateway in allowance.gateways
    what = f"{outcome.reason} {outcome.message}".strip()
    match outcome.end:
        case End.FINISHED | End.CANCELLED:
            return ""
        case End.ERROR if outcome.reason in allowance.reasons:
            return ""
        case End.ERROR:
            return f"ended with {what}"
        case End.TRUNCATED:
            return "the stream ended without a terminal event"
        case End.TRANSPORT:
            return "" if excused else f"its connection broke while its gateway lived: {what}"
        case End.HANGING:
            return "" if excused else f"nothing was heard of it until the client gave up: {what}"
        case None:
            return "nobody knows how it ended"


def same(outcome: Outcome, reference: Reference) -> bool:
    """Whether the tokens begin the undisturbed run's, and the text is its when they are all of them."""
    if tuple(outcome.ids) != reference.ids[: len(outcome.ids)]:
        return False
    if outcome.end is End.FINISHED and len(outcome.ids) == len(reference.ids):
        return outcome.text == reference.text
    return True


@dataclass(frozen=True, slots=True)
class Holding:
    """What one loaded version holds on its worker."""

    worker: str
    state: str
    kv_blocks_reserved: int
    kv_blocks_used: int
    running: int
    waiting: int

    @property
    def idle(self) -> bool:
        return not (self.kv_blocks_reserved or self.kv_blocks_used or self.running or self.waiting)


def unhealed(holdings: Sequence[Holding], *, replicas: int) -> str:
    """Return what is missing until every replica is READY, "" when nothing is."""
    ready = [holding.worker for holding in holdings if holding.state == "READY"]
    if len(ready) == replicas == len(holdings):
        return ""
    return f"{len(ready)} of {replicas} replicas are READY: {[(h.worker, h.state) for h in holdings]}"


def still_taken(holdings: Sequence[Holding]) -> str:
    """Return what is held though nothing runs, "" when all is free."""
    return "; ".join(
        f"{h.worker} holds {h.kv_blocks_reserved} blocks reserved, {h.kv_blocks_used} used,"
        f" {h.running} running, {h.waiting} waiting"
        for h in holdings
        if not h.idle
    )


def process_leaks(found: Mapping[str, int], expected: Mapping[str, int]) -> list[str]:
    """Return the names that have another number of processes than they should."""
    return [
        f"{name} has {found.get(name, 0)} processes instead of {expected.get(name, 0)}"
        for name in sorted({*found, *expected})
        if found.get(name, 0) != expected.get(name, 0)
    ]


def _name(outcome: Outcome) -> str:
    return f"request {outcome.number} ({outcome.gateway} {outcome.request_id})"
