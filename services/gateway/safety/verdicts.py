"""Verdicts of the models that a pack names: rows of fixed-cost models, in the turn of the tenant."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import structlog
from numpy.typing import NDArray

from fairway.formats.guards import JudgedTurn
from fairway.formats.safety import JudgeRule
from services.core.errors import (
    FailedPrecondition,
    FairwayError,
    PoisonedInput,
    PromptTooLong,
)
from services.core.fixed_cost.rows import RowEnd, RowsRequest
from services.core.fixed_cost.signature import Operation, Signature
from services.core.generation import Usage
from services.gateway.catalog import ModelCatalog, Route
from services.gateway.policy.claims import claims_of
from services.gateway.requests.terms import usage_of
from services.gateway.rows.inputs import PreparedRows, output_tensors, text_rows
from services.gateway.rows.results import class_outputs
from services.gateway.safety.judges import MOST_HALVINGS, Judges, halves
from services.gateway.safety.requests import Asker, ModelRule, ModelUse
from services.gateway.service_types import Ports
from services.gateway.text.text_model import TextModel
from services.ports.rows import RowRunner

log = structlog.get_logger()


class RowClassifiers:
    """Implements ``Classifiers``. A verdict is no request of the tenant: no rate of requests counts it."""

    def __init__(self, catalog: ModelCatalog, runner: RowRunner, ports: Ports, judges: Judges) -> None:
        self._catalog = catalog
        self._runner = runner
        self._ports = ports
        self._judges = judges

    async def scores(self, asker: Asker, rule: ModelRule, turns: Sequence[JudgedTurn]) -> Mapping[str, float]:
        if isinstance(rule, JudgeRule):
            return await self._judges.scores(asker, rule, turns)
        route = asker.route(self._catalog, rule.model)
        model = (await self._catalog.text_model(route.version_digest)).of_rows
        signature = _checked(rule, model)
        prepared = await self._rows(model, asker.payer.tenant.meta.name, turns[-1].text)
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
        for (model, digest), use in uses.items():
            self._ports.supervisor.spawn(f"settle {use.request_id}", self._settle(asker, model, digest, use))

    async def _settle(self, asker: Asker, model: str, digest: str, use: ModelUse) -> None:
        """Charge the use of one model. A tenant without room for it is charged in the ledger alone."""
        ports, payer, name, usage = self._ports, asker.payer, use.request_id, use.usage
        price = self._catalog.price(model, asker.priority)
        try:
            if ports.limiter is not None:
                reservation = await ports.limiter.admit(payer.tenant.meta.name, name, ())
                try:
                    output = usage.output_tokens
                    claims = claims_of(payer, price, usage.prompt_tokens, output, output)
                    reservation = await ports.limiter.reserve(reservation, claims, price)
                finally:
                    await ports.limiter.settle(reservation, usage)
        except FairwayError as error:
            log.info("safety.use_not_claimed", request_id=asker.request_id, reason=error.reason)
        if not use.is_reported:
            ports.report_usage(usage_of(payer, name, model, digest, price, usage, ports.clock.unix_s()))

    async def _rows(self, model: TextModel, tenant_id: str, text: str) -> PreparedRows:
        """Return the text as one row, or in parts where that is too long for the model."""
        parts, texts = [text], self._catalog.texts
        for _ in range(MOST_HALVINGS):
            try:
                return await text_rows(texts, model, tenant_id, parts, (), cut_to=None, field="text")
            except PromptTooLong:
                parts = [half for part in parts for half in halves(part)]
        return await text_rows(texts, model, tenant_id, parts, (), cut_to=None, field="text")

    def _request(self, asker: Asker, route: Route, prepared: PreparedRows) -> RowsRequest:
        tenant, now_s = asker.payer.tenant, self._ports.clock.monotonic_s()
        return RowsRequest(
            request_id=asker.use_of(route).request_id,
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
        counted = zip(prepared.tokens, ends, strict=True)
        tokens = sum(count for count, end in counted if end.error is None)
        device_s = sum(end.device_s for end in ends)
        asker.use_of(route).add(Usage(tokens, 0, device_s=device_s))


def _checked(rule: ModelRule, model: TextModel) -> Signature:
    """Return the signature of a model that has the labels of a rule. Raises FailedPrecondition."""
    signature = model.signature
    if signature is None or signature.operation is not Operation.CLASSIFY:
        raise FailedPrecondition(f"{rule.model} classifies no texts: roll out a pack that names a classifier")
    if missing := sorted(rule.labels.keys() - set(signature.classes.names)):
        raise FailedPrecondition(f"{rule.model} has no label {missing[0]!r}: roll out a pack that fits it")
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
