"""Ten times more work than a pool can do, on an installation of its own: who is served, who is told to wait.

The null executor takes a set time for a step, so that the pool's speed does not depend on the machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final

import grpc
import pytest

from fairway.cli.fleet.options import bundled_checkpoint
from fairway.client import AdminClient, Client, Options, Priority
from fairway.v1 import common_pb2, inference_pb2_grpc
from fairway.v1 import controlplane_pb2 as cp
from fairway.v1 import inference_pb2 as pb
from services.core import errors
from services.rpc.status import from_rpc_error
from tests.support.command_line import CommandLine
from tests.support.local_servers import free_port
from tests.support.stack import fairway, metadata, processes, role_credentials

PATIENCE_S: Final = 60.0
MODEL: Final = "null"
# Eight sequences at 50 tokens a second each: 20 requests of 20 tokens per second.
PER_S: Final = 20
TOKENS: Final = 20
STANDARD_S: Final = 2.0
INTERACTIVE_S: Final = 5.0
QUEUE_TTL_S: Final = 30.0
SETTINGS: Final = {
    "FAIRWAY_NULL_STEP_S": "0.02",
    "FAIRWAY_MAX_SEQUENCES": "8",
    "FAIRWAY_QUEUE_TTL_S": f"{QUEUE_TTL_S}",
    "FAIRWAY_TTFT_TARGET_STANDARD_S": f"{STANDARD_S}",
    "FAIRWAY_TTFT_TARGET_INTERACTIVE_S": f"{INTERACTIVE_S}",
}
TENANTS: Final[dict[str, dict[str, Any]]] = {
    "usual": {},
    "greedy": {"committed_tokens_per_minute": 1},
    "frugal": {"degrade": cp.DegradePolicy(max_output_tokens=4)},
}
BATCH: Final = common_pb2.PRIORITY_BATCH
STANDARD: Final = common_pb2.PRIORITY_STANDARD
INTERACTIVE: Final = common_pb2.PRIORITY_INTERACTIVE

# What an application does, in an environment that has nothing of Fairway.
SDK: Final = """
import json, sys, openai
base, model, *keys = sys.argv[1:]
found = []
for key in keys:
    client = openai.OpenAI(base_url=base + "/v1", api_key=key, max_retries=0)
    asked = {"ignore_eos": True} if found else {"ignore_eos": True, "priority": "batch"}
    while True:
        try:
            client.completions.create(model=model, prompt="The tide", max_tokens=20, extra_body=asked)
        except openai.APIStatusError as error:
            found.append([type(error).__name__, error.status_code, error.response.headers["retry-after"]])
            break
