"""Indexes of the fleet state: the objectives by model and class, and the budgets of each tenant."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Final, Generic, TypeVar

from services.core.records import Budget, Objective, Priority
from services.runtime.fleet_state.informer import RecordView, Versioned

R = TypeVar("R")
Built = TypeVar("Built")
_NONE: Final[tuple[Budget, ...]] = ()


class _Index(Generic[R, Built]):
    """What ``build`` makes of the records of one view, built again when the view changed."""

    def __init__(self, records: RecordView[R], build: Callable[[Iterable[R]], Built]) -> None:
        self._records = records
        self._build = build
        self._indexed: Mapping[str, Versioned[R]] | None = None
        self._built = build(())

    @property
    def built(self) -> Built:
        view = self._records.view
        if view is not self._indexed:
            self._built = self._build(view[key].record for key in sorted(view))
            self._indexed = view
        return self._built


class ObjectiveIndex:
    def __init__(self, objectives: RecordView[Objective]) -> None:
        self._index = _Index(objectives, lambda found: {(one.model, one.priority): one for one in found})

    @property
    def by_class(self) -> Mapping[tuple[str, Priority], Objective]:
        """The objective of each deployment and class that has one."""
        return self._index.built

    def ttft_target_s(self, model: str, priority: Priority) -> float | None:
        """Return the time to first token that shapes serving, None where an objective only observes."""
        found = self.by_class.get((model, priority))
        return (found.ttft.seconds or None) if found is not None and found.shapes_serving else None


class TenantBudgets:
    def __init__(self, budgets: RecordView[Budget]) -> None:
        self._index = _Index(budgets, _by_tenant)

    def of(self, tenant_id: str) -> tuple[Budget, ...]:
        """Return the budgets of a tenant, of all scopes."""
        return self._index.built.get(tenant_id, _NONE)


def _by_tenant(budgets: Iterable[Budget]) -> dict[str, tuple[Budget, ...]]:
    found: dict[str, list[Budget]] = {}
    for budget in budgets:
        found.setdefault(budget.tenant, []).append(budget)
    return {tenant: tuple(each) for tenant, each in found.items()}
