"""The terms of a request, and the request once it is admitted."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Final, Protocol

from services.core.aliases import SizeChoice
from services.core.errors import FairwayError
from services.core.generation import GenerationSpec, Usage
from services.core.limits import Price
from services.core.outputs.forms import OutputForm
from services.core.records import Tenant
from services.core.safety import REDACTED_ID, SafetyPins
from services.core.usage import RequestUsage
from services.gateway.catalog import PinnedVersion
from services.gateway.events import Finished, Received
from services.gateway.idempotency.record_codec import AcceptedTerms
from services.gateway.policy.claims import Payer
from services.gateway.policy.degrade import Degradation
from services.gateway.requests.egress import StreamEgress
from services.gateway.safety.requests import RequestSafety
from services.gateway.service_types import GatewayLimits, Ports
from services.gateway.telemetry import RequestTelemetry
from services.ports.limiter import Reservation
from services.runtime.secrets import Ticket


@dataclass(frozen=True, slots=True)
class Produced:
    """Output of an earlier run of a choice: its tokens, and the number of characters of their text."""

    ids: tuple[int, ...] = ()
    chars: int = 0
    text: str = ""  # the text; empty where no safety pack reads on

    @property
    def redacted(self) -> bool:
        """Whether tokens of it are not known: nothing can be continued after them."""
        return REDACTED_ID in self.ids


_NOTHING: Final = Produced()


@dataclass(frozen=True, slots=True)
class Resume:
    """The state from which a run continues an earlier one: its terms, and its output by choice."""

    version: PinnedVersion
    produced: tuple[Produced, ...]
    degradations: tuple[Degradation, ...]
    # How its outputs are written; None: as its version and its deployment declare.
    form: OutputForm | None = None
    # Whether the deployment's present version runs it: nothing of it was produced.
    replaceable: bool = False
    size: SizeChoice | None = None  # choice of its model among the sizes of an alias
    safety: SafetyPins | None = None  # safety packs that it obeyed; None: none


# The slot of an admitted request, and its usage.
Charge = tuple[Reservation, RequestUsage]


class Settlement(Protocol):
    """The record of an idempotency key, which settles its request in place of the limiter."""

    async def accept(self, terms: AcceptedTerms) -> None:
        """Record the acceptance before the request has any effect; a later one replaces it."""

    async def finish(self, end: Finished | FairwayError, charge: Charge | None) -> Finished | FairwayError:
        """Settle the request together with its end, and report its usage once that counts.

        Returns the end for the sink.
        """


@dataclass(frozen=True, slots=True)
class RunTerms:
    """The terms of one request."""

    received: Received
    timeout_s: float
    # Tokens that the client takes before it grants credit itself, None for any number.
    client_window: int | None = None
    # Whether the answer of an equal earlier request serves too.
    cache: bool = False
    # The result of an earlier run, which this run continues.
    resume: Resume | None = None
    # The record of its idempotency key; None without one.
    settlement: Settlement | None = None


@dataclass(frozen=True, slots=True)
class Admitted:
    """A request that passed the validator and the quotas, with what its choices share."""

    spec: GenerationSpec
    reservation: Reservation
    payer: Payer
    # Signed: tenant, request id, expiry, and the most tokens of a choice.
    ticket: bytes
    terms: RunTerms
    ports: Ports
    limits: GatewayLimits
    telemetry: RequestTelemetry
    # The differences from the client's request.
    degradations: tuple[Degradation, ...] = ()
    # At its admission.
    price: Price = field(default_factory=Price)
    # Returns it on the version that its model name resolves to now; None: it keeps its version.
    reroute: Callable[[Admitted], Awaitable[Admitted]] | None = None
    # What its output leaves through; None: nothing limits it.
    egress: StreamEgress | None = None
    # Called once, when its first run on a worker is accepted.
    accepted: Callable[[], None] | None = None
    # What judges its texts by the packs that ``spec.safety`` names; None: nothing.
    safety: RequestSafety | None = None

    def usage_report(self, usage: Usage) -> RequestUsage:
        """Return the event of the usage ledger for the settled request."""
        spec, ended_unix_s = self.spec, self.ports.clock.unix_s()
        return usage_of(
            self.payer, spec.request_id, spec.model, spec.version_digest, self.price, usage, ended_unix_s
        )

    @property
    def tenant(self) -> Tenant:
        return self.payer.tenant

    @property
    def deadline_s(self) -> float:
        """The request's deadline in monotonic seconds."""
        return self.terms.received.monotonic_s + self.terms.timeout_s

    @property
    def queue_ttl_s(self) -> float:
        """The longest time in the scheduler's queue."""
        return min(self.limits.queue_ttl_s, self.terms.timeout_s)

    @property
    def released(self) -> tuple[Produced, ...]:
        """What the sink has of an earlier run, by choice."""
        return self.terms.resume.produced if self.terms.resume is not None else ()

    def produced(self, choice: int) -> Produced:
        """Return what an earlier run produced for a choice; nothing where that cannot be continued."""
        found = self.released[choice] if choice < len(self.released) else _NOTHING
        return _NOTHING if found.redacted else found


def ticket_of(ports: Ports, tenant_id: str, spec: GenerationSpec, timeout_s: float) -> bytes:
    """Return the signed ticket of a request: its placements use no more than was reserved for it."""
    expire_unix_s = int(ports.clock.unix_s() + timeout_s) + 1
    tokens = len(spec.prompt.ids) + spec.limits.max_tokens
    return ports.sign_ticket(Ticket(tenant_id, spec.request_id, expire_unix_s, tokens, spec.choices))


def usage_of(
    payer: Payer,
    request_id: str,
    model: str,
    version_digest: str,
    price: Price,
    usage: Usage,
    ended_unix_s: float,
) -> RequestUsage:
    """Return the event of the usage ledger for a settled request of any kind."""
    return RequestUsage(
        request_id=request_id,
        tenant=payer.tenant.meta.name,
        key_id=payer.key.meta.name,
        user=payer.user,
        model=model,
        version_digest=version_digest,
        ended_unix_s=ended_unix_s,
        usage=usage,
        list_micros=price.cost_micros(usage),
        labels=payer.key.meta.labels,
        budgeted=bool(payer.budgets),
    )
