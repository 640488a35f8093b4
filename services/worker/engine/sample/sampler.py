"""From logits to tokens. Stateless: everything is derived from the sequence, so no row can inherit anything.

Order, for one row: logit bias, repetition penalty (prompt and output), presence and frequency penalties
(output), the mask of its constraint, log-probabilities, the min_tokens mask; then greedy, or temperature,
top-k, top-p over what top-k left, min-p, and the draw. Conventions are OpenAI's and those of vLLM and
transformers: as in vLLM, log-probabilities are those of the tokens that the constraint allows.

The draw inverts the cumulative distribution in token order at u(seed, choice, position). In token order a
disturbance of the logits moves the boundaries by as much as it moves the probabilities; in sorted order
two near-equal tokens could change places.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, Protocol, TypeAlias

import numpy as np
import torch
import torch.nn.functional as F

from services.worker.engine.execute.executor import NOT_FINITE, RuledRows, Samples, StepMasks
from services.worker.engine.execute.step_rows import (
    BIASED,
    DRAWN,
    FILTERED,
    LOGGED,
    MIN_TOKENS,
    OUTPUT_PENALTY,
    REPETITION,
    Floats,
    SamplingColumns,
    SamplingRows,
)
from services.worker.engine.sequence import MAX_LOGPROBS
from services.worker.engine_protocol import SampledLogprobs

TILE: Final = 128  # tokens whose weights are summed at once
CANDIDATES: Final = 128  # how many of the greatest logits top-p looks at first
WIDER: Final = 16  # factor by which top-p looks at more where these do not reach it
MOST_PLACES: Final = 1 << 16  # tokens of prompts and outputs whose penalties are computed at once
BITS: Final = torch.tensor([1 << bit for bit in range(8)], dtype=torch.uint8)
NO_TOKEN: Final = -1  # token of a row whose logits are no numbers

# Adds minus infinity to the logits [rows, vocabulary] that constraints forbid: what is no number stays none.
RuleOut: TypeAlias = Callable[[torch.Tensor, RuledRows], None]


class Reductions(Protocol):
    """Rows are contiguous; the last dimension is reduced."""

    def log_softmax(self, x: torch.Tensor) -> torch.Tensor:
        """Return float32 [rows, width] for x likewise."""

    def sums(self, x: torch.Tensor) -> torch.Tensor:
        """Return float64 [...] for float32 x [..., width]."""

    def running_sums(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sums up to each number, float64 [rows, width] for x likewise."""

    def greatest(self, x: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the greatest numbers and their places, each [rows, count], for x [rows, width]."""


class TorchReductions:
    """On a CPU a row is reduced by itself. On CUDA torch chooses by the number of rows how it is."""

    def log_softmax(self, x: torch.Tensor) -> torch.Tensor:
        """See ``Reductions``."""
        return x.log_softmax(dim=-1)

    def sums(self, x: torch.Tensor) -> torch.Tensor:
        """See ``Reductions``."""
        return x.sum(dim=-1, dtype=torch.float64)

    def running_sums(self, x: torch.Tensor) -> torch.Tensor:
        """See ``Reductions``."""
        return x.cumsum(dim=-1)

    def greatest(self, x: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """See ``Reductions``."""
        found = x.topk(count, dim=-1)
        return found.values, found.indices


TORCH: Final = TorchReductions()


@dataclass(frozen=True, slots=True)
class Sampled:
    """The samples of a step, perhaps still being computed on the device.

    ``tokens`` [rows] are NO_TOKEN where a row has none. For the rows in ``logged``, ``own`` [logged] is the
    log-probability of the token, ``top`` are the greatest and their tokens [logged, width]; ``wanted`` is
    how many of these are reported. ``copied``: all is on the host once this event of a CUDA stream is over.
    """

    tokens: torch.Tensor
    logged: list[int]
    wanted: list[int]
    own: torch.Tensor
    top: tuple[torch.Tensor, torch.Tensor]
    copied: torch.cuda.Event | None = None

    def to_host(self) -> Sampled:
        """Begin to copy them to the host: what is submitted behind them does not keep them from it."""
        if not self.tokens.is_cuda:
            return self
        tokens = own = values = ids = _begin_copy(self.tokens)
        if self.logged:
            own, (values, ids) = _begin_copy(self.own), map(_begin_copy, self.top)
        copied: torch.cuda.Event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        copied.record()
        return Sampled(tokens, self.logged, self.wanted, own, (values, ids), copied)

    def samples(self) -> Samples:
        """Wait for them. A row whose logits are no numbers fails, its neighbours do not."""
        if self.copied is not None:
            self.copied.synchronize()
        chosen: list[int] = self.tokens.tolist()
        errors: dict[int, str] = {}
        if NO_TOKEN in chosen:
            errors = {row: NOT_FINITE for row, token in enumerate(chosen) if token == NO_TOKEN}
        if not self.logged:
            return Samples(chosen, errors=errors)
        values, ids = (part.tolist() for part in self.top)
        columns = zip(self.logged, self.wanted, self.own.tolist(), ids, values, strict=True)
        return Samples(
            chosen,
            {row: _reported(own, top[:count], best[:count]) for row, count, own, top, best in columns},
            errors,
        )


def torch_rule_out(logits: torch.Tensor, ruled: RuledRows) -> None:
    """See ``RuleOut``. It works on any device, which receives only the bits."""
    bits = _on(torch.from_numpy(ruled.allowed), logits)[:, :, None]
    allowed = bits.bitwise_and(_on(BITS, logits)).flatten(1)[:, : logits.shape[1]]
    biases = torch.where(allowed == 0, -math.inf, 0.0)
    if len(ruled.rows) == len(logits):
        logits.add_(biases)
    else:
        logits.index_add_(0, _on(torch.tensor(ruled.rows), logits), biases)


def sample(logits: torch.Tensor, rows: SamplingRows) -> Samples:
    """Return a token per row of the float32 logits [rows, vocabulary], which are changed in place."""
    return launch(logits, rows).samples()


def launch(
    logits: torch.Tensor,
    rows: SamplingRows,
    reductions: Reductions = TORCH,
    masks: StepMasks | None = None,
    rule_out: RuleOut = torch_rule_out,
) -> Sampled:
    """Begin to sample the rows of the float32 logits [rows, vocabulary], which are changed in place.

    Rows that are greedy or drawn cost no look at their sequences; what each other thing costs is in
    proportion to the rows that ask for it. A row's result depends on the others where ``reductions`` do, and
    nowhere else: all else is by element, compares, or counts. ``masks`` are waited for: the device computes
    the logits meanwhile.
    """
    flags = int(np.bitwise_or.reduce(rows.columns.flags))
    if flags & BIASED:
        _add_bias(logits, rows)
    if flags & REPETITION:
        _penalise_repetition(logits, rows)
    if flags & OUTPUT_PENALTY:
        _penalise_output(logits, rows)
    ruled = None if masks is None else masks.result()
    if ruled is not None:
        rule_out(logits, ruled)
    logged = rows.asking(LOGGED) if flags & LOGGED else []
    places = _on(torch.tensor(logged), logits) if logged else None
    logprobs = None if places is None else reductions.log_softmax(logits[places])
    if flags & MIN_TOKENS:
        _mask_stops(logits, rows, ruled)
    best, tokens = logits.max(dim=-1)  # A NaN counts as the greatest, so it comes out here.
    finite = best.isfinite()
    if flags & DRAWN:
        tokens = _drawn(logits, best, tokens, rows, reductions)
    tokens.masked_fill_(~finite, NO_TOKEN)
    if places is None or logprobs is None:
        return Sampled(tokens, [], [], tokens, (tokens, tokens))
    wanted = [rows.sequences[row].sampling.logprobs or 0 for row in logged]
    # The count is constant, because the order of equal numbers depends on how many are selected.
    values, ids = reductions.greatest(logprobs, min(MAX_LOGPROBS, logprobs.shape[1]))
    top = values[:, : max(wanted)], ids[:, : max(wanted)]
    chosen = tokens[places].clamp(min=0)[:, None]
    return Sampled(tokens, logged, wanted, logprobs.gather(1, chosen)[:, 0], top)


def invert_cdf(weights: torch.Tensor, u: torch.Tensor, reductions: Reductions = TORCH) -> torch.Tensor:
    """Return for each row the first token whose cumulative weight exceeds u of the total, int64 [rows].

    ``weights`` [rows, vocabulary] are non-negative and need no normalising; a token of weight 0 is never
    returned. Sums go by tiles, then within one: a whole row in float64 would cost more than the draw.
    """
    rows, vocabulary = weights.shape
    tiles = F.pad(weights, (0, -vocabulary % TILE)).view(rows, -1, TILE)
    cumulative = reductions.running_sums(reductions.sums(tiles))
    target = _on(u[:, None], weights) * cumulative[:, -1:]
    tile = _first_above(cumulative, target)
    before = F.pad(cumulative, (1, 0)).gather(1, tile)
    found = tiles[torch.arange(rows, device=weights.device), tile[:, 0]]
    inside = reductions.running_sums(found.double())
    return (tile * TILE + _first_above(inside, target - before))[:, 0]


def floors(scaled: torch.Tensor, columns: SamplingColumns, reductions: Reductions = TORCH) -> torch.Tensor:
    """Return the least logit [rows, 1] that top-k, top-p and min-p keep; tokens equal to it are kept.

    ``scaled`` [rows, vocabulary] are logits over the temperature, less the row's greatest.
    """
    vocabulary = scaled.shape[1]
    with np.errstate(divide="ignore"):
        floor = _column(np.log(columns.min_p), scaled)
    limits = np.where(columns.top_k < vocabulary, columns.top_k, 0)
    cut = np.flatnonzero((limits > 0) | (columns.top_p < 1))
    if len(cut):
        width = min(vocabulary, max(CANDIDATES, int(limits.max())))
        chosen, of_cut = columns.take(cut), _on(torch.from_numpy(cut), scaled)
        cuts = _cut_floors(scaled[of_cut], chosen, width, reductions)
        floor[of_cut] = torch.maximum(floor[of_cut], cuts)
    return floor


def _drawn(
    logits: torch.Tensor,
    best: torch.Tensor,
    greatest: torch.Tensor,
    rows: SamplingRows,
    reductions: Reductions,
) -> torch.Tensor:
    """Return ``greatest`` [rows] with the draws in the rows that are drawn; the logits are used up."""
    columns, u = rows.columns, rows.uniforms()
    drawn = np.flatnonzero(columns.flags & DRAWN)
    if len(drawn) == len(rows):  # the usual case needs no copy
        return _draw(logits, best, columns, u, reductions)
    where = _on(torch.from_numpy(drawn), logits)
    mine, most = logits.index_select(0, where), best.index_select(0, where)
    tokens = _draw(mine, most, columns.take(drawn), u[drawn], reductions)
    return greatest.index_copy(0, where, tokens)


def _draw(
    logits: torch.Tensor, best: torch.Tensor, columns: SamplingColumns, u: Floats, reductions: Reductions
) -> torch.Tensor:
    """Return a token per row; that of a row without finite logits means nothing."""
    # The greatest becomes 0 first, so that a tiny temperature cannot overflow.
    scaled = logits.sub_(best[:, None]).div_(_column(columns.temperatures, logits))
    weights = scaled.exp()
    if (columns.flags & FILTERED).any():
        weights.masked_fill_(scaled < floors(scaled, columns, reductions), 0.0)
    return invert_cdf(weights, torch.from_numpy(u), reductions)


def _column(values: Floats, like: torch.Tensor) -> torch.Tensor:
    """Return the values as [rows, 1] of the tensor's type and device."""
    return torch.from_numpy(values)[:, None].to(like.device, like.dtype, non_blocking=True)


def _begin_copy(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor on the host that is what this one is once the stream got so far."""
    return tensor.to("cpu", non_blocking=True)


def _on(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return the tensor on the other's device, without waiting for what that computes."""
    return tensor.to(like.device, non_blocking=True)


def _cut_floors(
    scaled: torch.Tensor, columns: SamplingColumns, width: int, reductions: Reductions
) -> torch.Tensor:
    """Return the floors of top-k, then top-p, from the ``width`` greatest logits of each row."""
    vocabulary = scaled.shape[1]
    values = scaled.topk(width, dim=-1).values
    kth = _on(torch.from_numpy(np.where(columns.top_k < vocabulary, columns.top_k, 0))[:, None], scaled)
    top_p = _on(torch.from_numpy(columns.top_p)[:, None], scaled)
    floor = values.gather(1, (kth - 1).clamp(min=0)).masked_fill(kth == 0, -math.inf)
    total = reductions.sums(scaled.exp().masked_fill(scaled < floor, 0.0))[:, None]
    mass = values.double().exp().masked_fill(values < floor, 0.0)
    # A token stays while those before it have not reached top_p; the first always stays.
    kept = ((reductions.running_sums(mass) - mass) < top_p * total) & (values >= floor)
    kept[:, 0] = True
    result = values.gather(1, kept.sum(dim=-1, keepdim=True) - 1)
    result = torch.where(top_p < 1, result, floor)
    if width < vocabulary:  # a flat distribution: look at more of it
        wide = np.flatnonzero(kept.all(dim=-1).cpu().numpy() & (columns.top_p < 1))
        if len(wide):
            where, wider = _on(torch.from_numpy(wide), scaled), min(vocabulary, width * WIDER)
            result[where] = _cut_floors(scaled[where], columns.take(wide), wider, reductions)
    return result


def _first_above(cumulative: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return the first index [rows, 1] above the target; rounding may not carry past the last weight."""
    index = torch.searchsorted(cumulative, target, right=True)
    last = (cumulative < cumulative[:, -1:]).sum(dim=-1, keepdim=True)
    return torch.minimum(index, last)


def _add_bias(logits: torch.Tensor, rows: SamplingRows) -> None:
    width = logits.shape[1]
    biased = [(row, rows.sequences[row].sampling.logit_bias) for row in rows.asking(BIASED)]
    where = torch.tensor([row * width + token for row, bias in biased for token, _ in bias])
    what = torch.tensor([value for _, bias in biased for _, value in bias], dtype=logits.dtype)
    logits.view(-1)[_on(where, logits)] += _on(what, logits)


def _penalise_repetition(logits: torch.Tensor, rows: SamplingRows) -> None:
    """Divide positive and multiply negative logits of every token of prompt and output."""
    for asking in _slices(rows, rows.asking(REPETITION)):
        # The same token twice is written twice with the same value.
        where, row_of = _places(logits, asking, [rows.tokens(row) for row in asking])
        penalties = [rows.sequences[row].sampling.repetition_penalty for row in asking]
        penalty = torch.tensor(penalties, device=logits.device)[row_of]
        seen = logits.view(-1)[where]
        logits.view(-1)[where] = torch.where(seen > 0, seen / penalty, seen * penalty)


def _penalise_output(logits: torch.Tensor, rows: SamplingRows) -> None:
    """Subtract the presence penalty once and the frequency penalty per occurrence in the output."""
    with_output = [row for row in rows.asking(OUTPUT_PENALTY) if rows.positions[row] > 0]
    for asking in _slices(rows, with_output):
        places, row_of = _places(logits, asking, [rows.output(row) for row in asking])
        where, inverse, counts = torch.unique(places, return_inverse=True, return_counts=True)
        row_of = torch.empty_like(where).scatter_(0, inverse, row_of)
        samplings = [rows.sequences[row].sampling for row in asking]
        presence = _on(torch.tensor([each.presence_penalty for each in samplings]), logits)
        frequency = _on(torch.tensor([each.frequency_penalty for each in samplings]), logits)
        logits.view(-1)[where] -= presence[row_of] + frequency[row_of] * counts


def _mask_stops(logits: torch.Tensor, rows: SamplingRows, ruled: RuledRows | None) -> None:
    """Rule out every stop token while the output is shorter than min_tokens.

    An output that its constraint lets only end may end all the same.
    """
    width = logits.shape[1]
    where = [
        row * width + token
        for row in rows.asking(MIN_TOKENS)
        if rows.positions[row] < rows.sequences[row].limits.min_tokens
        and not (ruled is not None and _can_only_end(row, rows.sequences[row].stop_ids, ruled, width))
        for token in rows.sequences[row].stop_ids
    ]
    if where:
        logits.view(-1)[_on(torch.tensor(where), logits)] = -math.inf


def _can_only_end(row: int, stop_ids: frozenset[int], ruled: RuledRows, width: int) -> bool:
    """Whether the row is constrained, and no token but stop tokens may come next."""
    if row not in ruled.rows:
        return False
    bits = np.unpackbits(ruled.allowed[ruled.rows.index(row)], count=width, bitorder="little")
    return int(np.count_nonzero(bits)) == sum(int(bits[token]) for token in stop_ids)


def _reported(own: float, tokens: list[int], logprobs: list[float]) -> SampledLogprobs:
    """Return the log-probabilities of a row; alternatives that cannot come are left out."""
    if logprobs and logprobs[-1] == -math.inf:
        possible = logprobs.index(-math.inf)
        tokens, logprobs = tokens[:possible], logprobs[:possible]
    return SampledLogprobs(own, tokens, logprobs)


def _slices(rows: SamplingRows, asking: list[int]) -> Iterator[list[int]]:
    """Yield the rows in slices whose tokens are about MOST_PLACES: what a step takes is bounded."""
    part: list[int] = []
    tokens = 0
    for row in asking:
        part.append(row)
        tokens += len(rows.sequences[row].tokens)
        if tokens >= MOST_PLACES:
            yield part
            part, tokens = [], 0
    if part:
        yield part


def _places(
    logits: torch.Tensor, rows: list[int], tokens: list[list[int]]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each token's place in the flattened logits, and the index in ``rows`` of its row."""
    width = logits.shape[1]
    places = torch.cat([torch.tensor(ids) + row * width for row, ids in zip(rows, tokens, strict=True)])
    lengths = torch.tensor([len(ids) for ids in tokens])
    row_of = torch.arange(len(rows)).repeat_interleave(lengths)
    return _on(places, logits), _on(row_of, logits)
