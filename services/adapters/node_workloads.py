"""Nodes as pods of workloads in Kubernetes. Implements ``ports.nodes.NodeProvider``.

A workload is a Deployment or StatefulSet with the label ``NODE_TYPE_LABEL``, and perhaps ``ZONE_LABEL``. Its
replicas are the number of its orders, which a ConfigMap keeps: one entry for each order, with the workload
and the pod. A call writes the entry under the version that it read, then sets the scale; where it ended
between the two, the next list sets it. A pod that Kubernetes replaces takes its predecessor's order over, so
that evictions and new images lose none. This module needs the extra ``kubernetes``, and takes a second to
import: it is imported where it is used.

Scaling down removes pods by a rule of Kubernetes's: ``_goes_first``. Decision 0101 has the reasons.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

import aiohttp
import msgspec
from kubernetes_asyncio import client, config
from kubernetes_asyncio.client.exceptions import ApiException

from services.core.errors import Unavailable
from services.ports.nodes import ProvidedNode
from services.runtime.config import ConfigError

T = TypeVar("T")
NODE_TYPE_LABEL: Final = "fairway.internal/node-type"
ZONE_LABEL: Final = "fairway.internal/zone"
ORDERS: Final = "fairway-node-orders"  # name of the ConfigMap
COST: Final = "controller.kubernetes.io/pod-deletion-cost"
CALL_S: Final = 10.0  # longest time of one request
_PODS: Final = 1000  # most pods of a workload that are read
_SEEN_S: Final = 1.0  # time in which Kubernetes's controllers receive a change of a pod
_RETRY_S: Final = 10.0
_MANIFEST: Final = "deploy/kubernetes/nodes.yaml"
_HINTS: Final = {
    401: "its credentials are not valid",
    403: f"{_MANIFEST} has the role that it needs",
    404: f"{_MANIFEST} has what it needs",
    409: "it was changed meanwhile",
}


class _Status(msgspec.Struct, frozen=True):
    message: str = ""


@dataclass(frozen=True, slots=True)
class _Order:
    workload: str  # kind/name
    pod: str = ""  # empty until there is one

    def node(self, order_id: str) -> str:
        return self.pod or f"order-{order_id}"


@dataclass(frozen=True, slots=True)
class _Pod:
    is_unready: bool  # whether it runs and is not ready
    cost: int
    problem: str  # the reason why it does not start


@dataclass(slots=True)
class _Workload:
    key: str  # kind/name
    labels: Mapping[str, str]
    replicas: int
    selector: str
    first_ordinal: int = 0
    orders: dict[str, _Order] = field(default_factory=dict)
    pods: dict[str, _Pod] = field(default_factory=dict)  # pods that run or start, the oldest first

    @property
    def kind(self) -> str:
        return self.key.partition("/")[0]

    def fits(self, node_type: str, zone: str) -> bool:
        return node_type in ("", self.labels[NODE_TYPE_LABEL]) and zone in ("", self.labels.get(ZONE_LABEL))


class KubernetesNodes:
    """``namespace`` has the workloads and the ConfigMap. ``api`` is the caller's to close."""

    def __init__(
        self,
        api: Any,
        namespace: str,
        sleep: Callable[[float], Awaitable[None]],
        *,
        timeout_s: float = CALL_S,
    ) -> None:
        self._apps = client.AppsV1Api(api)
        self._core = client.CoreV1Api(api)
        self._namespace = namespace
        self._sleep = sleep
        self._timeout_s = timeout_s

    async def list(self) -> tuple[ProvidedNode, ...]:
        version, workloads, lost = await self._read()
        moved: dict[str, _Order | None] = dict.fromkeys(lost)
        for each in workloads:
            if each.orders:
                await self._read_pods(each)
                found = _bound(each.orders, each.pods)
                moved |= {key: one for key, one in found.items() if one != each.orders[key]}
                each.orders = found
        if moved:
            await self._write(version, moved)
        for each in workloads:
            await self._scale(each)
        return tuple(
            ProvidedNode(key, one.node(key), each.pods[one.pod].problem if one.pod else "")
            for each in workloads
            for key, one in each.orders.items()
        )

    async def order(self, order_id: str, node_type: str, zone: str) -> None:
        version, workloads, _ = await self._read()
        if any(order_id in each.orders for each in workloads):
            return
        fitting = [each for each in workloads if each.fits(node_type, zone)]
        if not fitting:
            raise Unavailable(
                f"no Deployment or StatefulSet of the namespace {self._namespace} has the labels "
                f"{NODE_TYPE_LABEL}={node_type or '*'} and {ZONE_LABEL}={zone or '*'}",
                retry_after_s=_RETRY_S,
            )
        chosen = min(fitting, key=lambda each: (len(each.orders), each.key))
        chosen.orders[order_id] = _Order(chosen.key)
        await self._write(version, {order_id: chosen.orders[order_id]})
        await self._scale(chosen)

    async def release(self, node: str) -> bool:
        version, workloads, _ = await self._read()
        for each in workloads:
            for order_id, one in each.orders.items():
                if one.node(order_id) == node:
                    return await self._release(each, order_id, version)
        return True

    async def _release(self, workload: _Workload, order_id: str, version: str) -> bool:
        await self._read_pods(workload)
        pod = workload.orders[order_id].pod
        if not _goes_first(workload, pod):
            return False
        if workload.kind == "deployment" and pod in workload.pods:
            cost = min(one.cost for one in workload.pods.values()) - 1
            patch = {"metadata": {"annotations": {COST: str(cost)}}}
            await self._call("mark a pod", self._core.patch_namespaced_pod(pod, self._namespace, patch))
            await self._sleep(_SEEN_S)
        await self._write(version, {order_id: None})
        del workload.orders[order_id]
        await self._scale(workload)
        return True

    async def _read(self) -> tuple[str, Sequence[_Workload], Sequence[str]]:
        """Return the version of the orders, the workloads with theirs and without pods, and lost orders."""
        version, orders = await self._call(
            f"read the ConfigMap {ORDERS}",
            self._core.read_namespaced_config_map(ORDERS, self._namespace),
            lambda found: (str(found.metadata.resource_version), dict(found.data or {})),
        )
        workloads: dict[str, _Workload] = {}
        for kind, listing in (
            ("deployment", self._apps.list_namespaced_deployment),
            ("statefulset", self._apps.list_namespaced_stateful_set),
        ):
            workloads |= await self._call(
                f"list {kind}s",
                listing(self._namespace, label_selector=NODE_TYPE_LABEL),
                partial(_workloads, kind),
            )
        lost = []
        for order_id, text in sorted(orders.items()):
            key, _, pod = text.partition(" ")
            if key in workloads:
                workloads[key].orders[order_id] = _Order(key, pod)
            else:  # an operator took the workload back, with its pods
                lost.append(order_id)
        return version, sorted(workloads.values(), key=lambda one: one.key), lost

    async def _read_pods(self, workload: _Workload) -> None:
        listing = self._core.list_namespaced_pod(
            self._namespace, label_selector=workload.selector, limit=_PODS
        )
        workload.pods = await self._call("list pods", listing, _pods)

    async def _write(self, version: str, changes: Mapping[str, _Order | None]) -> None:
        data = {
            key: None if one is None else f"{one.workload} {one.pod}".strip() for key, one in changes.items()
        }
        body = {"metadata": {"resourceVersion": version}, "data": data}
        patch = self._core.patch_namespaced_config_map(ORDERS, self._namespace, body)
        await self._call(f"write the ConfigMap {ORDERS}", patch)

    async def _scale(self, workload: _Workload) -> None:
        """Set the replicas to the number of orders."""
        if workload.replicas == len(workload.orders):
            return
        name, body = workload.key.partition("/")[2], {"spec": {"replicas": len(workload.orders)}}
        is_deployment = workload.kind == "deployment"
        method = (
            self._apps.patch_namespaced_deployment_scale
            if is_deployment
            else self._apps.patch_namespaced_stateful_set_scale
        )
        await self._call(f"scale {workload.key}", method(name, self._namespace, body))

    async def _call(
        self, what: str, call: Awaitable[Any], parse: Callable[[Any], T] = lambda answer: answer
    ) -> T:
        """Return the parsed answer. Raises Unavailable with the reason."""
        try:
            async with asyncio.timeout(self._timeout_s):
                answer = await call
            return parse(answer)
        except ApiException as error:
            reason = ": ".join(filter(None, (f"{error.status} {error.reason}", _message(error.body))))
            hint = _HINTS.get(error.status, "")
            after = str(error.headers.get("Retry-After", "")) if error.headers else ""
            retry_s = float(after) if after.isdecimal() else _RETRY_S
        except TimeoutError:
            reason, hint, retry_s = f"no answer within {self._timeout_s:g} s", "", _RETRY_S
        except (aiohttp.ClientError, OSError) as error:
            reason, hint, retry_s = f"{type(error).__name__} {error}", "", _RETRY_S
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            reason, hint, retry_s = f"the answer is not Kubernetes's: {error}", "", _RETRY_S
        text = f"Kubernetes did not {what}: {reason[:512]}"
        raise Unavailable(f"{text} ({hint})" if hint else text, retry_after_s=retry_s)


