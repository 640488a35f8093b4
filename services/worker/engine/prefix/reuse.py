"""The port between the planner and a cache of KV that earlier sequences left, and the keys of its blocks.

Keys are names of ``core.prefix``, and hashes chained to them in between.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from services.core.prefix import PREFIX_BLOCK_TOKENS, extend
from services.worker.engine.sequence import SequenceState
from services.worker.policy.prefill import PrefillClaim


def name_of(sequence: SequenceState, place: int) -> int:
    """Return the name of a sequence's first ``place`` prefix blocks, of none the root; it is made once."""
    names = sequence.prefix_names
    while len(names) <= place:
        start = (len(names) - 1) * PREFIX_BLOCK_TOKENS
        names.append(extend(names[-1], _bytes(sequence.tokens[start : start + PREFIX_BLOCK_TOKENS])))
    return names[place]


def block_key(sequence: SequenceState, place: int, block_size: int) -> int:
    """Return the key of the whole block at that place of a sequence's table."""
    end = (place + 1) * block_size
    names, rest = divmod(end, PREFIX_BLOCK_TOKENS)
    name = name_of(sequence, names)
    return extend(name, _bytes(sequence.tokens[end - rest : end])) if rest else name


def _bytes(tokens: Sequence[int]) -> bytes:
    return array("I", tokens).tobytes()


class Attached(NamedTuple):
    """``blocks`` hold the first tokens of a sequence, with a reference each for it.

    ``tokens`` are those of the blocks and, where ``copy_from`` is a block, some more: the first ones that it
    holds. That block is to be copied to the sequence's own next one before anything is written there.
    """

    blocks: list[int]
    tokens: int
    copy_from: int | None = None


class PrefixReuse(Protocol):
    """Finds blocks that hold the KV of a sequence's leading tokens. Never of all: the last is computed."""

    def reusable(self, sequence: SequenceState) -> tuple[int, int]:
        """Return how many leading tokens are there, and how many of their blocks others hold right now.

        Those blocks cost no free one.
        """

    def found(self, sequence: SequenceState) -> list[int]:
        """Return the blocks that ``attach`` would give it."""

    def attach(self, sequence: SequenceState) -> Attached:
        """Attach the cached KV to a sequence that starts, and count the request."""

    def advance(self, sequence: SequenceState) -> None:
        """Move a prefilling sequence past what others have computed since it started: ``computed`` rises,
        and their blocks replace its own in ``blocks``, which become free."""

    def next_name(self, sequence: SequenceState) -> int | None:
        """Return the name of the prefix block that it computes next, None where that is never entered.

        Sequences with the same name would compute the same.
        """

    def publish(self, sequence: SequenceState) -> None:
        """Enter the whole blocks that a prefilling sequence has computed; they stay its own.

        Where another was first, ``blocks`` has that one's block, and the sequence's is free.
        """

    def retain(self, sequence: SequenceState) -> None:
        """Enter all that a sequence has computed, before its blocks are released."""

    def discard(self, sequence: SequenceState) -> None:
        """Remove what a sequence has computed from the index: it may be wrong."""

    def clear(self) -> None:
        """Remove everything from the index, while no sequence holds a block."""

    def take_changes(self) -> tuple[list[int], list[int]]:
        """Return the names of prefix blocks added and removed since the previous call.

        One in both was removed and then added again: meanwhile, sequences that expected it did without. One
        that was added and then removed is in neither.
        """


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
