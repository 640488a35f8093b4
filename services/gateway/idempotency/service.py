"""The gateway's service with idempotency keys. Requests without a key run as in the plain service."""

from __future__ import annotations

import hmac
from copy import deepcopy
from functools import partial
from typing import Final

import structlog
from msgspec.structs import replace

from fairway.v1 import inference_pb2
from services.core.errors import FairwayError
from services.core.generation import Principal
from services.gateway.catalog import ModelCatalog, PinnedVersion
from services.gateway.events import Handle, Received, RequestSink
from services.gateway.idempotency.ownership import RecordOwnership
from services.gateway.idempotency.record_codec import degraded_out
from services.gateway.idempotency.record_reader import EarlierRun
from services.gateway.idempotency.records import KeyedRecords
from services.gateway.idempotency.types import KeyedPorts
from services.gateway.requests.egress import ChargedReplay
from services.gateway.requests.request import Admit, Request
from services.gateway.requests.terms import Resume, RunTerms
from services.gateway.requests.validate import Validator
from services.gateway.service import GatewayService
from services.gateway.service_types import AnyRequest, GatewayLimits, Ports
from services.ports.idempotency import RecordKey
from services.rpc import bounds
from services.runtime.identity import KeyDirectory

log = structlog.get_logger()

_DIGEST_CHARS: Final = 32


class IdempotentService(GatewayService):
    """Runs the request of a key once: its duplicates on any gateway receive the same output."""

    def __init__(
        self,
        keyed: KeyedPorts,
        *,
        validator: Validator,
        identity: KeyDirectory,
        catalog: ModelCatalog,
        ports: Ports,
        limits: GatewayLimits,
    ) -> None:
        super().__init__(validator=validator, identity=identity, catalog=catalog, ports=ports, limits=limits)
        self._identity = identity
        self.names_secret = keyed.names_secret
        self.records = KeyedRecords(keyed, ports.supervisor, self.capacity, self.enter)

    def submit(
        self,
        principal: Principal,
        generation: inference_pb2.Generation,
        sink: RequestSink,
        *,
        received: Received,
        timeout_s: float | None = None,
        client_window: int | None = None,
    ) -> Handle:
        """With a key, the sink follows the request of that key, which is started, joined or replayed.

        A caller without permission to run it receives nothing of it.
        """
        if not generation.idempotency_key:
            return super().submit(
                principal,
                generation,
                sink,
                received=received,
                timeout_s=timeout_s,
                client_window=client_window,
            )
        self.check_open(principal.tenant_id, generation.model, received)
        timeout_s = self.limits.timeout_of(generation, timeout_s)
        bounds.check(generation)
        self._validator.authorise(principal, generation.model)
        tenant_id = self._identity.still_valid(principal).meta.name
        egress = self._ports.egress(tenant_id, received)
        if egress is not None and egress.limited:
            sink = ChargedReplay(sink, egress)
        return self.records.attach(
            record_key(self.names_secret, tenant_id, generation.idempotency_key, received),
            fingerprint(self.names_secret, tenant_id, generation, received),
            sink,
            partial(self._launch, principal, generation, received),
            timeout_s=timeout_s,
            client_window=client_window,
            delivered=received.delivered,
        )

    async def flush_forever(self) -> None:
        """Write the records of requests with keys behind their runs; a task of the process."""
        await self.records.flush_forever()

    @property
    def busy(self) -> bool:
        return super().busy or self.records.busy > 0

    def cancel_all(self, error: FairwayError) -> int:
        """Requests with a key are released: another gateway continues them on the client's retry."""
        cut = super().cancel_all(error)
        self.records.stop(error)
        return cut

    async def flush(self) -> None:
        await self.records.write_endings()
        await super().flush()

    def _launch(
        self,
        principal: Principal,
        generation: inference_pb2.Generation,
        received: Received,
        ownership: RecordOwnership,
        earlier: EarlierRun | None,
    ) -> tuple[Request, Admit]:
        """Return the request, or what resumes it. Its clients have deadlines; the request has the server's.

        A resumed request keeps its terms, including those of a first run under pressure. Without output the
        deployment's present version runs it: its own may be gone.
        """
        resume = None
        if earlier is not None:
            accepted, own = earlier.terms, generation
            received = replace(
                received,
                monotonic_s=self._ports.clock.monotonic_s(),
                unix_us=accepted.received_unix_us,
                request_id=accepted.request_id,
            )
            generation = inference_pb2.Generation()
            generation.CopyFrom(own)
            generation.model = accepted.model
            generation.sampling.seed = accepted.seed
            begun = any(found.ids or found.chars for found in earlier.produced)
            if begun or own.HasField("max_output_tokens"):
                generation.max_output_tokens = accepted.max_output_tokens
            else:  # another version's context may have less room
                generation.default_output_tokens = accepted.max_output_tokens
            generation.parts = accepted.form is not None
            version = PinnedVersion(accepted.version_digest, accepted.route_revision)
            had = {"tokens": [len(one.ids) for one in earlier.produced]}
            had["chars"] = [one.chars for one in earlier.produced]
            log.info("idempotency.continued", request_id=accepted.request_id, **had)
            form = accepted.form or accepted.constrained_form
            degraded = degraded_out(accepted.degraded)
            resume = Resume(
                version,
                earlier.produced,
                degraded,
                form,
                replaceable=not begun,
                size=accepted.size,
                safety=accepted.safety,
            )
        longest_s = min(self.limits.max_timeout_s, self.max_timeout_s(principal, generation))
        terms = RunTerms(received, longest_s, resume=resume, settlement=ownership)
        return self.prepared(principal, generation, ownership, terms)


def record_key(secret: bytes, tenant_id: str, idempotency_key: str, received: Received) -> RecordKey:
    """Return the record of a key, of each generation of a request its own.

    Internal keys have names of their own: a client that sends the same bytes does not reach their records.

    Without the secret, a name discloses neither the key nor that two tenants use the same one.
    """
    space = "internal key v1" if received.internal else "key v2"
    text = f"fairway {space}\0{tenant_id}\0{received.part}\0{idempotency_key}".encode()
    return RecordKey(tenant_id, hmac.digest(secret, text, "sha256").hex()[:_DIGEST_CHARS])


def fingerprint(secret: bytes, tenant_id: str, request: AnyRequest, received: Received) -> str:
    """Return a keyed hash of everything in the request that decides its outcome.

    Excludes the timeout: a retry has less time left than the request that it repeats. Excludes whether the
    output comes in parts: faces of two releases ask differently for the same request.
    """
    body = deepcopy(request)
    if isinstance(body, inference_pb2.Generation):
        body.ClearField("parts")
    body.ClearField("idempotency_key")
    body.ClearField("timeout")
    kind = "" if isinstance(request, inference_pb2.Generation) else f"{request.DESCRIPTOR.name}\0"
    head = f"fairway request v2\0{tenant_id}\0{received.part}\0{received.whole}\0{kind}".encode()
    return hmac.digest(secret, head + body.SerializeToString(deterministic=True), "sha256").hex()[
        :_DIGEST_CHARS
    ]
