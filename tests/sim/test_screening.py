"""No token without a verdict: gateways and workers are lost, verdicts are late and fail."""

from __future__ import annotations

from zlib import crc32

import pytest

from fairway.formats.safety import Scope
from services.gateway.safety.requests import ModelRule, RequestSafety
from simulator.fleet.assembly import Parts
from simulator.fleet.chaos import chaos_faults, chaos_load, chaos_spec
from simulator.fleet.fault_actions import FaultSchedule
from simulator.fleet.fleet import RunReport, simulate
from simulator.invariants.screening import UNJUDGED, Screening, screened_gateways
from tests.support.sweep import daily

SEEDS = daily(range(12), range(3))


def run(seed: int, kind: type[RequestSafety] = RequestSafety) -> tuple[RunReport, Screening]:
    screening = Screening()
    report = simulate(
        chaos_spec(seed, workers=4),
        chaos_load(seed, 60),
        plans=(FaultSchedule(chaos_faults(seed)),),
        invariants=(screening,),
        parts=Parts(gateway=screened_gateways(screening, kind)),
    )
    return report, screening


@pytest.mark.parametrize("seed", SEEDS)
def test_no_token_leaves_without_a_verdict(seed: int) -> None:
    report, screening = run(seed)
    assert report.violations == ()
    assert report.outcomes.get("finished", 0) > 5
    assert screening.verdicts > 50
    assert screening.tokens > 500


class AsksNoModel(RequestSafety):
    """Lets one request in four pass without its models."""

    def models(self, scope: Scope) -> tuple[ModelRule, ...]:
        return () if crc32(self.request_id.encode()) % 4 == 0 else super().models(scope)


def test_the_planted_bug_is_found() -> None:
    report, _ = run(0, AsksNoModel)
    assert any(text.startswith(UNJUDGED) for text in report.violations)
