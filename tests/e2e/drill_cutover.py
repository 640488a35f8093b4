"""`make drill-cutover`: cutovers and reverts under load, with gateways and workers cut off from etcd.

Three gateways and four workers with the null executor; a proxy is on every edge. Each turn rolls a version
out to its final step and reverts it (``TURNS``). Meanwhile a gateway is cut off from etcd, after or before
the rollout's route was written, and the workers receive the cutover late. Other turns delete the model files
of all workers at once and then restart them two by two, kill an engine, take an engine's memory, so that a
step's allocation fails, and revert to a version that has left memory. At the end routes that lead nowhere are
written by hand.

The last line is ``RESULT {json}``:

- ``old_after_ack``: requests that began after the time of the event CUT_OVER and were answered by the version
  before, or after that of REVERTED and were answered by the candidate
- ``failed``: requests that ended otherwise than with all tokens
- ``revert_p95_s``: from the call of a revert until the last request began that the candidate answered
- ``storm_ready_s``: the longest time from the kill of two workers until both serve again
- ``memory_resumed``: streams that lost their engine to an allocation that failed, and went on

Exits 0 if the first three are 0, 0 and at most 60, a stream resumed, and the gateways reported the routes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import grpc

from bench.overhead import quantile
from fairway.cli.calls import credentials_of, publish_folder
from fairway.cli.state import read_secret
from fairway.client import AdminClient
from fairway.v1 import controlplane_pb2 as cp
from fairway.v1 import inference_pb2 as pb
from fairway.v1 import inference_pb2_grpc, worker_pb2
from services.core.records import dump
from services.core.rollouts.routes import ROUTES, ModelRoute, RouteArm
from services.ports.store import Delete, Operation, Put
from tests.chaos.faults import Fault, Lift, LoseModels, Net, inject
from tests.chaos.fleet import Fleet, Shape, read_page
from tests.support.faulty_versions import VersionFault, write_version
from tests.support.model_folder import safetensors
from tests.support.stack import ROOT, metadata

NAME: Final = "drill"
WORKERS, GATEWAYS = 4, 3
CLIENTS: Final = 4  # of each gateway
TOKENS: Final = 16
OTHER_BYTES: Final = 4096
WORKING_BYTES: Final = 64 * 2**20  # what a step allocates
PAUSE_S: Final = 0.05  # between two requests of a client
OLD_VIEW_S: Final = 17.0  # after it a gateway that is cut off takes the stable version only
AFTER_S: Final = 6.0  # of traffic after a cutover
SETTLED_S: Final = 3.0  # of traffic after a revert
LONGEST_S: Final = 120.0
MOST_REVERT_S: Final = 60.0
REPORT_S: Final = 10.0
LATE_S: Final = 2.5  # for which no worker receives the cutover; their leases last 5 s
CUT, LATE = "gateway-2", "worker-*"
SETTINGS: Final = {
    "PYTHONPATH": f"{ROOT}:{ROOT / 'tests/support/rollout_faults'}",
    "FAIRWAY_NULL_STEP_S": "0.02",
    "FAIRWAY_QUEUE_TTL_S": "5",
    "FAIRWAY_SHEDDING": "false",
}


@dataclass(frozen=True, slots=True)
class Turn:
    """A cutover and its revert. ``cut``: the gateway is cut off from ``before`` the rollout until its
    cutover, from the ``soak`` until the revert, or not. ``after``: what happens between them."""

    name: str
    cut: str = ""
    keep_warm_s: int = 600
    after: str = ""


TURNS: Final = (
    Turn("plain"),
    Turn("a gateway is cut off in the soak", cut="soak"),
    Turn("a gateway is cut off before the rollout", cut="before"),
    Turn("every worker loses its model files", after="storm"),
    Turn("an engine is killed", after="kill"),
    Turn("an engine is out of memory", after="memory"),
    Turn("the version before has left memory", keep_warm_s=0, after="leave"),
)


@dataclass(frozen=True, slots=True)
class Answer:
    """One request: when it began (wall clock), the version that it was accepted for last, its failure, and
    how often it was placed again after a loss."""

    gateway: str
    began_unix_s: float
    version_digest: str
    failure: str
    resumes: int


@dataclass(slots=True)
class CutoverLoad:
    """Clients of every gateway, each with a session of its own."""

    answers: list[Answer] = field(default_factory=list)

    @asynccontextmanager
    async def running(self, gateways: dict[str, str], api_key: str) -> AsyncIterator[None]:
        stopping = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            for name, address in gateways.items():
                group.create_task(self._clients(name, address, api_key, stopping))
            try:
                yield
            finally:
                stopping.set()

    def since(self, unix_s: float) -> list[Answer]:
        return [one for one in self.answers if one.began_unix_s >= unix_s]

    async def _clients(self, gateway: str, address: str, api_key: str, stopping: asyncio.Event) -> None:
        async with grpc.aio.insecure_channel(address, (("grpc.enable_http_proxy", 0),)) as channel:
            stub = inference_pb2_grpc.InferenceServiceStub(channel)

            async def client(number: int) -> None:
                while not stopping.is_set():
                    session = f"{gateway}-{number}-{len(self.answers)}"
                    self.answers.append(await _ask(stub, gateway, session, api_key))
                    await asyncio.sleep(PAUSE_S)

            await asyncio.gather(*map(client, range(CLIENTS)))


async def _ask(
    stub: inference_pb2_grpc.InferenceServiceAsyncStub, gateway: str, session: str, api_key: str
) -> Answer:
    generation = pb.Generation(
        model=NAME,
        token_ids=pb.TokenIds(ids=range(1, 17)),
        max_output_tokens=TOKENS,
        ignore_eos=True,
        session_key=session,
    )
    began_unix_s, digest, count, failure, resumes = time.time(), "", 0, "", 0
    try:
        request = pb.GenerateRequest(generation=generation)
        async for event in stub.Generate(request, metadata=metadata(api_key), timeout=60):
            if event.HasField("accepted"):
                digest = event.accepted.version_digest
            elif event.HasField("chunk"):
                count += len(event.chunk.ids)
            elif event.HasField("finished"):
                resumes = event.finished.resumes
    except grpc.aio.AioRpcError as error:
        failure = f"{error.code().name}: {error.details()}"
    if not failure and count != TOKENS:
        failure = f"{count} of {TOKENS} tokens"
    return Answer(gateway, began_unix_s, digest, failure, resumes)


@dataclass(frozen=True, slots=True)
class TurnResult:
    """``after_ack`` and ``after_revert``: requests after each acknowledgement; ``by_cut``: those of them at
    the gateway that was cut off."""

    name: str
    old_after_ack: int
    after_ack: int
    after_revert: int
    by_cut: int
    revert_s: float


class CutoverDrill:
    """What the operator does. ``storm_ready_s`` and ``resumed`` are of the turns that have them."""

    def __init__(self, fleet: Fleet, admin: AdminClient, load: CutoverLoad) -> None:
        self.fleet = fleet
        self.admin = admin
        self.load = load
        self.storm_ready_s = 0.0
        self.resumed = 0

    async def turn(self, number: int, turn: Turn, folder: Path) -> TurnResult:
        """Cut over to a new version and revert it."""
        tag = f"v{number}"
        await publish(self.admin, folder, number)
        lifts = await self._injected([Net(CUT, "etcd", "hole")] if turn.cut == "before" else [])
        rollout = await self.admin.rollouts.create(rollout_to(tag, turn))
        old, new = rollout.stable_digest, rollout.arms[0].version_digest
        await self._until(tag, lambda one: one.phase == cp.ROLLOUT_PHASE_SOAKING)
        if turn.cut == "soak":
            lifts += await self._injected([Net(CUT, "etcd", "hole")])
        await asyncio.sleep(OLD_VIEW_S if turn.cut else 1.0)
        late = await self._injected([Net(LATE, "etcd", "hole")] if turn.cut else [])
        await self.admin.rollouts.promote(tag)
        await asyncio.sleep(LATE_S if late else 0.0)
        for lift in late:
            await lift()
        found = await self._until(tag, lambda one: bool(one.cutover_revision))
        print(f"  {[(one.what, one.time.ToJsonString()[14:23]) for one in found.history[-2:]]}", flush=True)
        ack_unix_s = found.history[-1].time.ToNanoseconds() / 1e9
        await asyncio.sleep(AFTER_S)
        while lifts and turn.cut == "before":
            await lifts.pop()()
        await asyncio.sleep(SETTLED_S if turn.cut else 0.0)
        await self._between(turn, old, new)
        after = self.load.since(ack_unix_s)
        revert_s, reverted = await self._revert(tag, old, new)
        for lift in lifts:
            await lift()
        left = sum(one.version_digest == old for one in after)
        left_again = sum(one.version_digest == new for one in reverted)
        by_cut = sum(one.gateway == CUT for one in after + reverted) if turn.cut else 0
        return TurnResult(turn.name, left + left_again, len(after), len(reverted), by_cut, revert_s)

    async def _injected(self, faults: list[Fault]) -> list[Lift]:
        found = []
        for fault in faults:
            what, lift = await inject(fault, self.fleet)
            print(f"  {what}", flush=True)
            found.append(lift)
        return found

    async def _between(self, turn: Turn, old: str, new: str) -> None:
        match turn.after:
            case "storm":
                await self._storm(new)
            case "kill":
                os.kill(await self._engine_of("worker-1", new), signal.SIGKILL)
                await asyncio.sleep(AFTER_S)
            case "memory":
                await self._take_memory("worker-1", new)
            case "leave":
                await self._until_held({new})
            case _:
                pass

    async def _storm(self, serving: str) -> None:
        """All workers lose their files while they serve; then all start again without any, two at once."""
        names = self.fleet.addresses.worker_names
        for worker in names:
            for folder in (self.fleet.state.data(worker) / "models").iterdir():
                await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
        await asyncio.sleep(AFTER_S)
        took_s = []
        for wave in (names[:2], names[2:]):
            before = [await self._engine_of(worker, serving) for worker in wave]
            began_s = time.monotonic()
            await self._injected([LoseModels(worker) for worker in wave])
            for worker, pid in zip(wave, before, strict=True):
                await self._until_restarted(worker, serving, pid)
            took_s.append(time.monotonic() - began_s)
        self.storm_ready_s = max(took_s)
        print(f"  waves took {[round(one, 1) for one in took_s]} s", flush=True)

    async def _take_memory(self, worker: str, serving: str) -> None:
        """An engine can allocate nothing from now on; return once another one serves in its place."""
        pid = await self._engine_of(worker, serving)
        ended = len(self.load.answers)
        resource.prlimit(pid, resource.RLIMIT_DATA, (0, 0))
        await self._until_restarted(worker, serving, pid)
        await asyncio.sleep(AFTER_S)
        log = self.fleet.state.log(worker).read_text()
        assert "MemoryError" in log, "the engine ended for another reason"
        self.resumed = sum(one.resumes > 0 for one in self.load.answers[ended:])
        print(f"  a step of {pid} found no memory; {self.resumed} streams went on elsewhere", flush=True)

    async def _engine_of(self, worker: str, digest: str) -> int:
        """Return the process of a worker's engine of a version, 0 without one that serves."""
        for version in (await self.fleet.worker(worker)).versions:
            if version.version_digest == digest and version.state == worker_pb2.VERSION_STATE_READY:
                return version.engine_pid
        return 0

    async def _until_restarted(self, worker: str, digest: str, pid: int) -> None:
        """Return once another process than ``pid`` serves the version on the worker."""
        ends_s = time.monotonic() + LONGEST_S
        while time.monotonic() < ends_s:
            with suppress(grpc.aio.AioRpcError):
                if await self._engine_of(worker, digest) not in (0, pid):
                    return
            await asyncio.sleep(0.25)
        raise AssertionError(f"{worker} does not serve {digest} again")

    async def _revert(self, tag: str, old: str, new: str) -> tuple[float, list[Answer]]:
        """Return the seconds until the last request began that the reverted version answered, and the
        requests that began after the acknowledgement."""
        began_unix_s = time.time()
        await self.admin.rollouts.revert(tag, reason="the drill reverts it")
        found = await self._until(tag, lambda one: one.phase == cp.ROLLOUT_PHASE_REVERTED)
        ack_unix_s = found.history[-1].time.ToNanoseconds() / 1e9
        print(f"  reverted after {ack_unix_s - began_unix_s:.1f} s", flush=True)
        await self._until_held({old})  # nothing runs on the other one then
        await asyncio.sleep(SETTLED_S)
        by_new = [one for one in self.load.since(began_unix_s) if one.version_digest == new]
        last_unix_s = max((one.began_unix_s for one in by_new), default=began_unix_s)
        return last_unix_s - began_unix_s, self.load.since(ack_unix_s)

    async def _until_held(self, digests: set[str]) -> None:
        """Return once no worker has another version of the deployment."""
        ends_s = time.monotonic() + LONGEST_S
        while time.monotonic() < ends_s:
            replicas = (await self.admin.deployments.get(NAME)).status.replicas
            if {one.version_digest for one in replicas} == digests:
                return
            await asyncio.sleep(0.25)
        raise AssertionError(f"the workers do not have {digests} alone")

    async def _until(self, name: str, holds: Callable[[cp.Rollout], bool]) -> cp.Rollout:
        ends_s = time.monotonic() + LONGEST_S
        while not holds(found := await self.admin.rollouts.get(name)):
            if time.monotonic() > ends_s:
                raise AssertionError(f"{name} is {cp.RolloutPhase.Name(found.phase)}: {found.message}")
            await asyncio.sleep(0.1)
        return found

    async def misrouted(self) -> bool:
        """Write routes that lead nowhere by hand; return whether every gateway reported each and the
        deployment's version answered."""
        nowhere = "sha256:" + "00" * 32
        serving = (await self.admin.deployments.get(NAME)).version_digest
        arms = (RouteArm("stable", serving, 0), RouteArm("canary", nowhere, 10_000))
        key, reported, began_unix_s = ROUTES + NAME, [], time.time()
        for value, series in (
            (dump(ModelRoute(NAME, "by hand", arms)), 'route_faults{fault="no_worker"'),
            (dump(ModelRoute(NAME, "by hand", arms[:1])), 'route_faults{fault="malformed"'),
            (b"{", 'unreadable_records{prefix="/fairway/v1/routes/"} 1'),
        ):
            await self._commit(Put(key, value))
            written_unix_s, ends_s = time.time(), time.monotonic() + LONGEST_S
            reported += [await self._reports(name, series) for name in self.fleet.gateways]
            while not self.load.since(written_unix_s) and time.monotonic() < ends_s:
                await asyncio.sleep(0.25)  # a busy machine may have answered no request by this route
            await self._commit(Delete(key))
        answers = self.load.since(began_unix_s)
        print(f"routes by hand: reported {reported}, {len(answers)} requests", flush=True)
        return all(reported) and {one.version_digest for one in answers} == {serving}

    async def _commit(self, operation: Operation) -> None:
        await self.fleet.store.commit([operation])

    async def _reports(self, gateway: str, series: str) -> bool:
        """Return whether the gateway exports a series within ``REPORT_S``."""
        url = f"http://{self.fleet.addresses.of(f'{gateway}_metrics')}/metrics"
        ends_s = time.monotonic() + REPORT_S
        while time.monotonic() < ends_s:
            if series in await asyncio.to_thread(read_page, url):
                return True
            await asyncio.sleep(0.5)
        return False


