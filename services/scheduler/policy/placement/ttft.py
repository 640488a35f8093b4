"""Predicted time to first token on a worker, from the grant on, and the delay of the other prompts there.

Workers prefill the shortest rest first, and the oldest prompt with a quarter of each step
(``worker.policy.prefill_share``; Schrage, 1968). So only a part of the queue is ahead of a prompt: prompts
with less to compute, and the share of the oldest one. The composition of the queue is not reported. In a long
queue about ``AHEAD_RATIO`` times a prompt's own tokens run before it, whatever its length, as simulated
fleets near their capacity show (1.0 to 1.5 below 4,096 tokens, 1.8 above).

The rest of the queue waits for the prompt: its longer prompts are delayed by all that the prompt computes, so
a placement is charged for that delay too. A queue that is served shortest first contains mostly long prompts,
about one for every ``LONG_PROMPT_TOKENS``.

Prompts run in steps of at most ``CHUNK_TOKENS`` prompt tokens, each of which also decodes the running
sequences (Sarathi-Serve, OSDI'24). The current step ends first: half a step on average.
"""

from __future__ import annotations

from typing import Final

from services.core.fleet import LONG_PROMPT_TOKENS
from services.scheduler.policy.step_time import StepModel

CHUNK_TOKENS: Final = 512
AHEAD_RATIO: Final = 1.5


def predict_ttft_s(
    model: StepModel, *, ahead_tokens: int, uncached_tokens: int, running: int, attended_tokens: int
) -> float:
    """Return the seconds until the first token.

    ``ahead_tokens`` are queued for prefill besides this prompt's ``uncached_tokens``, of which at least one
    is always computed. ``running`` sequences read ``attended_tokens`` of KV in a step.
    """
    own_tokens = max(1, uncached_tokens)
    tokens = own_tokens + min(ahead_tokens, int(AHEAD_RATIO * own_tokens))
    step_s = model.per_step_s + model.per_decode_s * running + model.per_attended_s * attended_tokens
    steps = -(-tokens // CHUNK_TOKENS) + (0.5 if running or ahead_tokens > 0 else 0.0)
    return model.per_prefill_s * tokens + steps * step_s


def delay_of_others_s(model: StepModel, *, ahead_tokens: int, uncached_tokens: int) -> float:
    """Return the total delay in seconds of the queued prompts that a prompt of ``uncached_tokens`` causes
    where ``ahead_tokens`` are queued."""
    if ahead_tokens <= 0:
        return 0.0
    per_token_s = model.per_prefill_s + model.per_step_s / CHUNK_TOKENS
    return per_token_s * max(1, uncached_tokens) * ahead_tokens / LONG_PROMPT_TOKENS
