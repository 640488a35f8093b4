"""Tenants that both wait are served alike: the production queue over drawn loads, against the bound."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.core.fleet import SequenceUsage, TenantTokens
from services.core.records import Priority
from services.scheduler.policy.queue.fairness import Account, FairShares
from services.scheduler.queue.flow_queue import FlowQueue
from services.scheduler.queue.service_ledger import ServiceLedger
from tests.unit.scheduler.fair_model import FairRig, Load
from tests.unit.scheduler.model import DIGEST

Range = st.tuples(st.integers(1, 60), st.integers(0, 90)).map(lambda drawn: (drawn[0], sum(drawn)))
LOADS = st.lists(
    st.builds(
        lambda weight, prompt, output, period: Load(
            weight=weight,
            prompt=prompt,
            output=output,
            idle=lambda step: period > 0 and step // period % 3 == 2,
        ),
        st.sampled_from([0.5, 1.0, 1.0, 2.0, 5.0]),
        Range,
        Range,
        st.sampled_from([0, 0, 0, 40, 150]),
    ),
    min_size=2,
    max_size=5,
).map(lambda loads: {f"t{number}": load for number, load in enumerate(loads)})


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    seed=st.integers(0, 1 << 16),
    loads=LOADS,
    workers=st.integers(1, 3),
    slots=st.integers(1, 6),
    report_every=st.integers(1, 8),
    exact=st.booleans(),
)
def test_service_stays_within_the_bound(
    seed: int, loads: dict[str, Load], workers: int, slots: int, report_every: int, exact: bool
) -> None:
    rig = FairRig(seed, loads, workers=workers, slots=slots, report_every=report_every, exact=exact)
    rig.run(400)


def whale_and_minnows(plant: Callable[[FlowQueue], None] = lambda _: None) -> FairRig:
    """Unequal weights and lengths; one tenant is away for the first half."""
    loads = {
        "whale": Load(depth=40, prompt=(40, 64), output=(30, 40)),
        "paying": Load(weight=4.0),
        "late": Load(idle=lambda step: step < 1500),
    }
    return FairRig(7, loads, plant=plant)


def queues_that_run_dry(
    seed: int, longest: int, plant: Callable[[FlowQueue], None] = lambda _: None
) -> FairRig:
    """So much room that a pass grants all that wait."""
    loads = {
        "short": Load(weight=0.5, prompt=(1, 1), output=(1, 1)),
        "any": Load(weight=0.5, prompt=(1, 1), output=(1, longest)),
    }
    return FairRig(seed, loads, workers=2, slots=6, report_every=2, plant=plant)


@pytest.mark.parametrize(("seed", "longest"), [(0, 47), (0, 60), (1, 91)])
def test_who_returns_while_nobody_waits_starts_from_the_last_that_did(seed: int, longest: int) -> None:
    queues_that_run_dry(seed, longest).run(60)


def test_unequal_tenants_over_a_long_time() -> None:
    rig = whale_and_minnows()
    rig.run(3000)
    assert 0.05 < rig.widest < 1.0


@pytest.mark.parametrize("seed", range(4))
def test_failovers_lose_no_more_than_the_bound_allows(seed: int) -> None:
    loads = {"a": Load(output=(20, 60)), "b": Load(weight=3.0), "c": Load(prompt=(1, 4), output=(1, 4))}
    rig = FairRig(seed, loads)
    for _ in range(5):
        rig.run(250)
        rig.failovers += 1
        rig.new_leader()
    rig.run(250)


def test_counters_survive_a_failover() -> None:
    rig = FairRig(3, {"a": Load(), "b": Load(depth=2, idle=lambda step: step > 300)})
    rig.run(400)

    def settled() -> dict[str, float]:
        shares = rig.queue.ledger.shares(DIGEST)[Priority.STANDARD]
        return {account.tenant: account.settled for account in shares.accounts()}

    before = settled()
    rig.failovers += 1
    rig.new_leader()
    after = settled()
    assert after["a"] == pytest.approx(before["a"], abs=1000.0), "at most one report's worth is lost"
    assert after["a"] > 5000.0


def newcomer_under_a_new_leader(plant: Callable[[FlowQueue], None] = lambda _: None) -> FairRig:
    """The tenants of the old leader have nothing waiting when the new one comes, and return after another."""
    loads = {
        "a": Load(idle=lambda step: 3900 < step < 4010),
        "b": Load(idle=lambda step: 3900 < step < 4010, weight=2.0),
        "new": Load(depth=20, idle=lambda step: step < 4002),
    }
    rig = FairRig(5, loads, plant=plant)
    rig.run(4000)
    rig.failovers += 1
    rig.new_leader()
    return rig


def test_who_is_new_under_a_new_leader_is_not_owed_the_old_ones_life() -> None:
    newcomer_under_a_new_leader().run(1000)


# --- planted bugs ---------------------------------------------------------------------------------


class LiftsToTheFloor(FairShares):
    """As if those that waited last had been served nothing that is not reported yet."""

    def _start_value(self, account: Account) -> float:
        self._last = None
        return super()._start_value(account)


class NoLift(FairShares):
    def _start_value(self, account: Account) -> float:
        return 0.0


class LiftsToZero(FairShares):
    """A tenant that returns starts over."""

    def enter(self, tenant: str, weight: float) -> Account:
        account = super().enter(tenant, weight)
        if account.waiting == 1:
            account.base -= account.value
            self._changed(account)
        return account


class IgnoresWeight(FairShares):
    def enter(self, tenant: str, weight: float) -> Account:
        return super().enter(tenant, 1.0)


class ChargesNothingAhead(FairShares):
    """Many grants go out before the first report tells of one."""

    def advance(self, account: Account, tokens: float, worker_id: str) -> float:
        return super().advance(account, 0.0, worker_id)


class GivesNothingBack(FairShares):
    """An advance stays charged after its sequence ended."""

    def close(self, tenant: str, worker_id: str, virtual: float, *, used_tokens: float = 0.0) -> None:
        account = self.find(tenant)
        if account is not None and worker_id in account.tabs:
            account.served += account.tabs[worker_id].open / max(1, account.tabs[worker_id].advances)
        super().close(tenant, worker_id, virtual, used_tokens=used_tokens)


class ForgetsFloor(FairShares):
    """A new leader learns what tenants were served, and not from where others start."""

    def restore(self, tenant: str, counter: float, *, floor: float = 0.0) -> None:
        super().restore(tenant, counter)


class NeverCharges(ServiceLedger):
    def _charge(self, use: TenantTokens, worker_id: str) -> None: ...


class ChargesAtTheEnd(ServiceLedger):
    """Output counts once its sequence has ended; nothing is charged ahead."""

    def _charge(self, use: TenantTokens, worker_id: str) -> None: ...

    def _left(self, last: SequenceUsage, worker_id: str) -> None:
        use = TenantTokens(last.tenant, last.digest, last.prompt_tokens, last.output_tokens)
        super()._charge(use, worker_id)
        super()._left(last, worker_id)


def plant_shares(kind: type[FairShares]) -> Callable[[FlowQueue], None]:
    def plant(queue: FlowQueue) -> None:
        for shares in queue.ledger.shares(DIGEST).values():
            shares.__class__ = kind

    return plant


def plant_end_charge(queue: FlowQueue) -> None:
    queue.ledger.__class__ = ChargesAtTheEnd
    plant_shares(ChargesNothingAhead)(queue)


def plant_no_charge(queue: FlowQueue) -> None:
    queue.ledger.__class__ = NeverCharges


PLANTED = {
    "no lift": plant_shares(NoLift),
    "lift to zero": plant_shares(LiftsToZero),
    "weight ignored": plant_shares(IgnoresWeight),
    "charged at the end": plant_end_charge,
    "not charged ahead": plant_shares(ChargesNothingAhead),
    "not given back": plant_shares(GivesNothingBack),
    "never charged": plant_no_charge,
}


@pytest.mark.parametrize("bug", PLANTED)
def test_the_bound_catches_a_planted_bug(bug: str) -> None:
    with pytest.raises(AssertionError, match="apart"):
        whale_and_minnows(PLANTED[bug]).run(3000)


def test_the_bound_catches_a_start_value_the_floor_alone() -> None:
    with pytest.raises(AssertionError, match="apart"):
        queues_that_run_dry(0, 47, plant_shares(LiftsToTheFloor)).run(60)


def test_the_bound_catches_a_floor_that_is_lost_in_a_failover() -> None:
    with pytest.raises(AssertionError, match="apart"):
        newcomer_under_a_new_leader(plant_shares(ForgetsFloor)).run(1000)
