"""`make chaos-streams`: kills under streams, keys with concurrent duplicates, cancels at random stages.

Three parts on one fleet of three gateways and two workers, all drawn from ``--seed``:

1. 300 streams, greedy and sampled, each with a key. A client whose stream breaks sends its request again with
   its key. Each output must be that of an undisturbed run.
2. 2,000 keys, each sent by two or three clients at once to different gateways, and again by each whose stream
   breaks. All clients of a key must receive one output, and the tenant must be charged for each key once.
3. 20,000 requests without a key that their client cancels: at once, when accepted, at a drawn token, or
   after a drawn time. Nothing may stay reserved afterwards.

Engines, workers and gateways are killed at random during the first two, which run side by side.

With ``--engine vllm`` the model runs on vLLM in both workers; with ``--engine mixed`` on our engine in one
and on vLLM in the other, as two deployments of a version that the requests take by turns. Engines are then
also stopped without an end (SIGSTOP). Outputs of a deployment that promises no exactness (``--dtype
bfloat16``) must be whole: a token for each position. An engine of vLLM takes 10 to 20 s to start: streams and
kills are fewer.

The last line is ``RESULT {json}``. Exits 0 when the ratios are 1 and nothing leaked.
"""

from __future__ import annotations

import os

os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

import argparse
import asyncio
import json
import logging
import random
import sys
from collections import Counter
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import grpc
import structlog

from fairway.v1 import controlplane_pb2 as cp
from fairway.v1 import inference_pb2 as pb
from services.core.errors import FairwayError
from services.rpc.status import from_rpc_error
from services.runtime.process.shared_memory import SHARED, held_inodes
from tests.chaos.checker import Reference, process_leaks
from tests.chaos.driver import state_root, until
from tests.chaos.faults import Freeze, Kill, inject
from tests.chaos.fleet import Fleet, Shape
from tests.chaos.load import Client, make_specs, now_s, references
from tests.support.stack import ROOT, metadata

SHAPE: Final = Shape(workers=2, gateways=3)
KILLS: Final = (
    Kill("engine:worker-0"),
    Kill("engine:worker-1"),
    Kill("worker-0"),
    Kill("worker-1"),
    Kill("gateway"),
    Kill("gateway-1"),
    Kill("gateway-2"),
)
HANGS: Final = (Freeze("engine:worker-0"), Freeze("engine:worker-1"))
VLLM: Final = "fairway-tiny-vllm"
VLLM_FOLDER: Final = ROOT / ".venv-vllm"
STREAMS_AT_ONCE: Final = 24
KEYS_AT_ONCE: Final = 24
CANCELS_AT_ONCE: Final = 96
GIVEN_UP_S: Final = 240.0
RESTED_S: Final = 90.0
STARTED_S: Final = 240.0  # of engines of vLLM
_RETRIED_S: Final = 0.25


@dataclass(slots=True)
class KeyedResult:
    """What the clients of one key received. ``outputs`` has one entry per client that reached the end."""

    spec: int
    outputs: list[tuple[str, tuple[int, ...]]] = field(default_factory=list)  # request id, tokens
    prompt_tokens: int = 0
    problems: list[str] = field(default_factory=list)


class KeyedClients:
    """Clients that send a request with its key until they have received its end."""

    def __init__(self, client: Client, key: str) -> None:
        self._client = client
        self._key = key
        self.retries = 0

    async def finish(self, generation: pb.Generation, result: KeyedResult, gateway: int) -> None:
        """Return once the end was received or the time is up; what was wrong is in the result."""
        deadline_s = now_s() + GIVEN_UP_S
        last = ""
        while now_s() < deadline_s:
            name = self._client.names[gateway % len(self._client.names)]
            try:
                await self._once(name, generation, result)
                return
            except grpc.aio.AioRpcError as error:
                found = from_rpc_error(error)
                last = f"{found.reason} {found.message}"
                retried = found.retry_after_s is not None or error.code() is grpc.StatusCode.UNAVAILABLE
                if not retried:
                    break
                self.retries += 1
                gateway += 1
                await asyncio.sleep(max(found.retry_after_s or 0.0, _RETRIED_S))
        result.problems.append(f"no end received: {last}")

    async def _once(self, gateway: str, generation: pb.Generation, result: KeyedResult) -> None:
        call = self._client.stub(gateway).Generate(
            pb.GenerateRequest(generation=generation), metadata=metadata(self._key), timeout=GIVEN_UP_S
        )
        ids: list[int] = []
        request_id = ""
        async for event in call:
            if event.HasField("accepted"):
                request_id = event.accepted.request_id
                result.prompt_tokens = event.accepted.prompt_tokens
            elif event.HasField("chunk"):
                if event.chunk.offset != len(ids):
                    result.problems.append(f"offset {event.chunk.offset} after {len(ids)} tokens")
                ids += event.chunk.ids
            elif event.HasField("finished"):
                result.outputs.append((request_id, tuple(ids)))


