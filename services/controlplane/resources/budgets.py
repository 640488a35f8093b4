"""Budgets: the operations of operators, and what was spent of each."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

import structlog

from services.controlplane.resources.accounts import tenant_exists
from services.controlplane.resources.resources import Resources, Stored
from services.core.errors import FailedPrecondition, InvalidInput, StoreUnavailable
from services.core.limits import LimitKind, Price
from services.core.records import (
    BUDGET_ALERTS,
    BUDGETS,
    DEPLOYMENTS,
    EACH_USER,
    KEYS,
    ApiKey,
    Budget,
    Deployment,
)
from services.ports.clock import Clock
from services.ports.limiter import Spent
from services.ports.store import Delete, Store
from services.ports.usage import Spending
from services.runtime.idempotent_writes import WriteSet

log = structlog.get_logger()
_NAMED: Final = 8  # deployments without a price that a message names


@dataclass(frozen=True, slots=True)
class BudgetView:
    """A budget and what was spent of it, None: unknown.

    ``message``: why amounts are unknown, or what the budget does not cover.
    """

    stored: Stored[Budget]
    spent_micros: int | None = None
    reserved_micros: int | None = None
    day_spent_micros: int | None = None
    message: str = ""


class Budgets:
    """Stateless. A budget applies at each gateway once it receives the change, to requests after that."""

    def __init__(self, store: Store, clock: Clock, spending: Spending) -> None:
        self._store = store
        self._spending = spending
        self._budgets = Resources(store, clock, BUDGETS, Budget)
        self._keys = Resources(store, clock, KEYS, ApiKey)
        self._deployments = Resources(store, clock, DEPLOYMENTS, Deployment)

    async def create(self, budget: Budget, *, request_id: str = "") -> BudgetView:
        """Store a budget. Raises InvalidInput, FailedPrecondition for a tenant or key that does not exist."""
        _require_consistent(budget)
        request = self._budgets.request("create", budget, request_id)
        stored = await self._budgets.replayed(request)
        if stored is None:
            together = await tenant_exists(self._store, budget.tenant, user=budget.meta.name)
            await self._require_key(budget)
            stored = await self._budgets.create(budget, request, together=together)
            log.info("budget.created", budget=budget.meta.name, tenant=budget.tenant)
        return (await self.views([stored]))[0]

    async def get(self, name: str) -> BudgetView:
        return (await self.views([await self._budgets.get(name)]))[0]

    async def page(self, *, size: int = 0, token: str = "") -> tuple[tuple[BudgetView, ...], str]:
        """Return a page sorted by name, and the next page's token."""
        page, following = await self._budgets.page(size=size, token=token)
        return await self.views(page), following

    async def update(self, budget: Budget, *, etag: str = "", request_id: str = "") -> BudgetView:
        """Replace the limits and labels of a budget. Raises InvalidInput for another scope."""
        _require_consistent(budget)

        def changed(old: Budget) -> Budget:
            if replace(budget, tenant=old.tenant, key=old.key, user=old.user) != budget:
                raise InvalidInput(
                    "tenant, key and user of a budget never change: create another budget",
                    field="budget.tenant",
                )
            return budget

        request = self._budgets.request("update", budget, request_id, etag=etag)
        stored = await self._budgets.update(budget.meta.name, changed, request, etag=etag)
        log.info("budget.updated", budget=budget.meta.name)
        return (await self.views([stored]))[0]

    async def delete(self, name: str, *, etag: str = "", request_id: str = "") -> None:
        """Remove a budget. What was spent stays counted until the period ends, for a budget of that scope."""
        request = self._budgets.request("delete", name, request_id, etag=etag)
        alert = WriteSet(operations=(Delete(BUDGET_ALERTS + name),))
        await self._budgets.delete(name, request, etag=etag, together=alert)
        log.info("budget.deleted", budget=name)

    async def all(self) -> tuple[BudgetView, ...]:
        return await self.views(await self._budgets.all())

    async def views(self, budgets: Sequence[Stored[Budget]]) -> tuple[BudgetView, ...]:
        """Return the budgets with what was spent, in their order."""
        if not budgets:
            return ()
        deployments, keys = await asyncio.gather(self._deployments.all(), self._keys.all())
        by_name = {one.record.meta.name: one.record for one in keys}
        unpriced = [one.record.meta.name for one in deployments if one.record.price == Price()]
        return tuple(
            await asyncio.gather(
                *(self._view(one, _remarks(one.record, by_name, unpriced)) for one in budgets)
            )
        )

    async def _view(self, stored: Stored[Budget], remarks: list[str]) -> BudgetView:
        budget, found = stored.record, BudgetView(stored)
        if budget.user == EACH_USER:
            remarks.insert(0, "each end user has this budget: amounts are not summed")
        else:
            try:
                found = _with(found, await self._spending.spent(budget.tenant, budget.limits()))
            except StoreUnavailable:
                remarks.insert(0, "store unavailable: what was spent is unknown")
        return replace(found, message="; ".join(remarks)[:1024])

    async def _require_key(self, budget: Budget) -> None:
        entry = await self._store.get(KEYS + budget.key) if budget.key else None
        if budget.key and (entry is None or self._keys.stored(entry).record.tenant != budget.tenant):
            raise FailedPrecondition(
                f"tenant {budget.tenant} has no key {budget.key}", tenant=budget.tenant, key=budget.key
            )


def _require_consistent(budget: Budget) -> None:
    if budget.key and budget.user:
        raise InvalidInput("a budget is of a key or of an end user, not of both", field="budget.user")
    if not (budget.limit_micros or budget.day_limit_micros):
        raise InvalidInput("a budget needs a limit per month or per day", field="budget.limit_micros")
    if 0 < budget.limit_micros < budget.day_limit_micros:
        raise InvalidInput("the limit per day is above the limit per month", field="budget.day_limit_micros")


def _remarks(budget: Budget, keys: dict[str, ApiKey], unpriced: Iterable[str]) -> list[str]:
    """Return what the budget does not cover."""
    found: list[str] = []
    key = keys.get(budget.key)
    if budget.key and (key is None or key.tenant != budget.tenant):
        found.append(f"the key {budget.key} does not exist any more")
    free = [name for name in unpriced if key is None or not key.models or name in key.models]
    if free:
        names = ", ".join(free[:_NAMED]) + (", ..." if len(free) > _NAMED else "")
        found.append(f"no price, so requests cost nothing: {names}")
    return found


def _with(view: BudgetView, states: Iterable[Spent]) -> BudgetView:
    for state in states:
        if state.limit.kind is LimitKind.MONTH_MICROS:
            view = replace(view, spent_micros=state.settled_micros)
        else:
            view = replace(view, day_spent_micros=state.settled_micros)
        view = replace(view, reserved_micros=max(view.reserved_micros or 0, state.reserved_micros))
    return view