async def open_cluster(kubeconfig: Path | None) -> Any:
    """Return a client of the cluster in the file; None: of the one in which this process runs.

    Raises ConfigError.
    """
    found = client.Configuration()
    try:
        if kubeconfig is None:
            config.load_incluster_config(client_configuration=found)
        else:
            await config.load_kube_config(str(kubeconfig), client_configuration=found)
    except (config.ConfigException, OSError, ValueError) as error:
        raise ConfigError(
            f"no cluster for FAIRWAY_NODE_NAMESPACE: {error}; "
            "run in a pod with a service account, or set FAIRWAY_NODE_KUBECONFIG"
        ) from error
    return client.ApiClient(found)


def _workloads(kind: str, found: Any) -> dict[str, _Workload]:
    workloads = [
        _Workload(
            f"{kind}/{one.metadata.name}",
            dict(one.metadata.labels),
            int(one.spec.replicas or 0),
            ",".join(f"{key}={value}" for key, value in sorted(one.spec.selector.match_labels.items())),
            int(one.spec.ordinals.start or 0) if kind == "statefulset" and one.spec.ordinals else 0,
        )
        for one in found.items
    ]
    return {one.key: one for one in workloads}


def _pods(found: Any) -> dict[str, _Pod]:
    """Return the pods that run or start, the oldest first."""
    present = [
        one
        for one in found.items
        if one.metadata.deletion_timestamp is None and one.status.phase not in ("Failed", "Succeeded")
    ]
    present.sort(key=lambda one: (one.metadata.creation_timestamp, one.metadata.name))
    return {one.metadata.name: _pod(one) for one in present}


