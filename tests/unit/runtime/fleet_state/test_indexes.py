"""Which objectives reach a request: those that shape serving."""

from __future__ import annotations

from services.core.records import LatencyTarget, Meta, Objective, Priority
from services.runtime.fleet_state.indexes import ObjectiveIndex
from services.runtime.fleet_state.informer import Versioned


class View:
    def __init__(self, *objectives: Objective) -> None:
        self.view = {one.meta.name: Versioned(one, 1, 1) for one in objectives}


def test_a_target_reaches_requests_only_where_its_objective_shapes_serving() -> None:
    ttft = LatencyTarget(0.02)
    index = ObjectiveIndex(
        View(
            Objective(Meta("observes"), "a", Priority.STANDARD, ttft=ttft),
            Objective(Meta("shapes"), "a", Priority.BATCH, ttft=ttft, shapes_serving=True),
            Objective(Meta("without"), "b", Priority.BATCH, availability=0.9, shapes_serving=True),
        )
    )
    targets = {
        (model, priority): index.ttft_target_s(model, priority) for model in "ab" for priority in Priority
    }
    assert {of: target for of, target in targets.items() if target is not None} == {
        ("a", Priority.BATCH): 0.02
    }
    assert len(index.by_class) == 3, "each is measured"
