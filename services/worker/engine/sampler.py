"""From logits to tokens. Stateless: everything is derived from the sequence, so no row can inherit anything.

Order, for one row: logit bias, repetition penalty (prompt and output), presence and frequency penalties
(output), log-probabilities, the min_tokens mask; then greedy, or temperature, top-k, top-p over what
top-k left, min-p, and the draw. Conventions are OpenAI's and those of vLLM and transformers.

The draw inverts the cumulative distribution in token order at u(seed, choice, position). In token order a
disturbance of the logits moves the boundaries by as much as it moves the probabilities; in sorted order
two near-equal tokens could change places.
"""

from __future__ import annotations

import math
from collections.abc import Container, Sequence
from typing import Final

import torch
import torch.nn.functional as F

from services.worker.engine.executor import Samples
from services.worker.engine.keyed import GOLDEN, MULTIPLIER_1, MULTIPLIER_2, UNIFORM_BITS
from services.worker.engine.sequence import SequenceState
from services.worker.engine.validation import MAX_LOGPROBS
from services.worker.engine_protocol import Sampling, TokenLogprobs

TILE: Final = 128  # tokens whose weights are summed at once
CANDIDATES: Final = 128  # how many of the greatest logits top-p looks at first
WIDER: Final = 16  # and how many times as many where these do not reach top_p
NOT_FINITE: Final = "the model's logits are not finite"


def sample(logits: torch.Tensor, sequences: Sequence[SequenceState]) -> Samples:
    """Return a token per row of the float32 logits [rows, vocabulary], which are changed in place."""
    if all(_is_plain(sequence.sampling) for sequence in sequences):
        best, tokens = logits.max(dim=-1)
        return Samples(tokens.tolist(), errors=_errors(best))  # as the greatest, NaN comes out too
    _add_bias(logits, sequences)
    _penalise_repetition(logits, sequences)
    _penalise_output(logits, sequences)
    logged = [row for row, sequence in enumerate(sequences) if sequence.sampling.logprobs is not None]
    logprobs = logits[logged].log_softmax(dim=-1) if logged else None
    _mask_stops(logits, sequences)
    errors = _errors(logits.amax(dim=-1))
    chosen = _choose(logits, sequences, errors)
    if logprobs is None:
        return Samples(chosen, errors=errors)
    return Samples(chosen, _report(logprobs, logged, chosen, sequences), errors)


def uniforms(keys: Sequence[int], positions: Sequence[int]) -> torch.Tensor:
    """Return ``keyed.uniform`` of each pair, float64 [pairs]; int64 wraps as 64-bit words do."""
    words = torch.tensor([_signed(key) for key in keys]) + (torch.tensor(positions) + 1) * _signed(GOLDEN)
    words = (words ^ _shifted(words, 30)) * _signed(MULTIPLIER_1)
    words = (words ^ _shifted(words, 27)) * _signed(MULTIPLIER_2)
    words = words ^ _shifted(words, 31)
    return _shifted(words, 64 - UNIFORM_BITS).double() * 2.0**-UNIFORM_BITS