@dataclass(slots=True)
class Tally:
    """The figures of the RESULT line, and what went wrong."""

    streams: int = 0
    identical: int = 0
    unpromised: int = 0  # streams of deployments that do not promise to be exact
    kept: int = 0  # streams that are as promised
    keys: int = 0
    charged_once: int = 0
    cancels: int = 0
    leaked_blocks: int = 0
    leaked_slots: int = 0
    leaked_processes: int = 0
    leaked_segments: int = 0  # in shared memory
    problems: list[str] = field(default_factory=list)

    @property
    def result(self) -> dict[str, float]:
        return {
            "streams": self.streams,
            "identical_ratio": self.identical / max(self.streams, 1),
            "unpromised": self.unpromised,
            "kept_ratio": self.kept / max(self.streams, 1),
            "charged_once_ratio": self.charged_once / max(self.keys, 1),
            "cancels": self.cancels,
            "leaked_blocks": self.leaked_blocks,
            "leaked_slots": self.leaked_slots,
            "leaked_processes": self.leaked_processes,
            "leaked_segments": self.leaked_segments,
        }

    @property
    def passed(self) -> bool:
        whole = self.kept == self.streams and self.charged_once == self.keys
        leaked = self.leaked_blocks, self.leaked_slots, self.leaked_processes, self.leaked_segments
        return whole and not (any(leaked) or self.problems)