async def publish(admin: AdminClient, folder: Path, number: int) -> None:
    """Publish a version of its own under the tag vNUMBER."""
    tag = f"v{number}"
    written = write_version(folder / tag, VersionFault.GOOD, number, working_bytes=WORKING_BYTES)
    # No two versions share it, and no engine opens it beside a single file of weights.
    (written / "other.safetensors").write_bytes(await asyncio.to_thread(safetensors, OTHER_BYTES, number))
    await publish_folder(admin, written, NAME, tag, report=lambda _: None)


def rollout_to(tag: str, turn: Turn) -> cp.Rollout:
    """Return a rollout that moves all traffic once its replicas are READY, and is final when promoted."""
    found = cp.Rollout(
        metadata=cp.Metadata(name=tag),
        deployment=NAME,
        strategy=cp.ROLLOUT_STRATEGY_BLUE_GREEN,
        arms=[cp.RolloutArm(name="canary", version=tag)],
        gate=cp.RolloutGate(metrics=["cost"]),
    )
    found.gate.patience.FromSeconds(0)
    found.soak.FromSeconds(600)
    found.keep_warm.FromSeconds(turn.keep_warm_s)
    return found


async def run(folder: Path, turns: list[Turn]) -> tuple[list[TurnResult], CutoverDrill, bool]:
    shape = Shape(workers=WORKERS, gateways=GATEWAYS, schedulers=1, controlplanes=1, deploy=False)
    load = CutoverLoad()
    async with Fleet.started(folder / "state", shape, settings=SETTINGS) as fleet:
        admin = AdminClient(
            fleet.addresses.of("controlplane"),
            admin_key=fleet.admin_key,
            registry=fleet.addresses.of("registry"),
            credentials=credentials_of(fleet.addresses.certs),
        )
        async with admin:
            await publish(admin, folder, 0)
            deployment = cp.Deployment(
                metadata=cp.Metadata(name=NAME), model=NAME, version="v0", replicas=WORKERS, executor="null"
            )
            await admin.deployments.create(deployment)
            await admin.deployments.wait_ready(NAME)
            drill, found = CutoverDrill(fleet, admin, load), list[TurnResult]()
            async with load.running(fleet.gateways, read_secret(fleet.state, "api_key")):
                await asyncio.sleep(2.0)
                for number, turn in enumerate(turns, 1):
                    print(f"{turn.name}:", flush=True)
                    found.append(await drill.turn(number, turn, folder))
                    print(f"  {found[-1]}", flush=True)
                reported = await drill.misrouted()
    return found, drill, reported


