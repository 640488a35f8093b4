"""What a version is probed with on a worker, for how long, and whether its answer will do. Pure.

A probe has the shape of recorded requests. Its token ids are drawn from the shape alone, so that they are the
same on every worker and belong to nobody. It ends after exactly its number of tokens: an answer of another
length, or with an id outside of the vocabulary, fails.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Final

from services.core.estimates.traffic_shapes import (
    DEFAULT_ROWS,
    DEFAULT_SHAPES,
    RequestShape,
    SamplingKind,
)
from services.core.fixed_cost.rows import RawTensor
from services.core.fixed_cost.signature import TensorSpec
from services.core.generation import OutputLimits, Prompt, Sampling
from services.worker.engine_protocol import Ready, RowCosts, Submit

MOST_OUTPUT_TOKENS: Final = 32  # most output tokens of a prompt: later tokens run as these do
# Longest prefill of a prompt, by the engine's own measure; a longer prompt is cut.
MOST_PREFILL_S: Final = 20.0
SLACK_S: Final = 10.0  # addition to the deadline for a machine that is busy with other versions
DEADLINE_FACTOR: Final = 10.0  # ratio of the deadline to the estimated time
MOST_DEADLINE_S: Final = 600.0
MOST_ROW_TOKENS: Final = 4096  # most tokens of the batch of rows, with padding

_SAMPLING: Final = {
    SamplingKind.GREEDY: Sampling(seed=13, temperature=0.0),
    SamplingKind.SAMPLED: Sampling(seed=17, temperature=1.0, top_p=0.9, top_k=50),
    SamplingKind.PENALISED: Sampling(
        seed=3, temperature=0.7, presence_penalty=0.5, frequency_penalty=0.5, repetition_penalty=1.1
    ),
    SamplingKind.LOGPROBS: Sampling(seed=19, temperature=1.0, logprobs=2),
}


@dataclass(frozen=True, slots=True)
class EngineSpeed:
    """What a probe's time is derived from. ``full_step_s`` is the time of a step with ``token_budget``
    tokens."""

    token_budget: int
    full_step_s: float


@dataclass(frozen=True, slots=True)
class ProbePlan:
    """``rounds``: prompts that fit into the KV pool together. One round follows the other."""

    rounds: tuple[tuple[Submit, ...], ...]
    deadline_s: float

    @property
    def prompts(self) -> int:
        return sum(map(len, self.rounds))


def plan_probe(shapes: Sequence[RequestShape], ready: Ready, speed: EngineSpeed) -> ProbePlan:
    """Return the prompts for an engine that is ready, with handles from 1 on, cut to what it takes."""
    fitting = tuple(shape for shape in shapes if shape.sampling in _SAMPLING) or DEFAULT_SHAPES
    cut = dict.fromkeys(_cut(shape, ready, speed) for shape in fitting)
    rounds: list[list[Submit]] = []
    free = 0
    for handle, shape in enumerate(cut, start=1):
        blocks = -(-(shape.input_tokens + shape.output_tokens) // ready.block_size)
        if not rounds or blocks > free:
            rounds.append([])
            free = ready.kv_blocks_total
        free -= blocks
        rounds[-1].append(_submit(handle, shape, ready.vocab_size))
    return ProbePlan(tuple(map(tuple, rounds)), _deadline_s(sum(_estimate_s(one, speed) for one in cut)))


def _cut(shape: RequestShape, ready: Ready, speed: EngineSpeed) -> RequestShape:
    most = min(ready.max_model_len, ready.kv_blocks_total * ready.block_size)
    output = max(1, min(shape.output_tokens, MOST_OUTPUT_TOKENS, most - 1))
    tokens = max(1, min(shape.input_tokens, most - output))
    if speed.full_step_s:
        affordable = MOST_PREFILL_S / speed.full_step_s * speed.token_budget
        tokens = int(min(tokens, max(speed.token_budget, affordable)))
    return RequestShape(tokens, output, shape.sampling)


def _submit(handle: int, shape: RequestShape, vocab_size: int) -> Submit:
    rng = Random(f"probe {shape.input_tokens} {shape.output_tokens} {shape.sampling}")
    ids = [rng.randrange(vocab_size) for _ in range(shape.input_tokens)]
    return Submit(
        handle,
        Prompt(ids),
        _SAMPLING[shape.sampling],
        OutputLimits(shape.output_tokens, ignore_eos=True),
        credit_limit=shape.output_tokens,
        request_id=f"probe-{handle}",
    )


def _estimate_s(shape: RequestShape, speed: EngineSpeed) -> float:
    """Return an upper estimate: a decode takes no longer than a step of the whole budget."""
    steps = shape.input_tokens / speed.token_budget + shape.output_tokens
    return steps * speed.full_step_s


def _deadline_s(estimate_s: float) -> float:
    return min(MOST_DEADLINE_S, SLACK_S + DEADLINE_FACTOR * estimate_s)


def answer_problem(prompt: Submit, tokens: Sequence[int], reason: str, error: str, vocab_size: int) -> str:
    """Return why the answer to a prompt fails the probe, empty if it does not. ``error`` is the engine's."""
    if reason == "not_finite":
        return error or "the model returned no finite numbers"
    if reason == "error":
        return error or "the engine rejected it"
    if any(not 0 <= token < vocab_size for token in tokens):
        return f"an answer with tokens outside of the vocabulary of {vocab_size}"
    if reason != "length" or len(tokens) != prompt.limits.max_tokens:
        return f"{len(tokens)} of {prompt.limits.max_tokens} tokens, and then the end {reason!r}"
    return ""