def invert_cdf(weights: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    """Return for each row the first token whose cumulative weight exceeds u of the total, int64 [rows].

    ``weights`` [rows, vocabulary] are non-negative and need no normalising; a token of weight 0 is never
    returned. Sums go by tiles, then within one: a whole row in float64 would cost more than the draw.
    """
    rows, vocabulary = weights.shape
    tiles = F.pad(weights, (0, -vocabulary % TILE)).view(rows, -1, TILE)
    cumulative = tiles.sum(dim=-1, dtype=torch.float64).cumsum(dim=-1)
    target = u[:, None].to(weights.device) * cumulative[:, -1:]
    tile = _first_above(cumulative, target)
    before = F.pad(cumulative, (1, 0)).gather(1, tile)
    inside = tiles[torch.arange(rows, device=weights.device), tile[:, 0]].double().cumsum(dim=-1)
    return (tile * TILE + _first_above(inside, target - before))[:, 0]


def floors(scaled: torch.Tensor, samplings: Sequence[Sampling]) -> torch.Tensor:
    """Return the least logit [rows, 1] that top-k, top-p and min-p keep; tokens equal to it are kept.

    ``scaled`` [rows, vocabulary] are logits over the temperature, less the row's greatest.
    """
    vocabulary = scaled.shape[1]
    floor = scaled.new_tensor([[math.log(s.min_p) if s.min_p > 0 else -math.inf] for s in samplings])
    cut = [row for row, s in enumerate(samplings) if 0 < s.top_k < vocabulary or s.top_p < 1]
    if cut:
        chosen = [samplings[row] for row in cut]
        largest = max((s.top_k for s in chosen if s.top_k < vocabulary), default=0)
        width = min(vocabulary, max(CANDIDATES, largest))
        floor[cut] = torch.maximum(floor[cut], _cut_floors(scaled[cut], chosen, width))
    return floor


def _choose(logits: torch.Tensor, sequences: Sequence[SequenceState], errors: Container[int]) -> list[int]:
    """Return the token of each row; that of a row in ``errors`` means nothing."""
    rows = [row for row in range(len(sequences)) if row not in errors]
    drawn = [row for row in rows if sequences[row].sampling.temperature > 0]
    greedy = [row for row in rows if sequences[row].sampling.temperature == 0]
    chosen = [0] * len(sequences)
    for part, choose in ((drawn, _draw), (greedy, _greatest)):
        if part:
            whole = len(part) == len(sequences)  # the usual case needs no copy
            of_part = logits if whole else logits.index_select(0, torch.tensor(part, device=logits.device))
            tokens: list[int] = choose(of_part, [sequences[row] for row in part]).tolist()
            for row, token in zip(part, tokens, strict=True):
                chosen[row] = token
    return chosen


def _greatest(logits: torch.Tensor, sequences: Sequence[SequenceState]) -> torch.Tensor:
    return logits.argmax(dim=-1)


def _draw(logits: torch.Tensor, sequences: Sequence[SequenceState]) -> torch.Tensor:
    """Return a token per row; the logits are used up."""
    samplings = [sequence.sampling for sequence in sequences]
    temperatures = torch.tensor([[s.temperature] for s in samplings], device=logits.device)
    # The greatest becomes 0 first, so that a tiny temperature cannot overflow.
    scaled = logits.sub_(logits.amax(dim=-1, keepdim=True)).div_(temperatures)
    weights = scaled.exp()
    if any(s.top_k or s.top_p < 1 or s.min_p for s in samplings):
        weights.masked_fill_(scaled < floors(scaled, samplings), 0.0)
    positions = [sequence.output_tokens for sequence in sequences]
    return invert_cdf(weights, uniforms([sequence.key for sequence in sequences], positions))


def _cut_floors(scaled: torch.Tensor, samplings: Sequence[Sampling], width: int) -> torch.Tensor:
    """Return the floors of top-k, then top-p, from the ``width`` greatest logits of each row."""
    vocabulary = scaled.shape[1]
    values = scaled.topk(width, dim=-1).values
    kth = torch.tensor(
        [[s.top_k if 0 < s.top_k < vocabulary else 0] for s in samplings], device=scaled.device
    )
    top_p = torch.tensor([[s.top_p] for s in samplings], dtype=torch.float64, device=scaled.device)
    floor = values.gather(1, (kth - 1).clamp(min=0)).masked_fill(kth == 0, -math.inf)
    total = scaled.exp().masked_fill(scaled < floor, 0.0).sum(dim=-1, keepdim=True, dtype=torch.float64)
    mass = values.double().exp().masked_fill(values < floor, 0.0)
    # A token stays while those before it have not reached top_p; the first always stays.
    kept = ((mass.cumsum(dim=-1) - mass) < top_p * total) & (values >= floor)
    kept[:, 0] = True
    result = values.gather(1, kept.sum(dim=-1, keepdim=True) - 1)
    result = torch.where(top_p < 1, result, floor)
    full: list[bool] = kept.all(dim=-1).tolist()
    wide = [row for row, s in enumerate(samplings) if s.top_p < 1 and full[row]]
    if wide and width < vocabulary:  # a flat distribution: look at more of it
        chosen = [samplings[row] for row in wide]
        result[wide] = _cut_floors(scaled[wide], chosen, min(vocabulary, width * WIDER))
    return result


def _first_above(cumulative: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return the first index [rows, 1] above the target; rounding may not carry past the last weight."""
    index = torch.searchsorted(cumulative, target, right=True)
    last = (cumulative < cumulative[:, -1:]).sum(dim=-1, keepdim=True)
    return torch.minimum(index, last)


def _add_bias(logits: torch.Tensor, sequences: Sequence[SequenceState]) -> None:
    biased = [(row, s.sampling.logit_bias) for row, s in enumerate(sequences) if s.sampling.logit_bias]
    if biased:
        width = logits.shape[1]
        where = torch.tensor([row * width + token for row, bias in biased for token in bias])
        what = torch.tensor([value for _, bias in biased for value in bias.values()], dtype=logits.dtype)
        logits.view(-1)[where.to(logits.device)] += what.to(logits.device)


def _penalise_repetition(logits: torch.Tensor, sequences: Sequence[SequenceState]) -> None:
    """Divide positive and multiply negative logits of every token of prompt and output."""
    rows = [row for row, s in enumerate(sequences) if s.sampling.repetition_penalty != 1.0]
    if rows:
        # The same token twice is written twice with the same value.
        where, row_of = _places(logits, rows, [sequences[row].tokens for row in rows])
        penalties = [sequences[row].sampling.repetition_penalty for row in rows]
        penalty = torch.tensor(penalties, device=logits.device)[row_of]
        seen = logits.view(-1)[where]
        logits.view(-1)[where] = torch.where(seen > 0, seen / penalty, seen * penalty)


def _penalise_output(logits: torch.Tensor, sequences: Sequence[SequenceState]) -> None:
    """Subtract the presence penalty once and the frequency penalty per occurrence in the output."""
    rows = [
        row
        for row, s in enumerate(sequences)
        if (s.sampling.presence_penalty or s.sampling.frequency_penalty) and s.output_tokens
    ]
    if rows:
        outputs = [sequences[row].tokens[sequences[row].prompt_tokens :] for row in rows]
        places, row_of = _places(logits, rows, outputs)
        where, inverse, counts = torch.unique(places, return_inverse=True, return_counts=True)
        row_of = torch.empty_like(where).scatter_(0, inverse, row_of)
        presence = torch.tensor(
            [sequences[row].sampling.presence_penalty for row in rows], device=logits.device
        )
        frequency = torch.tensor(
            [sequences[row].sampling.frequency_penalty for row in rows], device=logits.device
        )
        logits.view(-1)[where] -= presence[row_of] + frequency[row_of] * counts


def _mask_stops(logits: torch.Tensor, sequences: Sequence[SequenceState]) -> None:
    """Rule out every stop token while the output is shorter than min_tokens."""
    width = logits.shape[1]
    where = [
        row * width + token
        for row, s in enumerate(sequences)
        if s.output_tokens < s.sampling.min_tokens
        for token in s.stop_ids
    ]
    if where:
        logits.view(-1)[torch.tensor(where, device=logits.device)] = -math.inf


def _places(
    logits: torch.Tensor, rows: Sequence[int], tokens: Sequence[Sequence[int]]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each token's place in the flattened logits, and the index in ``rows`` of its row."""
    width = logits.shape[1]
    places = torch.cat([torch.tensor(ids) + row * width for row, ids in zip(rows, tokens, strict=True)])
    lengths = torch.tensor([len(ids) for ids in tokens])
    row_of = torch.arange(len(rows)).repeat_interleave(lengths)
    return places.to(logits.device), row_of.to(logits.device)


def _report(
    logprobs: torch.Tensor, logged: Sequence[int], chosen: Sequence[int], sequences: Sequence[SequenceState]
) -> dict[int, TokenLogprobs]:
    wanted = [sequences[row].sampling.logprobs or 0 for row in logged]
    width = min(max(wanted), MAX_LOGPROBS, logprobs.shape[1])
    top = logprobs.topk(width, dim=-1)
    tokens = torch.tensor([[chosen[row]] for row in logged], device=logprobs.device)
    sampled: list[float] = logprobs.gather(1, tokens)[:, 0].tolist()
    columns = zip(logged, wanted, sampled, top.indices.tolist(), top.values.tolist(), strict=True)
    return {row: TokenLogprobs(own, ids[:count], values[:count]) for row, count, own, ids, values in columns}


def _errors(best: torch.Tensor) -> dict[int, str]:
    """Return the rows whose greatest logit is no number: their sequences fail, their neighbours do not."""
    finite = best.isfinite()
    if bool(finite.all()):
        return {}
    return {row: NOT_FINITE for row, good in enumerate(finite.tolist()) if not good}


def _is_plain(sampling: Sampling) -> bool:
    """Whether the token is the greatest logit, and nothing else is asked for."""
    return (
        sampling.temperature == 0.0
        and sampling.logprobs is None
        and not sampling.logit_bias
        and not sampling.min_tokens
        and sampling.repetition_penalty == 1.0
        and not (sampling.presence_penalty or sampling.frequency_penalty)
    )


def _shifted(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical shift to the right: int64 alone would copy the sign."""
    return (words >> bits) & ((1 << (64 - bits)) - 1)


def _signed(word: int) -> int:
    return word - (1 << 64) if word >= 1 << 63 else word
