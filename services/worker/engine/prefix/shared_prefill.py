"""Of sequences that would compute the same prefix block in one step, one does."""

from __future__ import annotations

from collections.abc import Sequence

from services.worker.engine.prefix.reuse import PrefixReuse
from services.worker.engine.sequence import SequenceState
from services.worker.policy.prefill_share import PrefillClaim


def claims(
    prefilling: Sequence[SequenceState], reuse: PrefixReuse | None
) -> tuple[list[SequenceState], list[PrefillClaim]]:
    """Return which sequences compute in this step, and what each claims; the others wait for one of them.

    That one is the first to finish, with the place in line of the oldest that waits for it. Each step decides
    again which wait, from what is computed by then, so the end of a sequence delays no other.
    """
    leaders: dict[int, SequenceState] = {}
    oldest: dict[int, tuple[int, int]] = {}
    names: list[int | None] = []
    for sequence in prefilling if reuse is not None else ():
        assert reuse is not None
        reuse.advance(sequence)
        name = reuse.next_name(sequence)
        names.append(name)
        if name is not None:
            first = leaders.setdefault(name, sequence)
            if (_rest(sequence), sequence.order) < (_rest(first), first.order):
                leaders[name] = sequence
            oldest[name] = min(oldest.get(name, sequence.order), sequence.order)
    movers, claimed = [], []
    for index, sequence in enumerate(prefilling):
        name = names[index] if names else None
        if name is None or leaders[name] is sequence:
            movers.append(sequence)
            claimed.append(PrefillClaim(_rest(sequence), sequence.order if name is None else oldest[name]))
    return movers, claimed


def _rest(sequence: SequenceState) -> int:
    return len(sequence.tokens) - sequence.computed
