"""What is planned against what a simulated fleet needs: production scheduler, engines and their planner."""

from __future__ import annotations

from simulator.elastic.traffic import Workload


def plan_error(load: Workload) -> float:
    return 0.0
