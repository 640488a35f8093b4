"""Which rows of a batch with proposals stand: those that were computed from tokens that are output.

The target is sampled in every row with the key of the row's position, and a proposal is accepted when it
equals what was sampled before it. So what stands is what one token after the other would have given, at every
temperature. Leviathan, Kalai and Matias (Fast Inference from Transformers via Speculative Decoding, ICML'23)
accept with a probability instead, which keeps the distribution but not the tokens.
"""

from __future__ import annotations

from collections.abc import Mapping

from services.worker.engine.execute.executor import Batch, Samples


def accepted_proposals(batch: Batch, samples: Samples) -> dict[int, int]:
    """Return how many proposals are accepted, by index in ``decodes``, of each decode that has any.

    A row whose sample failed accepts nothing: it is the last that stands.
    """
    accepted: dict[int, int] = {}
    extra = 0  # rows of proposals before this decode's first
    for index, proposed in sorted(batch.proposals.items()):
        first = index + extra
        sampled = samples.tokens[first : first + len(proposed)]
        pairs = zip(proposed, sampled, range(first, first + len(proposed)), strict=True)
        equal = (token == other and row not in samples.errors for token, other, row in pairs)
        accepted[index] = next((count for count, same in enumerate(equal) if not same), len(proposed))
        extra += len(proposed)
    return accepted


def standing_rows(batch: Batch, accepted: Mapping[int, int], rows: int) -> list[int]:
    """Return which of the sampling rows stand: of a decode the first, and one per accepted proposal."""
    standing: list[int] = []
    row = 0
    for index in range(len(batch.decodes)):
        standing += range(row, row + 1 + accepted.get(index, 0))
        row += 1 + len(batch.proposals.get(index, ()))
    standing += range(row, rows)
    return standing