def _pod(found: Any) -> _Pod:
    unmet = {one.type: one for one in found.status.conditions or () if one.status != "True"}
    waiting = [
        one.state.waiting
        for one in found.status.container_statuses or ()
        if one.state is not None and one.state.waiting is not None
    ]
    causes = [*filter(None, [unmet.get("PodScheduled")]), *waiting]
    cost = (found.metadata.annotations or {}).get(COST, "0")
    return _Pod(
        found.status.phase == "Running" and "Ready" in unmet,
        int(cost) if cost.removeprefix("-").isdecimal() else 0,
        ": ".join(filter(None, (causes[0].reason, causes[0].message)))[:256] if causes else "",
    )


def _bound(orders: Mapping[str, _Order], pods: Iterable[str]) -> dict[str, _Order]:
    """Return the orders with their pods: a pod without an order is for one that has none or lost its own."""
    present = dict.fromkeys(pods)
    taken = {one.pod for one in orders.values()}
    free = iter([name for name in present if name not in taken])
    return {
        key: one if one.pod in present else _Order(one.workload, next(free, ""))
        for key, one in orders.items()
    }


def _goes_first(workload: _Workload, pod: str) -> bool:
    """Return whether one replica less removes this pod, or one of no worker.

    A StatefulSet removes the highest ordinal. A Deployment removes pods that do not run, then those that run
    and are not ready, and of ready ones that with the lowest cost.
    """
    others = {one.pod for one in workload.orders.values()} - {pod}
    if workload.kind == "statefulset":
        kept = workload.first_ordinal + len(workload.orders) - 1
        return all(int(name.rpartition("-")[2]) < kept for name in others if name)
    return not any(one.is_unready for name, one in workload.pods.items() if name in others)


def _message(body: Any) -> str:
    try:
        return msgspec.json.decode(body or "{}", type=_Status).message
    except msgspec.DecodeError:
        return ""
