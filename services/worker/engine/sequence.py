"""The state of one sequence. The planner and the engine of one process own it; executors only read it."""

from __future__ import annotations

from collections.abc import MutableSequence
from dataclasses import dataclass, field
from enum import Enum, auto

from services.core.generation import OutputLimits, Sampling
from services.core.prefix import PREFIX_BLOCK_TOKENS
from services.worker.engine.sample.keyed_random import sequence_key
from services.worker.engine_protocol import Submit


class Status(Enum):
    """Where a sequence is. PREFILLING to MASKING have KV and a seat, STALLED and RETURNING KV alone."""

    WAITING = auto()  # new, no KV
    SUSPECT = auto()  # no KV, a suspect that waits for its turn to run in steps of its own
    PREEMPTED = auto()  # lost its KV, goes before new ones
    COMPILING = auto()  # no KV, its constraint is being compiled
    PARKED = auto()  # no KV and no credit: nothing to do until a Credit
    PREFILLING = auto()
    DECODING = auto()
    HELD = auto()  # its next token is being computed, and may be its last
    MASKING = auto()  # the mask of its next token is being computed separately
    STALLED = auto()  # holds KV, has no credit
    RETURNING = auto()  # holds KV, has credit again, waits for a seat
    FINISHED = auto()


@dataclass(slots=True, eq=False)  # two sequences are never the same one
class SequenceState:
    """What the engine keeps of one sequence."""

    handle: int
    # Prompt and output.
    tokens: MutableSequence[int]
    prompt_tokens: int
    sampling: Sampling
    limits: OutputLimits
    stop_ids: frozenset[int]
    key: int
    # (priority, arrival): smaller goes first and is preempted last.
    order: tuple[int, int]
    credit_limit: int
    # The length of tokens at which credit or max_tokens ends.
    pause_at: int = 0
    status: Status = Status.WAITING
    # KV is written for so many of the tokens.
    computed: int = 0
    blocks: list[int] = field(default_factory=list)
    # How many tokens the blocks hold.
    capacity: int = 0
    # The blocks are consecutive.
    contiguous: bool = True
    preemptions: int = 0
    # Computed tokens that came from a cache.
    cached: int = 0
    # Much of the prompt was left to compute when the sequence was queued, or got its place.
    is_long: bool = False
    # Moves with each change of the blocks.
    table_version: int = 0
    # The root of its chain in a prefix cache and the names known so far. Empty: it is not cached.
    prefix_names: list[int] = field(default_factory=list)
    # How it is sampled depends on its output so far.
    sees_output: bool = False
    # Up to that length of tokens it is computed in steps of its own.
    suspect_until: int = 0
    # It ends with its prefill.
    embeds: bool = False
    # Tokens of the prompt whose log-probabilities were reported.
    scored: int = 0

    @property
    def output_tokens(self) -> int:
        """Output tokens so far, those of an earlier run included; also the next output position."""
        return len(self.tokens) - self.prompt_tokens

    @property
    def has_credit(self) -> bool:
        return self.output_tokens < self.credit_limit

    @property
    def is_unscored(self) -> bool:
        """Whether log-probabilities of its prompt are to be computed."""
        return self.sampling.prompt_logprobs is not None and self.scored < self.prompt_tokens

    @property
    def is_suspect(self) -> bool:
        """Whether its next step has no other member."""
        return len(self.tokens) < self.suspect_until

    def run_alone(self, tokens: int) -> None:
        """Have it computed in steps of its own for so many tokens; 0: not at all."""
        self.suspect_until = len(self.tokens) + tokens if tokens else 0

    def set_credit(self, limit: int) -> None:
        """Raise the credit: a limit below the present one changes nothing."""
        self.credit_limit = max(self.credit_limit, limit)
        self._set_pause()

    def cut_credit(self, limit: int) -> None:
        """Take credit back: a limit above the present one changes nothing."""
        self.credit_limit = min(self.credit_limit, limit)
        self._set_pause()

    def _set_pause(self) -> None:
        self.pause_at = self.prompt_tokens + min(self.credit_limit, self.limits.max_tokens)


def sequence_of(submit: Submit, *, arrival: int, eos_ids: frozenset[int]) -> SequenceState:
    """Return the state of a new sequence; tokens produced before a resume count as output."""
    prompt, sampling, limits = submit.prompt, submit.sampling, submit.limits
    stop_ids = frozenset(limits.stop_token_ids)
    names = prompt.prefix_hashes[: len(prompt.ids) // PREFIX_BLOCK_TOKENS]
    # Cached KV has no logits: a prompt whose log-probabilities are requested is computed whole.
    cached = bool(prompt.prefix_root) and sampling.prompt_logprobs is None
    sequence = SequenceState(
        handle=submit.handle,
        tokens=[*prompt.ids, *submit.produced_ids],
        prompt_tokens=len(prompt.ids),
        sampling=sampling,
        limits=limits,
        stop_ids=stop_ids if limits.ignore_eos else stop_ids | eos_ids,
        key=sequence_key(sampling.seed, submit.choice),
        order=(submit.priority, arrival),
        credit_limit=submit.credit_limit,
        prefix_names=[prompt.prefix_root, *names] if cached else [],
        sees_output=bool(sampling.presence_penalty or sampling.frequency_penalty)
        or sampling.repetition_penalty != 1.0
        or sampling.constraint is not None,
        embeds=submit.embed,
        scored=submit.scored_tokens,
    )
    sequence.set_credit(submit.credit_limit)
    sequence.run_alone(submit.apart_tokens)
    return sequence
