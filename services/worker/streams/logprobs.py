"""Log-probabilities as gateways receive them: with the texts of their tokens."""

from __future__ import annotations

from collections.abc import Mapping

from services.core.generation import TokenLogprobs
from services.worker import engine_protocol as wire
from services.worker.streams.live_sequence import WorkerSequence
from services.worker.text.detokenizer import Vocabulary


def with_texts(token: int, entry: wire.SampledLogprobs, text: str, vocabulary: Vocabulary) -> TokenLogprobs:
    """Return the entry of a token, with the text that became final with it."""
    alone, part = vocabulary.alone, vocabulary.part
    parts = tuple(part(other) for other in entry.top_ids)
    return TokenLogprobs(
        sampled=entry.sampled,
        top_ids=tuple(entry.top_ids),
        top_logprobs=tuple(entry.top_logprobs),
        top_tokens=tuple(alone(other) for other in entry.top_ids),
        token=alone(token),
        text=text,
        rank=entry.rank,
        token_bytes=part(token),
        top_bytes=parts if any(parts) else (),
    )


def begin_scores(sequence: WorkerSequence, vocabulary: Vocabulary) -> None:
    """Let the log-probabilities of the sequence's prompt begin behind those that an earlier run sent."""
    generation = sequence.spec.generation
    if generation.sampling.prompt_logprobs is None:
        return
    sequence.scored = sequence.spec.scored_tokens
    sequence.prompt_text = vocabulary.open(generation.prompt.ids[: sequence.scored])


def add_scores(event: wire.Stepped, live: Mapping[int, WorkerSequence], vocabulary: Vocabulary) -> None:
    """Add what a step scored to the pending output of its sequences: the next tokens of their prompts."""
    for number, entries in event.prompt_logprobs.items():
        sequence = live.get(number)
        if sequence is None or (text := sequence.prompt_text) is None:
            continue
        first = sequence.scored
        ids = sequence.spec.generation.prompt.ids[first : first + len(entries)]
        for token, entry in zip(ids, entries, strict=True):
            sequence.pending_ids.append(token)
            sequence.pending_logprobs.append(with_texts(token, entry, text.feed(token), vocabulary))
        sequence.scored += len(entries)
        sequence.outbox.touch(sequence)
