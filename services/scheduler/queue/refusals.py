"""Errors of placements that end without a grant: what is missing and when to retry."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from services.core.errors import (
    FairwayError,
    KvBudgetExceeded,
    NoWorkerAvailable,
    PromptTooLong,
    QueueFull,
    QueueTimeout,
    ShareExceeded,
    retry_in,
)
from services.core.generation import PlaceSpec
from services.scheduler.policy.placement.candidate import (
    Candidate,
    Demand,
    PlaceQuery,
    has_kv_room,
    has_sequence_slot,
)
from services.scheduler.policy.placement.choose import Chosen, NoWorker

_LOADING_RETRY_S: Final = 2.0
_TEXTS: Final = {
    "ready": "not ready yet",
    "heard": "silent",
    "not_draining": "draining",
    "not_ejected": "ejected as too slow",
    "not_excluded": "excluded by the request",
    "within_kv_budget": "at the KV budget of the tenant",
    "in_node_group": "of another tenant or tier",
    "fits_when_empty": "too small",
}


def queue_full(what: str, *, model: str, retry_after_s: float) -> QueueFull:
    return QueueFull(f"{what}; {retry_in(retry_after_s)}", retry_after_s=retry_after_s, model=model)


def share_full(what: str, most: int, *, model: str, retry_after_s: float) -> ShareExceeded:
    return ShareExceeded(
        f"{what} of this tenant are queued already, the limit is {most}; wait until some have started, "
        f"or {retry_in(retry_after_s)}",
        retry_after_s=retry_after_s,
        model=model,
        limit=most,
    )


def timed_out(spec: PlaceSpec, found: Chosen | NoWorker, full: str, *, retry_after_s: float) -> FairwayError:
    """Return the error of a placement whose time in the queue ended. ``found`` is the result of a last
    attempt; ``full`` states what it waited for where workers serve."""
    waited = f"no worker accepted a request for {spec.model} within {spec.queue_ttl_s:g} s: "
    if isinstance(found, NoWorker) and not found.waits_for_room:
        retry_after_s = max(retry_after_s, _LOADING_RETRY_S)
        text = f"{waited}{_missing(found)}; {retry_in(retry_after_s)}"
        return NoWorkerAvailable(text, retry_after_s=retry_after_s, model=spec.model)
    text = f"{waited}{full}; {retry_in(retry_after_s)}"
    return QueueTimeout(text, retry_after_s=retry_after_s, model=spec.model)


def beyond_kv_budget(spec: PlaceSpec, demand: Demand, budget_tokens: int) -> KvBudgetExceeded:
    """Return the error of a request that alone needs more KV than its tenant may hold on any worker."""
    return KvBudgetExceeded(
        f"the request needs KV for {demand.reserved_tokens} tokens, and the tenant's share of a worker of "
        f"{spec.model} is {budget_tokens}: shorten the prompt, or raise the tenant's --kv-share",
        model=spec.model,
        reserved_tokens=demand.reserved_tokens,
        limit=budget_tokens,
    )


def full_of(query: PlaceQuery, candidates: Iterable[Candidate]) -> str:
    """Return what the serving workers lack for the query: KV memory, sequence slots, or their turn only."""
    serving = [found for found in candidates if found.serving]
    kv = sum(not has_kv_room(query, found) for found in serving)
    slots = sum(not has_sequence_slot(query, found) for found in serving)
    found = (("the KV memory", kv), ("every sequence slot", slots))
    full = " and ".join(f"{what} of {count}" for what, count in found if count)
    return f"of {len(serving)} workers, {full} is in use" if full else "others were first"


def too_long(spec: PlaceSpec, candidates: Iterable[Candidate]) -> PromptTooLong:
    """Return the error of a request that no serving worker accepts even when empty."""
    limit = max(
        (
            min(found.max_model_len or found.kv_tokens_total, found.kv_tokens_total)
            for found in candidates
            if found.serving and found.worker_id not in spec.excluded_workers
        ),
        default=0,
    )
    return PromptTooLong(
        f"{spec.prompt_tokens} prompt tokens and at most {spec.max_output_tokens} output tokens exceed the "
        f"{limit} tokens of a worker of {spec.model}",
        field="prompt",
        prompt_tokens=spec.prompt_tokens,
        max_output_tokens=spec.max_output_tokens,
        limit=limit,
    )


def _missing(found: NoWorker) -> str:
    """Return what is missing, from the filters that rejected the workers."""
    counts = found.rejections.counts
    if not counts:
        return "none has the version loaded"
    return ", ".join(f"{count} {_TEXTS.get(reason, reason)}" for reason, count in counts)
