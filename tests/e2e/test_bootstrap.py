"""`fairway bootstrap` on a fleet that something else started."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

from fairway.cli.fleet.options import BUNDLED_CLASSIFIER
from tests.support.stack import ROOT, Stack, fairway
from tests.support.updating import publish_twin


def bootstrap(stack: Stack, state: Path) -> list[str]:
    found = stack.endpoints
    return [
        "bootstrap",
        f"--state-dir={state}",
        f"--registry={found['registry']}",
        f"--controlplane={found['controlplane']}",
        f"--gateway={found['grpc']}",
        "--replicas=2",
    ]


def test_bootstrap_may_be_repeated_and_keeps_the_key(stack: Stack, tmp_path: Path) -> None:
    secrets = tmp_path / "secrets"
    secrets.mkdir()
    for name in ("admin_key", "api_key"):
        (secrets / name).write_text(stack.endpoints[name])
    shutil.copytree(stack.state / "certs", tmp_path / "certs")
    for _ in range(2):
        fairway(*bootstrap(stack, tmp_path))
        written = json.loads((tmp_path / "endpoints.json").read_text())
        assert written["api_key"] == stack.api_key
        assert written["model"] == stack.model
        assert (tmp_path / "endpoints.json").stat().st_mode & 0o077 == 0
    models = fairway("models", "list", "--state-dir", str(tmp_path)).stdout
    assert stack.model in models
    assert BUNDLED_CLASSIFIER in models


def test_bootstrap_without_an_admin_key_says_where_it_belongs(stack: Stack, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "fairway.cli.main", *bootstrap(stack, tmp_path)],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=ROOT,
    )
    assert done.returncode == 1
    assert str(tmp_path / "secrets" / "admin_key") in done.stderr.replace("\n", "")
    assert "FAIRWAY_ADMIN_KEY_FILE" in done.stderr


def test_a_restart_keeps_what_operators_changed_or_deleted(tmp_path: Path, installations: None) -> None:
    """On real stores: an updated deployment keeps its version, a deleted one stays deleted."""
    state = ("--state-dir", str(tmp_path / "state"))

    def deployed() -> dict[str, str]:
        found = json.loads(fairway("deployments", "list", "-o", "json", *state).stdout)["deployments"]
        return {one["metadata"]["name"]: one["version_digest"] for one in found}

    with Stack.started(tmp_path / "state", workers=1, replicas=1) as stack:
        publish_twin(stack, tmp_path / "twin", "twin")
        first = deployed()
        fairway("deployments", "update", stack.model, "--version", "twin", "--wait", *state)
        updated = deployed()
        assert updated != first
        fairway("down", *state)
        assert "stays as it is" in fairway("up", "--detach", *state).stderr
        assert deployed() == updated
        fairway("deployments", "delete", stack.model, "--yes", *state)
        # What a restart runs once its roles serve: the same steps without the wait for the roles.
        done = fairway(
            *bootstrap(
                Stack(stack.state, json.loads((stack.state / "endpoints.json").read_text())), stack.state
            )
        )
        assert "stays undeployed" in done.stderr
        assert deployed().keys() == {BUNDLED_CLASSIFIER}
