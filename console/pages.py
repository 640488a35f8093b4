"""The pages: what each reads from the API, and the values of its template."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import urlencode

from google.protobuf.timestamp_pb2 import Timestamp

from console.calls import Api, ReadAnswer, RecentAnswers, may_call
from console.sign_ins import SignIn
from fairway.v1 import controlplane_pb2 as cp
from services.core.errors import FairwayError, NotFound, PermissionDenied

PAGE_SIZE: Final = 100
MAX_LISTED: Final = 5_000
USAGE_DAYS: Final = 30
MAX_BARS: Final = 2000
_DAY_S: Final = 86_400


@dataclass(frozen=True, slots=True)
class Visit:
    """One request of a person who is signed in."""

    sign_in: SignIn
    answers: RecentAnswers
    api: Api
    unix_s: float
    path: Mapping[str, str] = field(default_factory=dict)
    query: Mapping[str, str] = field(default_factory=dict)

    def may(self, method: str) -> bool:
        return may_call(self.sign_in.role, method)

    async def read(self, method: str, **fields: Any) -> ReadAnswer:
        """Return the answer, or an earlier one with its age. Raises Unauthenticated."""
        return await self.answers.read(self.sign_in, method, **fields)

    async def permitted(self, method: str, **fields: Any) -> ReadAnswer | None:
        """Return the answer; None where the role may not call the method."""
        return await self.read(method, **fields) if self.may(method) else None

    async def every(self, method: str, name: str) -> ReadAnswer:
        """Return the items of all pages in the field ``name`` of the last, up to ``MAX_LISTED``."""
        items: list[Any] = []
        found = await self.read(method, page_size=1000)
        while found.message is not None:
            items += getattr(found.message, name)
            if not found.message.next_page_token or len(items) >= MAX_LISTED:
                break
            token = found.message.next_page_token
            found = await self.read(method, page_size=1000, page_token=token)
        if found.message is None:
            return found
        return ReadAnswer(items, found.age_s, found.problem, bool(found.message.next_page_token))

    def pages(self) -> dict[str, Any]:
        return {"page_size": PAGE_SIZE, "page_token": self.query.get("page", "")[:256]}

    def following(self, answer: ReadAnswer) -> str:
        """Return the query of the page after this one; empty after the last."""
        if answer.message is None or not answer.message.next_page_token:
            return ""
        return "?" + urlencode({**self.query, "page": answer.message.next_page_token})


@dataclass(frozen=True, slots=True)
class Page:
    """A template and its values. ``live_s``: the interval at which an open page replaces its block."""

    template: str
    title: str
    values: Mapping[str, Any] = field(default_factory=dict)
    live_s: int = 0
    status: int = 200


@dataclass(frozen=True, slots=True)
class PageRule:
    """Where a page is and what it reads first: without access to that method it does not exist."""

    path: str
    method: str
    make: Callable[[Visit], Awaitable[Page]]
    label: str = ""  # the text in the navigation; empty: none


def found(answer: ReadAnswer) -> Any:
    """Return the message. Raises the problem for what does not exist or is not the caller's."""
    if answer.message is None and isinstance(answer.problem, NotFound | PermissionDenied):
        raise answer.problem
    return answer.message


async def fleet(visit: Visit) -> Page:
    nodes, deployments, queues, workers = await asyncio.gather(
        visit.read("ListNodes", **visit.pages()),
        visit.read("ListDeployments", page_size=PAGE_SIZE),
        visit.read("ListQueues", page_size=PAGE_SIZE),
        visit.read("ListWorkers", page_size=1000),
    )
    health = {
        (worker.worker_id, pool.version_digest): pool
        for worker in (workers.message.workers if workers.message else ())
        for pool in worker.pools
    }
    pools = [queue.pool for queue in (queues.message.queues if queues.message else ())]
    values = {
        "nodes": nodes,
        "deployments": deployments,
        "queues": queues,
        "workers": workers,
        "health": health,
        "queued": sum(pool.queued for pool in pools),
        "running": sum(pool.running for pool in pools),
        "kv_total": sum(pool.kv_tokens_total for pool in pools),
        "kv_free": sum(pool.kv_tokens_free for pool in pools),
        "lost": cp.NODE_STATE_LOST,
        "next": visit.following(nodes),
    }
    return Page("fleet.html", "Fleet", values, live_s=3)


async def requests(visit: Visit) -> Page:
    kind = visit.query.get("kind", "slow")
    name = visit.query.get("id", "").strip()[:128]
    answer = await visit.read(
        "ListFinishedRequests",
        limit=PAGE_SIZE,
        tenant=visit.query.get("tenant", "").strip()[:64],
        model=visit.query.get("model", "").strip()[:128],
        request_name=name,
        failed=kind == "failed",
        slow=kind == "slow",
    )
    return Page("requests.html", "Requests", {"answer": answer, "kind": kind, "query": visit.query}, live_s=5)


