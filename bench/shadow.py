"""What a shadow at 100 % costs the requests that it copies: `make bench-shadow` (about 7 minutes).

Two workers with the null executor run the stable version and its shadow. A closed loop of clients saturates
the stable version, in alternating rounds of two tenants: one whose requests are copied, and one that the
rollout denies. Two loads: ``queued``, twice as many clients as the workers run sequences, so that requests
wait and gateways make no copies; ``full``, exactly as many, so that copies run beside them.

Goodput: requests per second that ended without an error, with the first token within ``TTFT_S``. A ratio is
the median over the pairs of rounds; ``goodput_ratio`` is the lower of the two loads'. The last line is
``RESULT {json}``.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import grpc
import uvloop

from bench.overhead import Target, quantile
from bench.results import Figure, print_result
from bench.stack import MODEL, NullStack, metric_sum
from fairway.client import AdminClient, tls_credentials
from fairway.v1 import controlplane_pb2 as cp
from fairway.v1 import inference_pb2_grpc

WORKERS: Final = 2
SEQUENCES: Final = 16  # that a replica runs at once
# Slow steps: the devices are the limit, and not the processors that this machine shares among all roles.
STEP_S: Final = 0.05
TOKENS: Final = (20, 60)  # random, so that the sequences do not end together
TTFT_S: Final = 5.0
WARM_S: Final = 2.5
REST_S: Final = 1.5
APART: Final = "apart"
COPIES: Final = "fairway_gateway_shadow_copies_total"
LOADS: Final = {"queued": 2 * WORKERS * SEQUENCES, "full": WORKERS * SEQUENCES}


@dataclass(slots=True)
class Round:
    """The requests that ended in the measured part of one round."""

    good: int = 0
    failed: int = 0
    ttft_s: list[float] = field(default_factory=list)


async def play(target: Target, clients: int, round_s: float) -> Round:
    """Return what a closed loop of clients got; nothing of it runs any more."""
    found = Round()
    began_s = time.perf_counter() + WARM_S
    ends_s = began_s + round_s

    async def client(number: int) -> None:
        rng = random.Random(number)
        while (sent_s := time.perf_counter()) < ends_s:
            first_s, failed, request = 0.0, False, target.request(rng.randint(*TOKENS))
            try:
                async for event in target.stub.Generate(request, metadata=target.metadata):
                    if not first_s and event.HasField("chunk"):
                        first_s = time.perf_counter() - sent_s
            except grpc.aio.AioRpcError:
                failed = True
            if began_s <= time.perf_counter() < ends_s:
                found.failed += failed
                found.good += not failed and first_s <= TTFT_S
                found.ttft_s.append(first_s)

    await asyncio.gather(*(client(number) for number in range(clients)))
    await asyncio.sleep(REST_S)
    return found


async def start_shadow(admin: AdminClient) -> str:
    """Return the key of the tenant whose requests are not copied, once copies of all others are made."""
    await admin.tenants.create(cp.Tenant(metadata=cp.Metadata(name=APART)))
    key = cp.Key(metadata=cp.Metadata(name=APART), tenant=APART, role=cp.KEY_ROLE_TENANT)
    secret = (await admin.keys.create(key)).secret
    await admin.rollouts.create(
        cp.Rollout(
            metadata=cp.Metadata(name="shadow"),
            deployment=MODEL,
            strategy=cp.ROLLOUT_STRATEGY_SHADOW,
            arms=[cp.RolloutArm(name="shadow", version="next")],
            shadow=cp.RolloutShadow(arm="shadow", fraction_ratio=1.0),
            rules=cp.RolloutRules(denied_tenants=[APART]),
        )
    )
    for _ in range(600):
        if (await admin.rollouts.get("shadow")).phase == cp.ROLLOUT_PHASE_RUNNING:
            return secret
        await asyncio.sleep(0.2)
    raise SystemExit("the shadow does not run after 2 minutes")


async def measure(stack: NullStack, state: Path, pairs: int, round_s: float) -> dict[str, Figure]:
    endpoints = json.loads((state / "endpoints.json").read_text())
    found: dict[str, Figure] = {}
    worst: list[list[float]] = []
    async with (
        AdminClient(
            endpoints["controlplane"],
            admin_key=endpoints["admin_key"],
            registry=endpoints["registry"],
            credentials=tls_credentials(endpoints["tls_dir"]),
        ) as admin,
        grpc.aio.insecure_channel(stack.grpc) as channel,
    ):
        keys = {"copied": stack.api_key, APART: await start_shadow(admin)}
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        targets = {
            name: Target(name, stub, (("authorization", f"Bearer {key}"),), stack.model)
            for name, key in keys.items()
        }
        for load, clients in LOADS.items():
            before = _copies(state)
            rounds: dict[str, list[Round]] = {name: [] for name in targets}
            for pair in range(pairs):
                order = list(targets) if pair % 2 else list(targets)[::-1]
                for name in order:
                    rounds[name].append(await play(targets[name], clients, round_s))
            ratios = [
                copied.good / max(1, apart.good)
                for copied, apart in zip(rounds["copied"], rounds[APART], strict=True)
            ]
            for name, some in rounds.items():
                rate = sum(one.good for one in some) / (round_s * pairs)
                ttft_s = quantile([value for one in some for value in one.ttft_s], 0.95)
                failed = sum(one.failed for one in some)
                print(f"{load} {name}: {rate:.1f} good/s, TTFT p95 {ttft_s:.3f} s, {failed} failed")
            made = {name: count - before[name] for name, count in _copies(state).items()}
            print(f"{load} ratios {[round(ratio, 3) for ratio in sorted(ratios)]}, copies {made}", flush=True)
            found[f"{load}_goodput_ratio"] = ratios
            worst.append(ratios)
            found[f"{load}_copies"] = made["FINISHED"]
    return {"goodput_ratio": min(worst, key=statistics.median), **found}


def _copies(state: Path) -> dict[str, int]:
    names = ("FINISHED", "SKIPPED_FULL", "SKIPPED_PRESSURE")
    return {name: int(metric_sum(state, "gateway", COPIES, f'outcome="{name}"')) for name in names}


def publish_next(folder: Path) -> None:
    """Publish a second version, which differs in a field that nothing reads."""
    model = folder / "next"
    shutil.copytree(folder / "model", model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "variant": "next"}))
    subprocess.run(
        [sys.executable, "-m", "fairway.cli.main", "models", "publish", str(model), "--name", MODEL,
         "--tag", "next", "--for-another-engine", "--state-dir", str(folder / "state")],
        check=True,
        stdout=subprocess.DEVNULL,
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--pairs", type=int, default=6)
    parser.add_argument("--round-s", type=float, default=8.0)
    options = parser.parse_args()
    settings = [f"worker-{number}:FAIRWAY_MAX_SEQUENCES={SEQUENCES}" for number in range(WORKERS)]
    with (
        tempfile.TemporaryDirectory(prefix="fairway-bench-") as folder,
        NullStack.started(Path(folder), step_s=STEP_S, workers=WORKERS, settings=settings) as stack,
    ):
        publish_next(Path(folder))
        state = Path(folder) / "state"
        figures = uvloop.run(measure(stack, state, options.pairs, options.round_s))
    print_result(figures)


if __name__ == "__main__":
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    main()
