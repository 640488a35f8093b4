"""One sequence on this worker: what the agent knows of it beyond the engine."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING

from services.core.generation import FallbackGrant, StartSpec, TokenLogprobs
from services.worker.text.text_stream import TextStream

if TYPE_CHECKING:
    from services.worker.streams.outbox import Outbox


class SlotState(Enum):
    """Whether a sequence has a slot of its engine's batch. See ``sequence_slots``."""

    RUNNING = auto()
    PARKED = auto()  # its reader gave no credit
    RETURNING = auto()  # it has credit and waits for a slot


@dataclass(slots=True, eq=False)
class LiveSequence:
    """Owned by its ``SequenceTable`` until it ends; its outbox keeps it a little longer, to send the rest.

    ``number`` is the engine's handle, ``handle`` the gateway's. ``tokens`` counts prompt and output.
    ``fast``: the next token needs neither stop strings nor log-probabilities nor pending bytes.
    """

    spec: StartSpec
    outbox: Outbox
    handle: int
    number: int
    text: TextStream
    prompt_tokens: int
    tokens: int
    credit_limit: int  # absolute output offset
    reserved_blocks: int
    reserved_tokens: int  # what fits into them
    notice_tokens: int  # with so many it needs a block more, or has no credit
    accepted_s: float
    deadline_s: float = math.inf
    fast: bool = False
    slot: SlotState = SlotState.RUNNING
    # not yet taken by the writer
    queued: bool = False
    dropped: bool = False
    pending_ids: list[int] = field(default_factory=list)
    pending_text: str = ""
    pending_logprobs: list[TokenLogprobs] = field(default_factory=list)
    # stage clock, flow control and accounting
    prefill_left: int = 0
    cached_tokens: int = 0  # of the tokens to prefill
    cache_told: bool = False  # the engine said what it found
    shared_prefixes: int = 0  # leading prefix blocks that it refers to; reserved_blocks has theirs
    prefill_started_s: float | None = None
    first_token_s: float | None = None
    blocked_since_s: float | None = None
    charged_output: int = 0  # output offset up to which the tenant was charged

    @property
    def fallback(self) -> bool:
        """Its gateway placed it, while nobody led."""
        return isinstance(self.spec.grant, FallbackGrant)

    @property
    def output_tokens(self) -> int:
        return self.tokens - self.prompt_tokens

    @property
    def has_credit(self) -> bool:
        return self.output_tokens < self.credit_limit

    def watch(self) -> None:
        """Set ``notice_tokens`` after a change of credit or reservation."""
        self.notice_tokens = min(self.reserved_tokens + 1, self.prompt_tokens + self.credit_limit)
