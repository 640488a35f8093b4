"""`fairway explain` and `fairway workers`: placement of requests, from the leading scheduler."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Final

import typer
from google.protobuf.duration_pb2 import Duration

from fairway.cli import completion
from fairway.cli.calls import checked
from fairway.cli.connection import Connection, Server, command
from fairway.cli.errors import CliError, ExitCode
from fairway.cli.flags import Format, OutputOption, WatchOption
from fairway.cli.terminal.cells import duration, moment, priority, short_digest
from fairway.cli.terminal.formats import DOCUMENTS, document_of, write_document
from fairway.cli.terminal.listing import Resource
from fairway.cli.terminal.table import Column, show_rows
from fairway.cli.watch import polled
from fairway.timelines import waits_of
from fairway.v1 import controlplane_pb2 as cp
from fairway.v1 import scheduler_pb2 as pb


def _ms(value: Duration) -> str:
    return _ms_of(value.ToMicroseconds() / 1e6)


def _ms_of(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"


def _candidate(found: pb.RankedWorker) -> str:
    drawn = "" if found.in_draw else "-"
    return f"{drawn}{found.worker_id}:{found.score:.3f}"


def _parts(found: pb.PlacementDecision) -> str:
    return "; ".join(
        f"{one.worker_id} cached={one.cached_tokens} ttft={_ms(one.predicted_ttft)} "
        + " ".join(f"{part.scorer}={part.value:.3f}" for part in one.parts)
        for one in found.ranked
    )


def _rejection(one: pb.FilterRejections) -> str:
    return f"{one.filter}:{one.workers}" + (f"({','.join(one.named)})" if one.named else "")


def _why(found: pb.PlacementDecision) -> str:
    """Why it waited, and which filters dropped workers; of a choice without either, from how many it was."""
    why = [found.size_reason] if found.size_reason else []
    why += waits_of(found)
    why += [_rejection(one) for one in found.rejections]
    best = f"best of {len(found.ranked)} workers" if found.ranked else ""
    return "; ".join(filter(None, (*why, best if not why or found.size_reason else "")))


_REASON: Final = 44  # cells of a reason that 80 columns have room for
DECISIONS: Final[tuple[Column[pb.PlacementDecision], ...]] = (
    Column("outcome", lambda found: found.outcome),
    Column("why", _why, least=_REASON),
    Column("wait", lambda found: duration(found.wait)),
    Column("worker", lambda found: found.worker_id, drop=1),
    Column("choice", lambda found: str(found.choice), key=True),
    Column("candidates", lambda found: " ".join(map(_candidate, found.ranked)), drop=2),
    Column("queued", lambda found: moment(found.queued_time), drop=3),
    Column("looks", lambda found: str(found.looks), wide=True),
    Column("bypassed", lambda found: str(found.bypassed), wide=True),
    Column("tenant", lambda found: f"{found.tenant}/{priority(found.priority)}", wide=True),
    Column("attempt", lambda found: str(found.attempt), wide=True),
    Column("counter", lambda found: f"{found.counter_tokens:.0f}", wide=True),
    Column("tokens", lambda found: f"{found.prompt_tokens}/{found.reserved_tokens}", wide=True),
    Column("excluded", lambda found: ",".join(found.excluded_workers), wide=True),
    Column("scores", _parts, wide=True),
    Column("epoch", lambda found: str(found.epoch), wide=True),
    Column("digest", lambda found: found.version_digest, wide=True),
    Column("safety", lambda found: found.safety, wide=True),
)


@dataclass(frozen=True, slots=True)
class RowLine:
    """One stay of a row on a worker, and the request that it is of."""

    request: pb.RowsExplanation
    trip: pb.RowTrip


def _lease(line: RowLine) -> str:
    trip = line.trip
    return f"{trip.lease_number} of {trip.lease_slots} slots" if trip.epoch else "without a leader"


def _objective(line: RowLine) -> str:
    """The latency target of the request's model and class."""
    return _ms_of(line.request.target_s) if line.request.target_s else "none"


def _window(line: RowLine) -> str:
    """The bound of the window by what it was derived from, and what was expected to arrive."""
    if not line.trip.HasField("window"):
        return ""
    found = line.trip.window
    return (
        f"{_ms_of(found.linger_s)} = {_ms_of(found.objective_s)} left of {_ms_of(found.target_s)} "
        f"- {_ms_of(found.compute_s)} compute "
        f"- {_ms_of(found.transport_s)} transport; {found.rate_per_s:.1f} rows/s, "
        f"{found.returning_rows:.0f} returning"
    )


