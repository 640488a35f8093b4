"""One fleet of containers for the whole run, and the line that says how it went.

Without a Docker engine the run ends with status 3 and "outcome": "SKIPPED", which is no success.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator

import pytest

from tests.compose.fleet import IMAGE, Fleet, command, compose_command, why_not

NO_ENGINE = 3
_counts: pytest.StashKey[Counter[str]] = pytest.StashKey()
_missing: pytest.StashKey[str] = pytest.StashKey()


def pytest_configure(config: pytest.Config) -> None:
    counts: Counter[str] = Counter()
    config.stash[_counts] = counts
    config.stash[_missing] = why_not()
    config.pluginmanager.register(Counting(counts))


def pytest_sessionstart(session: pytest.Session) -> None:
    if reason := session.config.stash[_missing]:
        pytest.exit(f"SKIPPED, nothing was tested: {reason}", returncode=NO_ENGINE)
    # Here and not in the fixture: the first build takes minutes, and the limits of a test do not hold for it.
    words = compose_command()
    assert words is not None
    environment = {**os.environ, "FLEET_IMAGE": IMAGE}
    command(*words, "build", "registry", timeout_s=3600, env=environment)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Images are built and containers restart: the limit only catches what hangs."""
    for item in items:
        item.add_marker(pytest.mark.timeout(900))


class Counting:
    def __init__(self, counts: Counter[str]) -> None:
        self._counts = counts

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            self._counts[report.outcome] += 1


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    counts, missing = config.stash.get(_counts, Counter()), config.stash.get(_missing, "")
    outcome = "SKIPPED" if missing else "FAILED" if counts["failed"] or not counts["passed"] else "PASSED"
    result = {
        "outcome": outcome,
        "passed": counts["passed"],
        "failed": counts["failed"],
        "skipped": counts["skipped"],
        **({"reason": missing} if missing else {}),
    }
    print(f"RESULT {json.dumps(result)}", flush=True)


@pytest.fixture(scope="session")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """The whole installation with two workers; the run leaves nothing of it."""
    running = Fleet.at(tmp_path_factory.mktemp("compose"), f"fairway-test-{os.getpid()}")
    try:
        running.up()
        yield running
    finally:
        running.remove()
    assert running.leftovers() == []
