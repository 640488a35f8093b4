"""The state of one sequence, how a command becomes one, and why it may not. A refusal concerns it alone.

The planner and the engine of one process own the state; executors only read it.

Draws are keyed: each is a function of (seed, choice, position) and of nothing else. SplitMix64 (Steele, Lea
and Flood, OOPSLA'14) is used as a counter: its state is never advanced, it is computed from the position, so
a stream that continues on another worker draws the same numbers.
"""

from __future__ import annotations

from collections.abc import MutableSequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Final

from services.core.generation import OutputLimits, Sampling
from services.core.prefix import PREFIX_BLOCK_TOKENS
from services.worker.engine_protocol import Submit

MAX_LOGPROBS: Final = 128
MAX_TEMPERATURE: Final = 100.0
MAX_PENALTY: Final = 100.0
MAX_BIAS: Final = 1e6  # far above any logit, and still finite in float32
MAX_WAITING: Final = 1 << 16
MASK64: Final = (1 << 64) - 1
GOLDEN: Final = 0x9E3779B97F4A7C15
MULTIPLIER_1: Final = 0xBF58476D1CE4E5B9
MULTIPLIER_2: Final = 0x94D049BB133111EB
UNIFORM_BITS: Final = 53  # what a double holds


def mix64(word: int) -> int:
    """Return the SplitMix64 finaliser of a 64-bit word; it is a bijection."""
    word = (word ^ (word >> 30)) * MULTIPLIER_1 & MASK64
    word = (word ^ (word >> 27)) * MULTIPLIER_2 & MASK64
    return word ^ (word >> 31)


def sequence_key(seed: int, choice: int) -> int:
    """Return the 64-bit key of one choice of one request; any two pairs differ but by chance of 2**-64."""
    return mix64((mix64((seed + GOLDEN) & MASK64) + choice * GOLDEN) & MASK64)


def uniform(key: int, position: int) -> float:
    """Return the draw in [0, 1) at an output position. The sampler has the same function over a batch."""
    return float(mix64((key + (position + 1) * GOLDEN) & MASK64) >> (64 - UNIFORM_BITS)) * 2.0**-UNIFORM_BITS


class Status(Enum):
    """Where a sequence is. PREFILLING to MASKING have KV and a seat, STALLED and RETURNING KV alone."""

    WAITING = auto()  # new, no KV
    SUSPECT = auto()  # no KV, a suspect that waits for its turn to run in steps of its own
    PREEMPTED = auto()  # lost its KV, goes before new ones
    OVER_BUDGET = auto()  # no KV: its tenant holds all that it may
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
    adapter: int = 0  # the adapter that computes it; 0: the base alone
    tenant: str = ""  # the tenant whose KV budget counts its blocks
    kv_share: float = 0.0  # share of the pool that the tenant may hold; 0: no budget
    probe: bool = False  # the version's probe scores its tokens

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
        adapter=submit.adapter,
        tenant=submit.tenant,
        kv_share=submit.kv_share,
        probe=submit.probe,
    )
    sequence.set_credit(submit.credit_limit)
    sequence.run_alone(submit.apart_tokens)
    return sequence


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """``max_model_len``: tokens of prompt and output together; it never exceeds what the KV pool holds."""

    vocab_size: int
    max_model_len: int


def refusal(submit: Submit, limits: ModelLimits) -> str | None:
    """Return why the sequence cannot run on this model, or None. Sizes come first: nothing is built yet."""
    return size_refusal(submit, limits) or _id_refusal(submit, limits) or _range_refusal(submit)


def size_refusal(submit: Submit, limits: ModelLimits) -> str | None:
    """Return why the sequence is too long, or too short, or None."""
    prompt, produced, most = len(submit.prompt.ids), len(submit.produced_ids), submit.limits.max_tokens
    if prompt == 0:
        return "the prompt is empty"
    scores = submit.sampling.prompt_logprobs is not None
    if most < (0 if scores or submit.embed else 1):
        return f"max_tokens is {most}"
    if not 0 <= submit.scored_tokens <= (prompt if scores else 0):
        return f"{submit.scored_tokens} scored tokens of {prompt}"
    if scores and produced and submit.scored_tokens < prompt:
        return "it has output before its prompt was scored"
    # A gateway of the release before states one token.
    if submit.embed and (most > 1 or produced):
        return "a sequence that embeds has no output"
    if prompt + most > limits.max_model_len:
        return f"{prompt} prompt tokens and max_tokens {most} exceed {limits.max_model_len}"
    if produced > most:
        return f"{produced} produced tokens exceed max_tokens {most}"
    return None


def is_complete(submit: Submit) -> bool:
    """Whether an earlier run made all that is requested."""
    scores = submit.sampling.prompt_logprobs is not None
    if submit.embed:
        return False
    if scores and submit.scored_tokens < len(submit.prompt.ids):
        return False
    return len(submit.produced_ids) >= submit.limits.max_tokens


def _id_refusal(submit: Submit, limits: ModelLimits) -> str | None:
    for name, ids in (
        ("prompt_ids", submit.prompt.ids),
        ("produced_ids", submit.produced_ids),
        ("stop_token_ids", submit.limits.stop_token_ids),
        ("logit_bias", [token for token, _ in submit.sampling.logit_bias]),
    ):
        if ids and not (min(ids) >= 0 and max(ids) < limits.vocab_size):
            return f"{name} holds a token outside the vocabulary of {limits.vocab_size}"
    return None


def _range_refusal(submit: Submit) -> str | None:
    sampling, limits = submit.sampling, submit.limits
    # Written so that NaN fails every one of them.
    checks = (
        ("temperature", 0.0 <= sampling.temperature <= MAX_TEMPERATURE),
        ("top_p", 0.0 < sampling.top_p <= 1.0),
        ("top_k", sampling.top_k >= 0),
        ("min_p", 0.0 <= sampling.min_p <= 1.0),
        ("presence_penalty", abs(sampling.presence_penalty) <= MAX_PENALTY),
        ("frequency_penalty", abs(sampling.frequency_penalty) <= MAX_PENALTY),
        ("repetition_penalty", 0.0 < sampling.repetition_penalty <= MAX_PENALTY),
        ("logprobs", sampling.logprobs is None or 0 <= sampling.logprobs <= MAX_LOGPROBS),
        ("prompt_logprobs", 0 <= (sampling.prompt_logprobs or 0) <= MAX_LOGPROBS),
        ("min_tokens", 0 <= limits.min_tokens <= limits.max_tokens),
        ("choice", submit.choice >= 0),
        ("logit_bias", all(abs(bias) <= MAX_BIAS for _, bias in sampling.logit_bias)),
    )
    return next((f"{name} is out of range" for name, holds in checks if not holds), None)


class Intake:
    """How a command becomes a sequence, or is refused. Another intake may keep less of a prompt."""

    def refusal(self, command: Submit, model: ModelLimits) -> str | None:
        """Return why the sequence cannot run, or None."""
        return refusal(command, model)

    def sequence(self, command: Submit, *, arrival: int, eos_ids: frozenset[int]) -> SequenceState:
        """Return the state of a sequence that is not refused."""
        return sequence_of(command, arrival=arrival, eos_ids=eos_ids)
