"""What happens in a rollout becomes events, once, by the difference of two states."""

from __future__ import annotations

from dataclasses import replace

from services.controlplane.policy.events import events_between
from services.controlplane.rollouts.policy.operate import abort
from services.controlplane.rollouts.records import RolloutEvent, RolloutPhase
from services.core.records import ROLLOUTS
from tests.unit.controlplane.rollouts.policy.driven import rollout

KEY = ROLLOUTS + "r"


def test_the_entries_of_the_history_are_events() -> None:
    first = rollout()
    (created,) = events_between({}, {KEY: first}, (KEY,))
    assert (created.reason, created.resource) == ("ROLLOUT_CREATED", "r")
    started = replace(first.noted(RolloutEvent(1.0, "STARTED", "1 %")), phase=RolloutPhase.RUNNING)
    (event,) = events_between({KEY: first}, {KEY: started}, (KEY,))
    assert (event.reason, event.message, event.warning) == ("ROLLOUT_STARTED", "1 %", False)
    assert not events_between({KEY: started}, {KEY: replace(started, message="waits")}, (KEY,))
    aborted = abort(started, "odd", 2.0)
    (event,) = events_between({KEY: started}, {KEY: aborted}, (KEY,))
    assert (event.reason, event.warning) == ("ROLLOUT_ABORTED_BY_OPERATOR", True)
    assert not events_between({KEY: aborted}, {}, (KEY,))
