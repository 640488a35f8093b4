"""A rollout keeps everything that its operator wants on the way to the record and back."""

from __future__ import annotations

from fairway.v1 import controlplane_pb2 as pb
from services.controlplane.objectives.policy.gates import GateMetric
from services.controlplane.rollouts.convert import rollout_from_proto, stored_to_proto
from services.controlplane.rollouts.records import (
    GateSettings,
    Inconclusive,
    Rollout,
    RolloutArm,
    RolloutStep,
    RolloutStrategy,
)
from services.core.records import Meta, Priority
from services.core.rollouts.routes import SplitRules

WHOLE = Rollout(
    Meta("r", {"team": "ml"}),
    "chat",
    RolloutStrategy.AB,
    (RolloutArm("b", "v2", "", 3000), RolloutArm("c", "v3", "", 1)),
    steps=(RolloutStep(100, 1.5, 7), RolloutStep(10_000, 0.0, 100)),
    rules=SplitRules(False, ("in",), ("out",), {"fixed": "b"}, {Priority.INTERACTIVE: 500}),
    gate=GateSettings(
        (GateMetric.COST, GateMetric.TTFT_P95), 9, 12.5, Inconclusive.ABORT, 0, {GateMetric.COST: "wanted"}
    ),
    soak_s=0.25,
    keep_warm_s=0.0,
    load_timeout_s=33.0,
)


def test_every_field_of_the_operator_survives() -> None:
    assert rollout_from_proto(stored_to_proto(WHOLE, "7")) == WHOLE


def test_what_is_absent_has_its_default() -> None:
    message = pb.Rollout(metadata=pb.Metadata(name="r"), deployment="chat")
    found = rollout_from_proto(message)
    default = Rollout(Meta("r"), "chat", RolloutStrategy.CANARY, ())
    assert found == default
