"""One sequence on this worker: the agent's state of it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING

from services.core.generation import NO_STEPS, FallbackGrant, RunFacts, StartSpec, StepSums, TokenLogprobs
from services.worker.detokenizer import Detokenizer, TextStream

if TYPE_CHECKING:
    from services.worker.streams.outbox import Outbox


class SlotState(Enum):
    """Whether a sequence has a slot of its engine's batch. See ``sequence_slots``."""

    RUNNING = auto()
    PARKED = auto()  # it has no credit
    RETURNING = auto()  # has credit and waits for a slot


@dataclass(slots=True, eq=False)
class WorkerSequence:
    """Owned by its ``SequenceTable`` until it ends; its outbox retains it until its output is sent."""

    spec: StartSpec  # the start as received
    outbox: Outbox  # frames of its gateway stream
    # The gateway's handle.
    handle: int
    # The engine's handle.
    number: int
    text: TextStream  # detokeniser and stop strings
    model: str  # the deployment that its usage is counted for
    prompt_tokens: int  # length of the prompt
    # Prompt and output.
    tokens: int
    credit_limit: int  # absolute output offset
    reserved_blocks: int  # KV blocks, shared ones included
    reserved_tokens: int  # capacity of the reserved blocks
    notice_tokens: int  # token count at which it needs one more block, or has no credit
    accepted_s: float  # monotonic time of the start
    deadline_s: float = math.inf  # monotonic time
    # The next token needs no stop strings, no log-probabilities and no pending bytes.
    fast: bool = False
    slot: SlotState = SlotState.RUNNING  # its group in ``SequenceSlots``
    # tokens of the prompt that the output begins with: those that were added, or sent by an earlier run
    scored: int = 0
    prompt_text: Detokenizer | None = None  # text of these tokens
    # output that the writer has not taken yet
    queued: bool = False  # it is in the outbox's ``dirty``
    dropped: bool = False  # cancelled; nothing more is sent
    pending_ids: list[int] = field(default_factory=list)  # tokens to send
    pending_text: str = ""  # final text to send
    pending_ends: list[int] | None = None  # ends of the pending tokens' texts in it; None: they are merged
    pending_logprobs: list[TokenLogprobs] = field(default_factory=list)  # one per pending token, or none
    pending_scores: list[float] = field(default_factory=list)  # probe's scores of the last pending tokens
    # stage clock, flow control and accounting
    prefill_left: int = 0  # tokens without a prefill
    cached_tokens: int = 0  # tokens to prefill that a cache had
    cache_reported: bool = False  # the engine has reported the cached tokens
    shared_prefixes: int = 0  # leading prefix blocks that it refers to; reserved_blocks includes them
    prefill_started_s: float | None = None  # None: not started
    first_token_s: float | None = None  # None: no token yet
    blocked_since_s: float | None = None  # None: it has credit
    charged_output: int = 0  # output offset up to which the tenant was charged
    device_us: int = 0  # its shares of engine steps, as reported by the engine
    accepted_steps: StepSums = NO_STEPS  # engine's steps before its acceptance
    first_steps: StepSums = NO_STEPS  # engine's steps up to its first token
    blocked_s: float = 0.0  # time without credit so far
    returning_s: float = 0.0  # time without a slot that others had so far
    yielded_since_s: float | None = None  # None: it has its slot, or no credit
    yields: int = 0  # how often it lost its slot to others

    @property
    def version_digest(self) -> str:
        return self.spec.grant.version_digest

    @property
    def fallback(self) -> bool:
        """Whether a gateway placed it while no leader answered."""
        return isinstance(self.spec.grant, FallbackGrant)

    @property
    def output_tokens(self) -> int:
        return self.tokens - self.prompt_tokens

    @property
    def ends_with_prefill(self) -> bool:
        """Whether it computes its prompt here and makes no token."""
        return self.spec.embed or (not self.output_tokens and self.scored > self.spec.scored_tokens)

    @property
    def has_credit(self) -> bool:
        return self.output_tokens < self.credit_limit

    def watch(self) -> None:
        """Set ``notice_tokens`` after a change of credit or reservation."""
        self.notice_tokens = min(self.reserved_tokens + 1, self.prompt_tokens + self.credit_limit)

    def unblock(self, now_s: float) -> None:
        """Its reader gave credit: from now on it waits for a slot."""
        if self.blocked_since_s is not None:
            self.blocked_s += now_s - self.blocked_since_s
        self.blocked_since_s, self.yielded_since_s = None, now_s

    def yield_slot(self, now_s: float) -> None:
        """Another sequence has its slot from now on."""
        self.yields += 1
        self.yielded_since_s = now_s

    def returned(self, now_s: float) -> None:
        """It has a slot again."""
        if self.yielded_since_s is not None:
            self.returning_s += now_s - self.yielded_since_s
        self.yielded_since_s = None

    def facts(self, steps: StepSums, now_s: float) -> RunFacts:
        """Return how it fared until now; ``steps``: those of its engine so far."""
        first = self.first_steps if self.first_token_s is not None else steps
        blocked_s = 0.0 if self.blocked_since_s is None else now_s - self.blocked_since_s
        returning_s = 0.0 if self.yielded_since_s is None else now_s - self.yielded_since_s
        return RunFacts(
            prefill_us=microseconds(self.prefill_started_s, self.first_token_s),
            before=first.since(self.accepted_steps),
            after=steps.since(first),
            blocked_us=round((self.blocked_s + blocked_s) * 1e6),
            returning_us=round((self.returning_s + returning_s) * 1e6),
            preemptions=self.yields,
        )


def microseconds(start_s: float | None, end_s: float | None) -> int:
    """Return the time between two moments, 0 without either."""
    return 0 if start_s is None or end_s is None else max(0, round((end_s - start_s) * 1e6))
