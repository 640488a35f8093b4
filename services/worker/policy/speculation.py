"""How many tokens to propose for each sequence. Pure: the caller supplies measured times.

A proposal adds a row (one more token position) to a step and saves a step of its sequence if it is accepted.
If each proposal of a sequence is accepted with probability ``a``, the ``j``-th is useful with probability
``a**j``. It pays while that exceeds the cost of a row divided by the cost of a token. Both costs are
measured: step time against rows, and the time to propose. Acceptance is a decayed mean per sequence, drawn
towards the mean of all sequences while its own data is scarce. The cost of a row can be measured only against
steps without proposals. So such plain steps are inserted: at once after a probe, and the more rarely the more
speculation gains.

A balance bounds the cost of a wrong estimate. Each step adds ``ALLOWANCE_RATIO`` of its time, accepted
tokens add the time they saved, and every proposal subtracts its cost; nothing is proposed beyond the balance.
So if nothing is ever accepted, speculation costs that part of the time plus the initial balance. The same
allowance pays for probes of sequences that do not speculate: their text may have begun to repeat.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

ALLOWANCE_RATIO: Final = 0.01  # most of the step time that speculation may lose
START_STEPS: Final = 0.5  # initial balance, in steps
MOST_STEPS: Final = 1.0  # maximum balance, in steps
CAUTION_RATIO: Final = 0.1  # margin: costs count as this much higher than measured, savings as lower
FIRST_ROW_RATIO: Final = 0.5  # cost of a row relative to that of a sequence, before a measurement
LEAST_ROW_RATIO: Final = 0.002  # lower bound of the same
NOISE_RATIO: Final = 0.03  # relative noise of equal steps
DRIFT_RATIO: Final = 0.01  # most that the row cost may change per step, relative to a sequence's share of it
MOVE_RATIO: Final = 0.25  # the same after a step with another number of sequences
LEVEL_WEIGHT: Final = 0.2  # weight of the newest step in the mean time
DECAY: Final = 0.8  # decay of a sequence's counts per verification
COMMON_DECAY: Final = 0.98  # decay of the counts of all sequences
PRIOR_WEIGHT: Final = 2.0  # number of proposals that the common mean counts as
FIRST_ACCEPTANCE: Final = 0.5
MOST_ACCEPTANCE: Final = 0.98
LEAST_ACCEPTANCE: Final = 0.01
FORGONE_RATIO: Final = 0.02  # most of the time that inserted plain steps may cost
PROBE_TOKENS: Final = 2
PROBES_RATIO: Final = 1 / 8  # largest share of the sequences that probe in one step
LEAST_PROBES: Final = 4


@dataclass(frozen=True, slots=True)
class Verified:
    """The result of the proposals for one sequence in a step."""

    handle: int
    proposed: int
    accepted: int


@dataclass(slots=True)
class _Acceptance:
    """Decayed counts of verified and of accepted proposals; ``probed_step`` is the step of the last probe."""

    tried: float = 0.0
    accepted: float = 0.0
    probed_step: int = -1

    def add(self, verified: Verified, decay: float) -> None:
        # Proposals after the first rejected one were not verified.
        tried = verified.accepted + (verified.accepted < verified.proposed)
        self.tried = self.tried * decay + tried
        self.accepted = self.accepted * decay + verified.accepted

    def mean(self, prior: float, weight: float) -> float:
        found = (self.accepted + weight * prior) / (self.tried + weight)
        return min(MOST_ACCEPTANCE, max(LEAST_ACCEPTANCE, found))


class StepCost:
    """The duration of a decode-only step, as a line in its rows near the usual number.

    The line's height is a decayed mean. A scalar Kalman filter estimates its slope from the steps with more
    rows than sequences: these are few, and step times are noisy.
    """

    def __init__(self) -> None:
        self._level_s = 0.0  # mean step time at ``_rows`` rows
        self._rows = 0.0
        self._row_s = 0.0
        self._variance = 0.0  # variance of ``_row_s`` in seconds squared

    @property
    def known(self) -> bool:
        return self._level_s > 0.0

    @property
    def row_s(self) -> float:
        """The cost of a row: one standard deviation above the estimate."""
        return self._row_s + math.sqrt(self._variance)

    def step_s(self, rows: int) -> float:
        """Return the duration of a step of ``rows`` rows; 0 before the first measurement."""
        return max(self._level_s + self._row_s * (rows - self._rows), 0.25 * self._level_s)

    def measured(self, decodes: int, rows: int, step_s: float) -> None:
        """Learn from a step of ``decodes`` sequences and ``rows`` rows; the surplus gives the row cost."""
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
        """Move to another number of sequences; this and the passing of time increase the variance."""
        moved = abs(decodes - self._rows) / max(decodes, self._rows)
        self._level_s = self.step_s(decodes)
        self._rows = float(decodes)
        share_s = self._level_s / decodes
        self._variance += ((DRIFT_RATIO + MOVE_RATIO * moved) * share_s) ** 2
        self._variance = min(self._variance, (FIRST_ROW_RATIO * share_s) ** 2)


class SpeculationPolicy:
    """Proposal counts per sequence, 0 to ``most_tokens``. Single writer: the engine's step."""

    def __init__(self, *, most_tokens: int) -> None:
        if most_tokens < 1:
            raise ValueError(f"{most_tokens} tokens are no proposal")
        self._most = most_tokens
        self._cost = StepCost()
        self._proposal_s = 0.0  # time to propose one token
        self._balance_s = 0.0
        self._since_plain = 0  # steps with proposals and no prefill, since one with neither
        self._common = _Acceptance()
        self._sequences: dict[int, _Acceptance] = {}
        self._step = 0

    @property
    def may_propose(self) -> bool:
        """Whether the balance covers the cost of one proposal."""
        return self._cost.known and self._balance_s >= self._token_s

    def counts(self, handles: Sequence[int], *, most_rows: int, prefills: bool = False) -> dict[int, int]:
        """Return how many tokens to propose, by index in ``handles``; those with none are left out.

        The total is at most ``most_rows`` and at most what the balance covers. Empty when a plain step is
        needed; a step that also ``prefills`` is not a plain one.
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
        """Learn from a step of ``decodes`` sequences; ``prefilled``: its time gives no cost of decodes."""
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
        """Return the estimated probability that a proposal for the sequence is accepted."""
        common = self._common.mean(FIRST_ACCEPTANCE, PRIOR_WEIGHT)
        known = self._sequences.get(handle)
        return common if known is None else known.mean(common, PRIOR_WEIGHT)

    def forget(self, handle: int) -> None:
        """Drop the counts of an ended sequence."""
        self._sequences.pop(handle, None)

    @property
    def _token_s(self) -> float:
        return self._cost.row_s + self._proposal_s

    def _paying(self, acceptance: Sequence[float]) -> dict[int, int]:
        """Return by index how many proposals pay for themselves, without zeros.

        Accepted proposals lower the cost of a token, so the threshold is computed twice.
        """
        found: dict[int, int] = {}
        for _ in range(2):
            bar = (1.0 + CAUTION_RATIO) * self._token_s * self._tokens_per_s(acceptance, found)
            found = {index: count for index, a in enumerate(acceptance) if (count := self._worth(a, bar))}
        return found

    def _plain_step_is_due(self, acceptance: Sequence[float], counts: dict[int, int]) -> bool:
        """Return whether a step without proposals now costs little enough, averaged since the last one."""
        if not self._since_plain:
            return False
        worth_it = 1.0 + FORGONE_RATIO * self._since_plain
        return self._tokens_per_s(acceptance, counts) <= worth_it * self._tokens_per_s(acceptance, {})

    def _tokens_per_s(self, acceptance: Sequence[float], counts: dict[int, int]) -> float:
        """Return the expected tokens per second of a step of these sequences with these proposals."""
        tokens = len(acceptance) + sum(_expected(acceptance[index], count) for index, count in counts.items())
        return tokens / (self._cost.step_s(len(acceptance)) + self._token_s * sum(counts.values()))

    def _worth(self, acceptance: float, bar: float) -> int:
        """Return how many proposals in a row are accepted with at least the probability ``bar``."""
        if acceptance < bar:
            return 0
        if bar <= 0.0:
            return self._most
        return min(self._most, int(math.log(bar) / math.log(acceptance)))

    def _probes(self, handles: Sequence[int], counts: dict[int, int], left: int) -> dict[int, int]:
        """Return a few tokens for the sequences whose last probe is the oldest."""
        idle = [index for index in range(len(handles)) if index not in counts]
        if left < 1 or not idle:
            return {}
        most = min(left, max(LEAST_PROBES, int(len(handles) * PROBES_RATIO)))
        known, probes = self._sequences, {}
        idle.sort(key=lambda index: known[handles[index]].probed_step if handles[index] in known else -1)
        for index in idle[:most]:
            probes[index] = min(PROBE_TOKENS, left, self._most)
            left -= probes[index]
            self._of(handles[index]).probed_step = self._step
            if left < 1:
                break
        return probes

    def _note(self, verified: Verified) -> None:
        known = self._of(verified.handle)
        known.add(verified, DECAY)
        self._common.add(verified, COMMON_DECAY)
        if verified.accepted:
            known.probed_step = -1  # text that seems to repeat is probed again at once

    def _settle(self, decodes: int, verified: Sequence[Verified], step_s: float, proposing_s: float) -> None:
        plain_s = self._cost.step_s(decodes)
        saved_s = (1.0 - CAUTION_RATIO) * sum(each.accepted for each in verified) * plain_s / decodes
        spent_s = sum(each.proposed for each in verified) * self._cost.row_s + proposing_s
        balance_s = self._balance_s + ALLOWANCE_RATIO * step_s + saved_s - spent_s
        self._balance_s = min(balance_s, MOST_STEPS * plain_s)

    def _of(self, handle: int) -> _Acceptance:
        return self._sequences.setdefault(handle, _Acceptance())


def _expected(acceptance: float, count: int) -> float:
    """Return the expected number of accepted proposals of ``count``: a + a**2 + ... + a**count."""
    return acceptance * (1.0 - acceptance**count) / (1.0 - acceptance)
