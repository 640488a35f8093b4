"""How a command becomes a sequence."""

from __future__ import annotations

from services.worker.engine.sequence import SequenceState, sequence_of
from services.worker.engine.validation import ModelLimits, refusal
from services.worker.engine_protocol import Submit


class Intake:
    """How a command becomes a sequence, or is refused. Another intake may keep less of a prompt."""

    def refusal(self, command: Submit, model: ModelLimits) -> str | None:
        """Return why the sequence cannot run, or None."""
        return refusal(command, model)

    def sequence(self, command: Submit, *, arrival: int, eos_ids: frozenset[int]) -> SequenceState:
        """Return the state of a sequence that is not refused."""
        return sequence_of(command, arrival=arrival, eos_ids=eos_ids)