ROWS: Final[tuple[Column[RowLine], ...]] = (
    Column("row", lambda line: str(line.trip.row)),
    Column("outcome", lambda line: line.trip.outcome),
    Column("worker", lambda line: line.trip.worker_id),
    Column("slot wait", lambda line: _ms_of(line.trip.slot_wait_s)),
    Column("stay", lambda line: _ms_of(line.trip.stay_s)),
    Column("batch wait", lambda line: _ms_of(line.trip.batch_wait_s)),
    Column("batch", lambda line: f"{line.trip.batch_rows} rows" if line.trip.batch_rows else ""),
    Column("started by", lambda line: line.trip.batch_cause),
    Column("bucket", lambda line: str(line.trip.window.width or ""), drop=2),
    Column("objective", _objective, drop=4),
    Column("window", _window, drop=1),
    Column("lease", _lease, drop=3),
    Column("gateway", lambda line: line.request.gateway_id, wide=True),
    Column("tenant", lambda line: f"{line.request.tenant}/{priority(line.request.priority)}", wide=True),
    Column("epoch", lambda line: str(line.trip.epoch), wide=True),
    Column("digest", lambda line: line.request.version_digest, wide=True),
)


def _pools(found: pb.Reporter) -> str:
    return " ".join(
        f"{short_digest(pool.version_digest)}:{pool.running}+{pool.waiting}" for pool in found.pools
    )


def _room(found: pb.Reporter) -> str:
    room = sum(pool.kv_tokens_room for pool in found.pools)
    return f"{room}/{sum(pool.kv_tokens_total for pool in found.pools)}"


def _steps(found: pb.Reporter) -> str:
    return " ".join(
        f"{_ms(pool.measured_step)}/{_ms(pool.predicted_step)}"
        for pool in found.pools
        if pool.HasField("measured_step")
    )


def _health(found: pb.Reporter) -> str:
    return " ".join(
        pool.health + (f"({pool.health_reason})" if pool.health_reason else "") for pool in found.pools
    )


WORKERS: Final[tuple[Column[pb.Reporter], ...]] = (
    Column("worker", lambda found: found.worker_id),
    Column("state", lambda found: found.state),
    Column("running", lambda found: str(sum(pool.running + pool.waiting for pool in found.pools)), drop=1),
    Column("kv room", _room),
    Column("step", _steps, drop=2),
    Column("slowness", lambda found: " ".join(f"{pool.slowness_ratio:.2f}" for pool in found.pools), drop=3),
    Column("health", _health, least=_REASON),
    Column("prefix blocks", lambda found: str(found.prefix_blocks), drop=4),
    Column("zone", lambda found: found.zone, drop=5),
    Column("type", lambda found: found.device_type, drop=6),
    Column("cost", lambda found: f"{found.cost_per_hour:g}" if found.cost_per_hour else "", drop=7),
    Column("last report", lambda found: duration(found.last_report), wide=True),
    Column("pools", _pools, wide=True),
    Column("slots", lambda found: " ".join(str(pool.slots) for pool in found.pools), wide=True),
    Column(
        "queued prefill",
        lambda found: str(sum(pool.queued_prefill_tokens for pool in found.pools)),
        wide=True,
    ),
    Column("address", lambda found: found.address, wide=True),
    Column("incarnation", lambda found: str(found.incarnation), wide=True),
)


def workers_of() -> Resource[pb.Reporter]:
    """Return the workers that reported to the leader."""

    async def listed(connection: Connection) -> Sequence[pb.Reporter]:
        return await checked(connection.admin.placements.workers(), what="cannot list the workers")

    watch = polled("worker", "the workers", lambda found: found.worker_id, listed)
    return Resource("worker", "workers", Server.CONTROLPLANE, WORKERS, listed, watch=watch)


def add(app: typer.Typer) -> None:
    """Add the commands `explain` and `workers` to ``app``."""
    _add_explain(app)
    _add_workers(app)


def _add_explain(app: typer.Typer) -> None:
    @command(
        app,
        "explain",
        to=Server.CONTROLPLANE,
        examples=(
            "fairway explain req_0123456789",
            "fairway explain chatcmpl-req_0123456789 -o wide",
            "fairway explain req_0123456789 -o json | jq '.decisions[].ranked'",
        ),
    )
    async def explain(
        connection: Connection,
        request_id: Annotated[
            str, typer.Argument(metavar="REQUEST_ID", help="Id of the response, or its x-request-id.")
        ],
        output: OutputOption = Format.TABLE,
    ) -> None:
        """Show the placement of a request: candidate workers, their scores, and why it waited.

        Of a fixed-cost model: the slots, batches and windows of its first rows.
        """
        found = await checked(
            connection.admin.placements.explain(request_id), what="cannot explain the request"
        )
        if not found.decisions and not found.rows:
            raise CliError(
                "NOT_FOUND",
                f"the leading scheduler has no record of {request_id}",
                next_step=f"its records begin at {moment(found.since)}; a gateway's own placements "
                "on a worker that has left are in the log of that gateway",
                exit_code=ExitCode.REFUSED,
            )
        if output in DOCUMENTS:
            write_document(document_of(found), output)
        elif found.rows:
            lines = [RowLine(each, trip) for each in found.rows for trip in each.trips]
            show_rows(ROWS, lines, wide=output is Format.WIDE)
        else:
            show_rows(DECISIONS, found.decisions, wide=output is Format.WIDE)


