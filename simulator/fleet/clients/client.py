"""Requests of simulated clients, their outcomes, and the expected output of a request.

The output is the engine's function of seed and position. A request's seed is unique and also encodes the
length of its output. So the simulated engine can derive where to end it, and no part of the fleet in between
has to carry that.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from services.core.records import Priority
from services.worker.engine.execute.null_executor import STRIDE
from services.worker.engine.sequence import sequence_key
from services.worker.engine_protocol import Submit
from simulator.engine.poison import Poison
from simulator.fleet.spec import VOCABULARY


@dataclass(frozen=True, slots=True)
class SimRequest:
    """One request of the load."""

    tenant: str
    prompt_tokens: int
    # The model's output length without a limit.
    output_tokens: int
    # Time since the start of the load.
    arrival_s: float = 0.0
    priority: Priority = Priority.STANDARD
    # The client's limit; None: just as many.
    max_output_tokens: int | None = None
    # Requests with the same id have the same leading tokens.
    prefix_id: int = 0
    # How many.
    prefix_tokens: int = 0
    # Names of the prompt's leading blocks, as in recorded traces, instead of a prefix id. A name has the same
    # tokens in any place.
    blocks: tuple[int, ...] = ()
    # Tokens of each.
    block_tokens: int = 0
    # Time after the arrival; None: no deadline.
    deadline_s: float | None = None
    # The client leaves so long after its arrival.
    cancel_after_s: float | None = None
    # How fast it reads; None: as it comes.
    read_tokens_per_s: float | None = None
    # An idempotency key, with which it retries when its gateway is lost.
    key: str = ""
    # How often it sends again what was refused with a delay, with the number of earlier attempts.
    retries: int = 0
    # The session whose requests stay on one version of a split; "": the API key's.
    session: str = ""
    # Its prompt is that of this poison alone, and ends the engine.
    poison: Poison | None = None


@dataclass(slots=True)
class RequestRecord:
    """What a client saw of one request. Times in seconds of the simulation; 0.0 for what did not happen."""

    number: int
    request: SimRequest
    sent_s: float
    gateway: str = ""
    accepted_s: float = 0.0
    first_token_s: float = 0.0
    last_token_s: float = 0.0
    ended_s: float = 0.0
    # "finished", or the reason of the error that ended it.
    outcome: str = ""
    # What came.
    output_tokens: int = 0
    cached_tokens: int = 0
    resumes: int = 0
    # How often it was sent.
    attempts: int = 0
    # How often again after a refusal.
    refusals: int = 0
    # Its output limit was reduced.
    degraded: bool = False
    queue_s: float = 0.0
    max_gap_s: float = 0.0
    # Gaps between two arrivals of tokens.
    gap_s: list[float] = field(default_factory=list)
    # How many tokens came with the later one: the inter-token latency is gap / tokens.
    gap_tokens: list[int] = field(default_factory=list)

    @property
    def finished(self) -> bool:
        return self.outcome == "finished"

    @property
    def ttft_s(self) -> float | None:
        """From sending to the first token; None without one."""
        return self.first_token_s - self.sent_s if self.first_token_s else None


EOS_ID: Final = 2
_LENGTH_BITS: Final = 20
_LONGEST: Final = 1 << 17
# The way of every output through the vocabulary, by a stride that is coprime to its size.
_WAY: Final = [position * STRIDE % VOCABULARY for position in range(VOCABULARY)]
_INDEX: Final = {token: index for index, token in enumerate(_WAY)}
_TOKENS: Final = [token + (token == EOS_ID) for token in _WAY] * (_LONGEST // VOCABULARY + 2)


def request_seed(number: int, output_tokens: int) -> int:
    """Return the sampling seed of a client's request."""
    return number << _LENGTH_BITS | output_tokens


def request_number(seed: int) -> int:
    """Return the number of the request with a sampling seed."""
    return seed >> _LENGTH_BITS


def output_length(command: Submit) -> int:
    """Return the model's output length without a limit, for the simulated engine."""
    return said_tokens(command.sampling.seed)


def said_tokens(seed: int) -> int:
    """Return the model's output length without a limit under a client's sampling seed."""
    return seed & ((1 << _LENGTH_BITS) - 1)


class Due:
    """The output of one seed. ``length`` is how many tokens come in all."""

    __slots__ = ("_cut_off", "_first", "length")

    def __init__(self, seed: int, *, output_tokens: int, allowed_tokens: int) -> None:
        self._first = _INDEX[sequence_key(seed, 0) % VOCABULARY]
        self._cut_off = output_tokens > allowed_tokens
        self.length = min(output_tokens, allowed_tokens)

    def tokens(self, offset: int, count: int) -> list[int]:
        """Return those from an offset on; the last of all is EOS, unless the output is cut off."""
        start = self._first + offset
        found = _TOKENS[start : start + count]
        if offset + count == self.length and not self._cut_off:
            found[-1] = EOS_ID
        return found
