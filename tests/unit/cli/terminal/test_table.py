"""Tables fit the terminal: nothing is folded, and what is cut ends with an ellipsis."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len
from rich.console import Console

from fairway.cli.commands.accounts import KEYS, TENANTS
from fairway.cli.commands.deployments import DEPLOYMENTS
from fairway.cli.commands.events import COLUMNS as EVENTS
from fairway.cli.commands.models import MODELS, VERSION_COLUMNS
from fairway.cli.commands.nodes import NODES
from fairway.cli.commands.placements import COLUMNS as QUEUES
from fairway.cli.commands.placements import DECISIONS, WORKERS
from fairway.cli.commands.status import COLUMNS as PARTS
from fairway.cli.commands.status import Part
from fairway.cli.fleet.record import Restarts
from fairway.cli.terminal.table import Column, table_of, visible
from fairway.v1 import controlplane_pb2 as cp
from fairway.v1 import registry_pb2 as rg
from fairway.v1 import scheduler_pb2 as pb
from fairway.v1 import worker_pb2

DIGEST = "sha256:" + "0123456789abcdef" * 4
NAME = "llama-3.2-instruct-quantised-for-the-customer-support-of-europe"
LABELS = {"team": "customer-support-of-europe", "cost-center": "4711-0815"}
META = cp.Metadata(name=NAME, labels=LABELS, etag="1234567890123")

LISTINGS: dict[str, tuple[Sequence[Column[Any]], Any]] = {
    "nodes": (
        NODES.columns,
        cp.Node(
            metadata=META,
            address="worker-17.europe-west4-b.internal.example.com:50071",
            device="cuda:0 (NVIDIA H100 80GB HBM3)",
            zone="europe-west4-b",
            memory_bytes=80 * 1024**3,
            cordoned=True,
            state=cp.NODE_STATE_LOST,
            incarnation=1_793_000_000,
            versions=[
                worker_pb2.LoadedVersion(deployment=NAME, state=worker_pb2.VERSION_STATE_READY, running=3),
                worker_pb2.LoadedVersion(deployment="another", state=worker_pb2.VERSION_STATE_LOADING),
            ],
        ),
    ),
    "deployments": (
        DEPLOYMENTS.columns,
        cp.Deployment(
            metadata=META,
            model=NAME,
            version="stable",
            version_digest=DIGEST,
            replicas=12,
            status=cp.DeploymentStatus(ready_replicas=3, message="waiting for a worker\nwith room"),
        ),
    ),
    "tenants": (
        TENANTS.columns,
        cp.Tenant(metadata=META, display_name="Customer Support of Europe, Ltd.", requests_per_minute=600),
    ),
    "keys": (
        KEYS.columns,
        cp.Key(metadata=META, role=cp.KEY_ROLE_TENANT, tenant=NAME, models=[NAME, "another-model"]),
    ),
    "models": (MODELS.columns, rg.RegisteredModel(name=NAME, versions=3, tags={"v1": DIGEST, "v2": DIGEST})),
    "versions": (VERSION_COLUMNS, rg.Version(digest=DIGEST, model=NAME, tags=["stable", "v2"])),
    "queue": (
        QUEUES,
        cp.Queue(deployments=[NAME], pool=pb.PoolQueue(queued=4, running=7, version_digest=DIGEST)),
    ),
    "workers": (
        WORKERS,
        pb.Reporter(
            worker_id=NAME,
            state="placed on",
            zone="europe-west4-b",
            pools=[pb.ReporterPool(version_digest=DIGEST, kv_tokens_total=65536, health="healthy")],
        ),
    ),
    "explain": (
        DECISIONS,
        pb.PlacementDecision(outcome="GRANTED", worker_id=NAME, version_digest=DIGEST, looks=3),
    ),
    "events": (
        EVENTS,
        cp.Event(kind=cp.RESOURCE_KIND_DEPLOYMENT, resource=NAME, reason="REPLICA_FAILED", message="x " * 90),
    ),
    "status": (
        PARTS,
        Part(
            "worker-0",
            12345,
            "127.0.0.1:50071",
            "serving",
            Path("logs/worker-0"),
            1.0,
            Restarts(1, "it was ended by SIGKILL"),
        ),
    ),
}


def lines_of(columns: Sequence[Column[Any]], items: Sequence[Any], width: int) -> list[str]:
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=width, color_system=None)
    console.print(table_of(columns, items, width=width))
    return file.getvalue().splitlines()


@pytest.mark.parametrize("wide", [False, True], ids=["table", "wide"])
@pytest.mark.parametrize("width", [60, 80, 120])
@pytest.mark.parametrize("name", LISTINGS)
def test_a_listing_fits(name: str, width: int, wide: bool) -> None:
    columns, item = LISTINGS[name]
    shown = visible(columns, wide=wide)
    header, *rows = (line.rstrip() for line in lines_of(shown, [item, item], width))
    assert all(len(line) <= width for line in (header, *rows))
    assert len(rows) == 2, "one line per item"
    names = [column.header.upper() for column in shown]
    left = re.split(r" {2,}", header)
    assert left[0] == names[0]
    assert [name for name in names if name in left] == left, "a header is cut or moved"
    assert "sha256:" not in rows[0]
    for column in shown[:1]:
        cell = column.cell(item).removeprefix("sha256:")
        first = rows[0].split("  ")[0]
        assert first in (cell, cell[:12]) or (first.endswith("…") and cell.startswith(first[:-1]))


def test_digests_are_short_and_all_columns_stay_where_they_fit() -> None:
    columns, item = LISTINGS["versions"]
    header, row = lines_of(columns, [item], 120)
    assert header.split() == ["DIGEST", "TAGS", "SIZE", "SERVABLE", "BY", "CREATED", "MODEL"]
    assert row.startswith("0123456789ab  stable,v2  ")


def test_what_matters_least_goes_first() -> None:
    columns, item = LISTINGS["nodes"]
    shown = visible(columns, wide=True)
    assert lines_of(shown, [item], 60)[0].split() == ["NAME", "STATE", "VERSIONS"]
    assert lines_of(shown, [item], 80)[0].split() == ["NAME", "ADDRESS", "STATE", "VERSIONS"]


def test_a_terminal_of_a_few_columns_has_the_names() -> None:
    columns, item = LISTINGS["nodes"]
    header, row = lines_of(columns, [item], 10)
    assert header.strip() == "NAME"
    assert row == "llama-3.2…"


def test_an_empty_listing_has_its_header() -> None:
    assert lines_of(LISTINGS["keys"][0], [], 80)[0].split()[0] == "NAME"


def test_wide_characters_count_twice() -> None:
    columns: tuple[Column[str], ...] = (
        Column("name", lambda item: item),
        Column("state", lambda item: "ready"),
    )
    assert all(cell_len(line) <= 40 for line in lines_of(columns, ["模型" * 20], 40))