async def request(visit: Visit) -> Page:
    name = visit.path["name"]
    may_see_steps = visit.may("GetTimeline")
    finished, explained, timeline = await asyncio.gather(
        visit.read("ListFinishedRequests", request_name=name, limit=1),
        visit.read("ExplainPlacement", request_id=name[:64]),
        visit.read("GetTimeline", request_name=name) if may_see_steps else _nothing(),
    )
    ended = list(finished.message.requests) if finished.message is not None else []
    if not ended and timeline and timeline.message and timeline.message.HasField("finished"):
        ended.append(timeline.message.finished)  # neither slow nor failed: only the samples have it
    values = {
        "name": name,
        "finished": finished,
        "ended": ended[0] if ended else None,
        "explained": explained,
        "is_unknown": not ended and not finished.problem,
        "timeline": timeline,
        "lanes": lanes_of(timeline.message) if timeline and timeline.message else (),
    }
    return Page("request.html", f"Request {name}", values)


@dataclass(frozen=True, slots=True)
class Lane:
    """The engine steps of a request on one worker. ``bars``: start and width in thousandths, and the step."""

    worker_id: str
    first_us: int
    took_s: float
    bars: tuple[tuple[float, float, Any], ...]
    slowest: tuple[Any, ...]
    others: tuple[Any, ...]


def lanes_of(timeline: Any) -> tuple[Lane, ...]:
    """Return the lanes of a timeline, in the order of its workers. Steps beyond ``MAX_BARS`` are left out."""
    found = []
    for host in timeline.workers:
        steps = list(host.steps[:MAX_BARS])
        if not steps:
            continue
        first_us = min(step.start_unix_us for step in steps)
        total_us = max(1, max(step.start_unix_us + step.took_us for step in steps) - first_us)
        scale = 1000 / total_us
        bars = tuple(
            ((step.start_unix_us - first_us) * scale, max(1.0, step.took_us * scale), step) for step in steps
        )
        slowest = sorted(steps, key=lambda step: -step.took_us)[:10]
        others = [each for each in host.sequences if each.request_id != timeline.request_id][:50]
        found.append(Lane(host.worker_id, first_us, total_us / 1e6, bars, tuple(slowest), tuple(others)))
    return tuple(found)


async def diagnosis(visit: Visit) -> Page:
    """Run on demand: a diagnosis reads the samples of an hour."""
    query = visit.query
    values: dict[str, Any] = {"answer": None, "query": query}
    if query.get("metric"):
        asked: dict[str, Any] = {"model": query.get("model", "").strip()[:128], "metric": query["metric"][:8]}
        asked["baseline"] = query.get("baseline", "").strip()[:48]
        asked["quantile"] = _float(query.get("quantile", ""))
        if minutes := _float(query.get("minutes", "")):
            asked["start_time"] = Timestamp(seconds=int(visit.unix_s - minutes * 60))
        values["answer"] = await visit.read("DiagnoseLatency", **asked)
    return Page("diagnosis.html", "Diagnosis", values)


def _float(text: str) -> float:
    """Return a number from 0 to a million; 0 for anything else."""
    try:
        found = float(text or 0)
    except ValueError:
        return 0.0
    return found if 0 < found <= 1e6 else 0.0


async def rollouts(visit: Visit) -> Page:
    answer = await visit.read("ListRollouts", **visit.pages())
    return Page("rollouts.html", "Rollouts", {"answer": answer, "next": visit.following(answer)}, live_s=5)


async def rollout(visit: Visit) -> Page:
    answer = await visit.read("GetRollout", name=visit.path["name"])
    one = found(answer)
    name = visit.path["name"]
    values = {"answer": answer, "name": name, "rollout": one.rollout if one else None, "buttons": ()}
    if one and visit.may("PromoteRollout"):
        values["buttons"] = buttons_of(one.rollout)
    return Page("rollout.html", f"Rollout {name}", values, live_s=3)


def buttons_of(one: cp.Rollout) -> tuple[str, ...]:
    """Return the changes that the phase of a rollout permits."""
    running = one.phase in (cp.ROLLOUT_PHASE_LOADING, cp.ROLLOUT_PHASE_RUNNING, cp.ROLLOUT_PHASE_SOAKING)
    if running:
        return ("promote", "resume" if one.paused else "pause", "abort", "revert")
    return ("revert",) if one.phase in (cp.ROLLOUT_PHASE_FINISHING, cp.ROLLOUT_PHASE_COMPLETED) else ()