def main() -> int:
    parser = argparse.ArgumentParser(prog="drill_cutover")
    parser.add_argument("--turns", default=",".join(map(str, range(len(TURNS)))), help="numbers, from 0")
    turns = [TURNS[int(number)] for number in parser.parse_args().turns.split(",")]
    with tempfile.TemporaryDirectory(prefix="fairway-cutover-") as folder:
        found, drill, reported = asyncio.run(run(Path(folder), turns))
    answers = drill.load.answers
    failures = [f"{one.gateway}: {one.failure}" for one in answers if one.failure]
    for failure in sorted(set(failures)):
        print(f"  {failures.count(failure)}: {failure[:200]}", flush=True)
    print(f"requests: {len(answers)}", flush=True)
    result = {
        "old_after_ack": sum(one.old_after_ack for one in found),
        "failed": len(failures),
        "revert_p95_s": round(quantile([one.revert_s for one in found], 0.95), 2),
        "storm_ready_s": round(drill.storm_ready_s, 1),
        "memory_resumed": drill.resumed,
    }
    seen = all(
        one.after_ack and one.after_revert and (one.by_cut or not turn.cut)
        for one, turn in zip(found, turns, strict=True)
    )
    print("RESULT", json.dumps(result))
    met = result["revert_p95_s"] <= MOST_REVERT_S and not result["old_after_ack"] and not failures
    tried = {turn.after for turn in turns}
    met &= bool(drill.resumed) or "memory" not in tried
    return 0 if met and reported and seen else 1


if __name__ == "__main__":
    sys.exit(main())
