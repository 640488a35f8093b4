"""What one process of a parallel run runs as a whole, and in which order."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from xdist.scheduler import LoadScopeScheduling
from xdist.workermanage import WorkerController

from tests.support.installations import KINDS, shared_by

ROOT = Path(__file__).parents[2]

# What takes a file over fifteen seconds alone, the longest first: those that wait between those that compute.
LONGEST = (
    *KINDS,
    "tests/unit/cli/test_up.py",
    "tests/sim/test_seeds.py",
    "tests/security/test_rpc_floods.py",
    "tests/sim/test_planted.py",
    "tests/security/test_limits_storm.py",
    "tests/sim/lab/test_outcomes.py",
    "tests/integration/worker/test_drafts.py",
    "tests/security/test_store_identity.py",
    "tests/unit/worker/engine/test_oracle.py",
    "tests/security/test_log_disk.py",
    "tests/contract/test_idempotency_model.py",
    "tests/unit/worker/engine/test_process.py",
    "tests/integration/client/test_gateways.py",
    "tests/sim/engine/test_shared_blocks.py",
    "tests/unit/worker/engine/native/test_prebuilt.py",
    "tests/integration/worker/test_damaged_files.py",
    "tests/sim/lab/test_simulate_cli.py",
    "tests/integration/test_redis_topologies.py",
    "tests/sim/test_scale.py",
    "tests/security/test_text_processes.py",
    "tests/integration/test_idempotency_resume.py",
    "tests/integration/controlplane/test_two_control_planes.py",
    "tests/tidy/test_house.py",
    "tests/security/test_http_connections.py",
    "tests/integration/registry/test_kill.py",
    "tests/security/test_stalled_readers.py",
    "tests/integration/test_informer_etcd.py",
)


def group_of(nodeid: str) -> str:
    """Return the file, or the installation that it shares with others."""
    file = nodeid.partition("::")[0]
    return shared_by(ROOT / file) or file


def sort(items: list[pytest.Item]) -> None:
    """The longest groups come first: a run ends when its last group does.

    The others come by their number of tests, so that files that wait and files that compute are mixed.
    """
    counts = Counter(group_of(item.nodeid) for item in items)
    places = {group: place for place, group in enumerate(LONGEST)}

    def rank(item: pytest.Item) -> tuple[int, int, str]:
        group = group_of(item.nodeid)
        return places.get(group, len(places)), -counts[group], item.nodeid.partition("::")[0]

    items.sort(key=rank)


class ByGroup(LoadScopeScheduling):  # type: ignore[misc]
    """Keeps a group together in a run of several processes."""

    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid)

    def remove_node(self, node: WorkerController) -> str | None:
        """Return the test in which a process died: it has failed, the others of its group run elsewhere.

        xdist itself would run that test again, in process after process, and hand out what has passed as
        groups without a test, after which a process waits forever.
        """
        left = {
            name: {item: run for item, run in group.items() if not run}
            for name, group in self.assigned_work[node].items()
        }
        died_in: str | None = next((item for group in left.values() for item in group), None)
        if died_in is not None:
            del left[group_of(died_in)][died_in]
            self.assigned_work[node] = {name: group for name, group in left.items() if group}
        super().remove_node(node)
        return died_in

    def _reschedule(self, node: WorkerController) -> None:
        """Give a process its next group once it has collected the tests."""
        if node in self.registered_collections:
            super()._reschedule(node)

    def schedule(self) -> None:
        """Hand out two groups, or one and the end: a process runs a test once it knows what is next."""
        super().schedule()
        super().schedule()
