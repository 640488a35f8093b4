"""The objectives by model and class, from the fleet state."""

from __future__ import annotations

from collections.abc import Mapping

from services.core.records import Objective, Priority
from services.runtime.fleet_state.informer import RecordView, Versioned


class ObjectiveIndex:
    """An index of one view, built again when the view changed."""

    def __init__(self, objectives: RecordView[Objective]) -> None:
        self._objectives = objectives
        self._indexed: Mapping[str, Versioned[Objective]] | None = None
        self._by_class: dict[tuple[str, Priority], Objective] = {}

    @property
    def by_class(self) -> Mapping[tuple[str, Priority], Objective]:
        """The objective of each deployment and class that has one."""
        view = self._objectives.view
        if view is not self._indexed:
            records = [view[key].record for key in sorted(view)]
            self._by_class = {(one.model, one.priority): one for one in records}
            self._indexed = view
        return self._by_class

    def ttft_target_s(self, model: str, priority: Priority) -> float | None:
        """Return the time to first token that shapes serving, None where an objective only observes."""
        found = self.by_class.get((model, priority))
        return (found.ttft.seconds or None) if found is not None and found.shapes_serving else None
