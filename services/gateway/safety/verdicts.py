"""Verdicts of the classifiers that a pack names: rows of fixed-cost models, in the turn of the tenant."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
import structlog
from numpy.typing import NDArray

from fairway.formats.safety import JudgeRule
from services.core.errors import (
    FailedPrecondition,
    FairwayError,
    PoisonedInput,
    PromptTooLong,
    UnsupportedFeature,
)
from services.core.fixed_cost.rows import RowEnd, RowsRequest
from services.core.fixed_cost.signature import Operation, Signature
from services.core.generation import NO_USAGE, Usage
from services.core.rollouts.routes import SplitCaller
from services.gateway.catalog import ModelCatalog, Route
from services.gateway.policy.claims import claims_of
from services.gateway.requests.terms import usage_of
from services.gateway.rows.inputs import PreparedRows, output_tensors, text_rows
from services.gateway.rows.results import class_outputs
from services.gateway.safety.requests import Asker, ModelRule
from services.gateway.service_types import Ports
from services.gateway.text.text_model import TextModel
from services.ports.rows import RowRunner

log = structlog.get_logger()

# A text that is too long for a model is judged in up to 2 to the power of this many parts.
_MOST_HALVINGS: Final = 7
_OVERLAP: Final = 8  # a part repeats so small a share of the one before


class RowClassifiers:
    """Implements ``Classifiers``. A verdict is no request of the tenant: no rate of requests counts it."""

    def __init__(self, catalog: ModelCatalog, runner: RowRunner, ports: Ports) -> None:
        self._catalog = catalog
        self._runner = runner
        self._ports = ports

    async def scores(self, asker: Asker, rule: ModelRule, text: str) -> Mapping[str, float]:
        if isinstance(rule, JudgeRule):
            raise UnsupportedFeature(f"{rule.model}: judges are not asked by this gateway")
        tenant = asker.payer.tenant
        caller = SplitCaller(tenant.meta.name, asker.session_key, tenant.max_priority)
        route = self._catalog.resolve(rule.model, caller)
        self._catalog.require_servable(route, tenant.residency)
        model = (await self._catalog.text_model(route.version_digest)).of_rows
        signature = _checked(rule, model)
        prepared = await self._rows(model, tenant.meta.name, text)
        if self._ports.poisons is not None:
            self._ports.poisons.check_rows(route.model, route.version_digest, prepared.rows)
        ends = await self._runner.run(self._request(asker, route, prepared))
        self._count(asker, route, prepared, ends)
        for row, end in zip(prepared.rows, ends, strict=True):
            if end.error is not None:
                if isinstance(end.error, PoisonedInput) and self._ports.poisons is not None:
                    deaths = int(end.error.metadata.get("deaths", "1"))
                    await self._ports.poisons.condemn_row(
                        asker.request_id, route.model, route.version_digest, row, deaths
                    )
                raise end.error
        found = _probabilities(ends, signature)
        return {name: float(found[at]) for at, name in enumerate(signature.classes.names)}

    def settle(self, asker: Asker) -> None:
        uses, asker.uses = asker.uses, {}
        for (model, digest), usage in uses.items():
            asker.settled += 1
            name = f"{asker.request_id}-safety-{asker.settled}"
            self._ports.supervisor.spawn(f"settle {name}", self._settle(asker, name, model, digest, usage))

    async def _settle(self, asker: Asker, name: str, model: str, digest: str, usage: Usage) -> None:
        """Charge the use of one model. A tenant without room for it is charged in the ledger alone."""
        ports, payer = self._ports, asker.payer
        price = self._catalog.price(model, asker.priority)
        try:
            if ports.limiter is not None:
                reservation = await ports.limiter.admit(payer.tenant.meta.name, name, ())
                try:
                    claims = claims_of(payer, price, usage.prompt_tokens)
                    reservation = await ports.limiter.reserve(reservation, claims, price)
                finally:
                    await ports.limiter.settle(reservation, usage)
        except FairwayError as error:
            log.info("safety.use_not_claimed", request_id=asker.request_id, reason=error.reason)
        ports.report_usage(usage_of(payer, name, model, digest, price, usage, ports.clock.unix_s()))

    async def _rows(self, model: TextModel, tenant_id: str, text: str) -> PreparedRows:
        """Return the text as one row, or in parts where that is too long for the model."""
        parts, texts = [text], self._catalog.texts
        for _ in range(_MOST_HALVINGS):
            try:
                return await text_rows(texts, model, tenant_id, parts, (), cut_to=None, field="text")
            except PromptTooLong:
                parts = [half for part in parts for half in _halves(part)]
        return await text_rows(texts, model, tenant_id, parts, (), cut_to=None, field="text")

    def _request(self, asker: Asker, route: Route, prepared: PreparedRows) -> RowsRequest:
        tenant, now_s = asker.payer.tenant, self._ports.clock.monotonic_s()
        return RowsRequest(
            request_id=asker.request_id,
            tenant_id=tenant.meta.name,
            model=route.model,
            version_digest=route.version_digest,
            rows=prepared.rows,
            priority=asker.priority,
            route_revision=route.route_revision,
            tenant_weight=tenant.weight,
            node_group=tenant.node_group,
            isolation_waits=tenant.isolation_waits,
            kv_share=tenant.kv_share,
            deadline_s=asker.deadline_s,
            traceparent=asker.traceparent,
            target_s=self._ports.ttft_target_s(route.model, asker.priority) or 0.0,
            received_s=now_s,
        )

    def _count(self, asker: Asker, route: Route, prepared: PreparedRows, ends: Sequence[RowEnd]) -> None:
        key = route.model, route.version_digest
        before = asker.uses.get(key, NO_USAGE)
        counted = zip(prepared.tokens, ends, strict=True)
        tokens = sum(count for count, end in counted if end.error is None)
        device_s = before.device_s + sum(end.device_s for end in ends)
        asker.uses[key] = Usage(before.prompt_tokens + tokens, 0, device_s=device_s)


def _checked(rule: ModelRule, model: TextModel) -> Signature:
    """Return the signature of a model that has the labels of a rule. Raises FailedPrecondition."""
    signature = model.signature
    if signature is None or signature.operation is not Operation.CLASSIFY:
        raise FailedPrecondition(f"{rule.model} classifies no texts")
    if missing := sorted(rule.labels.keys() - set(signature.classes.names)):
        raise FailedPrecondition(f"{rule.model} has no label {missing[0]!r}")
    return signature


def _probabilities(ends: Sequence[RowEnd], signature: Signature) -> NDArray[np.float64]:
    """Return the highest probability of each label in any row. Raises FailedPrecondition for other values."""
    (logits,) = output_tensors(ends, (), signature)
    labels = len(signature.classes.names)
    if logits.datatype != "FP32" or logits.shape != (len(ends), labels):
        raise FailedPrecondition(f"a classifier gave {logits.datatype} of shape {list(logits.shape)}")
    tensor, _ = class_outputs(logits, signature.classes)
    found = np.frombuffer(tensor.data, np.float64).reshape(len(ends), labels)
    if not ((found >= 0) & (found <= 1)).all():
        raise FailedPrecondition("a classifier gave values that are no probabilities")
    highest: NDArray[np.float64] = found.max(axis=0)
    return highest


def _halves(text: str) -> tuple[str, str]:
    """Return both halves of a text; the second begins before the end of the first."""
    half = -(-len(text) // 2)
    return text[:half], text[max(0, half - len(text) // _OVERLAP) :]
