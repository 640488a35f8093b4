"""A Kubernetes API with the controllers of Deployments and StatefulSets, as far as node providers need them.

Pods come and go at once when a scale is written, by the rules that Kubernetes documents.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import kmock
from kubernetes_asyncio import client

SPACE = "fairway-workers"
COST = "controller.kubernetes.io/pod-deletion-cost"
_PATH = re.compile(rf"/(?:api|apis/apps)/v1/namespaces/{SPACE}/(\w+)(?:/([\w.-]+)(?:/(\w+))?)?")


@dataclass
class Workload:
    kind: str
    name: str
    labels: dict[str, str]
    replicas: int = 0
    first_ordinal: int = 0

    @property
    def message(self) -> dict[str, Any]:
        spec: dict[str, Any] = {
            "replicas": self.replicas,
            "selector": {"matchLabels": {"pool": self.name}},
            "template": {"metadata": {}, "spec": {"containers": [{"name": "worker"}]}},
        }
        if self.kind == "statefulsets":
            spec |= {"serviceName": self.name, "ordinals": {"start": self.first_ordinal}}
        return {"metadata": {"name": self.name, "labels": self.labels}, "spec": spec}


@dataclass
class Cluster:
    """``refused``: the answer to each "VERB resource" that fails. ``schedules``: new pods run at once.

    ``creates``: pods are made at all.
    """

    workloads: dict[str, Workload] = field(default_factory=dict)
    pods: dict[str, dict[str, Any]] = field(default_factory=dict)
    orders: dict[str, str] | None = field(default_factory=dict)
    refused: dict[str, Any] = field(default_factory=dict)
    schedules: bool = True
    creates: bool = True
    version: int = 1
    calls: list[str] = field(default_factory=list)
    _made: Any = field(default_factory=itertools.count)

    def add(self, kind: str, name: str, **labels: str) -> Workload:
        found = {f"fairway.internal/{key.replace('_', '-')}": value for key, value in labels.items()}
        self.workloads[name] = Workload(kind, name, found)
        return self.workloads[name]

    def run(self, name: str, *, ready: bool = True) -> None:
        pod = self.pods[name]
        pod["spec"]["nodeName"] = "machine-1"
        pod["status"] = {
            "phase": "Running",
            "conditions": [{"type": "Ready", "status": str(ready), "lastTransitionTime": None}],
        }

    def evict(self, name: str) -> None:
        """A pod is gone, and its controller replaces it."""
        pool = self.pods.pop(name)["metadata"]["labels"]["pool"]
        self.settle(self.workloads[pool])

    def settle(self, workload: Workload) -> None:
        """The controller makes the number of pods that of the replicas."""
        mine = {n: pod for n, pod in self.pods.items() if pod["metadata"]["labels"]["pool"] == workload.name}
        if workload.kind == "statefulsets":
            first = workload.first_ordinal
            wanted = [f"{workload.name}-{first + one}" for one in range(workload.replicas)]
            for name in mine.keys() - set(wanted):
                del self.pods[name]
            missing = [name for name in wanted if name not in mine]
        else:
            for name in sorted(mine, key=lambda name: _rank(mine[name]))[
                : max(0, len(mine) - workload.replicas)
            ]:
                del self.pods[name]
            missing = [f"{workload.name}-x{next(self._made)}" for _ in range(workload.replicas - len(mine))]
        for name in missing if self.creates else ():
            at = f"2026-01-01T00:00:{next(self._made) % 60:02}Z"
            labels = {"pool": workload.name}
            self.pods[name] = {
                "metadata": {"name": name, "labels": labels, "creationTimestamp": at, "annotations": {}},
                "spec": {"containers": [{"name": "worker"}]},
                "status": {"phase": "Pending"},
            }
            if self.schedules:
                self.run(name)

    def answer(self, request: kmock.Request) -> Any:
        path = _PATH.fullmatch(request.url.path)
        assert path is not None, request.url.path
        resource, name, part = path.groups()
        verb = str(request.method).rpartition(".")[2].lower() if name else "list"
        call = f"{verb} {resource}{f'/{part}' if part else ''}"
        self.calls.append(call)
        if call in self.refused:
            return self.refused[call]
        if resource == "configmaps":
            return self._config(request)
        if resource == "pods" and verb == "list":
            pool = request.params["labelSelector"].removeprefix("pool=")
            mine = [pod for pod in self.pods.values() if pod["metadata"]["labels"]["pool"] == pool]
            return answered({"items": mine})
        if resource == "pods":
            self.pods[name]["metadata"]["annotations"] |= request.data["metadata"]["annotations"]
            return answered(self.pods[name])
        if verb == "list":
            label = request.params["labelSelector"]
            found = [one for one in self.workloads.values() if one.kind == resource and label in one.labels]
            return answered({"items": [one.message for one in found]})
        assert part == "scale"
        self.workloads[name].replicas = request.data["spec"]["replicas"]
        self.settle(self.workloads[name])
        return answered({"metadata": {"name": name}, "spec": request.data["spec"]})

    def _config(self, request: kmock.Request) -> kmock.Response:
        if self.orders is None:
            return failed(404, "Not Found", 'configmaps "fairway-node-orders" not found')
        if request.data:
            if request.data["metadata"]["resourceVersion"] != str(self.version):
                return failed(409, "Conflict", "the object has been modified")
            self.version += 1
            for key, value in request.data["data"].items():
                self.orders[key] = value
                if value is None:
                    del self.orders[key]
        meta = {"name": "fairway-node-orders", "resourceVersion": str(self.version)}
        return answered({"metadata": meta, "data": self.orders or None})


def _rank(pod: dict[str, Any]) -> Any:
    """Kubernetes removes pods of a ReplicaSet in this order."""
    ready = any(one["status"] == "True" for one in pod["status"].get("conditions", ()))
    cost = int(pod["metadata"]["annotations"].get(COST, 0))
    newest = [-ord(each) for each in pod["metadata"]["creationTimestamp"]]
    return "nodeName" in pod["spec"], pod["status"]["phase"] == "Running", ready, cost, newest


def answered(message: Any, status: int = 200, **headers: str) -> kmock.Response:
    return kmock.Response(payload=json.dumps(message).encode(), status=status, headers=headers)


def failed(status: int, reason: str, message: str, **headers: str) -> kmock.Response:
    body = {"kind": "Status", "status": "Failure", "reason": reason, "message": message, "code": status}
    return answered(body, status, **headers)


@asynccontextmanager
async def serving(cluster: Cluster) -> AsyncIterator[Any]:
    """Yield a client of the cluster."""
    async with kmock.RawHandler() as handler, kmock.Server(handler) as server:
        handler[re.compile(r"/.*")] << cluster.answer
        found = client.Configuration(host=str(server.url).rstrip("/"))
        async with client.ApiClient(found) as api:
            yield api