class StreamDrill:
    """The three parts on one running fleet."""

    def __init__(
        self,
        fleet: Fleet,
        client: Client,
        keys: Mapping[str, str],
        options: argparse.Namespace,
        models: Sequence[str],
        exact: Collection[str],
    ) -> None:
        """``keys``: the API key of each part's tenant. Requests take the ``models`` by turns.

        ``exact``: those that promise it.
        """
        self._fleet = fleet
        self._client = client
        self._keys = keys
        self._models = models
        self._exact = exact
        self._faults: tuple[Kill | Freeze, ...] = KILLS if options.engine == "torch" else KILLS + HANGS
        self._rng = random.Random(options.seed)
        self._specs = make_specs()
        self.tally = Tally()
        self._expected = 0  # tokens that the tenant of the keys is charged

    # --- kills ---------------------------------------------------------------------------------------

    @asynccontextmanager
    async def killing(self, every_s: float) -> AsyncIterator[None]:
        """Kill a process every few seconds inside; every process runs and streams again afterwards."""
        killing = asyncio.create_task(self._kill_forever(every_s))
        try:
            yield
        finally:
            killing.cancel()
            with suppress(asyncio.CancelledError):
                await killing
        await self._whole()

    async def streams(self, streams: int, undisturbed: Mapping[str, Mapping[int, Reference]]) -> None:
        """Run the streams; compare their outputs."""
        clients = KeyedClients(self._client, self._keys["kills"])
        results = [KeyedResult(self._rng.randrange(len(self._specs))) for _ in range(streams)]
        turns = asyncio.Semaphore(STREAMS_AT_ONCE)

        async def one(number: int, result: KeyedResult) -> None:
            async with turns:
                generation = self._generation(result.spec, number, f"kills-{number}")
                await clients.finish(generation, result, number)

        await asyncio.gather(*(one(number, result) for number, result in enumerate(results)))
        self.tally.streams = streams
        for number, result in enumerate(results):
            reference = undisturbed[self._model(number)][result.spec]
            same = [ids for _, ids in result.outputs] == [reference.ids]
            self.tally.identical += same
            if self._model(number) not in self._exact:
                self.tally.unpromised += 1
                same = [len(ids) for _, ids in result.outputs] == [len(reference.ids)]
            self.tally.kept += same
            if not same or result.problems:
                self.tally.problems.append(f"stream {number}: {result.problems or 'other tokens'}")
        print(f"kills: {streams} streams, {clients.retries} sent again", flush=True)

    async def _kill_forever(self, every_s: float) -> None:
        done: Counter[str] = Counter()
        faults: list[Kill | Freeze] = []
        try:
            while True:
                await asyncio.sleep(self._rng.uniform(0.5, 1.5) * every_s)
                if not faults:  # all have their turn; engines first, so that a short run has them
                    drawn = self._rng.sample(self._faults, len(self._faults))
                    faults = sorted(drawn, key=lambda fault: fault.target.startswith("engine"))
                fault = faults.pop()
                # What was killed just before may not run yet.
                with suppress(grpc.aio.AioRpcError, FairwayError, KeyError, LookupError, ProcessLookupError):
                    if isinstance(fault, Freeze) and await self._fleet.unready(self._models):
                        faults.insert(0, fault)  # an engine that hangs while it loads is given 300 s
                        continue
                    await inject(fault, self._fleet)
                    done[f"{type(fault).__name__} {fault.target}"] += 1
        finally:
            print(
                f"kills: {done.total()} processes killed or stopped: {dict(sorted(done.items()))}", flush=True
            )

    # --- keys ----------------------------------------------------------------------------------------

    async def keys(self, keys: int) -> None:
        """Send each key from several clients at once; compare their outputs and the tenant's charge."""
        clients = KeyedClients(self._client, self._keys["keys"])
        results = [KeyedResult(self._rng.randrange(len(self._specs))) for _ in range(keys)]
        duplicates = [self._rng.choice((2, 3)) for _ in range(keys)]
        turns = asyncio.Semaphore(KEYS_AT_ONCE)

        async def one(number: int, result: KeyedResult) -> None:
            async with turns:
                generation = self._generation(result.spec, number, f"keys-{number}", tokens=8)
                calls = (
                    clients.finish(generation, result, number + copy) for copy in range(duplicates[number])
                )
                await asyncio.gather(*calls)

        await asyncio.gather(*(one(number, result) for number, result in enumerate(results)))
        self.tally.keys = keys
        for number, result in enumerate(results):
            outputs = set(result.outputs)
            once = len(outputs) == 1 and len(result.outputs) == duplicates[number] and not result.problems
            self.tally.charged_once += once
            if not once:
                self.tally.problems.append(f"key {number}: {len(outputs)} outputs, {result.problems}")
            self._expected += result.prompt_tokens + sum(len(ids) for _, ids in outputs)
        print(f"keys: {keys} keys, {clients.retries} sent again", flush=True)

    async def charged(self) -> None:
        """The tenant is charged what its keys received; a token more or less is a charge lost or doubled."""
        charged, expected = 0, self._expected

        async def exact() -> str:
            nonlocal charged
            charged = await self._fleet.charged_tokens("keys")
            return "" if charged == expected else f"{charged} tokens are charged of {expected}"

        if missing := await until(exact, RESTED_S):
            self.tally.charged_once = 0
            self.tally.problems.append(missing)
        print(f"keys: {charged} tokens charged of {expected}", flush=True)

    # --- cancels -------------------------------------------------------------------------------------

    async def cancels(self, cancels: int) -> None:
        """Start requests and cancel each at a drawn stage."""
        turns = asyncio.Semaphore(CANCELS_AT_ONCE)
        stages = [(self._rng.randrange(4), self._rng.random()) for _ in range(cancels)]

        async def one(number: int) -> None:
            async with turns:
                stage, drawn = stages[number]
                await self._cancelled(number, stage, drawn)

        await asyncio.gather(*(one(number) for number in range(cancels)))
        self.tally.cancels = cancels

    async def _cancelled(self, number: int, stage: int, drawn: float) -> None:
        """Cancel at once (0), when accepted (1), at a token (2), or after a time (3)."""
        generation = self._specs[number % len(self._specs)].generation(self._model(number))
        name = self._client.names[number % len(self._client.names)]
        call = self._client.stub(name).Generate(
            pb.GenerateRequest(generation=generation), metadata=metadata(self._keys["cancels"]), timeout=60
        )
        try:
            async with asyncio.timeout({0: 0.0, 3: drawn * 0.5}.get(stage)):
                tokens = 0
                async for event in call:
                    tokens += len(event.chunk.ids)
                    accepted = event.HasField("accepted")
                    if (stage == 1 and accepted) or (stage == 2 and tokens > drawn * 30):
                        return
        except (TimeoutError, grpc.aio.AioRpcError):
            pass  # shed or cut: what counts is what it leaves behind
        finally:
            call.cancel()

    # --- afterwards ----------------------------------------------------------------------------------

    async def rest(self) -> None:
        """Count the blocks and slots that are still taken when nothing runs any more."""

        async def free() -> str:
            holdings = await self._fleet.holdings()
            self.tally.leaked_blocks = sum(each.kv_blocks_reserved + each.kv_blocks_used for each in holdings)
            self.tally.leaked_slots = sum(
                [await self._fleet.limiter.concurrency(tenant) for tenant in self._keys]
            )
            leaks = process_leaks(self._fleet.found_processes(), self._fleet.expected_processes())
            self.tally.leaked_processes = len(leaks)
            held = self.tally.leaked_blocks, self.tally.leaked_slots
            return f"{held[0]} blocks and {held[1]} slots are held; {leaks}" if any((*held, leaks)) else ""

        if missing := await until(free, RESTED_S):
            self.tally.problems.append(missing)

    async def _whole(self) -> None:
        """Wait until every process runs and streams again after the kills."""

        async def whole() -> str:
            absent = set(self._fleet.expected_processes()) - set(self._fleet.pids())
            return f"{sorted(absent)} do not run" if absent else await self._fleet.unready(self._models)

        if missing := await until(whole, STARTED_S):
            self.tally.problems.append(missing)
        await asyncio.sleep(3.0)

    def _model(self, number: int) -> str:
        return self._models[number % len(self._models)]

    def _generation(self, spec: int, number: int, key: str, tokens: int | None = None) -> pb.Generation:
        generation = self._specs[spec].generation(self._model(number), tokens)
        generation.idempotency_key = key
        return generation


