"""docker-compose.yml without an engine: its settings are known, and no container has more than it needs."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from fairway.engines.environment import FOLDER_VARIABLE as VLLM_DIR
from scripts import compose_secrets
from services.app.process import ROLES
from services.runtime import config

ROOT: Final = Path(__file__).parents[3]
COMPOSE: Final = ROOT / "deploy" / "compose"
TEXT: Final = (ROOT / "docker-compose.yml").read_text()
FILE: Final[dict[str, Any]] = yaml.safe_load(TEXT)
SERVICES: Final[dict[str, dict[str, Any]]] = FILE["services"]
ROLE_NAMES: Final = [
    name for name, each in SERVICES.items() if each.get("command", [""])[:3] == ["python", "-P", "-m"]
]


def filled(value: object) -> str:
    """A value with the defaults of its variables."""
    return re.sub(r"\$\{[A-Z0-9_]+:-([^}]*)\}", r"\1", str(value))


def seconds(text: str) -> float:
    assert text.endswith("s")
    return float(text[:-1])


def test_every_role_is_there_twice_but_the_registry_and_followers() -> None:
    counted = {role: [SERVICES[name]["command"][4] for name in ROLE_NAMES].count(role) for role in ROLES}
    assert counted == {
        "registry": 1,
        "controlplane": 2,
        "scheduler": 2,
        "worker": 5,
        "gateway": 2,
        "follower": 0,
    }


@pytest.mark.parametrize("name", ROLE_NAMES)
def test_the_settings_of_a_role_are_valid(name: str) -> None:
    environment = {key: filled(value) for key, value in SERVICES[name]["environment"].items()}
    settings = config.load(environment)
    assert settings.advertised == f"{name}:{settings.listen.rpartition(':')[2]}"
    assert seconds(SERVICES[name]["stop_grace_period"]) > settings.drain_s + 2 + 5
    probed = SERVICES[name]["healthcheck"]["test"]
    assert probed[1:5] == ["python", "-P", "-m", "services.rpc.probe"]
    assert probed[5].rpartition(":")[2] == settings.listen.rpartition(":")[2]
    given = {f"/run/secrets/{secret}" for secret in SERVICES[name]["secrets"]}
    assert {value for key, value in environment.items() if key.endswith("_FILE")} == given
    if "worker_id" in settings.model_fields_set:
        assert settings.worker_id == name


@pytest.mark.parametrize("name", SERVICES)
def test_a_container_has_limits_and_no_rights(name: str) -> None:
    service = SERVICES[name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["mem_limit"]
    assert service["pids_limit"]
    assert service["logging"]["options"]["max-size"]
    root = str(service["user"]).startswith("0")
    assert root == (name == "volumes")
    if root:
        assert service["network_mode"] == "none"
    else:
        assert "cap_add" not in service
    assert "privileged" not in service


def test_images_are_pinned_and_ports_are_on_the_loopback() -> None:
    for name, service in SERVICES.items():
        tag = filled(service["image"]).rpartition(":")[2]
        assert re.search(r"\d+\.\d+", tag), f"{name}: {service['image']}"
        for port in service.get("ports", ()):
            assert filled(port).startswith("127.0.0.1:"), f"{name}: {port}"
    assert FILE["networks"]["fleet"]["internal"] is True
    assert FILE["networks"]["state"]["internal"] is True


def test_no_secret_is_a_variable() -> None:
    for name, service in SERVICES.items():
        for key in service.get("environment", {}):
            secret = re.search(r"PASSWORD|TOKEN|SECRET|ADMIN_KEY|API_KEY", key)
            assert not secret or key.endswith("_FILE"), f"{name}: {key}"


def test_every_volume_is_given_to_its_user() -> None:
    given = {each.partition(":")[0] for each in SERVICES["volumes"]["volumes"]}
    used = {
        each.partition(":")[0]
        for name, service in SERVICES.items()
        if name != "volumes" and service["user"] == SERVICES["gateway"]["user"]
        for each in service.get("volumes", ())
        if each.partition(":")[0] in FILE["volumes"]
    }
    assert given == used
    assert all(
        each.endswith(":nocopy")
        for name in [*ROLE_NAMES, "etcd", "redis"]
        for each in SERVICES[name].get("volumes", ())
        if each.partition(":")[0] in FILE["volumes"]
    )


def test_each_container_has_its_own_certificate_and_no_other() -> None:
    named = {name for name, service in SERVICES.items() if name in compose_secrets.CERTIFICATES}
    for name in [*named, "prometheus"]:
        mounted = [each for each in SERVICES[name]["volumes"] if "/certs" in each]
        folder = "monitor" if name == "prometheus" else name
        assert mounted == [f"${{FLEET_STATE:-./.fairway/compose}}/certs/{folder}:/run/fairway/tls:ro"]
        assert SERVICES[name]["depends_on"]["certs"]["condition"] == "service_completed_successfully"
    assert named | {"operator", "monitor"} == set(compose_secrets.CERTIFICATES)
    made = " ".join(SERVICES["certs"]["command"]).split()
    assert set(compose_secrets.CERTIFICATES) <= set(made)


def test_what_is_mounted_from_the_tree_is_there() -> None:
    mounted = re.findall(r"^ +- (\./[^:]+):", TEXT, re.MULTILINE)
    assert len(mounted) >= 5
    assert [path for path in mounted if not (ROOT / path).exists()] == []


def test_variables_are_on_the_page() -> None:
    page = (ROOT / "docs" / "operations" / "compose.md").read_text()
    images = set(re.findall(r"\$\{(FLEET_\w+_IMAGE):-", TEXT))
    asked = set(re.findall(r"\$\{(FLEET_\w+):-", TEXT)) - images
    assert asked - set(re.findall(r"FLEET_\w+", page)) == set()


def test_prometheus_asks_every_role() -> None:
    scraped = yaml.safe_load((COMPOSE / "prometheus.yml").read_text())["scrape_configs"][0]
    (found,) = scraped["dns_sd_configs"]
    assert sorted(found["names"]) == sorted(ROLE_NAMES)
    ports = {
        SERVICES[name]["environment"]["FAIRWAY_METRICS_LISTEN"].rpartition(":")[2] for name in ROLE_NAMES
    }
    assert ports == {str(found["port"])}
    job = next(each["regex"] for each in scraped["relabel_configs"] if each["target_label"] == "job")
    for name in ROLE_NAMES:
        named = re.fullmatch(job, name)
        assert named, f"alerts by role miss {name}"
        assert named[1] == SERVICES[name]["command"][4]


@pytest.mark.parametrize("name", ["Makefile", "deploy/compose/restore.sh", "docs/operations/compose.md"])
def test_what_takes_the_containers_away_names_every_profile(name: str) -> None:
    """`docker compose down` leaves the containers of a profile that it is not told of."""
    profiles = {profile for service in SERVICES.values() for profile in service.get("profiles", ())}
    named = re.findall(r"COMPOSE_PROFILES=(\S+) \S+(?: compose)? down", (ROOT / name).read_text())
    assert [set(each.split(",")) for each in named] == [profiles]


def test_dashboards_are_where_grafana_looks_and_have_their_source() -> None:
    mounts = dict(each.split(":")[:2] for each in SERVICES["grafana"]["volumes"])
    assert mounts["./deploy/compose/grafana"] == "/etc/grafana/provisioning"
    (provider,) = yaml.safe_load((COMPOSE / "grafana/dashboards/fairway.yml").read_text())["providers"]
    assert mounts["./deploy/grafana"] == provider["options"]["path"]
    sources = yaml.safe_load((COMPOSE / "grafana/datasources/fairway.yml").read_text())["datasources"]
    assert [each["type"] for each in sources if each.get("isDefault")] == ["prometheus"]
    for path in sorted((ROOT / "deploy/grafana").glob("*.json")):
        board = json.loads(path.read_text())
        source = board["templating"]["list"][0]
        assert (source["name"], source["type"], source["query"]) == ("datasource", "datasource", "prometheus")
        panels = [panel for panel in board["panels"] if panel["type"] != "row"]
        assert {panel["datasource"]["uid"] for panel in panels} == {"${datasource}"}


def test_prometheus_finds_the_alerts() -> None:
    mounts = dict(each.split(":")[:2] for each in SERVICES["prometheus"]["volumes"])
    (pattern,) = yaml.safe_load((COMPOSE / "prometheus.yml").read_text())["rule_files"]
    assert pattern == mounts["./deploy/prometheus"] + "/*.yml"
    assert list((ROOT / "deploy/prometheus").glob("*.yml"))


def test_prometheus_keeps_the_exemplars_that_its_page_names() -> None:
    (flag,) = re.findall(r"`(--enable-feature=\S+)`", (ROOT / "docs/operations/observability.md").read_text())
    assert flag in SERVICES["prometheus"]["command"]


def test_spans_find_their_way_to_the_store() -> None:
    collector = yaml.safe_load((COMPOSE / "otel-collector.yml").read_text())
    (pipeline,) = collector["service"]["pipelines"].values()
    assert set(pipeline["receivers"]) == set(collector["receivers"])
    assert set(pipeline["processors"]) == set(collector["processors"])
    assert set(pipeline["exporters"]) == set(collector["exporters"])
    assert collector["exporters"]["otlp"]["endpoint"].partition(":")[0] in SERVICES
    for source in yaml.safe_load((COMPOSE / "grafana/datasources/fairway.yml").read_text())["datasources"]:
        assert source["url"].removeprefix("http://").partition(":")[0] in SERVICES


def test_the_worker_of_the_profile_vllm_has_an_image_with_its_environment() -> None:
    worker = SERVICES["worker-vllm"]
    assert worker["profiles"] == ["vllm"]
    assert worker["build"]["target"] == "vllm"
    targets = {each["build"].get("target") for each in SERVICES.values() if "build" in each}
    assert targets == {None, "vllm"}
    dockerfile = (ROOT / "deploy" / "Dockerfile").read_text()
    stages = re.findall(r"^FROM (\S+)(?: AS (\S+))?$", dockerfile, re.MULTILINE)
    assert ("fairway", "vllm") in stages
    assert stages[-1] == ("fairway", ""), "without a target the image has no vLLM"
    (installed,) = re.findall(r"engines install vllm .* --dir (\S+)", dockerfile)
    assert f"ENV {VLLM_DIR}={installed}" in dockerfile


def test_what_the_image_copies_is_in_its_context() -> None:
    """The file of what is left out names each folder that is not."""
    lines = (ROOT / "deploy" / "Dockerfile").read_text().splitlines()
    copies = [line.split()[1:-1] for line in lines if line.startswith("COPY ") and "--from" not in line]
    sent = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert {source for sources in copies for source in sources} == sent
