"""Our engine and its peers by turns on one load, and the results of the rounds.

A shared machine changes its pace within minutes. So each turn of a peer stands beside a turn of ours, the
ratio is taken of such a pair, and what is reported is the median of the pairs' ratios.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from bench.engines.load import Request, warm_up
from bench.engines.runner import Answer, Runner, RunnerFailed


@dataclass(slots=True)
class Compared:
    """Output tokens/s of ours and of one peer, pair by pair. ``failure`` is why there are no more.

    ``same`` of the load's requests got the same tokens from both.
    """

    peer: str
    ours: list[float] = field(default_factory=list)
    theirs: list[float] = field(default_factory=list)
    same: int = 0
    failure: str = ""

    @property
    def ratios(self) -> list[float]:
        return [mine / other for mine, other in zip(self.ours, self.theirs, strict=True)]

    @property
    def rounds(self) -> list[float] | None:
        """The pairs' ratios; None where a peer failed or was not there."""
        return self.ratios if self.ratios and not self.failure else None

    @property
    def ratio(self) -> float | None:
        """The median of the pairs' ratios; None where a peer failed or was not there."""
        return None if self.rounds is None else median(self.rounds)

    def join(self, other: Compared) -> None:
        """Take in what was compared elsewhere, on the same load."""
        self.ours += other.ours
        self.theirs += other.theirs
        self.same = other.same
        self.failure = self.failure or other.failure

    def line(self) -> str:
        """Return what a reader sees of it."""
        if self.ratio is None:
            return f"  {self.peer}: {self.failure or 'missing'}"
        rounds = ", ".join(f"{ratio:.2f}" for ratio in self.ratios)
        return (
            f"  {self.peer}: {self.ratio:.2f} ({rounds}); ours {median(self.ours):.1f}, "
            f"theirs {median(self.theirs):.1f} tokens/s; {self.same} requests with the same tokens"
        )


def compare(
    own: Runner, peers: Mapping[str, Runner], requests: Sequence[Request], *, rounds: int
) -> list[Compared]:
    """Return one entry per peer, after ``rounds`` pairs of turns with each, odd ones in reverse order."""
    found = {name: Compared(name) for name in peers}
    own.run(warm_up(requests))
    for name, peer in peers.items():
        _guarded(found[name], peer, warm_up(requests))
    for number in range(rounds):
        for name, peer in peers.items():
            if not found[name].failure:
                _pair(found[name], own, peer, requests, reverse=number % 2 == 1)
    return list(found.values())


def _pair(entry: Compared, own: Runner, peer: Runner, requests: Sequence[Request], *, reverse: bool) -> None:
    theirs = _guarded(entry, peer, requests) if reverse else None
    ours = own.run(requests)
    theirs = theirs or _guarded(entry, peer, requests)
    if theirs is not None:
        entry.ours.append(ours.tokens_per_s)
        entry.theirs.append(theirs.tokens_per_s)
        entry.same = sum(mine == other for mine, other in zip(ours.tokens, theirs.tokens, strict=True))


def _guarded(entry: Compared, peer: Runner, requests: Sequence[Request]) -> Answer | None:
    """A peer that fails is reported as that; it does not end the comparison with the others."""
    if entry.failure:
        return None
    try:
        return peer.run(requests)
    except RunnerFailed as error:
        entry.failure = str(error)
        return None
