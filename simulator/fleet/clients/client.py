"""Requests of simulated clients, and their outcomes."""

from __future__ import annotations

from dataclasses import dataclass, field

from services.core.records import Priority


@dataclass(frozen=True, slots=True)
class SimRequest:
    """One request of the load.

    ``output_tokens`` is the model's output length without a limit, ``max_output_tokens`` the client's limit;
    None: just as many. The first ``prefix_tokens`` of the prompt are those of every request with the same
    ``prefix_id``. ``blocks`` name the leading blocks of ``block_tokens`` tokens of the prompt, as recorded
    traces do: blocks of one name have the same tokens, whatever their place; with them there is no
    ``prefix_id``. ``arrival_s`` counts from the start of the load, ``deadline_s`` from the arrival.
    ``cancel_after_s``: the client leaves so long after its arrival. ``read_tokens_per_s``: how fast it reads;
    None: as it comes. ``key``: an idempotency key, with which it retries when its gateway is lost.
    ``retries``: how often it sends again what was refused with a delay, with the number of earlier attempts.
    """

    tenant: str
    prompt_tokens: int
    output_tokens: int
    arrival_s: float = 0.0
    priority: Priority = Priority.STANDARD
    max_output_tokens: int | None = None
    prefix_id: int = 0
    prefix_tokens: int = 0
    blocks: tuple[int, ...] = ()
    block_tokens: int = 0
    deadline_s: float | None = None
    cancel_after_s: float | None = None
    read_tokens_per_s: float | None = None
    key: str = ""
    retries: int = 0


@dataclass(slots=True)
class Record:
    """What a client saw of one request. Times in seconds of the simulation; 0.0 for what did not happen.

    ``outcome`` is "finished" or the reason of the error that ended it. ``gap_s`` and ``gap_tokens`` are the
    gaps between two arrivals of tokens and how many tokens came with the later one: the inter-token latency,
    token by token, is gap / tokens. ``output_tokens`` counts what came; ``attempts`` how often it was sent,
    ``refusals`` how often again after a refusal. ``degraded``: its output limit was reduced.
    """

    number: int
    request: SimRequest
    sent_s: float
    gateway: str = ""
    accepted_s: float = 0.0
    first_token_s: float = 0.0
    last_token_s: float = 0.0
    ended_s: float = 0.0
    outcome: str = ""
    output_tokens: int = 0
    cached_tokens: int = 0
    resumes: int = 0
    attempts: int = 0
    refusals: int = 0
    degraded: bool = False
    queue_s: float = 0.0
    max_gap_s: float = 0.0
    gap_s: list[float] = field(default_factory=list)
    gap_tokens: list[int] = field(default_factory=list)

    @property
    def finished(self) -> bool:
        return self.outcome == "finished"

    @property
    def ttft_s(self) -> float | None:
        """From sending to the first token; None without one."""
        return self.first_token_s - self.sent_s if self.first_token_s else None
