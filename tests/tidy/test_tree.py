"""What the repository says must be true of it: imports, stubs, commands, and nothing of one machine."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from services.runtime import config
from tests.tidy.sources import ROOT, project_files

BIN: Final = Path(sys.executable).parent
CPU_INDEX_USERS: Final = {
    "fairway/engines/install.py",
    "scripts/setup_env.py",
    "docs/decisions/0004-torch-installation.md",
    "Makefile",
    "README.md",
}
_S: Final = "/"  # the patterns below must not match themselves
MACHINE: Final = {
    "a path of one machine": re.compile(
        rf"(?<![\w.]){_S}(?:work|root|opt|Users|home{_S}\w+|var{_S}tmp|mnt){_S}[\w.-]"
    ),
    "a host of a package registry": re.compile(
        r"pypi[.]org|pythonhosted[.]org|npmjs[.]|anaconda[.]org|crates[.]io|devpi|artifactory", re.IGNORECASE
    ),
}
CPU_INDEX: Final = re.compile(r"download[.]pytorch[.]org")


def machine_traces(text: str) -> list[str]:
    """Return what in a text belongs to one machine."""
    return [
        f"{line}: {kind}"
        for line, content in enumerate(text.splitlines(), start=1)
        for kind, pattern in MACHINE.items()
        if pattern.search(content)
    ]


def _texts() -> list[tuple[str, str]]:
    texts = []
    for path in project_files():
        data = path.read_bytes()
        name = path.relative_to(ROOT).as_posix()
        if b"\0" not in data[:8192] and len(data) < 2_000_000 and name != "tests/tidy/test_tree.py":
            texts.append((name, data.decode("utf-8", "replace")))
    return texts


def test_no_file_names_this_machine() -> None:
    assert [f"{name}:{trace}" for name, text in _texts() for trace in machine_traces(text)] == []


def test_only_the_installation_names_the_cpu_index() -> None:
    assert {name for name, text in _texts() if CPU_INDEX.search(text)} <= CPU_INDEX_USERS


@pytest.mark.parametrize("path", ["work/main/x", "root/.cache", "home/ann/code", "Users/ann", "var/tmp/x"])
def test_machine_rule_catches(path: str) -> None:
    assert machine_traces(f"see /{path}") != []


@pytest.mark.parametrize(
    "text", ["/v1/models", "src/work/items", "/tmp/x", "https://example.com/root/x", "/homepage"]
)
def test_machine_rule_leaves_the_rest_alone(text: str) -> None:
    assert machine_traces(text) == []


def test_import_rules_hold() -> None:
    done = subprocess.run(
        [str(BIN / "lint-imports"), "--no-logo"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_stubs_are_current() -> None:
    done = subprocess.run(
        [sys.executable, "scripts/gen_stubs.py", "--check"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    "name", ["README.md", "CONTRIBUTING.md", "docs/operations/running.md", "docs/benchmarks.md"]
)
def test_documented_make_targets_exist(name: str) -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z0-9-]+):", makefile, re.MULTILINE))
    named = set(re.findall(r"\bmake ([a-z][a-z0-9-]+)(?![A-Za-z0-9-])", (ROOT / name).read_text()))
    assert named - targets == set()


def test_every_target_that_people_use_is_in_the_help() -> None:
    done = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    for target in ("up", "down", "test", "verify", "verify-full", "fix", "stubs", "e2e", "chaos", "clean"):
        assert f"make {target} " in done.stdout


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "docs"])
def test_relative_links_lead_somewhere(name: str) -> None:
    start = ROOT / name
    pages = sorted(start.rglob("*.md")) if start.is_dir() else [start]
    dead = [
        f"{page.relative_to(ROOT)}: {target}"
        for page in pages
        for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text())
        if "://" not in target and not target.startswith("mailto:") and not (page.parent / target).exists()
    ]
    assert dead == []


def anchors(text: str) -> set[str]:
    """Return the anchors of a page: its headings as GitHub names them, and the explicit ones."""
    found = set(re.findall(r'<a id="([^"]+)"', text))
    for heading in re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S), re.M):
        found.add(re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-"))
    return found


def test_links_lead_to_headings() -> None:
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
    dead = [
        f"{page.relative_to(ROOT)}: {target}#{anchor}"
        for page in pages
        for target, anchor in re.findall(r"\]\(([^)#\s:]*)#([^)\s]+)\)", page.read_text())
        if anchor not in anchors((page.parent / target if target else page).read_text())
    ]
    assert dead == []


def test_anchors_are_those_of_headings() -> None:
    text = "# One\n\n```\n# no heading\n```\n\n## `fairway up` fails, twice\n"
    assert anchors(text) == {"one", "fairway-up-fails-twice"}


@pytest.mark.parametrize("folder", ["docs/architecture", "docs/operations"])
def test_an_index_names_every_page(folder: str) -> None:
    index = (ROOT / folder / "README.md").read_text()
    pages = {path.name for path in (ROOT / folder).glob("*.md")} - {"README.md"}
    assert pages - set(re.findall(r"\]\(([a-z]+\.md)\)", index)) == set()


def test_every_setting_is_on_the_page_of_settings() -> None:
    pages = (ROOT / "docs" / "reference" / "settings.md").read_text()
    known = {config.PREFIX + name.upper() for name in config.Settings.model_fields}
    assert known - set(re.findall(r"`(FAIRWAY_[A-Z0-9_]+)`", pages)) == set()


def test_commands_that_alerts_name_are_there() -> None:
    rules = (ROOT / "deploy" / "prometheus" / "fairway.yml").read_text()
    for words in re.findall(r"`fairway ([a-z -]+)", rules):
        done = subprocess.run(
            [str(BIN / "fairway"), *words.split(), "--help"], capture_output=True, timeout=60
        )
        assert done.returncode == 0, words


def test_pins_satisfy_the_bounds_and_have_no_local_version() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    assert [name for name, version in pins.items() if "+" in version] == []
    declared = re.findall(r'^    "([A-Za-z0-9_.-]+)>=', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    known = {name.lower().replace("_", "-") for name in pins}
    assert [name for name in declared if name.lower().replace("_", "-") not in known] == []
