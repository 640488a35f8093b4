"""The budgets of each tenant, from the fleet state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from services.core.records import Budget
from services.runtime.fleet_state.informer import RecordView, Versioned

_NONE: Final[tuple[Budget, ...]] = ()


class TenantBudgets:
    """An index of one view, built again when the view changed."""

    def __init__(self, budgets: RecordView[Budget]) -> None:
        self._budgets = budgets
        self._indexed: Mapping[str, Versioned[Budget]] | None = None
        self._by_tenant: dict[str, tuple[Budget, ...]] = {}

    def of(self, tenant_id: str) -> tuple[Budget, ...]:
        """Return the budgets of a tenant, of all scopes."""
        view = self._budgets.view
        if view is not self._indexed:
            found: dict[str, list[Budget]] = {}
            for key in sorted(view):
                found.setdefault(view[key].record.tenant, []).append(view[key].record)
            self._by_tenant = {tenant: tuple(budgets) for tenant, budgets in found.items()}
            self._indexed = view
        return self._by_tenant.get(tenant_id, _NONE)
