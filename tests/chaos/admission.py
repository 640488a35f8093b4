"""`make chaos-admission`: one tenant near its limits, on three gateways, while Redis and gateways fail.

1,000 clients send requests of one tenant in a closed loop through three gateways to two workers that take
fixed steps. The tenant has a limit of requests at once and a month's budget that the run uses up. Meanwhile
Redis is frozen, then killed, and two gateways are killed one after the other. Every request is recorded; a
pure checker judges the history, what Redis counts at rest and what the usage ledger has. Then a budget is
spent through a failover of Sentinels (``admission_failover``).

The last line is ``RESULT {json}``. Exits 0 when nothing was overspent, falsely rejected, leaked or lost.
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
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import grpc
import structlog

from fairway.v1 import controlplane_pb2 as cp
from fairway.v1 import controlplane_pb2_grpc, usage_pb2
from fairway.v1 import inference_pb2 as pb
from services.core.errors import BudgetExceeded, ConcurrencyExceeded
from services.core.generation import Usage
from services.core.limits import Limit, LimitKind, Price
from services.rpc.status import from_rpc_error
from tests.chaos.admission_checker import (
    AdmissionEnd,
    AdmissionLimits,
    AdmissionRecord,
    AdmissionVerdict,
    FinalMeters,
    judge_admissions,
)
from tests.chaos.admission_failover import run_failover
from tests.chaos.driver import state_root, until
from tests.chaos.faults import Freeze, Kill, inject
from tests.chaos.fleet import Fleet, Shape
from tests.chaos.load import Client, now_s
from tests.support.stack import metadata

SHAPE: Final = Shape(workers=2, gateways=3)
SETTINGS: Final = {"FAIRWAY_NULL_STEP_S": "0.02", "FAIRWAY_MAX_SEQUENCES": "128"}
TENANT: Final = "near"
MODEL: Final = "priced"
PRICE: Final = Price(input_micros=1_000_000, cached_micros=1_000_000, output_micros=2_000_000)
TOKENS: Final = 40
SLOTS: Final = 150
HELD_S: Final = 75.0  # a lease of 60 s, and the time until the next admission or the settler finds it
AFTER_OUTAGE_S: Final = 4.0
FROZEN_S: Final = 4.0
CALM_S: Final = 8.0
RESTED_S: Final = 180.0
_PAUSE_S: Final = (0.1, 0.6)  # of a client that was rejected


class AdmissionDrill:
    """The clients, the faults and the record of one run."""

    def __init__(self, fleet: Fleet, client: Client, key: str, options: argparse.Namespace) -> None:
        self._fleet = fleet
        self._client = client
        self._key = key
        self._clients: int = options.clients
        self._budget: int = options.budget_micros
        self._rng = random.Random(options.seed)
        self._stopped = False
        self._began = datetime.now(UTC)
        self.history: list[AdmissionRecord] = []
        self.outages: list[tuple[float, float]] = []
        self.reasons: Counter[str] = Counter()

    async def run(self) -> AdmissionVerdict:
        """Return the verdict once nothing runs any more."""
        sending = [asyncio.create_task(self._send_forever(number)) for number in range(self._clients)]
        try:
            await self._faults()
        finally:
            self._stopped = True
            await asyncio.gather(*sending)
        meters = await self._rested()
        limits = AdmissionLimits(self._budget, SLOTS, HELD_S, tuple(self.outages))
        return judge_admissions(self.history, limits, meters)

    # --- faults --------------------------------------------------------------------------------------

    async def _faults(self) -> None:
        await asyncio.sleep(CALM_S)
        await self._outage("frozen", Freeze("redis"), FROZEN_S)
        await asyncio.sleep(CALM_S)
        await self._outage("killed", Kill("redis"), 1.0)
        await asyncio.sleep(CALM_S)
        for gateway in self._client.names[1:]:
            what, lift = await inject(Kill(gateway), self._fleet)
            print(what, flush=True)
            await asyncio.sleep(CALM_S)
            await lift()
        await until(self._spent_up, RESTED_S)
        await asyncio.sleep(CALM_S)

    async def _outage(self, what: str, fault: Freeze | Kill, hold_s: float) -> None:
        began_s = now_s()
        _, lift = await inject(fault, self._fleet)
        await asyncio.sleep(hold_s)
        await lift()
        ended_s = now_s() + AFTER_OUTAGE_S
        self.outages.append((began_s, ended_s))
        print(f"redis {what} for {ended_s - AFTER_OUTAGE_S - began_s:.1f} s", flush=True)

    async def _spent_up(self) -> str:
        rejected = sum(each.end is AdmissionEnd.NO_BUDGET for each in self.history[-200:])
        return "" if rejected > 100 else "the budget is not used up"

    # --- clients -------------------------------------------------------------------------------------

    async def _send_forever(self, number: int) -> None:
        gateway = number
        await asyncio.sleep(self._rng.uniform(0, 2.0))
        while not self._stopped:
            name = self._client.names[gateway % len(self._client.names)]
            record = await self._request(name)
            self.history.append(record)
            if record.end is not AdmissionEnd.FINISHED:
                gateway += record.end is AdmissionEnd.CUT
                await asyncio.sleep(self._rng.uniform(*_PAUSE_S))

    async def _request(self, gateway: str) -> AdmissionRecord:
        generation = pb.Generation(
            model=MODEL,
            prompt="def add(left, right):",
            max_output_tokens=self._rng.randint(4, TOKENS),
            ignore_eos=True,
        )
        began_s, prompt, received = now_s(), 0, 0
        end = AdmissionEnd.CUT
        call = self._client.stub(gateway).Generate(
            pb.GenerateRequest(generation=generation), metadata=metadata(self._key), timeout=120
        )
        try:
            async for event in call:
                if event.HasField("accepted"):
                    prompt = event.accepted.prompt_tokens
                elif event.HasField("chunk"):
                    received += len(event.chunk.ids)
                elif event.HasField("finished"):
                    end = AdmissionEnd.FINISHED
        except grpc.aio.AioRpcError as error:
            found = from_rpc_error(error)
            broken = found.message.startswith("the peer ended the call with ")
            self.reasons["connection lost" if broken else found.reason] += 1
            if isinstance(found, BudgetExceeded):
                end = AdmissionEnd.NO_BUDGET
            elif isinstance(found, ConcurrencyExceeded):
                end = AdmissionEnd.NO_SLOT
            elif not broken:
                end = AdmissionEnd.REFUSED
        # A request that was cut before its acceptance may have been reserved: the prompt is the same for all.
        worst = PRICE.cost_micros(Usage(prompt or PROMPT_TOKENS, generation.max_output_tokens))
        paid = PRICE.cost_micros(Usage(prompt, received)) if prompt else 0
        return AdmissionRecord(began_s, now_s(), end, worst, paid)

    # --- at rest -------------------------------------------------------------------------------------

    async def _rested(self) -> FinalMeters:
        limits = (Limit(LimitKind.MONTH_MICROS, self._budget),)
        meters = FinalMeters(0, 0, 0)

        async def rested() -> str:
            nonlocal meters
            await self._fleet.limiter.settle_lapsed(TENANT)
            (spent,) = await self._fleet.limiter.spent(TENANT, limits)
            slots = await self._fleet.limiter.concurrency(TENANT)
            meters = FinalMeters(spent.settled_micros, spent.reserved_micros, slots)
            if slots or spent.reserved_micros:
                return f"{meters}"
            booked = await self._booked()
            meters = replace(
                meters,
                by_gateways_micros=booked[usage_pb2.USAGE_SOURCE_GATEWAY],
                by_workers_micros=booked[usage_pb2.USAGE_SOURCE_WORKER],
            )
            # What workers report after a lapse is charged by the settler's next round.
            return "" if meters.charged_micros == meters.by_workers_micros else f"{meters}"

        if missing := await until(rested, RESTED_S):
            print(f"not at rest after {RESTED_S:g} s: {missing}", flush=True)
        return meters

    async def _booked(self) -> Counter[usage_pb2.UsageSource.ValueType]:
        """Return the list cost of the tenant's requests in the usage ledger, by source."""
        request = cp.ListUsageRequest(tenant=TENANT, page_size=1000)
        request.start_time.FromDatetime(self._began)
        stub = controlplane_pb2_grpc.ControlPlaneServiceStub(
            self._fleet.channel(self._fleet.addresses.of("controlplane"))
        )
        listed = await stub.ListUsage(request, metadata=metadata(self._fleet.admin_key), timeout=30)
        booked: Counter[usage_pb2.UsageSource.ValueType] = Counter()
        for record in listed.records:
            booked[record.source] += record.list_cost_micros
        return booked


