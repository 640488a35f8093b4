"""Every list and explain view, from fixed messages. As a program, it writes the golden files:

python -m tests.unit.cli.terminal.views
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, cast

from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp
from rich.console import Console

from fairway.cli.authority import Issued
from fairway.cli.commands import (
    accounts,
    aliases,
    audit,
    batches,
    certs,
    deployments,
    models,
    nodes,
    placements,
    policies,
    rollouts,
    usage,
)
from fairway.cli.commands.accounts import BUDGETS, KEYS
from fairway.cli.commands.events import COLUMNS as EVENTS
from fairway.cli.commands.placements import DECISIONS, ROWS, WORKERS, RowLine
from fairway.cli.commands.reliability import INPUTS, REQUESTS, SLIS, show_lines
from fairway.cli.commands.rollouts import ROLLOUTS
from fairway.cli.commands.scaling import SCALING
from fairway.cli.commands.status import COLUMNS as PARTS
from fairway.cli.commands.status import Part
from fairway.cli.commands.timeline import LINES, NEIGHBOURS
from fairway.cli.fleet.record import Restarts
from fairway.cli.terminal.listing import lines_of as lines_of_resource
from fairway.cli.terminal.table import Column, blocks_of, table_of, visible
from fairway.timelines import lines_of, neighbours_of
from fairway.tls import Leaf, SpiffeId
from fairway.v1 import common_pb2, slis_pb2, worker_pb2
from fairway.v1 import controlplane_pb2 as cp
from fairway.v1 import registry_pb2 as rg
from fairway.v1 import scheduler_pb2 as pb
from tests.support.timelines import sample_timeline

GOLDEN: Final = Path(__file__).parent / "golden"
WIDTHS: Final = (80, 120)
NOON: Final = Timestamp(seconds=1_798_718_400)
ONE, TWO = ("sha256:" + digit * 64 for digit in "ab")
WORKER: Final = "worker-3.eu-west"
CLASSES: Final = (common_pb2.PRIORITY_INTERACTIVE, common_pb2.PRIORITY_STANDARD, common_pb2.PRIORITY_BATCH)


def _span(seconds: float) -> Duration:
    return Duration(seconds=int(seconds), nanos=round(seconds % 1 * 1e9))


def _meta(name: str) -> cp.Metadata:
    return cp.Metadata(name=name, etag="4711", labels={"team": "support"})


def _decisions() -> list[pb.PlacementDecision]:
    ranked = [
        pb.RankedWorker(worker_id=f"worker-{number}", score=3.5 - number, in_draw=number < 2)
        for number in range(4)
    ]
    waited = pb.PlacementDecision(
        outcome="GRANTED",
        worker_id=WORKER,
        queued_time=NOON,
        wait=_span(12.4),
        looks=9,
        looks_without_room=7,
        bypassed=2,
        ranked=ranked,
        version_digest=ONE,
        priority=common_pb2.PRIORITY_STANDARD,
        tenant="acme",
        prompt_tokens=812,
        reserved_tokens=1068,
    )
    refused = pb.PlacementDecision(
        outcome="NO_WORKER_AVAILABLE",
        choice=1,
        queued_time=NOON,
        wait=_span(30),
        looks=4,
        rejections=[
            pb.FilterRejections(filter="ready", workers=2, named=["worker-0", "worker-1"]),
            pb.FilterRejections(filter="not_draining", workers=1, named=[WORKER]),
        ],
        version_digest=ONE,
        tenant="acme",
        priority=common_pb2.PRIORITY_BATCH,
    )
    return [waited, refused]


def _slis() -> list[cp.SliSummary]:
    """Rows that differ in the class or the version alone."""
    return [
        cp.SliSummary(
            model="chat",
            version_digest=digest,
            tenant="customer-support",
            priority=priority,
            zone="eu-1a",
            requests=12345,
            errors=12,
            started=12300,
            broken=3,
            output_tokens=1234567,
            device_s=8123.4,
            ttft_p50_s=0.0987,
            ttft_p95_s=0.4567,
            ttft_p99_s=12.345,
            itl_p50_s=0.0212,
            itl_p95_s=0.0345,
        )
        for digest in (ONE, TWO)
        for priority in CLASSES[:2]
    ]


def _usage() -> tuple[Sequence[Column[Any]], list[Any]]:
    names = ("day", "tenant", "model")
    records = [
        cp.UsageRecord(
            tenant=tenant,
            model="llama-3.2-instruct",
            hour=NOON,
            requests=1234,
            prompt_tokens=5_678_901,
            cached_tokens=1_234_567,
            output_tokens=987_654,
            device_us=8_123_400_000,
            list_cost_micros=12_345_678,
            measured_cost_micros=9_876_543,
        )
        for tenant in ("acme", "customer-support")
    ]
    return usage.columns_of(names), usage.lines_of(records, names)


def _queue() -> cp.Queue:
    waits = [
        pb.ClassWait(priority=priority, predicted_wait=_span(3.5 * 10**number))
        for number, priority in enumerate(CLASSES)
    ]
    pool = pb.PoolQueue(
        version_digest=ONE,
        queued=412,
        oldest_wait=_span(31),
        pressure_ratio=0.83,
        running=64,
        workers=4,
        serving_workers=3,
        waits=waits,
        kv_tokens_free=512,
        kv_tokens_total=262144,
        shares=[pb.QueueShare(tenant="acme", priority=CLASSES[1], queued=400)],
    )
    return cp.Queue(deployments=["llama-3.2-instruct"], pool=pool)


def _requests() -> list[slis_pb2.FinishedRequest]:
    return [
        slis_pb2.FinishedRequest(
            request_id=f"req_{letter * 24}",
            face="openai",
            tenant="customer-support",
            model="llama-3.2-instruct",
            version_digest=ONE,
            priority=CLASSES[1],
            reason=reason,
            received_unix_us=NOON.seconds * 1_000_000,
            stages_us=[1200, 800, 12_400_000, 900, 2100, 180_000, decode_us, 100],
            prompt_tokens=812,
            output_tokens=256,
        )
        for letter, reason, decode_us in (("a", "FINISHED", 3_100_000), ("b", "QUEUE_TIMEOUT", 0))
    ]


def _row() -> RowLine:
    window = common_pb2.BatchWindow(
        linger_s=0.02, objective_s=0.04, target_s=0.05, compute_s=0.015, transport_s=0.005, rate_per_s=812.5
    )
    trip = pb.RowTrip(
        row=3,
        outcome="DONE",
        worker_id=WORKER,
        slot_wait_s=0.0021,
        stay_s=0.0312,
        batch_wait_s=0.0182,
        batch_rows=32,
        batch_cause="window",
        window=window,
        epoch=7,
        lease_number=2,
        lease_slots=8,
    )
    return RowLine(pb.RowsExplanation(target_s=0.05, gateway_id="gateway", tenant="acme"), trip)


_NODE: Final = cp.Node(
    metadata=_meta(WORKER),
    address="worker-3.eu-west.internal.example.com:50071",
    device="cuda:0 (NVIDIA H100 80GB HBM3)",
    zone="eu-west",
    memory_bytes=80 * 1024**3,
    state=cp.NODE_STATE_LIVE,
    versions=[worker_pb2.LoadedVersion(deployment="chat", state=worker_pb2.VERSION_STATE_READY, running=3)],
)
_DEPLOYMENT: Final = cp.Deployment(
    metadata=_meta("customer-support"),
    model="llama-3.2-instruct",
    version="stable",
    version_digest=ONE,
    replicas=3,
    status=cp.DeploymentStatus(ready_replicas=2, message="1 replica waits: no worker has 24.1 GiB free"),
)
_ROLLOUT: Final = cp.Rollout(
    metadata=_meta("customer-support-20261228-120000"),
    deployment="customer-support",
    message="the candidate needs 412 more sessions until its first verdict",
)
_BATCH: Final[dict[str, Any]] = {
    "id": "batch_0123456789abcdef",
    "status": "in_progress",
    "request_counts": {"total": 10_000, "completed": 4_711, "failed": 3},
    "endpoint": "/v1/chat/completions",
    "created_at": NOON.seconds,
    "expires_at": NOON.seconds + 86_400,
    "input_file_id": "file-in",
    "output_file_id": None,
    "error_file_id": None,
    "errors": None,
    "metadata": {},
}


def _audit() -> list[cp.AuditEvent]:
    """A change, and failed authentications that are one entry."""
    change = cp.AuditEvent(
        time=NOON,
        actor="admin",
        action="ControlPlaneService/UpdateDeployment",
        resource="llama-3.2-instruct",
        index=41_117,
        outcome="OK",
        role="admin",
        address="10.0.0.7",
        count=1,
        revision=88_412,
        request_id="req_" + "a" * 24,
    )
    refused = cp.AuditEvent(
        time=NOON,
        actor="ci",
        action="POST /v1/chat/completions",
        index=41_118,
        outcome="UNAUTHENTICATED",
        address="192.0.2.77",
        count=311,
    )
    return [change, refused]


def _certificate() -> Issued:
    leaf = Leaf(SpiffeId("fairway.internal", "worker", WORKER), 0x4F1D2C3B, 0.0, float(NOON.seconds))
    return Issued(Path(WORKER), cast(Any, None), leaf, revoked=True)


_SCALED: Final = cp.DeploymentScaling(
    deployment="customer-support",
    scaling=cp.Scaling(min_replicas=0, max_replicas=6, max_cost_per_hour=12.5),
    replicas=3,
    ready_replicas=2,
    reasons=[cp.ScalingReason(signal="sustained", replicas=3, text="2.14 replicas of work arrive")],
    decide_time=NOON,
    start=Duration(seconds=48),
)
_TIMELINE: Final = sample_timeline()
VIEWS: Final[dict[str, tuple[Sequence[Column[Any]], list[Any]]]] = {
    "nodes": (nodes.NODES.columns, [_NODE]),
    "audit": (audit.EVENTS.columns, _audit()),
    "certificates": (certs.COLUMNS, [_certificate()]),
    "pack-changes": (
        policies._CHANGES,
        [
            policies.PolicyChange(
                NOON.ToDatetime(), "ASSIGNED", "customer-support", "obeys strict from now on"
            )
        ],
    ),
    "pack-cases": (
        policies._TABLE,
        [policies.CategoryTable("secrets", hits=41, false_alarms=2, misses=1, rest=956)],
    ),
    "deployments": (deployments.DEPLOYMENTS.columns, [_DEPLOYMENT]),
    "revisions": (
        deployments._REVISIONS,
        [cp.DeploymentRevision(name="r-7", time=NOON, cause="rollout chat-2", deployment=_DEPLOYMENT)],
    ),
    "tenants": (
        accounts.TENANTS.columns,
        [cp.Tenant(metadata=_meta("customer-support"), display_name="Support, Ltd.", max_concurrency=64)],
    ),
    "keys": (KEYS.columns, [cp.Key(metadata=_meta("ci"), role=cp.KEY_ROLE_TENANT, tenant="acme")]),
    "budgets": (
        BUDGETS.columns,
        [
            cp.Budget(
                metadata=_meta("support-december"),
                tenant="acme",
                limit_micros=500_000_000,
                spent_micros=487_120_000,
                currency="USD",
                message="97 % of the month is spent",
            )
        ],
    ),
    "aliases": (
        aliases.ALIASES.columns,
        [
            cp.Alias(
                metadata=_meta("auto"),
                sizes=aliases.sizes_of(["chat-small:context=4000", "chat-large:quality=60,tools,schemas"]),
            )
        ],
    ),
    "objectives": (
        deployments.OBJECTIVES.columns,
        [cp.Objective(metadata=_meta("fast"), model="chat", priority=CLASSES[0])],
    ),
    "quarantine": (
        INPUTS.columns,
        [cp.QuarantinedInput(fingerprint="0123abcd" * 4, model="chat", version_digest=ONE, deaths=2)],
    ),
    "models": (models.MODELS.columns, [rg.RegisteredModel(name="llama", versions=3, tags={"stable": ONE})]),
    "versions": (
        models.VERSION_COLUMNS,
        [rg.Version(digest=ONE, model="llama", tags=["stable", "v2"], size_bytes=93_000_000)],
    ),
    "batches": (batches._COLUMNS, [_BATCH]),
    "queue": (placements.COLUMNS, [_queue()]),
    "scaling": (SCALING.columns, [_SCALED]),
    "workers": (
        WORKERS,
        [
            pb.Reporter(
                worker_id=WORKER,
                state="placed on",
                zone="eu-west",
                pools=[
                    pb.ReporterPool(
                        version_digest=ONE,
                        kv_tokens_total=65536,
                        health="ejected",
                        health_reason="3.1 times slower than its peers for 12 s",
                    )
                ],
            )
        ],
    ),
    "requests": (REQUESTS.columns, _requests()),
    "explain": (DECISIONS, _decisions()),
    "explain-rows": (ROWS, [_row()]),
    "timeline": (LINES, lines_of(_TIMELINE)),
    "timeline-neighbours": (NEIGHBOURS, neighbours_of(_TIMELINE)),
    "events": (
        EVENTS,
        [
            cp.Event(
                time=NOON,
                severity=cp.EVENT_SEVERITY_WARNING,
                kind=cp.RESOURCE_KIND_DEPLOYMENT,
                resource="customer-support",
                reason="REPLICA_FAILED",
                message="the replica on worker-3 ended 3 times: out of memory",
            )
        ],
    ),
    "slis": (SLIS.columns, _slis()),
    "usage": _usage(),
    "status": (
        PARTS,
        [
            Part(
                "worker-0",
                12345,
                "127.0.0.1:50071",
                "unreachable",
                Path("logs/worker-0.log"),
                started_s=None,
                restarts=Restarts(3, "exit status 70"),
            )
        ],
    ),
    "rollouts": (ROLLOUTS.columns, [_ROLLOUT]),
    "rollout-arms": (
        rollouts.ARM_COLUMNS,
        [
            cp.RolloutArmStatus(
                name="candidate",
                version_digest=TWO,
                weight_ratio=0.1,
                ready_replicas=1,
                wanted_replicas=2,
                verdict="continue",
                waits_for="412 more sessions until the first verdict",
            )
        ],
    ),
    "rollout-evidence": (
        rollouts.EVIDENCE_COLUMNS,
        [cp.GateEvidence(metric="ttft_p95", baseline_samples=912, candidate_samples=101, statistic=1.2)],
    ),
    "rollout-history": (
        rollouts.HISTORY_COLUMNS,
        [
            cp.RolloutHistoryEntry(
                time=NOON, what="rolled back", message="ttft_p95 is 38 % above the stable version's"
            )
        ],
    ),
    "rollout-plan": (
        rollouts.FIT_COLUMNS,
        [cp.RolloutFit(name="candidate", replicas=2, missing_replicas=1, rejected=["worker-0: 3 GiB short"])],
    ),
}


def capture(name: str) -> str:
    """Return a view at each width, with all of its columns at the first, and as `show` prints it."""
    columns, items = VIEWS[name]
    parts = [f"# {width} columns\n{_table(visible(columns, wide=False), items, width)}" for width in WIDTHS]
    parts.append(f"# 80 columns, wide\n{blocks_of(visible(columns, wide=True), items)}")
    if isinstance(items[0], Message) and hasattr(items[0], "metadata"):
        parts.append("# show\n" + "".join(f"{line}\n" for line in lines_of_resource(items[0])))
    if name == "requests":
        parts.append(f"# show\n{show_lines(items[0])}")
    return "\n".join(parts)


def _table(columns: Sequence[Column[Any]], items: Sequence[Any], width: int) -> str:
    file = io.StringIO()
    Console(file=file, width=width, color_system=None).print(table_of(columns, items, width=width))
    return "".join(f"{line.rstrip()}\n" for line in file.getvalue().splitlines())


if __name__ == "__main__":
    GOLDEN.mkdir(exist_ok=True)
    for each in VIEWS:
        (GOLDEN / f"{each}.txt").write_text(capture(each))
