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
import os
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import psutil

from fairway.cli.calls import credentials_of
from fairway.client import AdminClient
from fairway.client.values import Priority
from fairway.v1 import common_pb2
from fairway.v1 import controlplane_pb2 as cp
from tests.chaos.fleet import Fleet, Shape, read_page
from tests.chaos.proxy import Rule
from tests.e2e.diagnosed_traffic import CHAT, EMBED, SMALL, Habits, Traffic, summary
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
    "rita": Habits(per_s=1.5, window_tokens=4),
    "milo": Habits(per_s=2.0, model=SMALL, output_tokens=(30, 50)),
    "iris": Habits(per_s=0.2, model=SMALL, output_tokens=(70, 90), priority=Priority.INTERACTIVE),
    "nora": Habits(prompt_tokens=(1500, 1900), output_tokens=(2, 4)),
    "theo": Habits(),
    "vera": Habits(per_s=6.0, model=EMBED, prompt_tokens=(128, 128), rows=8),
}
WARM_S, BASELINE_S, SETTLE_S, WINDOW_S, RECOVER_S = 30.0, 40.0, 5.0, 30.0, 5.0
REPORT_S: Final = 5.0  # gateways report what they finished within it
DIAGNOSIS_S: Final = 120.0
BASELINE: Final = "usual"
NEW: Final = "new"  # a version that an action published
OUT: Final = ROOT / "build/drill-diagnose"
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
    out: Path
    names: dict[str, str]  # names of the file, by what a diagnosis calls them
    versions: Callable[[], int] = field(default_factory=lambda: itertools.count(1).__next__)

    async def publish(self, step_ratio: float, model: str = CHAT) -> str:
        """Return the digest of a new version."""
        folder = self.folder / f"v{self.versions()}"
        written = await asyncio.to_thread(write_version, folder, step_ratio)
        return (await self.admin.models.publish(written, model)).digest

    async def worker_of(self, tenant: str) -> str:
        """Return the worker of the tenant's last request."""
        last = next(one for one in reversed(self.traffic.sent) if one.tenant == tenant and not one.failure)
        return (await self.admin.placements.explain(last.request_id)).decisions[-1].worker_id


# --- actions -----------------------------------------------------------------------------------------


@asynccontextmanager
async def habits(drill: Drill, *, tenant: str, **changed: Any) -> AsyncIterator[None]:
    """A tenant changes its habits."""
    before = drill.traffic.habits[tenant]
    ranges: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value for key, value in changed.items()
    }
    drill.traffic.habits[tenant] = replace(before, **ranges)
    try:
        yield
    finally:
        drill.traffic.habits[tenant] = before


@asynccontextmanager
async def fault(drill: Drill, *, kind: str, process: str, value: float) -> AsyncIterator[None]:
    """A process has a fault of ``live_faults``. ``home:TENANT`` is the worker that ran the tenant last."""
    if process.startswith("home:"):
        home = await drill.worker_of(process.removeprefix("home:"))
        drill.names[home], process = process, home
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
    new = await drill.publish(step_ratio)
    drill.names = {key: name for key, name in drill.names.items() if name != NEW} | {new: NEW}
    await _move(drill.admin, new)
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


async def run(drill: Drill, cases: Sequence[Case], *, diagnoses: bool) -> list[Window]:
    await asyncio.sleep(WARM_S)
    from_s = time.time()
    await asyncio.sleep(BASELINE_S)
    baseline = from_s, time.time()
    await asyncio.sleep(REPORT_S)
    if diagnoses:
        await drill.admin.diagnoses.save_baseline(
            BASELINE, start=datetime.fromtimestamp(from_s, UTC), end=datetime.fromtimestamp(baseline[1], UTC)
        )
    found = []
    for case in cases:
        window = await observed(drill, case, baseline)
        if diagnoses:
            window = await diagnosed(drill, window)
        (drill.out / f"{case.name}.json").write_text(json.dumps(asdict(window), indent=1, default=str))
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
    await asyncio.sleep(REPORT_S)
    before = drill.traffic.between(*baseline, model=case.model)
    during = drill.traffic.between(from_s, to_s, model=case.model)
    return Window(case, from_s, to_s, summary(before, case.metric), summary(during, case.metric))


async def diagnosed(drill: Drill, window: Window) -> Window:
    """Return the window with the command's answer; its samples go to a file of their own."""
    case, addresses = window.case, drill.fleet.addresses
    options = {
        "--model": case.model,
        "--metric": case.metric,
        "--from": _moment(window.from_s),
        "--to": _moment(window.to_s),
        "--baseline": BASELINE,
        "--samples": str(drill.out / f"{case.name}.samples.json"),
        "--output": "json",
        "--controlplane": addresses.of("controlplane"),
        "--admin-key": drill.fleet.admin_key,
    }
    command = [sys.executable, "-m", "fairway.cli.main", "diagnose", *itertools.chain(*options.items())]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("FAIRWAY_")}
    environment["FAIRWAY_TLS_DIR"] = str(addresses.certs)
    done = await asyncio.to_thread(
        subprocess.run,
        command,
        capture_output=True,
        text=True,
        timeout=DIAGNOSIS_S,
        cwd=ROOT,
        env=environment,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"fairway diagnose failed: {done.stdout}{done.stderr}")
    answer = json.loads(done.stdout)
    for cause in answer.get("causes", ()):
        cause["subject"] = drill.names.get(cause["subject"], cause["subject"])
    return replace(window, answer=answer)


def _moment(unix_s: float) -> str:
    return datetime.fromtimestamp(unix_s, UTC).isoformat()


