"""`make drill-diagnose`: causes of slowness are planted on a live installation, and `fairway diagnose` names
them.

Two gateways and four workers in the zones a and b, with a proxy on each edge, serve tenants with steady
habits: a model of paced steps, and one that embeds. After a stored baseline, each cause of
``diagnosed_causes.toml`` is planted for one window, and its metric diagnosed; between them are quiet windows
of ordinary variation, in which nothing may be named.

Prints per window how far the p95 of the clients moved, and what was named. ``--out DIR`` keeps a JSON file of
each; ``--only a,b``: these windows only; ``--plant-only``: without a diagnosis. The last line is ``RESULT
{json}``: ``named_first`` and ``named_in_three`` are shares of the causes, ``false_accusations`` counts quiet
windows. The drill fails where a figure misses ``AIMS`` or a planted cause moved nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import sys
import time
import tomllib
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from fairway.cli.calls import credentials_of
from fairway.client import AdminClient
from fairway.client.values import Priority
from fairway.v1 import common_pb2
from fairway.v1 import controlplane_pb2 as cp
from tests.chaos.fleet import Fleet, Shape
from tests.chaos.proxy import Rule
from tests.e2e.diagnosed_traffic import CHAT, EMBED, Habits, Traffic, summary
from tests.support.live_faults import FILE_VARIABLE, write_fault
from tests.support.paced_engine import write_version
from tests.support.row_versions import embedding_version
from tests.support.stack import ROOT

CAUSES: Final = Path(__file__).with_name("diagnosed_causes.toml")
SHAPE: Final = Shape(workers=4, gateways=2, schedulers=1, controlplanes=1, deploy=False, zones=("a", "b"))
SETTINGS: Final = {
    "PYTHONPATH": f"{ROOT}:{ROOT / 'tests/support/drill_faults'}",
    "FAIRWAY_SHEDDING": "false",
    "FAIRWAY_MAX_SEQUENCES": "4",
    "FAIRWAY_EJECTION_RATIO": "20",  # an ejected worker slows nothing
    "FAIRWAY_KV_MEMORY_BYTES": str(128 * 1024**2),
}
HABITS: Final = {
    "ann": Habits(per_s=2.5, prompt_tokens=(80, 160)),
    "bob": Habits(per_s=2.5, prompt_tokens=(1300, 1400), shared_tokens=1280),
    "cleo": Habits(per_s=2.3),
    "dora": Habits(per_s=1.0),
    "rita": Habits(per_s=1.0, window_tokens=4),
    "iris": Habits(per_s=0.4, output_tokens=(40, 60), priority=Priority.INTERACTIVE),
    "nora": Habits(prompt_tokens=(1500, 1900), output_tokens=(2, 4)),
    "theo": Habits(),
    "vera": Habits(per_s=6.0, model=EMBED, prompt_tokens=(128, 128)),
}
WARM_S, BASELINE_S, SETTLE_S, WINDOW_S, RECOVER_S = 12.0, 40.0, 5.0, 30.0, 8.0
LEAST_MOVE: Final = 1.5  # ratio of a planted metric's p95 to that of the baseline
AIMS: Final = {"named_first": 0.9, "named_in_three": 1.0, "false_accusations": 0, "recorder_overhead": 0.01}


@dataclass(frozen=True, slots=True)
class Case:
    """A window of the drill: what is planted, which metric is diagnosed, what is to be named."""

    name: str
    metric: str
    plant: Sequence[dict[str, Any]]
    model: str = CHAT
    kind: str = ""  # cause kind to be named; empty: quiet
    subjects: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Window:
    """What came of a case. Times in Unix seconds."""

    case: Case
    from_s: float
    to_s: float
    before: dict[str, float]
    during: dict[str, float]
    answer: dict[str, Any] = field(default_factory=dict)

    @property
    def moved(self) -> float:
        return self.during.get("p95_s", 0.0) / self.before["p95_s"]

    @property
    def named(self) -> list[tuple[str, str]]:
        return [(one["kind"], one["subject"]) for one in self.answer.get("causes", ())]

    @property
    def place(self) -> int | None:
        """Place of the planted cause among those named, from 0; None where it is not named."""
        wanted = [(self.case.kind, subject) for subject in self.case.subjects]
        return next((place for place, one in enumerate(self.named) if one in wanted), None)


@dataclass(slots=True)
class Drill:
    fleet: Fleet
    admin: AdminClient
    traffic: Traffic
    folder: Path
    faults: Path
    versions: Callable[[], int] = field(default_factory=lambda: itertools.count(1).__next__)

    async def publish(self, step_ratio: float) -> str:
        """Return the tag of a new version."""
        tag = f"v{self.versions()}"
        written = await asyncio.to_thread(write_version, self.folder / tag, step_ratio)
        await self.admin.models.publish(written, CHAT, tag)
        return tag


# --- actions -----------------------------------------------------------------------------------------


@asynccontextmanager
async def habits(drill: Drill, *, tenant: str, **changed: Any) -> AsyncIterator[None]:
    """A tenant changes its habits."""
    before = drill.traffic.habits[tenant]
    ranges = {key: tuple(value) if isinstance(value, list) else value for key, value in changed.items()}
    drill.traffic.habits[tenant] = replace(before, **ranges)
    try:
        yield
    finally:
        drill.traffic.habits[tenant] = before


@asynccontextmanager
async def fault(drill: Drill, *, kind: str, process: str, value: float) -> AsyncIterator[None]:
    """A process has a fault of ``live_faults``."""
    write_fault(drill.faults, kind, process, value)
    try:
        yield
    finally:
        write_fault(drill.faults, kind, process, None)


@asynccontextmanager
async def network(drill: Drill, *, source: str, target: str, delay_s: float) -> AsyncIterator[None]:
    """What passes between two processes, shell patterns both, is late, both ways."""
    rule = Rule(source, target, "delay", delay_s)
    await drill.fleet.network.add(rule)
    try:
        yield
    finally:
        await drill.fleet.network.remove(rule)


@asynccontextmanager
async def version(drill: Drill, *, step_ratio: float) -> AsyncIterator[None]:
    """The deployment moves to a new version, whose steps take so many times as long."""
    before = (await drill.admin.deployments.get(CHAT)).version_digest
    await _move(drill.admin, await drill.publish(step_ratio))
    try:
        yield
    finally:
        await _move(drill.admin, before)


async def _move(admin: AdminClient, to: str) -> None:
    def change(found: cp.Deployment) -> None:
        found.version = to

    await admin.deployments.change(CHAT, change)
    await admin.deployments.wait_ready(CHAT, timeout_s=120)


ACTIONS: Final[dict[str, Callable[..., AbstractAsyncContextManager[None]]]] = {
    "habits": habits,
    "fault": fault,
    "network": network,
    "version": version,
}


def read_cases(path: Path) -> list[Case]:
    """Return causes and quiet windows in turn. Raises ValueError for an action that there is not."""
    found = tomllib.loads(path.read_text())
    causes = [Case(**one) for one in found["cause"]]
    quiet = [Case(**one) for one in found["quiet"]]
    for case in (*causes, *quiet):
        if unknown := {one["action"] for one in case.plant} - ACTIONS.keys():
            raise ValueError(f"{case.name}: there is no action {', '.join(sorted(unknown))}: {[*ACTIONS]}")
    pairs = itertools.zip_longest(quiet, causes)
    return [case for case in itertools.chain.from_iterable(pairs) if case is not None]


# --- the drill ---------------------------------------------------------------------------------------


async def run(drill: Drill, cases: Sequence[Case], out: Path, *, diagnoses: bool) -> list[Window]:
    await asyncio.sleep(WARM_S)
    from_s = time.time()
    await asyncio.sleep(BASELINE_S)
    baseline = from_s, time.time()
    found = []
    for case in cases:
        window = await observed(drill, case, baseline)
        if diagnoses:
            window = await diagnosed(drill, window, baseline)
        (out / f"{case.name}.json").write_text(json.dumps(asdict(window), indent=1, default=str))
        print(line(window), flush=True)
        found.append(window)
        await asyncio.sleep(RECOVER_S)
    return found


async def observed(drill: Drill, case: Case, baseline: tuple[float, float]) -> Window:
    """Plant the case, and return what the clients measured in its window."""
    async with AsyncExitStack() as planted:
        for action in case.plant:
            parameters = {key: value for key, value in action.items() if key != "action"}
            await planted.enter_async_context(ACTIONS[action["action"]](drill, **parameters))
        await asyncio.sleep(SETTLE_S)
        from_s = time.time()
        await asyncio.sleep(WINDOW_S)
        to_s = time.time()
    before = drill.traffic.between(*baseline, model=case.model)
    during = drill.traffic.between(from_s, to_s, model=case.model)
    return Window(case, from_s, to_s, summary(before, case.metric), summary(during, case.metric))


async def diagnosed(drill: Drill, window: Window, baseline: tuple[float, float]) -> Window:
    raise NotImplementedError


def line(window: Window) -> str:
    case = window.case
    named = ", ".join(f"{kind}({subject})" for kind, subject in window.named[:3])
    text = f"{case.name:<22} {case.model} {case.metric} p95 x{window.moved:.2f}"
    return f"{text} {window.before} {window.during} | {window.answer.get('verdict', '')}: {named}"


@asynccontextmanager
async def installed(root: Path) -> AsyncIterator[Drill]:
    """Yield the drill under its background traffic."""
    faults = root / "faults.json"
    settings = {**SETTINGS, FILE_VARIABLE: str(faults)}
    async with Fleet.started(root / "state", SHAPE, settings=settings) as fleet:
        addresses = fleet.addresses
        async with AdminClient(
            addresses.of("controlplane"),
            admin_key=fleet.admin_key,
            registry=addresses.of("registry"),
            credentials=credentials_of(addresses.certs),
        ) as admin:
            keys = {name: await new_tenant(admin, name) for name in HABITS}
            gateways = [addresses.of(f"{name}_grpc") for name in addresses.gateway_names]
            drill = Drill(fleet, admin, Traffic(gateways, keys, dict(HABITS)), root, faults)
            await admin.models.publish(await asyncio.to_thread(embedding_of, root / "embed"), EMBED, "v0")
            for model, tag, replicas, executor in (
                (CHAT, await drill.publish(1.0), SHAPE.workers, "null"),
                (EMBED, "v0", 1, ""),
            ):
                deployment = cp.Deployment(
                    metadata=cp.Metadata(name=model),
                    model=model,
                    version=tag,
                    replicas=replicas,
                    executor=executor,
                )
                await admin.deployments.create(deployment)
                await admin.deployments.wait_ready(model, timeout_s=180)
            await asyncio.sleep(2.0)  # gateways receive new keys a moment after they were made
            async with drill.traffic.running():
                yield drill


def embedding_of(folder: Path) -> Path:
    folder.mkdir()
    return embedding_version(folder, max_position_embeddings=256)


async def new_tenant(admin: AdminClient, name: str) -> str:
    """Return an API key of a new tenant, which may use every class."""
    await admin.tenants.create(
        cp.Tenant(metadata=cp.Metadata(name=name), max_priority=common_pb2.PRIORITY_INTERACTIVE)
    )
    key = cp.Key(metadata=cp.Metadata(name=f"key-{name}"), role=cp.KEY_ROLE_TENANT, tenant=name)
    return (await admin.keys.create(key)).secret


async def drilled(cases: Sequence[Case], out: Path, *, diagnoses: bool) -> list[Window]:
    async with installed(out) as drill:
        found = await run(drill, cases, out, diagnoses=diagnoses)
        failures = [one.failure for one in drill.traffic.sent if one.failure]
        print(
            f"requests: {len(drill.traffic.sent)}; failed: {len(failures)} {sorted(set(failures))[:5]}; "
            f"not sent: {dict(drill.traffic.dropped)}",
            flush=True,
        )
        return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="drill_diagnose")
    parser.add_argument("--only", default="")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--plant-only", action="store_true")
    arguments = parser.parse_args()
    cases = read_cases(CAUSES)
    if only := set(filter(None, arguments.only.split(","))):
        if unknown := only - {case.name for case in cases}:
            parser.error(f"there is no window {', '.join(sorted(unknown))}")
        cases = [case for case in cases if case.name in only]
    arguments.out.mkdir(parents=True, exist_ok=True)
    asyncio.run(drilled(cases, arguments.out, diagnoses=not arguments.plant_only))
    return 0


if __name__ == "__main__":
    sys.exit(main())
