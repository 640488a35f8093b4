"""What KV blocks are keyed by: names of ``core.prefix``, and hashes chained to them in between."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from services.core.prefix import PREFIX_BLOCK_TOKENS, extend
from services.worker.engine.sequence import SequenceState


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
