"""What versions of a model are served with in addition to their settings. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Final

from services.core.estimates.traffic_shapes import RequestShape
from services.core.records import AssignedVersion, Objective


@dataclass(frozen=True, slots=True)
class ServingTerms:
    """``probes``: shapes of the model's traffic. ``itl_target_s`` 0: none is promised."""

    probes: tuple[RequestShape, ...] = ()
    itl_target_s: float = 0.0

    def of(self, version: AssignedVersion) -> AssignedVersion:
        """Return the version with these terms."""
        return replace(version, probes=self.probes, itl_target_s=self.itl_target_s)


NO_TERMS: Final = ServingTerms()


def serving_terms(
    objectives: Iterable[Objective], probes: Mapping[str, tuple[RequestShape, ...]]
) -> dict[str, ServingTerms]:
    """Return the terms by deployment. The tightest ITL target of any class holds: they share steps.

    An objective that only observes has no part in them.
    """
    targets: dict[str, float] = {}
    for one in objectives:
        if one.shapes_serving and one.itl.seconds > 0:
            targets[one.model] = min(one.itl.seconds, targets.get(one.model, one.itl.seconds))
    models = sorted({*targets, *probes})
    return {model: ServingTerms(probes.get(model, ()), targets.get(model, 0.0)) for model in models}
