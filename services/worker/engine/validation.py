"""How a command becomes a sequence, or why it may not run on a model. A refusal concerns it alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from services.worker.engine.sequence import SequenceState, sequence_of
from services.worker.engine_protocol import Submit

MAX_LOGPROBS: Final = 128
MAX_TEMPERATURE: Final = 100.0
MAX_PENALTY: Final = 100.0
MAX_BIAS: Final = 1e6  # far above any logit, and still finite in float32
MAX_WAITING: Final = 1 << 16


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """``max_model_len``: tokens of prompt and output together; it never exceeds what the KV pool holds."""

    vocab_size: int
    max_model_len: int


def refusal(submit: Submit, limits: ModelLimits) -> str | None:
    """Return why the sequence cannot run on this model, or None. Sizes come first: nothing is built yet."""
    return size_refusal(submit, limits) or _id_refusal(submit, limits) or _range_refusal(submit)


def size_refusal(submit: Submit, limits: ModelLimits) -> str | None:
    """Return why the sequence is too long, or too short, or None."""
    prompt, produced, most = len(submit.prompt.ids), len(submit.produced_ids), submit.limits.max_tokens
    if prompt == 0:
        return "the prompt is empty"
    scores = submit.sampling.prompt_logprobs is not None
    if most < (0 if scores or submit.embed else 1):
        return f"max_tokens is {most}"
    if not 0 <= submit.scored_tokens <= (prompt if scores else 0):
        return f"{submit.scored_tokens} scored tokens of {prompt}"
    if scores and produced and submit.scored_tokens < prompt:
        return "it has output before its prompt was scored"
    # A gateway of the release before states one token.
    if submit.embed and (most > 1 or produced):
        return "a sequence that embeds has no output"
    if prompt + most > limits.max_model_len:
        return f"{prompt} prompt tokens and max_tokens {most} exceed {limits.max_model_len}"
    if produced > most:
        return f"{produced} produced tokens exceed max_tokens {most}"
    return None


def is_complete(submit: Submit) -> bool:
    """Whether an earlier run made all that is requested."""
    scores = submit.sampling.prompt_logprobs is not None
    if submit.embed:
        return False
    if scores and submit.scored_tokens < len(submit.prompt.ids):
        return False
    return len(submit.produced_ids) >= submit.limits.max_tokens


def _id_refusal(submit: Submit, limits: ModelLimits) -> str | None:
    for name, ids in (
        ("prompt_ids", submit.prompt.ids),
        ("produced_ids", submit.produced_ids),
        ("stop_token_ids", submit.limits.stop_token_ids),
        ("logit_bias", [token for token, _ in submit.sampling.logit_bias]),
    ):
        if ids and not (min(ids) >= 0 and max(ids) < limits.vocab_size):
            return f"{name} holds a token outside the vocabulary of {limits.vocab_size}"
    return None


def _range_refusal(submit: Submit) -> str | None:
    sampling, limits = submit.sampling, submit.limits
    # Written so that NaN fails every one of them.
    checks = (
        ("temperature", 0.0 <= sampling.temperature <= MAX_TEMPERATURE),
        ("top_p", 0.0 < sampling.top_p <= 1.0),
        ("top_k", sampling.top_k >= 0),
        ("min_p", 0.0 <= sampling.min_p <= 1.0),
        ("presence_penalty", abs(sampling.presence_penalty) <= MAX_PENALTY),
        ("frequency_penalty", abs(sampling.frequency_penalty) <= MAX_PENALTY),
        ("repetition_penalty", 0.0 < sampling.repetition_penalty <= MAX_PENALTY),
        ("logprobs", sampling.logprobs is None or 0 <= sampling.logprobs <= MAX_LOGPROBS),
        ("prompt_logprobs", 0 <= (sampling.prompt_logprobs or 0) <= MAX_LOGPROBS),
        ("min_tokens", 0 <= limits.min_tokens <= limits.max_tokens),
        ("choice", submit.choice >= 0),
        ("logit_bias", all(abs(bias) <= MAX_BIAS for _, bias in sampling.logit_bias)),
    )
    return next((f"{name} is out of range" for name, holds in checks if not holds), None)


class Intake:
    """How a command becomes a sequence, or is refused. Another intake may keep less of a prompt."""

    def refusal(self, command: Submit, model: ModelLimits) -> str | None:
        """Return why the sequence cannot run, or None."""
        return refusal(command, model)

    def sequence(self, command: Submit, *, arrival: int, eos_ids: frozenset[int]) -> SequenceState:
        """Return the state of a sequence that is not refused."""
        return sequence_of(command, arrival=arrival, eos_ids=eos_ids)
