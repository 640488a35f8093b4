"""A resumed watch tells what changed between its revision and the state that it reads first."""

from __future__ import annotations

from services.controlplane.fleet import snapshot_of
from services.controlplane.watcher import ResourceKind, ResourceWatch
from services.core.records import DEPLOYMENTS, TENANTS, Deployment, Meta, Tenant, dump
from services.ports.store import Entry, KeyChanged, KeyRemoved, WatchBatch

KEPT = Entry(DEPLOYMENTS + "kept", dump(Deployment(Meta("kept"), "m", "v", "sha256:1", 1)), 3, 9)


def test_what_an_early_batch_changed_is_told_once_the_state_is_reached() -> None:
    follower = ResourceWatch(snapshot_of(10, {KEPT.key: KEPT}), [ResourceKind.DEPLOYMENT], 5)
    assert follower.apply(WatchBatch(7, (KeyRemoved(DEPLOYMENTS + "gone", 7),))) == ()
    assert follower.revision == 5, "resuming from here tells it again"
    told = follower.apply(WatchBatch(10, (KeyChanged(KEPT),)))
    assert [(change.name, change.view is None) for change in told] == [("gone", True), ("kept", False)]
    assert follower.revision == 10
    assert follower.apply(WatchBatch(11, ())) == ()


def test_what_is_told_as_it_is_stored_needs_no_state() -> None:
    follower = ResourceWatch(snapshot_of(10, {}), [ResourceKind.TENANT], 5)
    tenant = Entry(TENANTS + "acme", dump(Tenant(Meta("acme"))), 6, 6)
    (made,) = follower.apply(WatchBatch(6, (KeyChanged(tenant),)))
    (gone,) = follower.apply(WatchBatch(7, (KeyRemoved(TENANTS + "acme", 7),)))
    assert (made.view is None, gone.view is None, follower.revision) == (False, True, 7)