PROMPT_TOKENS: Final = 16


async def provision(fleet: Fleet, budget_micros: int) -> str:
    """Create the deployment, the tenant, its budget and its key; return the key's secret."""
    admin = metadata(fleet.admin_key)
    stub = controlplane_pb2_grpc.ControlPlaneServiceStub(fleet.channel(fleet.addresses.of("controlplane")))
    price = cp.Price(
        input_micros=PRICE.input_micros, cached_micros=PRICE.cached_micros, output_micros=PRICE.output_micros
    )
    deployment = cp.Deployment(
        metadata=cp.Metadata(name=MODEL),
        model=fleet.options.model_name,
        version="latest",
        replicas=SHAPE.workers,
        executor="null",
        price=price,
    )
    # One worker runs one executor of a version.
    bundled = cp.DeleteDeploymentRequest(name=fleet.options.model_name)
    await stub.DeleteDeployment(bundled, metadata=admin, timeout=15)
    await stub.CreateDeployment(cp.CreateDeploymentRequest(deployment=deployment), metadata=admin, timeout=15)
    tenant = cp.Tenant(metadata=cp.Metadata(name=TENANT), max_concurrency=SLOTS)
    await stub.CreateTenant(cp.CreateTenantRequest(tenant=tenant), metadata=admin, timeout=15)
    budget = cp.Budget(metadata=cp.Metadata(name="near"), tenant=TENANT, limit_micros=budget_micros)
    await stub.CreateBudget(cp.CreateBudgetRequest(budget=budget), metadata=admin, timeout=15)
    key = cp.Key(metadata=cp.Metadata(name="near"), role=cp.KEY_ROLE_TENANT, tenant=TENANT)
    created = await stub.CreateKey(cp.CreateKeyRequest(key=key), metadata=admin, timeout=15)

    async def ready() -> str:
        found = await stub.GetDeployment(cp.GetDeploymentRequest(name=MODEL), metadata=admin, timeout=5)
        replicas = found.deployment.status.ready_replicas
        return "" if replicas == SHAPE.workers else f"{replicas} replicas are ready"

    if missing := await until(ready, 60.0):
        raise RuntimeError(missing)
    await asyncio.sleep(2.0)  # the gateways receive it
    return created.secret


