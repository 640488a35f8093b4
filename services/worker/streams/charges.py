"""Usage accounting of one engine's sequences: the prompt, the growing output, the final record."""

from __future__ import annotations

from services.core.fleet import SequenceUsage
from services.core.generation import FinishReason
from services.worker.streams.live_sequence import WorkerSequence
from services.worker.streams.usage_tally import Key, Tally


class UsageAccounting:
    """UsageAccounting each token once. Single writer: the sequence table; the tally is the worker's."""

    def __init__(self, version_digest: str, tally: Tally) -> None:
        self._version_digest = version_digest
        self._tally = tally

    def add_prefill(self, sequence: WorkerSequence) -> None:
        """Charge the prefilled tokens. Called once, with the first token."""
        tokens = sequence.spec.prefill_tokens
        self._tally.add_prefill(self._key_of(sequence), tokens, sequence.cached_tokens)

    def add_output(self, sequence: WorkerSequence) -> None:
        """Charge the output since the last call."""
        output = sequence.output_tokens
        self._tally.add_output(self._key_of(sequence), output - sequence.charged_output)
        sequence.charged_output = output

    def add_ended(self, sequence: WorkerSequence, reason: FinishReason) -> None:
        """Add the final record of a sequence; ``ended`` is true if it completed its output."""
        generation = sequence.spec.generation
        self._tally.add_ended(
            SequenceUsage(
                request_id=generation.request_id,
                choice=sequence.spec.choice,
                tenant=sequence.spec.tenant_id,
                digest=self._version_digest,
                prompt_tokens=sequence.prompt_tokens,
                output_tokens=sequence.output_tokens,
                cached_tokens=min(sequence.cached_tokens, sequence.prompt_tokens),
                ended=reason in (FinishReason.STOP, FinishReason.LENGTH),
                placed_alone=sequence.fallback,
                priority=generation.priority,
            )
        )

    def _key_of(self, sequence: WorkerSequence) -> Key:
        return sequence.spec.tenant_id, self._version_digest, sequence.spec.generation.priority