async def run(options: argparse.Namespace, root: Path) -> Tally:
    before = segments()
    settings = {"FAIRWAY_ENGINE_DTYPE": options.dtype}
    if options.engine != "torch":
        settings["FAIRWAY_VLLM_DIR"] = str(options.vllm_dir.resolve())
    async with Fleet.started(root, SHAPE, settings=settings) as fleet:
        models = await deploy(fleet, options.engine)
        keys = await fleet.create_tenants(["kills", "keys", "cancels", "reference"])
        client = Client(fleet.gateways, models[0], timeout_s=GIVEN_UP_S)
        try:
            await fleet.meter("keys", models)
            await asyncio.sleep(2.0)  # the gateways receive the keys, the price and the budget
            undisturbed = {}
            for client.model in models:
                undisturbed[client.model] = await references(client, make_specs(), keys["reference"])
            exact = await fleet.exact(models)
            print(f"promised exact: {sorted(exact)} of {models}", flush=True)
            drill = StreamDrill(fleet, client, keys, options, models, exact)
            async with drill.killing(options.kill_every_s):
                await asyncio.gather(drill.streams(options.streams, undisturbed), drill.keys(options.keys))
            await drill.charged()
            await drill.cancels(options.cancels)
            await drill.rest()
        finally:
            await client.close()
    tally = drill.tally
    if left := fleet.found_processes():
        tally.leaked_processes += sum(left.values())
        tally.problems.append(f"processes outlive the fleet: {left}")
    if more := segments() - before:
        tally.leaked_segments = len(more)
        tally.problems.append(f"shared memory that nothing maps: {sorted(more)}")
    return tally


async def deploy(fleet: Fleet, engine: str) -> list[str]:
    """Return the deployments that requests take, ready."""
    model = fleet.options.model_name
    if engine == "torch":
        return [model]
    vllm = cp.Deployment(
        metadata=cp.Metadata(name=VLLM),
        model=model,
        version="latest",
        replicas=SHAPE.workers,
        executor="vllm",
    )
    own = cp.Deployment(
        metadata=cp.Metadata(name=model), model=model, version="latest", replicas=1, executor="torch"
    )
    deployments = [vllm]
    if engine == "mixed":  # a worker runs one executor of a version
        vllm.replicas = 1
        own.node_selector["name"], vllm.node_selector["name"] = fleet.addresses.worker_names
        deployments = [own, vllm]
    await fleet.deploy_instead(deployments)
    names = [each.metadata.name for each in deployments]
    if missing := await until(lambda: fleet.unready(names), STARTED_S):
        raise RuntimeError(missing)
    return names


def segments() -> set[str]:
    """Return what is in shared memory and mapped or held open by no process."""
    held, _ = held_inodes(Path("/proc"), str(SHARED))
    return {entry.name for entry in os.scandir(SHARED) if entry.inode() not in held}


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="make chaos-streams", description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--engine", choices=("torch", "vllm", "mixed"), default="torch")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--vllm-dir", type=Path, default=VLLM_FOLDER, help="folder of vLLM's environment")
    parser.add_argument("--streams", type=int, help="default: 300; with vLLM 200")
    parser.add_argument("--keys", type=int, help="default: 2000; with vLLM 200")
    parser.add_argument("--cancels", type=int, help="default: 20000; with vLLM 2000")
    parser.add_argument("--kill-every-s", type=float, help="default: 2; with vLLM 10")
    parser.add_argument("--state-dir", default="", help="keep logs and state here; else they are removed")
    options = parser.parse_args(arguments)
    torch = options.engine == "torch"
    for name, ours, theirs in (
        ("streams", 300, 200),
        ("keys", 2000, 200),
        ("cancels", 20_000, 2000),
        ("kill_every_s", 2.0, 10.0),
    ):
        if getattr(options, name) is None:
            setattr(options, name, ours if torch else theirs)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    with state_root(options.state_dir, "streams") as root:
        tally = asyncio.run(run(options, root))
    for problem in tally.problems[:30]:
        print(problem)
    print(f"RESULT {json.dumps(tally.result)}")
    return 0 if tally.passed else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
