"""Conversion of a start into the engine's ``Submit`` command."""

from __future__ import annotations

from services.worker import engine_protocol as wire
from services.worker.streams.live_sequence import LiveSequence


def submit_command(sequence: LiveSequence) -> wire.Submit:
    """Return the engine's command for a start."""
    spec = sequence.spec
    generation = spec.generation
    sampling = generation.sampling
    return wire.Submit(
        handle=sequence.number,
        prompt_ids=generation.prompt_ids,
        produced_ids=spec.produced_ids,
        credit_limit=sequence.credit_limit,
        priority=-generation.priority.rank,
        request_id=generation.request_id,
        prefix_hashes=list(generation.prefix_hashes),
        prefix_root=generation.prefix_root,
        sampling=wire.Sampling(
            seed=sampling.seed,
            choice=spec.choice,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            presence_penalty=sampling.presence_penalty,
            frequency_penalty=sampling.frequency_penalty,
            repetition_penalty=sampling.repetition_penalty,
            logit_bias=dict(sampling.logit_bias),
            logprobs=generation.logprobs,
            max_tokens=generation.max_output_tokens,
            min_tokens=generation.min_output_tokens,
            stop_token_ids=generation.stop_token_ids,
            ignore_eos=generation.ignore_eos,
        ),
    )