def _add_workers(app: typer.Typer) -> None:
    @command(
        app,
        "workers",
        to=Server.CONTROLPLANE,
        examples=(
            "fairway workers",
            "fairway workers -o wide --watch",
            "fairway workers -o json | jq '.workers[].pools'",
        ),
    )
    async def workers(
        connection: Connection, output: OutputOption = Format.TABLE, watch: WatchOption = False
    ) -> None:
        """Show the workers as placement uses them: free KV, measured and predicted step time, health."""
        await workers_of().show_all(connection, output, watch=watch)


def _shares(found: cp.Queue) -> str:
    shares = " ".join(f"{each.tenant}/{priority(each.priority)}:{each.queued}" for each in found.pool.shares)
    return shares + (f" (+{found.pool.shares_left_off})" if found.pool.shares_left_off else "")


def _served(found: cp.Queue) -> str:
    """Return the served weighted tokens per tenant; within a class the least is served first."""
    counters = found.pool.counters
    return " ".join(
        f"{each.tenant_id}/{priority(each.priority)}:{each.virtual_tokens:.0f}" for each in counters
    )


def _predicted(found: cp.Queue) -> str:
    """Return the wait of each class, as refusals state it."""
    return " ".join(
        f"{priority(one.priority)}:"
        + (duration(one.predicted_wait) if one.HasField("predicted_wait") else "unknown")
        for one in found.pool.waits
    )


COLUMNS: Final[tuple[Column[cp.Queue], ...]] = (
    Column("pool", lambda found: ",".join(found.deployments) or short_digest(found.pool.version_digest)),
    Column("queued", lambda found: str(found.pool.queued)),
    Column(
        "oldest wait", lambda found: duration(found.pool.oldest_wait) if found.pool.queued else "", drop=2
    ),
    Column("predicted wait", _predicted, least=48),
    Column("pressure", lambda found: f"{found.pool.pressure_ratio:.2f}", drop=1),
    Column("running", lambda found: str(found.pool.running)),
    Column("workers", lambda found: f"{found.pool.serving_workers}/{found.pool.workers}"),
    Column("prompt tokens", lambda found: str(found.pool.queued_prompt_tokens), wide=True),
    Column("granted", lambda found: str(found.pool.granted), wide=True),
    Column("waiting", lambda found: str(found.pool.waiting), wide=True),
    Column("kv free", lambda found: f"{found.pool.kv_tokens_free}/{found.pool.kv_tokens_total}", wide=True),
    Column("shares", _shares, wide=True),
    Column("served", _served, wide=True),
    Column("digest", lambda found: found.pool.version_digest, wide=True),
)


def queues_of(tenant: str) -> Resource[cp.Queue]:
    """Return the pools, with the shares of one tenant or of all."""

    async def listed(connection: Connection) -> Sequence[cp.Queue]:
        return await checked(connection.admin.queues.list(tenant=tenant), what="cannot list the queues")

    watch = polled("queue", "the queues", lambda found: found.pool.version_digest, listed)
    return Resource("queue", "queues", Server.CONTROLPLANE, COLUMNS, listed, watch=watch)


def add_queue(app: typer.Typer) -> None:
    """Add the command `queue` to ``app``."""

    @command(
        app,
        "queue",
        to=Server.CONTROLPLANE,
        examples=(
            "fairway queue",
            "fairway queue -o wide --watch",
            "fairway queue --tenant acme -o json | jq '.queues[].pool.shares'",
        ),
    )
    async def queue(
        connection: Connection,
        tenant: Annotated[
            str,
            typer.Option("--tenant", help="Only this tenant's shares.", autocompletion=completion.tenants),
        ] = "",
        output: OutputOption = Format.TABLE,
        watch: WatchOption = False,
    ) -> None:
        """Show the queued and running requests by pool, one per model version."""
        await queues_of(tenant).show_all(connection, output, watch=watch)
