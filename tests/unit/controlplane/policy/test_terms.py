"""What versions of a model are served with travels with their assignments."""

from __future__ import annotations

from dataclasses import replace

from services.controlplane.policy.assign import PutAssignment, ServingTerms, plan, serving_terms
from services.core.estimates.traffic_shapes import RequestShape, SamplingKind
from services.core.records import (
    AssignedVersion,
    Assignment,
    Deployment,
    LatencyTarget,
    Meta,
    Objective,
    Priority,
    Worker,
    dump,
    load,
)
from services.core.rollouts.routes import ModelRoute, RevisedRoute, RouteArm

DEPLOYMENT = Deployment(Meta("chat"), "m", "v", "sha256:0", 1)
WORKERS = (Worker("w0", "w0:1"), Worker("w1", "w1:1"))
SHAPES = (RequestShape(9, 5, SamplingKind.GREEDY),)


def objective(model: str, itl_s: float, priority: Priority = Priority.STANDARD) -> Objective:
    itl = LatencyTarget(itl_s)
    return Objective(Meta(f"{model}-{priority}"), model, priority, itl=itl, shapes_serving=True)


def assigned(held: tuple[Assignment, ...], terms: dict[str, ServingTerms]) -> tuple[Assignment, ...]:
    route = ModelRoute("chat", "s", (RouteArm("stable", "sha256:0", 10_000), RouteArm("canary", "sha256:1")))
    actions = plan([DEPLOYMENT], WORKERS, [], held, [RevisedRoute(route, 1)], terms=terms)
    puts = {one.assignment.worker_id: one.assignment for one in actions if isinstance(one, PutAssignment)}
    return tuple(({one.worker_id: one for one in held} | puts).values())


def versions(held: tuple[Assignment, ...]) -> list[AssignedVersion]:
    return [version for one in held for version in one.versions]


def test_the_tightest_target_of_the_classes_of_a_model_holds() -> None:
    objectives = [objective("a", 0.1), objective("a", 0.05, Priority.INTERACTIVE), objective("b", 0.0)]
    objectives.append(replace(objective("a", 0.01, Priority.BATCH), shapes_serving=False))
    found = serving_terms(objectives, {"c": SHAPES})
    assert found == {"a": ServingTerms((), 0.05), "c": ServingTerms(SHAPES, 0.0)}


def test_the_stable_version_and_an_arm_get_the_terms_of_their_model() -> None:
    found = assigned((), {"chat": ServingTerms(SHAPES, 0.05), "other": ServingTerms((), 1.0)})
    assert len(versions(found)) == 2
    assert {(one.probes, one.itl_target_s) for one in versions(found)} == {(SHAPES, 0.05)}
    assert load(dump(found[0]), Assignment).versions[0].probes == SHAPES


def test_new_shapes_alone_write_no_assignment() -> None:
    held = assigned((), {"chat": ServingTerms(SHAPES)})
    other = (RequestShape(900, 5, SamplingKind.SAMPLED),)
    again = assigned(held, {"chat": ServingTerms(other)})
    assert {one.probes for one in versions(again)} == {SHAPES}


def test_a_changed_target_reaches_every_version_of_the_model() -> None:
    held = assigned((), {"chat": ServingTerms(SHAPES, 0.05)})
    again = assigned(held, {"chat": ServingTerms(SHAPES, 0.2)})
    assert {one.itl_target_s for one in versions(again)} == {0.2}
    assert {one.itl_target_s for one in versions(assigned(again, {}))} == {0.0}
