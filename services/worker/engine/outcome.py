"""What a step was, and what came of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from operator import attrgetter
from typing import Final

from services.worker.engine.execute.executor import Samples
from services.worker.engine.sequence import SequenceState
from services.worker.engine_protocol import SampledLogprobs
from services.worker.policy.speculation import Verified

_HANDLE: Final = attrgetter("handle")
PromptLogprobs = dict[int, list[SampledLogprobs]]  # log-probabilities of prompt tokens by handle


@dataclass(frozen=True, slots=True)
class Work:
    """What a step is measured by: its decodes read ``attended_tokens`` of KV; ``cached`` is by handle what of
    a prompt came from a cache, in the step that first computes it."""

    decodes: int = 0
    prefill_tokens: int = 0
    attended_tokens: int = 0
    cached: dict[int, int] = field(default_factory=dict)


@dataclass(slots=True)
class Outcome:
    """The results of a step, in the columns of ``Stepped``."""

    handles: list[int]
    tokens: list[int]
    logprobs: dict[int, list[SampledLogprobs]] = field(default_factory=dict)
    verified: list[Verified] = field(default_factory=list)
    prompt_logprobs: PromptLogprobs = field(default_factory=dict)


def outcome_of(
    sampled: list[SequenceState], samples: Samples, kept: list[int], prompt_logprobs: PromptLogprobs
) -> Outcome:
    """Return the columns of the rows that were kept, of the sequences that were sampled."""
    tokens = samples.tokens
    if len(kept) < len(sampled):
        sampled, tokens = [sampled[row] for row in kept], [tokens[row] for row in kept]
    outcome = Outcome(list(map(_HANDLE, sampled)), tokens, prompt_logprobs=prompt_logprobs)
    if samples.logprobs:
        for row, sequence in zip(kept, sampled, strict=True):
            if row in samples.logprobs:
                outcome.logprobs.setdefault(sequence.handle, []).append(samples.logprobs[row])
    return outcome
