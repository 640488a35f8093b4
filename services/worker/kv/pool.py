"""The limits and the current numbers of one engine's KV pool."""

from __future__ import annotations

from dataclasses import dataclass

from services.worker import engine_protocol as wire


@dataclass(frozen=True, slots=True)
class PoolLimits:
    """The sizes that the engine reported when it was ready, and the agent's bound on sequences."""

    kv_blocks_total: int
    block_size: int
    max_model_len: int
    max_sequences: int
    full_step_s: float = 0.0


@dataclass(slots=True)
class PoolStats:
    """The engine's own numbers, as of its last message."""

    kv_blocks_used: int = 0  # allocated in the engine
    # Sequences that run.
    running: int = 0
    # Sequences that wait.
    waiting: int = 0
    # Number of the last step.
    steps: int = 0
    # Sum of step durations.
    step_seconds: float = 0.0
    # Work inside the steps: tokens prefilled, tokens decoded, tokens of KV that the decodes read.
    prefill_tokens: int = 0
    decode_tokens: int = 0
    attended_tokens: int = 0

    def note_step(self, event: wire.Stepped) -> None:
        """Count a step, with all its tokens as decoded; the table subtracts those that prefills produced."""
        self.steps = event.step
        self.step_seconds += event.step_s
        self.prefill_tokens += event.prefill_tokens
        self.decode_tokens += len(event.handles)
        self.attended_tokens += event.attended_tokens
        self.note_levels(event)

    def note_levels(self, event: wire.Stepped | wire.EngineHeartbeat) -> None:
        self.kv_blocks_used = event.kv_blocks_used
        self.running = event.running
        self.waiting = event.waiting