def line(window: Window) -> str:
    case = window.case
    named = ", ".join(f"{kind}({subject})" for kind, subject in window.named[:3])
    text = f"{case.name:<22} {case.model} {case.metric} p95 x{window.moved:.2f}"
    return f"{text} {window.before} {window.during} | {window.answer.get('verdict', '')}: {named}"


@asynccontextmanager
async def installed(root: Path, out: Path) -> AsyncIterator[Drill]:
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
            traffic = Traffic(gateways, keys, dict(HABITS))
            names = {address: name for name, address in fleet.gateways.items()}
            drill = Drill(fleet, admin, traffic, root, faults, out, names)
            await deploy(admin, await drill.publish(1.0), CHAT, SHAPE.workers)
            await deploy(admin, await drill.publish(1.0, SMALL), SMALL, 1)
            embedding = await asyncio.to_thread(embedding_of, root / "embed")
            await deploy(admin, (await admin.models.publish(embedding, EMBED)).digest, EMBED, 1, executor="")
            await asyncio.sleep(2.0)  # gateways receive new keys a moment after they were made
            async with drill.traffic.running():
                yield drill


async def deploy(
    admin: AdminClient, version: str, model: str, replicas: int, *, executor: str = "null"
) -> None:
    await admin.deployments.create(
        cp.Deployment(
            metadata=cp.Metadata(name=model),
            model=model,
            version=version,
            replicas=replicas,
            executor=executor,
        )
    )
    await admin.deployments.wait_ready(model, timeout_s=180)


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


async def drilled(cases: Sequence[Case], out: Path, *, diagnoses: bool) -> tuple[list[Window], float | None]:
    """Return the windows, and the overhead of the flight recorder meanwhile."""
    with tempfile.TemporaryDirectory(prefix="fairway-diagnose-") as folder:
        async with installed(Path(folder), out) as drill:
            found = await run(drill, cases, diagnoses=diagnoses)
            overhead = await asyncio.to_thread(recorder_overhead, drill.fleet)
            traffic = drill.traffic
    failures = Counter(one.failure for one in traffic.sent if one.failure)
    print(f"requests: {len(traffic.sent)}; failures: {dict(failures.most_common(5))}; ", end="")
    print(f"not sent: {dict(traffic.dropped)}", flush=True)
    return found, overhead


def recorder_overhead(fleet: Fleet) -> float | None:
    """Return the time that the workers' agents spent in the flight recorder over the time of their steps, and
    print it over their processor time, of which they need little.

    None where no worker exports it.
    """
    spent_s = steps_s = used_s = 0.0
    for name in fleet.addresses.worker_names:
        page = read_page(f"http://{fleet.addresses.of(f'{name}_metrics')}/metrics")
        spent_s += sum(samples_of(page, "fairway_worker_recorder_seconds_total"))
        steps_s += sum(samples_of(page, "fairway_worker_step_seconds_sum"))
        used_s += sum(psutil.Process(fleet.pids()[name]).cpu_times()[:2])
    if not spent_s:
        return None
    print(f"recorders: {spent_s:.2f} s in {steps_s:.1f} s of steps, {used_s:.1f} s of processors", flush=True)
    return round(spent_s / steps_s, 5)


def samples_of(page: str, name: str) -> list[float]:
    """Return the values of a metric on a page of metrics."""
    lines = (line for line in page.splitlines() if line.startswith((f"{name} ", f"{name}{{")))
    return [float(line.rpartition(" ")[2]) for line in lines]


def result_of(windows: Sequence[Window], overhead: float | None) -> dict[str, float | None]:
    """Return the figures of the last line; None for what was not measured."""
    causes = [window for window in windows if window.case.kind]
    places = [window.place for window in causes]
    first, three = places.count(0), sum(place is not None and place < 3 for place in places)
    return {
        "named_first": round(first / len(causes), 3) if causes else None,
        "named_in_three": round(three / len(causes), 3) if causes else None,
        "false_accusations": sum(bool(window.named) for window in windows if not window.case.kind),
        "recorder_overhead": overhead,
    }


def failures_of(windows: Sequence[Window], result: Mapping[str, float | None]) -> list[str]:
    """Return which demands the drill misses."""
    missed = [
        f"{window.case.name} moved its p95 by {window.moved:.2f}, below {LEAST_MOVE:g}: nothing was planted"
        for window in windows
        if window.case.kind and window.moved < LEAST_MOVE
    ]
    for name, aim in AIMS.items():
        value, least = result[name], name.startswith("named")
        if value is None or (value < aim if least else value > aim):
            missed.append(f"{name} is {value}, {'below' if least else 'above'} {aim:g}")
    return missed


def main() -> int:
    parser = argparse.ArgumentParser(prog="drill_diagnose")
    parser.add_argument("--only", default="")
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--plant-only", action="store_true")
    arguments = parser.parse_args()
    cases = read_cases(CAUSES)
    only = set(filter(None, arguments.only.split(",")))
    if unknown := only - {case.name for case in cases}:
        parser.error(f"there is no window {', '.join(sorted(unknown))}: {[case.name for case in cases]}")
    chosen = [case for case in cases if not only or case.name in only]
    arguments.out.mkdir(parents=True, exist_ok=True)
    windows, overhead = asyncio.run(drilled(chosen, arguments.out, diagnoses=not arguments.plant_only))
    result = result_of(windows, overhead)
    failures = failures_of(windows, result)
    for failure in failures:
        print(f"FAILED: {failure}", flush=True)
    print("RESULT", json.dumps(result))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
