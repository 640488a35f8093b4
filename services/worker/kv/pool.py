"""One engine's pool: how much it holds, and its own numbers."""

from __future__ import annotations

from dataclasses import dataclass

from services.worker import engine_protocol as wire


@dataclass(frozen=True, slots=True)
class PoolLimits:
    """What the engine said when it was ready, and how many sequences the agent lets it hold."""

    kv_blocks_total: int
    block_size: int
    max_model_len: int
    max_sequences: int
    full_step_s: float = 0.0


@dataclass(slots=True)
class PoolStats:
    """The engine's own numbers, as of its last message."""

    kv_blocks_used: int = 0
    running: int = 0
    waiting: int = 0
    steps: int = 0
    step_seconds: float = 0.0
    # Work inside the steps: tokens prefilled, tokens decoded, tokens of KV that the decodes read.
    prefill_tokens: int = 0
    decode_tokens: int = 0
    attended_tokens: int = 0

    def note_step(self, event: wire.Stepped) -> None:
        """Count a step and all its tokens as decoded; the table takes back those that prefills made."""
        self.steps = event.step
        self.step_seconds += event.step_s
        self.prefill_tokens += event.prefill_tokens
        self.decode_tokens += len(event.handles)
        self.attended_tokens += event.attended_tokens
        self.note_levels(event)

    def note_levels(self, event: wire.Stepped | wire.Heartbeat) -> None:
        self.kv_blocks_used = event.kv_blocks_used
        self.running = event.running
        self.waiting = event.waiting
