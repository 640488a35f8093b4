"""Nodes in Kubernetes: orders outlive their pods, and the pod of a released node is the one that goes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import kmock
import pytest

from services.adapters.node_workloads import KubernetesNodes
from services.core.errors import Unavailable
from tests.support.kubernetes import COST, SPACE, Cluster, answered, failed, serving


async def at_once(seconds: float) -> None:
    assert seconds > 0.0


@asynccontextmanager
async def nodes_of(cluster: Cluster) -> AsyncIterator[KubernetesNodes]:
    async with serving(cluster) as api:
        yield KubernetesNodes(api, SPACE, at_once)


def gpus(kind: str = "deployments") -> Cluster:
    cluster = Cluster()
    cluster.add(kind, "gpu", node_type="gpu", zone="a")
    return cluster


async def listed(nodes: KubernetesNodes) -> dict[str, str]:
    return {one.order_id: one.node for one in await nodes.list()}


async def test_an_order_goes_to_the_emptiest_workload_of_its_type_and_zone() -> None:
    cluster = gpus()
    cluster.add("statefulsets", "gpu-b", node_type="gpu", zone="b")
    cluster.add("deployments", "cpu", node_type="cpu")
    async with nodes_of(cluster) as nodes:
        await nodes.order("o1", "gpu", "b")
        await nodes.order("o2", "gpu", "")
        await nodes.order("o3", "cpu", "")
        assert {one.name: one.replicas for one in cluster.workloads.values()} == {
            "gpu": 1,
            "gpu-b": 1,
            "cpu": 1,
        }
        with pytest.raises(
            Unavailable, match=r"has the labels fairway\.internal/node-type=tpu and .*zone=\*"
        ):
            await nodes.order("o4", "tpu", "")
        with pytest.raises(Unavailable, match="zone=a"):
            await nodes.order("o5", "cpu", "a")


async def test_an_order_without_a_pod_is_listed_and_released_under_a_name_of_its_own() -> None:
    cluster = gpus()
    cluster.creates = False
    async with nodes_of(cluster) as nodes:
        await nodes.order("o1", "", "")
        assert await listed(nodes) == {"o1": "order-o1"}
        assert await nodes.release("order-o1")
        assert (await nodes.list(), cluster.workloads["gpu"].replicas) == ((), 0)


async def test_a_replaced_pod_takes_the_order_over() -> None:
    cluster = gpus()
    async with nodes_of(cluster) as nodes:
        for name in ("o1", "o2"):
            await nodes.order(name, "", "")
        before = await listed(nodes)
        cluster.evict(before["o1"])
        after = await listed(nodes)
        assert after["o2"] == before["o2"]
        assert after["o1"] not in before.values()
        assert cluster.workloads["gpu"].replicas == 2
        assert set(after.values()) == set(cluster.pods)


async def test_a_call_that_ended_between_order_and_scale_is_completed_by_the_next_list() -> None:
    cluster = gpus()
    cluster.refused["patch deployments/scale"] = failed(500, "Internal Server Error", "etcdserver: timed out")
    async with nodes_of(cluster) as nodes:
        with pytest.raises(Unavailable, match=r"did not scale deployment/gpu: 500 .*etcdserver: timed out"):
            await nodes.order("o1", "", "")
        cluster.refused.clear()
        await nodes.list()
        await nodes.order("o1", "", "")
        assert cluster.workloads["gpu"].replicas == 1
        assert list(await listed(nodes)) == ["o1"]
        cluster.workloads["gpu"].replicas = 5  # as by `kubectl scale`
        cluster.settle(cluster.workloads["gpu"])
        await nodes.list()
        assert len(cluster.pods) == 1


async def test_the_released_pod_of_a_deployment_is_the_one_that_goes() -> None:
    cluster = gpus()
    async with nodes_of(cluster) as nodes:
        for number in range(5):
            await nodes.order(f"o{number}", "", "")
        found = await listed(nodes)
        cluster.pods[found["o4"]]["metadata"]["annotations"][COST] = "-7"  # of a release that was cut off
        for number in (0, 3, 1):
            node = found.pop(f"o{number}")
            assert await nodes.release(node)
            assert node not in cluster.pods
            assert await listed(nodes) == found, "a cost of before removes no other"
    assert set(cluster.pods) == set(found.values())


async def test_a_pod_that_is_not_ready_is_not_removed_in_place_of_the_released() -> None:
    cluster = gpus()
    async with nodes_of(cluster) as nodes:
        for name in ("o1", "o2"):
            await nodes.order(name, "", "")
        found = await listed(nodes)
        cluster.run(found["o2"], ready=False)
        assert not await nodes.release(found["o1"])
        assert await listed(nodes) == found
        cluster.run(found["o2"])
        assert await nodes.release(found["o1"])
        assert await listed(nodes) == {"o2": found["o2"]}


@pytest.mark.parametrize("first", [0, 3])
async def test_a_lower_ordinal_is_released_after_those_above_it(first: int) -> None:
    cluster = gpus("statefulsets")
    cluster.workloads["gpu"].first_ordinal = first
    async with nodes_of(cluster) as nodes:
        for name in ("o1", "o2", "o3"):
            await nodes.order(name, "", "")
        assert await listed(nodes) == {f"o{one + 1}": f"gpu-{first + one}" for one in range(3)}
        assert not await nodes.release(f"gpu-{first + 1}")
        assert len(cluster.pods) == 3
        assert await nodes.release(f"gpu-{first + 2}")
        assert await nodes.release(f"gpu-{first + 1}")
        assert await listed(nodes) == {"o1": f"gpu-{first}"}
        assert set(cluster.pods) == {f"gpu-{first}"}
    assert "patch pods" not in cluster.calls


async def test_an_order_without_a_pod_removes_no_ordinal_of_another() -> None:
    cluster = gpus("statefulsets")
    async with nodes_of(cluster) as nodes:
        for name in ("o1", "o2"):
            await nodes.order(name, "", "")
        assert await listed(nodes) == {"o1": "gpu-0", "o2": "gpu-1"}
        cluster.creates = False
        cluster.evict("gpu-0")
        assert await listed(nodes) == {"o1": "order-o1", "o2": "gpu-1"}
        assert not await nodes.release("order-o1")
        assert set(cluster.pods) == {"gpu-1"}


async def test_a_workload_without_the_label_is_not_touched_and_its_orders_end() -> None:
    cluster = gpus()
    cluster.add("deployments", "own", team="search")
    cluster.workloads["own"].replicas = 4
    async with nodes_of(cluster) as nodes:
        await nodes.order("o1", "", "")
        del cluster.workloads["gpu"].labels["fairway.internal/node-type"]
        assert await nodes.list() == ()
        assert cluster.orders == {}
        assert (cluster.workloads["gpu"].replicas, cluster.workloads["own"].replicas) == (1, 4)


async def test_what_keeps_a_pod_from_starting_is_listed() -> None:
    cluster = gpus()
    cluster.schedules = False
    async with nodes_of(cluster) as nodes:
        await nodes.order("o1", "", "")
        ((name, pod),) = cluster.pods.items()
        assert [(one.node, one.problem) for one in await nodes.list()] == [(name, "")]
        why = "0/3 nodes are available: 3 Insufficient nvidia.com/gpu."
        unscheduled = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": why}
        pod["status"]["conditions"] = [unscheduled]
        assert [one.problem for one in await nodes.list()] == [f"Unschedulable: {why}"]
        waiting = {"waiting": {"reason": "ImagePullBackOff"}}
        pod["status"]["conditions"] = []
        pod["status"]["containerStatuses"] = [
            {
                "name": "worker",
                "ready": False,
                "restartCount": 0,
                "image": "",
                "imageID": "",
                "state": waiting,
            }
        ]
        assert [one.problem for one in await nodes.list()] == ["ImagePullBackOff"]


async def stalled() -> kmock.Response:
    await asyncio.sleep(2.0)  # longer than the client waits
    return answered({})


@pytest.mark.parametrize(
    ("call", "answer", "why", "retry_s"),
    [
        ("list pods", failed(401, "Unauthorized", "Unauthorized"), "credentials are not valid", 10.0),
        (
            "list deployments",
            failed(403, "Forbidden", "deployments.apps is forbidden: User cannot list resource"),
            "403 Forbidden: deployments.apps is forbidden.*has the role that it needs",
            10.0,
        ),
        ("patch deployments/scale", failed(404, "Not Found", "not found"), "scale deployment/gpu: 404", 10.0),
        ("patch configmaps", failed(409, "Conflict", "modified"), "changed meanwhile", 10.0),
        (
            "list statefulsets",
            failed(429, "Too Many Requests", "slow down", **{"Retry-After": "42"}),
            "429 Too Many Requests: slow down",
            42.0,
        ),
        ("get configmaps", answered("<html>gateway timeout</html>", 504), "504 Gateway Timeout", 10.0),
        ("get configmaps", kmock.Response(payload=b"<html>", status=200), "did not read the ConfigMap", 10.0),
        ("list deployments", answered({"items": [{"spec": {}}]}), "did not list deployments", 10.0),
        ("list pods", stalled, r"no answer within 0\.5 s", 10.0),
    ],
)
async def test_a_failure_of_the_cluster_is_named(call: str, answer: object, why: str, retry_s: float) -> None:
    cluster = gpus()
    cluster.orders = {"o1": "deployment/gpu"}
    if call == "patch configmaps":  # the pod that is there gets the order
        cluster.workloads["gpu"].replicas = 1
        cluster.settle(cluster.workloads["gpu"])
    cluster.refused[call] = answer
    async with serving(cluster) as api:
        nodes = KubernetesNodes(api, SPACE, at_once, timeout_s=0.5 if answer is stalled else 10.0)
        with pytest.raises(Unavailable, match=why) as caught:
            await nodes.list()
        assert caught.value.retry_after_s == retry_s
        cluster.refused.clear()
        assert list(await listed(KubernetesNodes(api, SPACE, at_once))) == ["o1"]


async def test_a_cluster_that_is_not_there_or_has_no_orders_is_named() -> None:
    cluster = gpus()
    cluster.orders = None
    async with serving(cluster) as api:
        nodes = KubernetesNodes(api, SPACE, at_once)
        with pytest.raises(
            Unavailable, match=r"404 Not Found.*deploy/kubernetes/nodes\.yaml has what it needs"
        ):
            await nodes.list()
        api.configuration.host = "http://127.0.0.1:1"
        with pytest.raises(Unavailable, match="did not read the ConfigMap fairway-node-orders"):
            await nodes.list()