print(json.dumps(found))
"""

Kind = tuple[str, "common_pb2.Priority.ValueType"]


@dataclass
class Outcome:
    """Of one request. Times in seconds from when it was sent."""

    ttft_s: float | None = None
    ended_s: float = 0.0
    error: errors.FairwayError | None = None


@dataclass
class Plant:
    """The installation, and a secret of each tenant."""

    endpoints: dict[str, Any]
    secrets: dict[str, str]
    stub: inference_pb2_grpc.InferenceServiceAsyncStub

    async def ask(self, tenant: str, priority: common_pb2.Priority.ValueType = STANDARD) -> Outcome:
        """Send one request and hear it to its end."""
        generation = pb.Generation(
            model=MODEL, prompt="The tide", max_output_tokens=TOKENS, priority=priority, ignore_eos=True
        )
        outcome, began_s = Outcome(), time.monotonic()
        try:
            async for event in self.stub.Generate(
                pb.GenerateRequest(generation=generation), metadata=metadata(self.secrets[tenant])
            ):
                if event.HasField("chunk") and outcome.ttft_s is None:
                    outcome.ttft_s = time.monotonic() - began_s
        except grpc.aio.AioRpcError as error:
            outcome.error = from_rpc_error(error)
        outcome.ended_s = time.monotonic() - began_s
        return outcome

    async def burst(self, *kinds: Kind, count: int) -> dict[Kind, list[Outcome]]:
        """Send ``count`` requests in turn of each kind, ten times as fast as the pool can do."""
        tasks: dict[Kind, list[asyncio.Task[Outcome]]] = {kind: [] for kind in kinds}
        async with asyncio.TaskGroup() as group:
            for number in range(count):
                kind = kinds[number % len(kinds)]
                tasks[kind].append(group.create_task(self.ask(*kind)))
                await asyncio.sleep(0.1 / PER_S)
        return {kind: [task.result() for task in found] for kind, found in tasks.items()}

    @contextlib.asynccontextmanager
    async def pressed(self) -> AsyncIterator[None]:
        """Hold the pool at twice of what it can do, from when it refuses somebody on."""
        refused = asyncio.Event()

        async def one(group: asyncio.TaskGroup) -> None:
            if (await self.ask("usual")).error is not None:
                refused.set()

        async def press() -> None:
            async with asyncio.TaskGroup() as group:
                while True:
                    group.create_task(one(group))
                    await asyncio.sleep(0.5 / PER_S)

        pressing = asyncio.create_task(press())
        try:
            async with asyncio.timeout(PATIENCE_S):
                await refused.wait()
            yield
        finally:
            pressing.cancel()
            await asyncio.wait([pressing])

    async def until_refused(self, tenant: str, **fields: Any) -> tuple[int, dict[str, str], Any]:
        """Return the first answer that is a refusal."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                found = await asyncio.to_thread(self.curl, tenant, **fields)
                if found[0] != 200:
                    return found

    def curl(self, tenant: str, *headers: str, **fields: Any) -> tuple[int, dict[str, str], Any]:
        """Return status, headers and body of a completion over HTTP."""
        body = {"model": MODEL, "prompt": "The tide", "max_tokens": TOKENS, "ignore_eos": True, **fields}
        given = [part for header in headers for part in ("--header", header)]
        done = subprocess.run(
            ["curl", "--silent", "--show-error", "--include", "--max-time", f"{PATIENCE_S:g}",
             "--header", f"Authorization: Bearer {self.secrets[tenant]}",
             "--header", "Content-Type: application/json", *given,
             "--data", json.dumps(body), f"{self.endpoints['http']}/v1/completions"],
            capture_output=True, check=True,
        )  # fmt: skip
        head, _, content = done.stdout.decode().partition("\r\n\r\n")
        status, *lines = head.split("\r\n")
        pairs = (line.partition(": ") for line in lines)
        return int(status.split()[1]), {name.lower(): text for name, _, text in pairs}, json.loads(content)


@pytest.fixture(scope="module")
def installation(tmp_path_factory: pytest.TempPathFactory, installations: None) -> Iterator[Path]:
    state = tmp_path_factory.mktemp("overload") / "state"
    ports = (f"--http-port={free_port()}", f"--grpc-port={free_port()}")
    fairway("up", "--detach", "--no-model", *ports, "--state-dir", str(state), settings=SETTINGS)
    try:
        cli = CommandLine(state)
        cli("models", "publish", str(bundled_checkpoint()), "--name", MODEL, "--tag", "latest")
        yield state
    finally:
        fairway("down", "--state-dir", str(state))
        assert processes(state) == [], "processes were left behind"