async def objectives(visit: Visit) -> Page:
    answer, slis = await asyncio.gather(
        visit.read("ListObjectives", **visit.pages()), visit.read("ListSlis", page_size=PAGE_SIZE)
    )
    values = {
        "answer": answer,
        "slis": slis,
        "next": visit.following(answer),
        "paging": (cp.BURN_ALERT_FAST, cp.BURN_ALERT_ACUTE),
        "slow": cp.BURN_ALERT_SLOW,
    }
    return Page("objectives.html", "Objectives", values, live_s=15)


async def tenants(visit: Visit) -> Page:
    answer, budgets = await asyncio.gather(
        visit.read("ListTenants", **visit.pages()), visit.every("ListBudgets", "budgets")
    )
    of_tenant: defaultdict[str, list[cp.Budget]] = defaultdict(list)
    for budget in budgets.message or ():
        of_tenant[budget.tenant].append(budget)
    values = {"answer": answer, "budgets": budgets, "of_tenant": of_tenant, "next": visit.following(answer)}
    return Page("tenants.html", "Tenants", values)


async def tenant(visit: Visit) -> Page:
    name = visit.path["name"]
    own = visit.sign_in.caller.tenant
    if own and own != name:
        raise NotFound(f"there is no tenant {name}")
    start_s = int(visit.unix_s) // _DAY_S * _DAY_S - (USAGE_DAYS - 1) * _DAY_S
    asked = {"tenant": name, "start_time": Timestamp(seconds=start_s), "page_size": 1000}
    one, keys, budgets, by_day, by_model = await asyncio.gather(
        visit.permitted("GetTenant", name=name),
        visit.every("ListKeys", "keys") if visit.may("ListKeys") else _nothing(),
        visit.every("ListBudgets", "budgets"),
        visit.read("ListUsage", granularity=cp.USAGE_GRANULARITY_DAY, **asked),
        visit.read("ListUsage", group_by=[cp.USAGE_DIMENSION_MODEL], **asked),
    )
    values = {
        "name": name,
        "tenant": one,
        "keys": keys,
        "of_tenant": [key for key in (keys.message if keys else None) or () if key.tenant == name],
        "budgets": budgets,
        "its_budgets": [budget for budget in budgets.message or () if budget.tenant == name],
        "by_day": by_day,
        "by_model": by_model,
        "days": USAGE_DAYS,
        "may_create": visit.may("CreateKey"),
        "first_seconds": start_s,
    }
    if one is not None:
        found(one)
    return Page("tenant.html", f"Tenant {name}", values)


async def events(visit: Visit) -> Page:
    kinds = {each.removeprefix("RESOURCE_KIND_").lower(): cp.ResourceKind.Value(each) for each in _KINDS}
    kind = visit.query.get("kind", "")
    answer = await visit.read(
        "ListEvents",
        kinds=[kinds[kind]] if kind in kinds else [],
        resource=visit.query.get("resource", "").strip()[:128],
        **visit.pages(),
    )
    values = {
        "answer": answer,
        "kinds": kinds,
        "kind": kind,
        "resource": visit.query.get("resource", ""),
        "warning": cp.EVENT_SEVERITY_WARNING,
        "next": visit.following(answer),
    }
    return Page("events.html", "Events", values, live_s=0 if visit.query.get("page") else 5)


async def playground(visit: Visit) -> Page:
    models: ReadAnswer
    if not visit.sign_in.caller.tenant:
        models = ReadAnswer(problem=PermissionDenied("a role without a tenant runs no models"))
    else:
        try:
            models = ReadAnswer(await visit.api.models(visit.sign_in.credential))
        except FairwayError as error:
            models = ReadAnswer(problem=error)
    return Page("playground.html", "Playground", {"models": models, "wanted": visit.query.get("model", "")})


async def _nothing() -> None:
    return None


_KINDS: Final = tuple(value.name for value in cp.ResourceKind.DESCRIPTOR.values if value.number)
PAGES: Final = (
    PageRule("/", "ListNodes", fleet, "Fleet"),
    PageRule("/requests", "ListFinishedRequests", requests, "Requests"),
    PageRule("/requests/{name}", "ListFinishedRequests", request),
    PageRule("/rollouts", "ListRollouts", rollouts, "Rollouts"),
    PageRule("/rollouts/{name}", "GetRollout", rollout),
    PageRule("/objectives", "ListObjectives", objectives, "Objectives"),
    PageRule("/tenants", "ListTenants", tenants, "Tenants"),
    PageRule("/tenants/{name}", "ListUsage", tenant),
    PageRule("/events", "ListEvents", events, "Events"),
    PageRule("/diagnosis", "DiagnoseLatency", diagnosis, "Diagnosis"),
    PageRule("/playground", "GetCaller", playground, "Playground"),
)
