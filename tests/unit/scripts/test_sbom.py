"""The bill of materials and the VEX document, by rules of their formats that are written here."""

from __future__ import annotations

import copy
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from scripts.sbom import BadStatement, main, pinned, vex_of
from tests.tidy.sources import ROOT

PURL = re.compile(r"pkg:pypi/[a-z0-9][a-z0-9-]*@[A-Za-z0-9.+!_-]+")
SERIAL = re.compile(r"urn:uuid:[0-9a-f]{8}-([0-9a-f]{4}-){3}[0-9a-f]{12}")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("sbom")
    main([str(made)])
    return made


@pytest.fixture
def bill(folder: Path) -> Any:
    return json.loads((folder / "fairway.cdx.json").read_text("utf-8"))


@pytest.fixture
def vex(folder: Path) -> Any:
    return json.loads((folder / "fairway.openvex.json").read_text("utf-8"))


def problems(bill: Any) -> list[str]:
    """Return what CycloneDX 1.6 does not allow, of the fields that this document has."""
    found = []
    if (bill["bomFormat"], bill["specVersion"], bill["version"]) != ("CycloneDX", "1.6", 1):
        found.append("format")
    if not SERIAL.fullmatch(bill["serialNumber"]):
        found.append("serialNumber")
    components = [bill["metadata"]["component"], *bill["components"]]
    refs = [one["bom-ref"] for one in components]
    if len(set(refs)) != len(refs):
        found.append("a bom-ref is there twice")
    for one in components:
        if (
            one["type"] not in ("application", "library")
            or not one["name"]
            or not PURL.fullmatch(one["purl"])
        ):
            found.append(f"component {one['name']}")
        if extra := one.keys() - {"type", "bom-ref", "name", "version", "purl", "licenses"}:
            found.append(f"{one['name']} has {extra}")
        licences = one.get("licenses", [{"license": {"name": "-"}}])
        is_expression = len(licences) == 1 and licences[0].keys() == {"expression"}
        if not is_expression and not all(each.get("license", {}).get("name") for each in licences):
            found.append(f"licences of {one['name']}")
    edges = [edge["ref"] for edge in bill["dependencies"]]
    if sorted(edges) != sorted(refs):
        found.append("each component has one entry of dependencies")
    for edge in bill["dependencies"]:
        targets = edge["dependsOn"]
        if len(set(targets)) != len(targets) or not set(targets) <= set(refs) - {edge["ref"]}:
            found.append(f"dependencies of {edge['ref']}")
    return found


def test_the_bill_names_every_pin_and_follows_the_schema(bill: Any) -> None:
    assert problems(bill) == []
    pins = pinned((ROOT / "constraints.txt").read_text("utf-8"))
    assert {one["name"]: one["version"] for one in bill["components"]} == pins
    edges = {edge["ref"]: edge["dependsOn"] for edge in bill["dependencies"]}
    root = edges[bill["metadata"]["component"]["bom-ref"]]
    assert f"pkg:pypi/model-signing@{pins['model-signing']}" in root
    assert f"pkg:pypi/sigstore@{pins['sigstore']}" in edges[f"pkg:pypi/model-signing@{pins['model-signing']}"]
    licensed = sum("licenses" in one for one in bill["components"])
    assert licensed > 0.8 * len(pins)


def test_the_rules_find_what_they_forbid(bill: Any) -> None:
    spoils: tuple[Callable[[Any], object], ...] = (
        lambda b: b.update(specVersion="1.5"),
        lambda b: b["components"].append(b["components"][0]),
        lambda b: b["dependencies"].pop(),
        lambda b: b["dependencies"][0]["dependsOn"].append("pkg:pypi/absent@1"),
        lambda b: b["components"][0].update(purl="absent"),
        lambda b: b["components"][0].update(licenses=[{"license": {}}]),
    )
    for spoil in spoils:
        spoiled = copy.deepcopy(bill)
        spoil(spoiled)
        assert problems(spoiled)


def test_another_process_writes_the_same_bytes(folder: Path, tmp_path: Path) -> None:
    program = [sys.executable, str(ROOT / "scripts" / "sbom.py"), str(tmp_path)]
    subprocess.run(program, check=True, env={"PYTHONHASHSEED": "7"}, capture_output=True)
    for name in ("fairway.cdx.json", "fairway.openvex.json"):
        assert (tmp_path / name).read_bytes() == (folder / name).read_bytes()


def test_each_statement_is_about_a_pinned_component_and_justified(bill: Any, vex: Any) -> None:
    assert vex["@context"] == "https://openvex.dev/ns/v0.2.0"
    assert vex["@id"]
    assert vex["author"]
    assert vex["version"] >= 1
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", vex["timestamp"])
    refs = {one["bom-ref"] for one in bill["components"]}
    for one in vex["statements"]:
        assert re.fullmatch(r"CVE-\d{4}-\d+|GHSA(-[0-9a-z]{4}){3}", one["vulnerability"]["name"])
        assert one["status"] != "not_affected" or one["justification"]
        (product,) = one["products"]
        assert product["@id"] == bill["metadata"]["component"]["bom-ref"]
        assert {each["@id"] for each in product["subcomponents"]} <= refs


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"package": "absent"}, "not pinned"),
        ({"status": "safe"}, "status is none of"),
        ({"justification": "we are careful"}, "justification is none of"),
        ({"status": "affected"}, "action_statement"),
    ],
)
def test_a_statement_that_says_nothing_is_refused(change: dict[str, str], message: str) -> None:
    statement = {
        "vulnerability": "CVE-2025-0001",
        "package": "a",
        "timestamp": "2026-01-01T00:00:00Z",
        "status": "not_affected",
        "justification": "component_not_present",
    }
    source = {"author": "us", "version": 1, "statements": [statement | change]}
    with pytest.raises(BadStatement, match=message):
        vex_of(source, {"a": "1"}, {"name": "fairway", "version": "0"})


def test_a_line_that_pins_nothing_is_refused() -> None:
    assert pinned("# comment\nJinja2==3.1.6\nuvloop==1 ; sys_platform != 'win32'\n") == {
        "jinja2": "3.1.6",
        "uvloop": "1",
    }
    with pytest.raises(ValueError, match="pins no version"):
        pinned("jinja2>=3\n")
