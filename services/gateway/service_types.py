"""The ports and bounds of the gateway's service."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random

from fairway.v1 import inference_pb2
from services.core.errors import FairwayError, QueueFull, ShareExceeded, retry_in
from services.core.limits import share_of
from services.core.output_quantile import OutputPolicy, OutputQuantiles
from services.core.records import Budget, Priority, Tenant
from services.core.usage import RequestUsage
from services.gateway.catalog import Waking
from services.gateway.events import BATCH_FACE, Received
from services.gateway.poison import PoisonGate
from services.gateway.policy.degrade import DegradeLevels
from services.gateway.policy.retry import OutsideKills, RetryBudget
from services.gateway.requests.egress import EgressGate, StreamEgress
from services.gateway.response_cache import ResponseCache
from services.gateway.safety.packs import SafetyPacks
from services.gateway.safety.requests import SafetyDesk
from services.gateway.telemetry import GatewayTelemetry
from services.ports.clock import Clock
from services.ports.limiter import Limiter
from services.ports.placement import PlacementClient
from services.ports.worker import WorkerClient
from services.rpc.convert.inference import seconds_of
from services.runtime.secrets import Ticket
from services.runtime.supervisor import Supervisor

# A request of a fixed-cost model, of any kind; all kinds have the same fields besides their inputs.
RowsMessage = (
    inference_pb2.EmbedRequest
    | inference_pb2.RerankRequest
    | inference_pb2.ScoreRequest
    | inference_pb2.InferRequest
)
AnyRequest = inference_pb2.Generation | RowsMessage


@dataclass(frozen=True, slots=True)
class GatewayLimits:
    """Bounds of one gateway process. Times in seconds, windows in tokens."""

    # Requests that run or wait at once.
    max_requests: int = 4096
    # Calls of one tenant that count tokens at once.
    max_tenant_counts: int = 16
    # The longest time in the scheduler's queue.
    queue_ttl_s: float = 30.0
    # The interval without an event after which a heartbeat is sent.
    heartbeat_s: float = 5.0
    # Tokens of a choice that may be under way to the client and untaken.
    window_tokens: int = 256
    # The upper bound of a request's timeout.
    max_timeout_s: float = 3600.0
    # The interval between renewals of reservations.
    renew_s: float = 20.0
    # Reservations per renewal call.
    renew_batch: int = 512
    # Leading blocks of a prompt that a placement names; 0: placement ignores cached prefixes.
    placed_prefix_blocks: int = 1024
    degrade: DegradeLevels = field(default_factory=DegradeLevels)

    @property
    def max_tenant_requests(self) -> int:
        """The bound for one tenant's requests, and for its clients with idempotency keys: half of all."""
        return share_of(self.max_requests)

    def timeout_of(self, generation: AnyRequest, rpc_timeout_s: float | None) -> float:
        """The minimum of the server's bound, the RPC's deadline and the request's own timeout, in seconds."""
        found = self.max_timeout_s if rpc_timeout_s is None else min(rpc_timeout_s, self.max_timeout_s)
        if generation.HasField("timeout"):
            own_s = seconds_of(generation.timeout)
            if own_s > 0:
                found = min(found, own_s)
        return found


@dataclass(frozen=True, slots=True)
class Ports:
    """What the service acts through."""

    # None: nothing is limited and nobody is charged.
    limiter: Limiter | None
    placement: PlacementClient
    workers: WorkerClient
    clock: Clock
    supervisor: Supervisor
    rng: Random
    sign_ticket: Callable[[Ticket], bytes]
    new_incident: Callable[[], str]
    # Builds the domain error of (reason, message) from a worker.
    error_of: Callable[[str, str], FairwayError]
    telemetry: GatewayTelemetry = field(default_factory=GatewayTelemetry)
    # Receives each request's usage once it is settled.
    report_usage: Callable[[RequestUsage], None] = lambda _event: None
    # Returns why no request of a tenant with budgets is admitted; empty while its use can be recorded.
    unrecorded: Callable[[], str] = lambda: ""
    # Returns the pressure of a version, 0..1, as far as it is reported.
    pressure: Callable[[str], float] = lambda _digest: 0.0
    # Returns whether a worker serves a version for a model name, or will.
    serves: Callable[[str, str], bool] = lambda _model, _digest: True
    # Returns how a request of a model waits for its first replica; None where it need not.
    waking: Callable[[str], Waking | None] = lambda _model: None
    # Returns the budgets of a tenant.
    budgets_of: Callable[[str], Sequence[Budget]] = lambda _tenant: ()
    # Returns the time to first token that a model and class are promised, None for none.
    ttft_target_s: Callable[[str, Priority], float | None] = lambda _model, _priority: None
    # Predicts the output that token rates reserve.
    outputs: OutputQuantiles = field(default_factory=lambda: OutputQuantiles(OutputPolicy()))
    # Answers for equal requests; None: every request runs.
    responses: ResponseCache | None = None
    # The budget of placements after losses.
    retries: RetryBudget = field(default_factory=RetryBudget)
    # The kills of engines that this gateway's sequences observed.
    kills: OutsideKills = field(default_factory=OutsideKills)
    # Holds output back to the egress rates of tenants; None: nothing is held.
    gate: EgressGate | None = None
    # Refuses inputs that ended an engine; None: nothing is refused.
    poisons: PoisonGate | None = None
    # The safety packs of requests; None: no request obeys one.
    packs: SafetyPacks | None = None
    # What judges texts by packs; there wherever packs are.
    safety: SafetyDesk | None = None

    def waits_for_node(self, tenant: Tenant, model: str) -> bool:
        """Return whether a tenant's request waits while no node of its group serves the model: by the
        tenant's setting, or because it starts the first replica on these nodes."""
        waking = self.waking(model)
        return tenant.isolation_waits or (waking is not None and waking.tenant == tenant.meta.name)

    def egress(self, tenant_id: str, received: Received) -> StreamEgress | None:
        """Return what the output of a request leaves through; that of a batch's line is written to a file."""
        if self.gate is None or received.face == BATCH_FACE:
            return None
        return StreamEgress(self.gate, tenant_id)


class RequestCapacity:
    """Bounds what one gateway serves at once, in all and per tenant.

    Counts the running requests, and the clients that follow a request without running it.
    """

    def __init__(self, most: int, most_of_tenant: int) -> None:
        self._most = most
        self._most_of_tenant = most_of_tenant
        self._running = 0
        self._per_tenant: Counter[str] = Counter()

    def refusal(self, tenant_id: str) -> FairwayError | None:
        """The reason against one more of the tenant, None when it can be accepted."""
        mine, most = self._per_tenant[tenant_id], self._most_of_tenant
        if mine >= most:
            return ShareExceeded(
                f"this gateway runs {mine} requests of this tenant, and at most {most} of one tenant; "
                f"send it to another gateway, or {retry_in(1.0)}",
                retry_after_s=1.0,
                limit=most,
            )
        if self._running >= self._most:
            return QueueFull(
                f"this gateway runs {self._running} requests, the maximum; send it to another gateway, or "
                f"{retry_in(1.0)}",
                retry_after_s=1.0,
            )
        return None

    def enter(self, tenant_id: str) -> None:
        """Count one more; ``leave`` must follow."""
        self._running += 1
        self._per_tenant[tenant_id] += 1

    def leave(self, tenant_id: str) -> None:
        self._running -= 1
        subtract(self._per_tenant, tenant_id)


def subtract(counts: Counter[str], name: str) -> None:
    """Decrease a count; delete it at zero."""
    counts[name] -= 1
    if counts[name] <= 0:
        del counts[name]
