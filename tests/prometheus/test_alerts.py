"""A promise that a real installation breaks reaches a pager, by Prometheus and by the control plane."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import pytest

from tests.prometheus.servers import Receiver, alertmanager, get, prometheus, query, until
from tests.support.stack import Stack, fairway

BURNS = "FairwayObjectiveBurnsFast"
REQUESTS = 30  # more than an alert needs


@dataclass
class Watched:
    stack: Stack
    prometheus: str
    # That of Prometheus, and that of the control plane.
    alertmanagers: tuple[str, str]
    receivers: tuple[Receiver, Receiver]


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory, installations: None) -> Iterator[Watched]:
    folder, receivers = tmp_path_factory.mktemp("watched"), (Receiver(), Receiver())
    with (
        receivers[0].open(),
        receivers[1].open(),
        alertmanager(folder / "a", receivers[0]) as first,
        alertmanager(folder / "b", receivers[1]) as second,
    ):
        settings = {
            "FAIRWAY_ALERTMANAGERS": second,
            "FAIRWAY_ZONE": "eu-1a",
            "FAIRWAY_COST_PER_HOUR": "3.6",
            "FAIRWAY_DEVICE_PEAK_FLOPS": "1e12",
        }
        with (
            Stack.started(folder / "state", workers=1, replicas=1, settings=settings) as stack,
            prometheus(folder / "prometheus", jobs(stack), alertmanager=first) as url,
        ):
            yield Watched(stack, url, (first, second), receivers)


def jobs(stack: Stack) -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = {}
    for process, address in stack.endpoints["metrics"].items():
        found.setdefault(process.partition("-")[0], {})[process] = address
    return found


def ask(stack: Stack, number: int) -> None:
    body = {
        "model": stack.model,
        "messages": [{"role": "user", "content": f"{number}: a story of two ships"}],
        "max_tokens": 16,
    }
    headers = {"authorization": f"Bearer {stack.api_key}", "content-type": "application/json"}
    request = urllib.request.Request(f"{stack.http}/v1/chat/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=120) as answer:
        assert answer.status == 200


def traffic(stack: Stack) -> None:
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda number: ask(stack, number), range(REQUESTS)))


def test_a_broken_promise_reaches_the_pager_both_ways_and_once(watched: Watched) -> None:
    stack, model = watched.stack, watched.stack.model
    own = ("--state-dir", str(stack.state))
    fairway("objectives", "create", "impossible", "--model", model, "--total", "1ms", *own)
    traffic(stack)
    for receiver in watched.receivers:
        (alert, *_) = until(partial(receiver.alerts, BURNS, "firing"), "the alert is notified")
        assert alert["labels"] == {
            "alertname": BURNS,
            "severity": "page",
            "objective": "impossible",
            "sli": "total",
            "model": model,
        }
        texts = alert["annotations"]
        assert texts["command"] == f"fairway diagnose --model {model} --metric total --since 15m"
        assert texts["runbook_url"] == "docs/operations/observability.md#alerts"
        assert texts["summary"]
        assert texts["action"]
    # The two are the same to an Alertmanager, so one that receives both notifies once.
    prints = [
        {one["fingerprint"] for one in get(f"{url}/api/v2/alerts") if one["labels"]["alertname"] == BURNS}
        for url in watched.alertmanagers
    ]
    assert prints[0] == prints[1]
    assert len(prints[0]) == 1
    fairway("objectives", "delete", "impossible", "--yes", *own)
    for receiver in watched.receivers:
        until(partial(receiver.alerts, BURNS, "resolved"), "its end is notified")


def test_indicators_have_values_on_an_installation(watched: Watched) -> None:
    """Group intervals are 30 s, and a rate needs two samples: traffic goes on meanwhile."""
    wanted = {
        "fairway:stream_completion:ratio_rate5m": {"tenant", "model", "zone"},
        "fairway:kv_hit:ratio_rate5m": {"tenant", "model", "zone"},
        "fairway:tokens_per_device_second:ratio_rate5m": {"tenant", "model", "zone"},
        "fairway:cost_per_1k_tokens:ratio_rate5m": {"tenant", "model", "zone"},
        "fairway:mfu:ratio_rate5m": {"model", "zone"},
        "fairway:tokens_per_device:rate5m": {"zone"},
        "fairway:idle_device_minutes:increase1h": {"zone"},
        "fairway:out_of_memory:increase1h": {"model", "zone"},
    }
    found: dict[str, dict[frozenset[tuple[str, str]], float]] = {}

    def all_there() -> bool:
        traffic(watched.stack)
        found.update({name: query(watched.prometheus, name) for name in wanted})
        return all(found.values())

    until(all_there, f"values of all of {list(wanted)}", 400)
    for name, labels in wanted.items():
        for one, value in found[name].items():
            assert {label for label, _ in one} == labels, name
            assert dict(one)["zone"] == "eu-1a", name
            assert value >= 0, name
    assert 0 < max(found["fairway:mfu:ratio_rate5m"].values()) < 1
    assert max(found["fairway:cost_per_1k_tokens:ratio_rate5m"].values()) > 0
    assert max(found["fairway:stream_completion:ratio_rate5m"].values()) == 1.0
