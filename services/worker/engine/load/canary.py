"""What a loaded engine promises, found by trying it.

Sequences run alone, then in company with their prompts cut, then resumed in the middle. Their
log-probabilities are compared by bits, because equal tokens hide differences that change one in a million.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from services.core.generation import OutputLimits, Prompt, Sampling
from services.worker.engine.core import Engine
from services.worker.engine_protocol import SampledLogprobs, Submit

PROMPT_TOKENS: Final = (5, 40, 97, 140)
TOKENS: Final = 6
RESUMED_AT: Final = 3
Output = list[tuple[int, SampledLogprobs]]


def is_exact(fresh: Callable[[], Engine], vocab_size: int) -> bool:
    """Return whether sequences are the same alone, in company and resumed.

    ``fresh`` returns an engine without sequences.
    """
    submits = _submits(vocab_size, fresh().max_model_len)
    alone = [_run(fresh(), [each])[0] for each in submits]
    if _run(fresh(), submits) != alone:
        return False
    cut = [output[:RESUMED_AT] for output in alone]
    resumed = [
        msgspec.structs.replace(submit, produced_ids=[token for token, _ in output])
        for submit, output in zip(submits, cut, strict=True)
    ]
    rest = _run(fresh(), resumed)
    return [first + last for first, last in zip(cut, rest, strict=True)] == alone


def _submits(vocab_size: int, longest: int) -> list[Submit]:
    drawn = random.Random(0)
    limits = OutputLimits(TOKENS, ignore_eos=True)
    submits = []
    for handle, wished in enumerate(PROMPT_TOKENS):
        size = max(1, min(wished, longest - TOKENS))
        prompt = Prompt([drawn.randrange(vocab_size) for _ in range(size)])
        sampling = Sampling(seed=handle, temperature=float(handle % 2), logprobs=0)
        submits.append(Submit(handle, prompt, sampling, limits, credit_limit=TOKENS))
    return submits


def _run(engine: Engine, submits: Sequence[Submit]) -> list[Output]:
    outputs: dict[int, Output] = {submit.handle: [] for submit in submits}
    for submit in submits:
        engine.apply(submit)
    while engine.has_work:
        stepped = engine.step()
        for handle, token in zip(stepped.handles, stepped.tokens, strict=True):
            outputs[handle].append((token, stepped.logprobs[handle].pop(0)))
    return list(outputs.values())
