"""A worker that holds a version without running it: its replica starts without a download."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.support.command_line import CommandLine
from tests.support.stack import Stack

HANG_S = 90.0


@pytest.mark.timeout(300)
def test_a_promoted_replica_fetches_nothing(tmp_path: Path, installations: None) -> None:
    with Stack.started(tmp_path / "state", workers=2, replicas=1) as stack:
        cli = CommandLine(stack.state)
        cli("deployments", "update", stack.model, "--min-replicas", "1", "--max-replicas", "2")
        digest = cli("deployments", "show", stack.model, "-o", "json").json["version_digest"]
        idle = until_prefetched(cli, digest)
        fetched = downloads(stack, idle)
        assert len(fetched) == 1, fetched
        began_s = time.monotonic()
        cli("scaling", "override", stack.model, "2")
        until_ready(cli, stack.model, 2)
        print(f"promotion: {time.monotonic() - began_s:.2f} s")
        assert downloads(stack, idle) == fetched, "a promotion downloaded something"


def until_prefetched(cli: CommandLine, digest: str) -> str:
    """Return the node that holds the version without running it."""
    deadline = time.monotonic() + HANG_S
    while True:
        for node in cli("nodes", "list", "-o", "json").json["nodes"]:
            if node.get("prefetched") == [digest]:
                assert not node.get("versions")
                return str(node["metadata"]["name"])
        assert time.monotonic() < deadline
        time.sleep(0.1)


def until_ready(cli: CommandLine, model: str, replicas: int) -> None:
    deadline = time.monotonic() + HANG_S
    while cli("deployments", "show", model, "-o", "json").json["status"].get("ready_replicas") != replicas:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def downloads(stack: Stack, worker: str) -> list[str]:
    """Return the folders that a worker completed, by its log."""
    log = stack.state / "logs" / f"{worker}.log"
    return [line for line in log.read_text().splitlines() if "model_folder.completed" in line]