def prompt_name(prompt: Submit) -> str:
    """Return a prompt of the probe as messages name it."""
    return f"the prompt of {len(prompt.prompt.ids)} tokens"


@dataclass(frozen=True, slots=True)
class RowProbePlan:
    """One batch of rows."""

    rows: tuple[tuple[RawTensor, ...], ...]
    width: int  # 0: rows have no length
    deadline_s: float


def plan_row_probe(
    shapes: Sequence[RequestShape],
    inputs: Sequence[TensorSpec],
    costs: RowCosts,
    *,
    max_tokens: int,
    memory_bytes: int,
) -> RowProbePlan:
    """Return a batch of the recorded widths, the longest first, as many as the memory of a batch allows.

    Images have one size, the largest. ``max_tokens`` is the longest row in tokens or the largest image in
    tiles; 0: rows have no length. ``memory_bytes`` 0: no bound.
    """
    fitting = tuple(shape for shape in shapes if shape.sampling is SamplingKind.ROW) or DEFAULT_ROWS
    lengths = sorted({max(1, min(shape.input_tokens, max_tokens or 1)) for shape in fitting}, reverse=True)
    width = lengths[0]
    most = max(1, MOST_ROW_TOKENS // width)
    if memory_bytes:
        most = min(most, max(1, memory_bytes // max(1, costs.row_bytes + width * costs.token_bytes)))
    varies = any(spec.has_length for spec in inputs)
    lengths = lengths[:most] if varies else [width] * min(most, len(fitting))
    estimate_s = costs.batch_s + len(lengths) * (costs.row_s + width * costs.token_s)
    rows = tuple(tuple(_tensor(spec, length) for spec in inputs if not spec.optional) for length in lengths)
    return RowProbePlan(rows, width if max_tokens else 0, _deadline_s(estimate_s))


def _tensor(spec: TensorSpec, length: int) -> RawTensor:
    """Return zeros: an id that every vocabulary has, a picture without anything on it."""
    shape = spec.shape_of(length)
    width = 8 if spec.datatype == "INT64" else 4
    return RawTensor(spec.name, spec.datatype, shape, bytes(math.prod(shape) * width))