async def run(options: argparse.Namespace, root: Path) -> AdmissionVerdict:
    async with Fleet.started(root, SHAPE, settings=SETTINGS) as fleet:
        secret = await provision(fleet, options.budget_micros)
        client = Client(fleet.gateways, MODEL, timeout_s=120)
        try:
            drill = AdmissionDrill(fleet, client, secret, options)
            verdict = await drill.run()
        finally:
            await client.close()
    ends = Counter(each.end.value for each in drill.history)
    print(f"{len(drill.history)} requests: {dict(ends)}; errors: {dict(drill.reasons)}")
    return verdict


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="make chaos-admission", description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--clients", type=int, default=1000)
    parser.add_argument("--budget-micros", type=int, default=250_000)
    parser.add_argument("--state-dir", default="", help="keep logs and state here; else they are removed")
    options = parser.parse_args(arguments)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    with state_root(options.state_dir, "admission") as root:
        verdict = asyncio.run(run(options, root))
        failover = asyncio.run(run_failover(root / "failover", options.seed))
    print(failover)
    problems = [*verdict.problems, *failover.problems]
    for problem in problems:
        print(problem)
    figures = {
        "budget_overspend": verdict.budget_overspend,
        "false_rejections": verdict.false_rejections,
        "leaked": verdict.leaked,
        "killed_charged_ratio": verdict.killed_charged_ratio,
        "sentinel_overspend_within_bound": failover.overspend <= failover.bound,
    }
    print(f"RESULT {json.dumps(figures)}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