@pytest.fixture(scope="module")
def known(installation: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """The endpoints, and a secret of each tenant. The model serves, and the gateway knows who may ask."""
    endpoints: dict[str, Any] = json.loads((installation / "endpoints.json").read_text())
    return endpoints, asyncio.run(deployed(endpoints))


async def deployed(endpoints: dict[str, Any]) -> dict[str, str]:
    secrets = {}
    credentials = role_credentials(endpoints)
    async with AdminClient(
        [endpoints["controlplane"]], admin_key=endpoints["admin_key"], credentials=credentials
    ) as admin:
        named = cp.Metadata(name=MODEL)
        await admin.deployments.create(
            cp.Deployment(metadata=named, model=MODEL, version="latest", executor="null", replicas=1)
        )
        for name, fields in TENANTS.items():
            named = cp.Metadata(name=name)
            await admin.tenants.create(cp.Tenant(metadata=named, max_priority=INTERACTIVE, **fields))
            key = cp.Key(metadata=named, role=cp.KEY_ROLE_TENANT, tenant=name)
            secrets[name] = (await admin.keys.create(key)).secret
        await admin.deployments.wait_ready(MODEL, timeout_s=PATIENCE_S)
    async with grpc.aio.insecure_channel(endpoints["grpc"]) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        for secret in secrets.values():
            await until_listed(stub, secret)
    return secrets


async def until_listed(stub: inference_pb2_grpc.InferenceServiceAsyncStub, secret: str) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while True:
            with contextlib.suppress(grpc.aio.AioRpcError):  # the key is not known yet
                answer = await stub.ListModels(pb.ListModelsRequest(), metadata=metadata(secret))
                if any(model.ready_replicas for model in answer.models):
                    return
            await asyncio.sleep(0.05)


@pytest.fixture
async def plant(known: tuple[dict[str, Any], dict[str, str]]) -> AsyncIterator[Plant]:
    endpoints, secrets = known
    async with grpc.aio.insecure_channel(endpoints["grpc"]) as channel:
        yield Plant(endpoints, secrets, inference_pb2_grpc.InferenceServiceStub(channel))


def sensible(error: errors.FairwayError) -> bool:
    """Whether it says when to come back: not at once, and not in an hour."""
    return error.retry_after_s is not None and 1.0 <= error.retry_after_s <= 90.0


async def test_a_burst_on_a_pool_of_unknown_speed_is_cut_in_time(plant: Plant) -> None:
    """Refused as soon as two seconds of work were measured; nobody waits for a whole time to live."""
    usual: Kind = "usual", STANDARD
    outcomes = (await plant.burst(usual, count=12 * PER_S))[usual]
    refused = [found for found in outcomes if found.error is not None]
    assert len(refused) >= 2 * PER_S, "of twelve seconds of work about seven are done or kept"
    assert {type(found.error) for found in refused} == {errors.Overloaded}
    assert all(sensible(found.error) for found in refused if found.error is not None)
    assert max(found.ended_s for found in refused) < QUEUE_TTL_S / 2
    served = [found.ttft_s for found in outcomes if found.ttft_s is not None]
    assert len(served) >= 2 * PER_S
    assert max(served) < QUEUE_TTL_S / 2


async def test_ten_times_the_load_costs_the_low_classes_and_not_the_high_one(plant: Plant) -> None:
    kinds: list[Kind] = [("usual", INTERACTIVE), ("usual", STANDARD), ("greedy", STANDARD), ("frugal", BATCH)]
    high, standard, greedy, batch = kinds
    turns = [batch, greedy, standard, batch, greedy, batch, high, batch, standard, greedy]
    async with plant.pressed():
        await plant.ask("greedy", INTERACTIVE)  # above its rate, as soon as the scheduler is told
        outcomes = await plant.burst(*turns, count=6 * PER_S)
    interactive = [found.ttft_s for found in outcomes[high] if found.ttft_s is not None]
    assert all(found.error is None for found in outcomes[high]), "it fits, and what is below it goes first"
    assert median(interactive) <= INTERACTIVE_S
    assert max(interactive) < QUEUE_TTL_S / 2, "a busy machine delays one, and no queue does"
    wanted: dict[Kind, set[type[errors.FairwayError]]] = {
        standard: {errors.Overloaded},
        greedy: {errors.OverCommitment, errors.Overloaded},
        batch: {errors.Overloaded},
    }
    shares = {}
    for kind, error_types in wanted.items():
        refused = [found.error for found in outcomes[kind] if found.error is not None]
        assert {type(error) for error in refused} <= error_types, kind
        assert all(sensible(error) for error in refused)
        shares[kind] = len(refused) / len(outcomes[kind])
    assert shares[batch] > 0.5
    assert errors.OverCommitment in {type(found.error) for found in outcomes[greedy]}
    waited = [found.ended_s for kind in wanted for found in outcomes[kind] if found.error is not None]
    assert max(waited) < QUEUE_TTL_S / 2, "early, and not after a time to live"


async def test_over_http_a_refusal_says_when_to_come_back(plant: Plant, openai_python: str) -> None:
    """To curl, and to the OpenAI SDK as an error of its own."""
    command = [openai_python, "-c", SDK, plant.endpoints["http"], MODEL]
    command += [plant.secrets["usual"], plant.secrets["greedy"]]
    async with plant.pressed():
        await plant.ask("greedy", INTERACTIVE)  # above its rate from here on, whatever came before
        sdk, batch, greedy = await asyncio.gather(
            asyncio.to_thread(subprocess.run, command, capture_output=True, timeout=PATIENCE_S),
            plant.until_refused("usual", priority="batch"),
            plant.until_refused("greedy"),
        )
    for (status, headers, body), wanted in ((batch, (503, "overloaded")), (greedy, (429, "over_commitment"))):
        assert (status, body["error"]["code"]) == wanted
        assert 1 <= int(headers["retry-after"]) <= 90
        assert int(headers["retry-after-ms"]) >= 1000
    assert sdk.returncode == 0, sdk.stderr.decode()
    found = json.loads(sdk.stdout)
    assert [(name, status) for name, status, _ in found] == [
        ("InternalServerError", 503),
        ("RateLimitError", 429),
    ]
    assert all(1 <= int(later) <= 90 for _, _, later in found)


async def until_degraded(plant: Plant) -> tuple[str, dict[str, str], Any]:
    """Return a request's key with its answer: a gateway hears of the pressure once a second."""
    number, headers, answer = 0, dict[str, str](), None
    while "x-fairway-degraded" not in headers:
        number += 1
        key = f"Idempotency-Key: {number}"
        status, headers, answer = await asyncio.to_thread(plant.curl, "frugal", key, priority="interactive")
        assert status == 200, answer
    return f"Idempotency-Key: {number}", headers, answer


async def until_eased(plant: Plant) -> Any:
    """Return the first answer that is as it was asked for."""
    headers, answer = {"x-fairway-degraded": ""}, None
    async with asyncio.timeout(PATIENCE_S):
        while "x-fairway-degraded" in headers:
            _, headers, answer = await asyncio.to_thread(plant.curl, "frugal", priority="interactive")
    return answer


async def test_a_degraded_answer_says_so_and_its_replay_says_the_same(plant: Plant) -> None:
    cut = f"output_capped; original={TOKENS}; applied=4"
    options = Options(max_output_tokens=TOKENS, priority=Priority.INTERACTIVE, ignore_eos=True)
    async with (
        plant.pressed(),
        asyncio.timeout(PATIENCE_S),
        Client(plant.endpoints["grpc"], api_key=plant.secrets["frugal"]) as client,
    ):
        key, headers, first = await until_degraded(plant)
        # The client makes a key of its own for each generation.
        answers = [await client.complete(MODEL, "The tide", options) for _ in range(3)]
    assert headers["x-fairway-degraded"] == cut
    assert first["usage"]["completion_tokens"] == 4
    assert first["degraded"] == [{"kind": "output_capped", "original": "20", "applied": "4"}]
    assert any(found.accepted.degradations for found in answers)
    fresh = await until_eased(plant)
    assert fresh["usage"]["completion_tokens"] == TOKENS
    status, headers, again = await asyncio.to_thread(plant.curl, "frugal", key, priority="interactive")
    assert (status, headers["idempotent-replayed"]) == (200, "true")
    assert headers["x-fairway-degraded"] == cut
    assert again == first
