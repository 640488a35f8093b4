"""Routes and text models: pinned, shared, bounded."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from services.core.errors import (
    FairwayError,
    IntegrityError,
    ModelNotFound,
    NoWorkerAvailable,
    VersionGone,
)
from services.core.limits import Price
from services.core.records import (
    DEPLOYMENTS,
    SCALED,
    WORKERS,
    Deployment,
    LoadedVersion,
    Meta,
    Priority,
    VersionState,
    Worker,
)
from services.core.scaling import Scaled, Scaling
from services.gateway import catalog as module
from services.gateway.catalog import ModelCatalog, PinnedVersion, Waking
from services.gateway.splits import Splits
from simulator.fleet.nodes.gateway_node import LocalTexts
from tests.support.waiting import until

DIGEST = "sha256:" + "ab" * 32


def test_a_route_is_the_deployment_s_version_and_revision(fleet: Any) -> None:
    route = fleet.catalog.resolve("chat-small")
    assert (route.model, route.version_digest, route.route_revision) == ("chat-small", DIGEST, 42)
    assert route.deployment.model == "tiny"
    assert route.ready_replicas == 1


def test_a_route_is_exact_while_all_its_ready_replicas_promise_it(fleet: Any) -> None:
    def replica(number: int, state: VersionState, *capabilities: str) -> None:
        version = LoadedVersion("chat-small", "tiny", DIGEST, state, capabilities=capabilities)
        fleet.workers.put(f"{WORKERS}w{number}", Worker(f"w{number}", "w:1", versions=(version,)))

    fleet.workers.records = {}
    assert not fleet.catalog.resolve("chat-small").exact
    replica(1, VersionState.READY, "exact", "resize")
    replica(2, VersionState.LOADING)
    assert fleet.catalog.resolve("chat-small").exact
    replica(2, VersionState.READY, "resize")
    assert not fleet.catalog.resolve("chat-small").exact
    assert not fleet.catalog.resolve_pinned("chat-small", PinnedVersion(DIGEST, 7)).exact


@pytest.mark.parametrize("name", ["missing", "tiny", "", "chat-small/", "../keys/alpha", "chat-small\x00"])
def test_other_names_are_not_found_and_reveal_nothing(fleet: Any, name: str) -> None:
    with pytest.raises(ModelNotFound) as caught:
        fleet.catalog.resolve(name)
    assert "chat-small" not in caught.value.message.replace(repr(name), "")


def test_an_alias_is_another_name_of_a_deployment(fleet: Any) -> None:
    assert fleet.catalog.resolve("org/Chat-Small") == fleet.catalog.resolve("chat-small")
    assert fleet.catalog.has("org/Chat-Small")
    assert fleet.catalog.aliases_of("chat-small") == ["org/Chat-Small"]
    pinned = fleet.catalog.resolve_pinned("org/Chat-Small", PinnedVersion(DIGEST, 7))
    assert (pinned.model, pinned.route_revision) == ("chat-small", 7)
    for name in ("org/Gone", "org/chat-small", "Chat-Small"):
        with pytest.raises(ModelNotFound, match=name) as caught:
            fleet.catalog.resolve(name)
        assert "gone" not in caught.value.message


def test_the_class_batch_has_a_price_of_its_own(fleet: Any, executor: ThreadPoolExecutor) -> None:
    price = Price(1_000_000, 100_001, 3_000_000)
    priced = Deployment(Meta("chat-small"), "tiny", "v1", DIGEST, 1, price=price)
    fleet.deployments.put(DEPLOYMENTS + "chat-small", priced, 43)
    catalog = ModelCatalog(
        fleet.deployments,
        fleet.workers,
        fleet.files,
        fleet.clock,
        texts=LocalTexts(executor, fleet.clock),
        splits=Splits(fleet.routes),
        scaled=fleet.scaled,
        sized=fleet.sized,
        batch_price_ratio=0.5,
    )
    assert catalog.price("chat-small", Priority.STANDARD) == price
    assert catalog.price("chat-small", Priority.BATCH) == Price(500_000, 50_000, 1_500_000)
    assert fleet.catalog.price("chat-small", Priority.BATCH) == price, "by default nothing is cheaper"
    assert catalog.price("gone", Priority.BATCH) == Price()


def test_a_deployment_without_a_version_is_not_served(fleet: Any) -> None:
    fleet.deployments.put(DEPLOYMENTS + "empty", Deployment(Meta("empty"), "tiny", "v9", "", 1))
    assert [route.model for route in fleet.catalog.routes()] == ["chat-small"]
    with pytest.raises(ModelNotFound):
        fleet.catalog.resolve("empty")


def test_a_pinned_version_is_found_while_a_worker_has_it(fleet: Any) -> None:
    pinned = PinnedVersion(DIGEST, 7)
    route = fleet.catalog.resolve_pinned("chat-small", pinned)
    assert (route.version_digest, route.route_revision, route.deployment.model) == (DIGEST, 7, "tiny")
    fleet.deployments.put(
        DEPLOYMENTS + "chat-small", Deployment(Meta("chat-small"), "tiny", "v2", "other", 1)
    )
    route = fleet.catalog.resolve_pinned("chat-small", pinned)
    assert (route.version_digest, route.route_revision, route.deployment.model) == (DIGEST, 7, "tiny")
    fleet.workers.records = {}
    with pytest.raises(VersionGone) as caught:
        fleet.catalog.resolve_pinned("chat-small", pinned)
    assert caught.value.metadata["version_digest"] == DIGEST


def test_a_pinned_version_that_is_deployed_needs_no_worker_now(fleet: Any) -> None:
    fleet.workers.records = {}
    assert fleet.catalog.resolve_pinned("chat-small", PinnedVersion(DIGEST, 7)).route_revision == 7


def test_a_version_is_served_while_it_is_deployed_or_on_a_worker_that_stays(fleet: Any) -> None:
    serves = fleet.catalog.serves
    assert serves("chat-small", DIGEST)
    assert not serves("chat-small", "sha256:other")
    fleet.deployments.put(
        DEPLOYMENTS + "chat-small", Deployment(Meta("chat-small"), "tiny", "v2", "sha256:other", 1)
    )
    assert serves("chat-small", "sha256:other")
    assert serves("chat-small", DIGEST)
    fleet.workers.records = {}
    assert not serves("chat-small", DIGEST)


def test_only_ready_versions_on_workers_that_stay_count(fleet: Any) -> None:
    fleet.ready("w1", max_model_len=200)
    fleet.ready("w2", max_model_len=999, draining=True)
    loading = LoadedVersion("chat-small", "tiny", DIGEST, VersionState.LOADING, max_model_len=999)
    fleet.workers.put(WORKERS + "w3", Worker("w3", "w3:1", versions=(loading,)))
    assert fleet.catalog.resolve("chat-small").ready_replicas == 2
    assert fleet.catalog.max_context_tokens(DIGEST) == 200
    fleet.workers.records = {}
    assert fleet.catalog.resolve("chat-small").ready_replicas == 0
    assert fleet.catalog.max_context_tokens(DIGEST) == 0


def test_a_model_that_failed_everywhere_is_refused_at_once_with_the_reason(fleet: Any) -> None:
    failed = LoadedVersion(
        "chat-small", "tiny", DIGEST, VersionState.FAILED, "a path and figures", reason="DOES_NOT_FIT"
    )
    fleet.catalog.require_servable(fleet.catalog.resolve("chat-small"))
    fleet.workers.records = {}
    fleet.catalog.require_servable(fleet.catalog.resolve("chat-small"))  # nobody has said anything yet
    fleet.workers.put(WORKERS + "w1", Worker("w1", "w1:1", versions=(failed,)))
    with pytest.raises(NoWorkerAvailable) as caught:
        fleet.catalog.require_servable(fleet.catalog.resolve("chat-small"))
    assert caught.value.metadata["cause"] == "DOES_NOT_FIT"
    assert "path" not in caught.value.message
    assert caught.value.retry_after_s == module.MAX_RETRY_S
    loading = LoadedVersion("chat-small", "tiny", DIGEST, VersionState.LOADING)
    fleet.workers.put(WORKERS + "w2", Worker("w2", "w2:1", versions=(loading,)))
    fleet.catalog.require_servable(fleet.catalog.resolve("chat-small"))


def test_a_deployment_of_no_replicas_is_not_served_by_workers_of_another_one(fleet: Any) -> None:
    idle = Deployment(Meta("idle"), "tiny", "v1", DIGEST, 0)
    fleet.deployments.put(DEPLOYMENTS + "idle", idle)
    route = fleet.catalog.resolve("idle")
    assert route.ready_replicas == 0
    with pytest.raises(NoWorkerAvailable, match="fairway deployments update idle --replicas 1") as caught:
        fleet.catalog.require_servable(route)
    assert caught.value.metadata == {"model": "idle", "cause": "NO_REPLICAS"}
    fleet.catalog.require_servable(fleet.catalog.resolve("chat-small"))
    gone = fleet.catalog.resolve_pinned("deleted", PinnedVersion(DIGEST, 7))
    fleet.catalog.require_servable(gone)  # what began on a version goes on while a worker has it


NEW = "sha256:" + "cd" * 32


def update(fleet: Any, *states: tuple[str, str, VersionState], replicas: int = 2) -> str:
    """Return the version that takes requests while these (worker, digest, state) are on the workers."""
    new = Deployment(Meta("chat-small"), "tiny", "v2", NEW, replicas)
    fleet.deployments.put(DEPLOYMENTS + "chat-small", new, 43)
    fleet.workers.records = {}
    for worker_id in sorted({worker_id for worker_id, _, _ in states}):
        versions = tuple(
            LoadedVersion("chat-small", "tiny", digest, state)
            for worker, digest, state in states
            if worker == worker_id
        )
        fleet.workers.put(WORKERS + worker_id, Worker(worker_id, "w:1", versions=versions))
    route = fleet.catalog.resolve("chat-small")
    assert route.route_revision == 43
    assert route.deployment.version_digest == NEW
    digest = route.version_digest
    assert isinstance(digest, str)
    return digest


def test_the_version_before_serves_until_as_many_of_the_new_one_do(fleet: Any) -> None:
    ready, loading, retiring = VersionState.READY, VersionState.LOADING, VersionState.RETIRING
    assert update(fleet, ("a", DIGEST, ready), ("b", DIGEST, ready), ("a", NEW, loading)) == DIGEST
    assert update(fleet, ("a", DIGEST, ready), ("b", DIGEST, ready), ("a", NEW, ready)) == DIGEST
    assert update(fleet, ("a", NEW, ready), ("b", DIGEST, ready)) == NEW
    assert update(fleet, ("a", DIGEST, ready), ("b", DIGEST, ready), ("a", NEW, ready), replicas=1) == NEW
    assert update(fleet, ("a", DIGEST, retiring), ("a", NEW, loading)) == NEW
    assert update(fleet, ("a", NEW, VersionState.FAILED)) == NEW
    assert update(fleet) == NEW


def test_a_version_before_that_serves_is_a_route_with_hope(fleet: Any) -> None:
    update(fleet, ("a", DIGEST, VersionState.READY), ("a", NEW, VersionState.FAILED))
    route = fleet.catalog.resolve("chat-small")
    assert (route.version_digest, route.ready_replicas) == (DIGEST, 1)
    fleet.catalog.require_servable(route)


def test_what_began_on_a_version_goes_on_while_it_retires(fleet: Any) -> None:
    update(fleet, ("a", DIGEST, VersionState.RETIRING), ("b", NEW, VersionState.READY))
    route = fleet.catalog.resolve_pinned("chat-small", PinnedVersion(DIGEST, 7))
    assert (route.version_digest, route.ready_replicas) == (DIGEST, 1)


async def test_both_versions_of_an_update_are_loaded_before_they_are_asked_for(fleet: Any) -> None:
    update(fleet, ("a", DIGEST, VersionState.READY), ("a", NEW, VersionState.LOADING))
    warming = asyncio.create_task(fleet.catalog.warm_forever())
    await until(lambda: len(fleet.files.fetched) >= 2)
    warming.cancel()
    assert sorted(fleet.files.fetched) == [("tiny", DIGEST), ("tiny", NEW)]


async def test_the_context_is_bounded_by_model_and_workers(fleet: Any) -> None:
    fleet.ready(max_model_len=100_000)
    fleet.catalog.resolve("chat-small")
    await fleet.catalog.text_model(DIGEST)
    assert fleet.catalog.max_context_tokens(DIGEST) == 128


async def test_a_text_model_is_loaded_once(fleet: Any) -> None:
    fleet.catalog.resolve("chat-small")
    found = await asyncio.gather(*[fleet.catalog.text_model(DIGEST) for _ in range(8)])
    assert all(model is found[0] for model in found)
    assert fleet.files.fetched == [("tiny", DIGEST)]
    assert fleet.files.pins == 0


async def test_a_resolved_request_outlives_its_deployment(fleet: Any) -> None:
    fleet.catalog.resolve("chat-small")
    fleet.deployments.records = {}
    assert (await fleet.catalog.text_model(DIGEST)).version_digest == DIGEST


async def test_an_unknown_digest_is_not_fetched(fleet: Any) -> None:
    with pytest.raises(ModelNotFound):
        await fleet.catalog.text_model("sha256:" + "00" * 32)
    assert fleet.files.fetched == []


async def test_a_failed_load_is_tried_again(fleet: Any, executor: ThreadPoolExecutor) -> None:
    class Failing:
        def __init__(self, good: Any) -> None:
            self.good, self.failures = good, 1

        async def fetch(self, *args: Any, **kwargs: Any) -> Path:
            if self.failures:
                self.failures -= 1
                raise IntegrityError("a chunk is damaged")
            return await self.good.fetch(*args, **kwargs)  # type: ignore[no-any-return]

        async def readable(self, *args: Any) -> Any:
            return await self.good.readable(*args)

        def pin(self, folder: Path) -> None: ...

        def unpin(self, folder: Path) -> None: ...

    catalog = ModelCatalog(
        fleet.deployments,
        fleet.workers,
        Failing(fleet.files),
        fleet.clock,
        texts=LocalTexts(executor, fleet.clock),
        splits=Splits(fleet.routes),
        scaled=fleet.scaled,
        sized=fleet.sized,
    )
    catalog.resolve("chat-small")
    with pytest.raises(IntegrityError):
        await catalog.text_model(DIGEST)
    assert (await catalog.text_model(DIGEST)).version_digest == DIGEST


async def test_loaded_models_and_remembered_versions_are_bounded(
    fleet: Any, make_folder: Callable[..., Path]
) -> None:
    fleet.workers.records = {}  # else the version that is READY serves on
    for number in range(module.MAX_LOADED + 3):
        digest = f"sha256:{number:064x}"
        fleet.deployments.put(
            DEPLOYMENTS + "chat-small", Deployment(Meta("chat-small"), "tiny", "v", digest, 1)
        )
        await fleet.catalog.text_model(fleet.catalog.resolve("chat-small").version_digest)
    for number in range(module.MAX_REMEMBERED + 3):
        digest = f"sha256:{number:064x}"
        fleet.deployments.put(
            DEPLOYMENTS + "chat-small", Deployment(Meta("chat-small"), "tiny", "v", digest, 1)
        )
        fleet.catalog.resolve("chat-small")
    fleet.catalog.check_integrity()
    with pytest.raises(FairwayError):
        await fleet.catalog.text_model("sha256:" + "ab" * 32)


def scaled(fleet: Any, scaling: Scaling, decided: Scaled | None) -> None:
    """Give chat-small bounds and a decision, without any replica."""
    deployment = replace(
        fleet.deployments.view[DEPLOYMENTS + "chat-small"].record, replicas=1, scaling=scaling
    )
    fleet.deployments.put(DEPLOYMENTS + "chat-small", deployment)
    fleet.workers.records = {}
    if decided is not None:
        fleet.scaled.put(SCALED + "chat-small", decided)


def test_a_deployment_that_its_load_may_start_is_servable_at_zero(fleet: Any) -> None:
    assert fleet.catalog.waking("chat-small") is None
    scaled(fleet, Scaling(0, 2), Scaled("chat-small", 0, start_s=20.0))
    route = fleet.catalog.resolve("chat-small")
    assert (route.deployment.replicas, route.ready_replicas) == (0, 0)
    fleet.catalog.require_servable(route)
    assert fleet.catalog.waking("chat-small") == Waking(70.0)
    held = fleet.deployments.view[DEPLOYMENTS + "chat-small"].record
    fleet.deployments.put(DEPLOYMENTS + "chat-small", replace(held, tenant="acme"))
    assert fleet.catalog.waking("chat-small") == Waking(70.0, tenant="acme")
    fleet.ready()
    assert fleet.catalog.waking("chat-small") is None, "a replica serves"


@pytest.mark.parametrize(
    ("scaling", "decided", "cause"),
    [
        (
            Scaling(0, 2),
            Scaled("chat-small", 0, failure="no tensor x", failed_wakes=1, retry_unix_s=1e12),
            "START_FAILED",
        ),
        (Scaling(0, 2, override_replicas=0), Scaled("chat-small", 0), "NO_REPLICAS"),
        (Scaling(1, 2, override_replicas=0), Scaled("chat-small", 0), "NO_REPLICAS"),
        (Scaling(0, 2, frozen=True), Scaled("chat-small", 0), "NO_REPLICAS"),
    ],
)
def test_a_deployment_that_nothing_starts_is_refused_with_the_cause(
    fleet: Any, scaling: Scaling, decided: Scaled, cause: str
) -> None:
    scaled(fleet, scaling, decided)
    with pytest.raises(NoWorkerAvailable) as caught:
        fleet.catalog.require_servable(fleet.catalog.resolve("chat-small"))
    assert caught.value.metadata["cause"] == cause


def test_the_next_start_is_awaited_once_its_time_has_come(fleet: Any) -> None:
    failed = Scaled("chat-small", 0, failure="no tensor x", failed_wakes=1, retry_unix_s=1.0)
    scaled(fleet, Scaling(0, 2), failed)
    fleet.catalog.require_servable(fleet.catalog.resolve("chat-small"))


def test_a_decision_counts_in_place_of_the_deployments_number(fleet: Any) -> None:
    scaled(fleet, Scaling(1, 4), None)
    assert fleet.catalog.resolve("chat-small").deployment.replicas == 1
    fleet.scaled.put(SCALED + "chat-small", Scaled("chat-small", 3))
    assert fleet.catalog.resolve("chat-small").deployment.replicas == 3, "routes are made again"
