"""The manifests are valid for Kubernetes, and the role permits what the node provider calls and no more."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from services.adapters.node_workloads import KubernetesNodes
from services.runtime.config import Settings
from tests.support.kubernetes import SPACE, Cluster, serving

FOLDER = Path(__file__).parents[3] / "deploy" / "kubernetes"


def documents(name: str) -> list[dict[str, Any]]:
    return [one for one in yaml.safe_load_all((FOLDER / name).read_text()) if one]


@pytest.mark.parametrize("name", sorted(path.name for path in FOLDER.glob("*.yaml")))
def test_manifests_are_valid(name: str) -> None:
    for document in documents(name):
        for version in ("1.31", "1.37"):
            kubernetes_validate.validate(document, version, strict=True)


async def test_the_role_permits_what_the_provider_calls_and_no_more() -> None:
    cluster = Cluster()
    for kind in ("deployments", "statefulsets"):
        cluster.add(kind, kind, node_type=kind)

    async def at_once(seconds: float) -> None: ...

    async with serving(cluster) as api:
        nodes = KubernetesNodes(api, SPACE, at_once)
        for kind in ("deployments", "statefulsets"):
            await nodes.order(kind, kind, "")
        for one in await nodes.list():
            assert await nodes.release(one.node)
    (role,) = (one for one in documents("nodes.yaml") if one["kind"] == "Role")
    permitted = {
        f"{verb} {resource}"
        for rule in role["rules"]
        for verb in rule["verbs"]
        for resource in rule["resources"]
    }
    assert permitted == set(cluster.calls)
    (names,) = (rule["resourceNames"] for rule in role["rules"] if "resourceNames" in rule)
    config = next(one for one in documents("nodes.yaml") if one["kind"] == "ConfigMap")
    assert names == [config["metadata"]["name"]] == ["fairway-node-orders"]


def test_the_workers_settings_exist_and_its_labels_are_those_of_selectors() -> None:
    (workload,) = documents("workers.yaml")
    (container,) = workload["spec"]["template"]["spec"]["containers"]
    names = {one["name"] for one in container["env"]} - {"POD_IP"}
    assert names <= {f"FAIRWAY_{name.upper()}" for name in Settings.model_fields}
    labels = next(one["value"] for one in container["env"] if one["name"] == "FAIRWAY_LABELS").split(",")
    own = workload["metadata"]["labels"].items()
    assert sorted(labels) == sorted(f"{key.rpartition('/')[2]}={value}" for key, value in own)
