"""How many tokens to propose for each sequence. Pure: the caller brings the measured times.

A proposal makes a step longer by a row and saves a step of its sequence if it is accepted. Of a sequence
whose proposals are accepted with probability ``a`` each, the ``j``-th is of use with ``a**j``; it pays while
that is more than what a row costs over what a token costs. Both are measured: the time of steps against their
rows, the time that proposing takes, and acceptance as a decayed mean of each sequence, drawn to that of all
where little is known of it. What a row costs can be told only beside steps that propose nothing, so there
are such steps between: at once after a probe, and the rarer the more speculation gains.

An account bounds what a wrong estimate can cost. Steps pay in ``ALLOWANCE_RATIO`` of their time, accepted
tokens what they saved, and every proposal takes out what it costs; without means nothing is proposed. So
where nothing is ever accepted, speculation costs that part of the time and what was there at the start. The
same allowance pays for probes of sequences that do not speculate: their text may have begun to repeat.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

ALLOWANCE_RATIO: Final = 0.01  # of the time of steps: what may be lost
START_STEPS: Final = 0.5  # what the account begins with, in steps
MOST_STEPS: Final = 1.0  # and what it holds at most
CAUTION_RATIO: Final = 0.1  # by how much costs are taken to be higher than measured, and savings lower
FIRST_ROW_RATIO: Final = (
    0.5  # what a row is taken to cost over what a sequence costs, before one was measured
)
LEAST_ROW_RATIO: Final = 0.002  # and what it costs at least
NOISE_RATIO: Final = 0.03  # of a step's time, by which steps differ that should not
DRIFT_RATIO: Final = 0.01  # of a sequence's share of a step: by which what a row costs may change with it
MOVE_RATIO: Final = 0.25  # and with another number of sequences
LEVEL_WEIGHT: Final = 0.2  # of the newest step in the mean time
DECAY: Final = 0.8  # of what is known of a sequence, with each verification
COMMON_DECAY: Final = 0.98  # and of what is known of all
PRIOR_WEIGHT: Final = 2.0  # proposals that the common mean counts as
FIRST_ACCEPTANCE: Final = 0.5
MOST_ACCEPTANCE: Final = 0.98
LEAST_ACCEPTANCE: Final = 0.01
FORGONE_RATIO: Final = 0.02  # of the time: what plain steps among those that speculate may forgo
PROBE_TOKENS: Final = 2
PROBES_RATIO: Final = 1 / 8  # of the sequences, in one step
LEAST_PROBES: Final = 4


@dataclass(frozen=True, slots=True)
class Verified:
    """What became of the proposals for one sequence in a step."""

    handle: int
    proposed: int
    accepted: int


@dataclass(slots=True)
class _Acceptance:
    """Decayed counts of proposals that were looked at, and accepted; ``asked`` is the step of the last."""

    tried: float = 0.0
    accepted: float = 0.0
    asked: int = -1

    def add(self, verified: Verified, decay: float) -> None:
        # Those after the first that was rejected were never looked at.
        tried = verified.accepted + (verified.accepted < verified.proposed)
        self.tried = self.tried * decay + tried
        self.accepted = self.accepted * decay + verified.accepted

    def mean(self, prior: float, weight: float) -> float:
        found = (self.accepted + weight * prior) / (self.tried + weight)
        return min(MOST_ACCEPTANCE, max(LEAST_ACCEPTANCE, found))


class StepCost:
    """The time of a step that only decodes, as a line in its rows near those that are seen.

    The line's height is a decayed mean. Its slope is what a scalar Kalman filter makes of the steps that had
    more rows than sequences: these are few, and a step's time is noisy.
    """

    def __init__(self) -> None:
        self._level_s = 0.0  # at so many rows
        self._rows = 0.0
        self._row_s = 0.0
        self._variance = 0.0  # of that, in seconds squared

    @property
    def known(self) -> bool:
        return self._level_s > 0.0

    @property
    def row_s(self) -> float:
        """What a row costs, as far as it is known: by a standard deviation more than it seems to."""
        return self._row_s + math.sqrt(self._variance)

    def step_s(self, rows: int) -> float:
        """Return what a step of so many rows takes, 0 before one was seen."""
        return max(self._level_s + self._row_s * (rows - self._rows), 0.25 * self._level_s)

    def measured(self, decodes: int, rows: int, step_s: float) -> None:
        """Follow a step of ``decodes`` sequences with ``rows`` rows: its other rows tell what a row costs."""
        if not self.known:
            self._level_s, self._rows = step_s, float(decodes)
            self._row_s = 0.0
            self._variance = (FIRST_ROW_RATIO * step_s / decodes) ** 2
            return
        self._drift(decodes)
        error_s, surplus = step_s - self.step_s(rows), rows - decodes
        if surplus:
            known = self._variance * surplus**2
            gain = known / (known + (NOISE_RATIO * self._level_s) ** 2)
            self._row_s += gain * error_s / surplus
            self._variance *= 1.0 - gain
        self._level_s = max(1e-9, self._level_s + LEVEL_WEIGHT / (1 + surplus) * error_s)
        share_s = self._level_s / decodes
        self._row_s = min(share_s, max(LEAST_ROW_RATIO * share_s, self._row_s))

    def _drift(self, decodes: int) -> None:
        """Move to another number of sequences; with time, and with that, less is known."""
        moved = abs(decodes - self._rows) / max(decodes, self._rows)
        self._level_s = self.step_s(decodes)
        self._rows = float(decodes)
        share_s = self._level_s / decodes
        self._variance += ((DRIFT_RATIO + MOVE_RATIO * moved) * share_s) ** 2
        self._variance = min(self._variance, (FIRST_ROW_RATIO * share_s) ** 2)


class SpeculationPolicy:
    """Counts per sequence, 0 to ``most_tokens``. Single writer: the engine's step."""

    def __init__(self, *, most_tokens: int) -> None:
        if most_tokens < 1:
            raise ValueError(f"{most_tokens} tokens are no proposal")
        self._most = most_tokens
        self._cost = StepCost()
        self._proposal_s = 0.0  # what proposing a token takes
        self._balance_s = 0.0
        self._since_plain = 0  # steps that proposed and did not prefill, since one that did neither
        self._common = _Acceptance()
        self._sequences: dict[int, _Acceptance] = {}
        self._step = 0

    @property
    def may_propose(self) -> bool:
        """Whether the account holds what a proposal costs."""
        return self._cost.known and self._balance_s >= self._token_s

    def counts(self, handles: Sequence[int], *, most_rows: int, prefills: bool = False) -> dict[int, int]:
        """Return how many tokens to propose, by index in ``handles``, without those that get none.

        In all at most ``most_rows``, and no more than the account holds. Nothing where a plain step is due;
        a step that also ``prefills`` would be none.
        """
        acceptance = [self.acceptance(handle) for handle in handles]
        paying = self._paying(acceptance)
        left = min(most_rows, int(self._balance_s / self._token_s))
        counts: dict[int, int] = {}
        for index in sorted(paying, key=lambda each: -paying[each]):
            if left < 1:
                break
            counts[index] = min(paying[index], left)
            left -= counts[index]
        if not prefills and self._plain_step_is_due(acceptance, counts):
            return {}
        return counts | self._probes(handles, counts, left)

    def measured(
        self,
        decodes: int,
        verified: Sequence[Verified],
        *,
        step_s: float,
        proposing_s: float,
        prefilled: bool,
    ) -> None:
        """Follow a step of ``decodes`` sequences; ``prefilled``: its time says nothing about decodes."""
        if step_s <= 0.0 or decodes < 1:
            return
        first = not self._cost.known
        proposed = sum(each.proposed for each in verified)
        if not prefilled:
            self._cost.measured(decodes, decodes + proposed, step_s)
            self._since_plain = self._since_plain + 1 if proposed else 0
        if not self._cost.known:
            return
        if proposed:
            self._proposal_s += LEVEL_WEIGHT * (proposing_s / proposed - self._proposal_s)
        for each in verified:
            self._note(each)
        self._settle(decodes, verified, step_s, proposing_s)
        if first:
            self._balance_s = START_STEPS * self._cost.step_s(decodes)
        self._step += 1

    def acceptance(self, handle: int) -> float:
        """Return the estimate of how likely a proposal for the sequence is accepted."""
        common = self._common.mean(FIRST_ACCEPTANCE, PRIOR_WEIGHT)
        known = self._sequences.get(handle)
        return common if known is None else known.mean(common, PRIOR_WEIGHT)

    def forget(self, handle: int) -> None:
        """A sequence is gone."""
        self._sequences.pop(handle, None)

    @property
    def _token_s(self) -> float:
        return self._cost.row_s + self._proposal_s

    def _paying(self, acceptance: Sequence[float]) -> dict[int, int]:
        """Return by index how many proposals pay for themselves, where any does.

        What a token costs falls as proposals are accepted, so the bar is set a second time.
        """
        found: dict[int, int] = {}
        for _ in range(2):
            bar = (1.0 + CAUTION_RATIO) * self._token_s * self._tokens_per_s(acceptance, found)
            found = {index: count for index, a in enumerate(acceptance) if (count := self._worth(a, bar))}
        return found

    def _plain_step_is_due(self, acceptance: Sequence[float], counts: dict[int, int]) -> bool:
        """Whether a step without proposals, seen from the last one, forgoes little enough."""
        if not self._since_plain:
            return False
        worth_it = 1.0 + FORGONE_RATIO * self._since_plain
        return self._tokens_per_s(acceptance, counts) <= worth_it * self._tokens_per_s(acceptance, {})

    def _tokens_per_s(self, acceptance: Sequence[float], counts: dict[int, int]) -> float:
        """Return what is expected of a step of these sequences with so many proposals, by index."""
        tokens = len(acceptance) + sum(_expected(acceptance[index], count) for index, count in counts.items())
        return tokens / (self._cost.step_s(len(acceptance)) + self._token_s * sum(counts.values()))

    def _worth(self, acceptance: float, bar: float) -> int:
        """Return how many proposals in a row are of use with at least the probability ``bar``."""
        if acceptance < bar:
            return 0
        if bar <= 0.0:
            return self._most
        return min(self._most, int(math.log(bar) / math.log(acceptance)))

    def _probes(self, handles: Sequence[int], counts: dict[int, int], left: int) -> dict[int, int]:
        """Return a few tokens for those that were not asked for longest."""
        idle = [index for index in range(len(handles)) if index not in counts]
        if left < 1 or not idle:
            return {}
        most = min(left, max(LEAST_PROBES, int(len(handles) * PROBES_RATIO)))
        known, probes = self._sequences, {}
        idle.sort(key=lambda index: known[handles[index]].asked if handles[index] in known else -1)
        for index in idle[:most]:
            probes[index] = min(PROBE_TOKENS, left, self._most)
            left -= probes[index]
            self._of(handles[index]).asked = self._step
            if left < 1:
                break
        return probes

    def _note(self, verified: Verified) -> None:
        known = self._of(verified.handle)
        known.add(verified, DECAY)
        self._common.add(verified, COMMON_DECAY)
        if verified.accepted:
            known.asked = -1  # what looks as if it had begun to repeat is asked again at once

    def _settle(self, decodes: int, verified: Sequence[Verified], step_s: float, proposing_s: float) -> None:
        plain_s = self._cost.step_s(decodes)
        saved_s = (1.0 - CAUTION_RATIO) * sum(each.accepted for each in verified) * plain_s / decodes
        spent_s = sum(each.proposed for each in verified) * self._cost.row_s + proposing_s
        balance_s = self._balance_s + ALLOWANCE_RATIO * step_s + saved_s - spent_s
        self._balance_s = min(balance_s, MOST_STEPS * plain_s)

    def _of(self, handle: int) -> _Acceptance:
        return self._sequences.setdefault(handle, _Acceptance())


def _expected(acceptance: float, count: int) -> float:
    """Return how many of so many proposals are accepted on average: a + a**2 + ... + a**count."""
    return acceptance * (1.0 - acceptance**count) / (1.0 - acceptance)
