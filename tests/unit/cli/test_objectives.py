"""`fairway objectives`: the option that lets one shape serving, and the warnings on stderr."""

from __future__ import annotations

import pytest
import typer

from fairway.cli.commands.deployments import OBJECTIVES, _write_objective
from fairway.cli.commands.rollouts import StrategyName, arms_of, rollout_of
from fairway.cli.flags import Format
from fairway.v1 import controlplane_pb2 as cp


def test_warnings_go_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    made = cp.Objective(
        metadata=cp.Metadata(name="chat"),
        model="chat",
        ttft=cp.LatencyTarget(seconds=0.02, quantile=0.95),
        shapes_serving=True,
        warnings=["requests are refused"],
    )
    _write_objective(made, Format.TABLE)
    found = capsys.readouterr()
    assert found.err == "warning: requests are refused\n"
    assert "shapes serving" in found.out
    promise = next(one for one in OBJECTIVES.columns if one.header == "promise")
    made.shapes_serving = False
    assert "shapes" not in str(promise.cell(made))


@pytest.mark.parametrize("strategy", [StrategyName.AB, StrategyName.SHADOW, StrategyName.BLUE_GREEN])
def test_a_hold_is_refused_where_no_step_is_held(strategy: StrategyName) -> None:
    with pytest.raises(typer.BadParameter, match="an operator ends an A/B test"):
        rollout_of("r", "chat", strategy, arms_of("v2", None), {"hold": 30.0})


@pytest.mark.parametrize("strategy", [StrategyName.BLUE_GREEN, StrategyName.INSTANT])
def test_the_requests_of_a_gate_can_be_set_where_all_traffic_moves_at_once(strategy: StrategyName) -> None:
    arms = arms_of("v2", None)
    found = rollout_of("r", "chat", strategy, arms, {"min_requests": 20, "soak": 30.0})
    assert [(one.weight_ratio, one.min_requests) for one in found.steps] == [(1.0, 20)]
    assert not rollout_of("r", "chat", strategy, arms, {}).steps
