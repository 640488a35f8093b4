"""A base and its adapters on a whole installation: one engine process, and answers of each its own."""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.adapters import write_adapter
from tests.support.stack import ROOT, Stack, fairway, kill

BUNDLED = ROOT / "models" / "tiny" / "checkpoint"
ENGINE = "services.worker.engine.process"

# An installation of its own is started; the limit only catches what hangs.
pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory, installations: None) -> Iterator[Stack]:
    state = tmp_path_factory.mktemp("adapters") / "state"
    with Stack.started(state, workers=1, replicas=1, settings={"FAIRWAY_SHEDDING": "false"}) as running:
        yield running


def answer(stack: Stack, model: str, key: str = "") -> Any:
    body = {"model": model, "prompt": "def fibonacci(n):", "max_tokens": 16, "temperature": 0}
    headers = {"authorization": f"Bearer {key or stack.api_key}", "content-type": "application/json"}
    request = urllib.request.Request(f"{stack.http}/v1/completions", json.dumps(body).encode(), headers)
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=60) as found:
        return json.loads(found.read()) | {"headers": dict(found.headers)}


def test_a_base_and_its_adapters_answer_from_one_process(stack: Stack, tmp_path: Path) -> None:
    state = ("--state-dir", str(stack.state))
    digests = {}
    for seed, name in enumerate(("mine", "yours")):
        folder = write_adapter(tmp_path / name, BUNDLED, seed=seed)
        options = ("--name", name, "--base", f"{stack.model}@latest", *state)
        published = fairway("models", "publish", str(folder), *options)
        assert "servable by torch and vllm" in published.stderr
        digests[name] = published.stdout.strip()
        fairway("deployments", "create", name, "--wait", *state)
    engines = stack.pids(ENGINE)
    assert len(engines) == 1
    before = {name: answer(stack, name) for name in (stack.model, *digests)}
    assert len({found["choices"][0]["text"] for found in before.values()}) == 3
    for name, digest in digests.items():
        assert before[name]["system_fingerprint"] == "fp_" + digest.removeprefix("sha256:")[:12]
    base = json.loads(fairway("models", "show", stack.model, "-o", "json", *state).stdout)
    shown = json.loads(fairway("models", "show", "mine", "-o", "json", *state).stdout)
    assert shown["manifest"]["base_digest"] == base["digest"]
    weights = base["manifest"]["weights_digest"]
    assert {found["headers"]["x-fairway-weights"] for found in before.values()} == {weights}
    assert {found["headers"]["x-fairway-exact"] for found in before.values()} == {"true"}
    bases = {name: found["headers"].get("x-fairway-base", "") for name, found in before.items()}
    assert bases == dict.fromkeys(digests, base["digest"]) | {stack.model: ""}
    kill(engines[0])
    for name, found in before.items():
        assert answer(stack, name)["choices"] == found["choices"]
    assert len(stack.pids(ENGINE)) == 1
    for name in digests:
        fairway("deployments", "delete", name, "--yes", *state)
    assert answer(stack, stack.model)["choices"] == before[stack.model]["choices"]


def test_a_new_version_of_an_adapter_is_rolled_out_and_charged_to_its_tenant(
    stack: Stack, tmp_path: Path
) -> None:
    state = ("--state-dir", str(stack.state))
    fairway("tenants", "create", "tuner", *state)
    made = fairway("keys", "create", "tuner-key", "--tenant", "tuner", "-o", "json", *state)
    key = json.loads(made.stdout)["secret"]
    digests = []
    for seed in (7, 8):
        folder = write_adapter(tmp_path / str(seed), BUNDLED, seed=seed)
        options = ("--name", "tuned", "--base", f"{stack.model}@latest", *state)
        digests.append(fairway("models", "publish", str(folder), *options).stdout.strip())
        if seed == 7:
            fairway("deployments", "create", "tuned", "--wait", *state)
    fingerprints = ["fp_" + digest.removeprefix("sha256:")[:12] for digest in digests]
    served = [answer(stack, "tuned", key)]
    terms = ("--steps", "100", "--inconclusive", "promote", "--name", "next")
    spans = [word for name in ("hold", "soak", "patience") for word in (f"--{name}", "1s")]
    fairway("rollouts", "start", "tuned", "--to", digests[1], *terms, *spans, *state)
    phase = ""
    while phase != "ROLLOUT_PHASE_COMPLETED":
        assert phase not in ("ROLLOUT_PHASE_ABORTED", "ROLLOUT_PHASE_REVERTED"), phase
        served += [answer(stack, "tuned", key) for _ in range(5)]
        phase = json.loads(fairway("rollouts", "show", "next", "-o", "json", *state).stdout)["phase"]
    served.append(answer(stack, "tuned", key))
    shown = [found["system_fingerprint"] for found in served]
    assert (shown[0], shown[-1], {*shown}) == (*fingerprints, {*fingerprints})
    assert len({(found["system_fingerprint"], found["choices"][0]["text"]) for found in served}) == 2
    assert len(stack.pids(ENGINE)) == 1

    def record() -> Any:
        used = fairway("usage", "--by", "tenant", "--by", "model", "-o", "json", *state)
        found = [one for one in json.loads(used.stdout)["records"] if one["tenant"] == "tuner"]
        return found[0] if len(found) == 1 else {}

    deadline_s = time.monotonic() + 30.0
    while int(record().get("requests", 0)) < len(served):
        assert time.monotonic() < deadline_s, record()
    found = record()
    assert found["model"] == "tuned"
    assert int(found["requests"]) == len(served)
    assert int(found["output_tokens"]) == sum(one["usage"]["completion_tokens"] for one in served)
    assert int(found["device_us"]) > 0
