"""An alias of several sizes at the validator: the first that meets a generation, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from random import Random
from typing import Any

import pytest

from fairway.v1 import common_pb2, inference_pb2
from services.core.aliases import ALIASES, Alias, AliasSize, Capability, SizeChoice
from services.core.errors import (
    InvalidInput,
    ModelNotFound,
    NoWorkerAvailable,
    PromptTooLong,
    UnsupportedFeature,
)
from services.core.generation import GenerationSpec, Principal
from services.core.records import (
    DEPLOYMENTS,
    KEYS,
    WORKERS,
    ApiKey,
    Deployment,
    KeyRole,
    LoadedVersion,
    Meta,
    VersionState,
    Worker,
)
from services.gateway.policy.claims import NO_BOUNDS, RequestBound, RequestBounds
from services.gateway.requests.validate import Validator

SMALL, LARGE = "sha256:" + "ab" * 32, "sha256:" + "cd" * 32
WHO = Principal("alpha", KeyRole.TENANT, "acme")
Resolve = Callable[..., Any]


@pytest.fixture
def validator(fleet: Any, executor: ThreadPoolExecutor) -> Validator:
    large = LoadedVersion("chat-large", "tiny", LARGE, VersionState.READY, max_model_len=128)
    fleet.workers.put(WORKERS + "w1", Worker("w1", "w1:1", versions=(large,)))
    fleet.deployments.put(DEPLOYMENTS + "chat-large", Deployment(Meta("chat-large"), "tiny", "v2", LARGE, 1))
    sizes(fleet, AliasSize("chat-small"), AliasSize("chat-large", 60, 0, tuple(Capability)))
    return Validator(fleet.catalog, fleet.identity, Random(7))


def sizes(fleet: Any, *found: AliasSize) -> None:
    fleet.sized.put(ALIASES + "auto", Alias(Meta("auto"), found))


@pytest.fixture
def resolve(validator: Validator) -> Resolve:
    async def run(bounds: RequestBounds = NO_BOUNDS, who: Principal = WHO, **fields: Any) -> GenerationSpec:
        generation = inference_pb2.Generation(**{"model": "auto", "prompt": "the quick", **fields})
        return await validator.resolve(who, generation, "req_1", validator.check(who, generation), bounds)

    return run


def reasons(spec: GenerationSpec) -> dict[str, str]:
    assert spec.size is not None
    return {one.deployment: one.reason for one in spec.size.passed}


async def test_the_smallest_that_meets_a_generation_serves_it(resolve: Resolve) -> None:
    spec = await resolve()
    assert (spec.model, spec.version_digest, spec.size) == ("chat-small", SMALL, SizeChoice("auto"))
    for fields, reason in (
        ({"quality": 60}, "needs quality 60, has 0"),
        ({"sampling": common_pb2.Sampling(constraint=common_pb2.Constraint(regex="a+"))}, "needs schemas"),
    ):
        spec = await resolve(**fields)
        assert (spec.model, spec.version_digest) == ("chat-large", LARGE)
        assert reasons(spec) == {"chat-small": reason}


async def test_a_longer_generation_goes_to_a_larger_size(resolve: Resolve, fleet: Any) -> None:
    tokens = len((await resolve()).prompt.ids)
    fits = await resolve(max_output_tokens=96 - tokens)
    assert fits.model == "chat-small"
    spec = await resolve(max_output_tokens=97 - tokens)
    assert (spec.model, spec.limits.max_tokens) == ("chat-large", 97 - tokens)
    assert reasons(spec) == {"chat-small": "needs 97 tokens of context, has 96"}
    sizes(fleet, AliasSize("chat-small", context_tokens=tokens + 1), AliasSize("chat-large"))
    spec = await resolve()
    assert (spec.model, spec.limits.max_tokens) == ("chat-small", 96 - tokens), "outputs have all the context"
    spec = await resolve(max_output_tokens=2)
    assert reasons(spec) == {"chat-small": f"needs {tokens + 2} tokens of context, has {tokens + 1}"}


async def test_refusals_have_the_figures_of_the_largest(resolve: Resolve) -> None:
    tokens = len((await resolve()).prompt.ids)
    with pytest.raises(PromptTooLong) as caught:
        await resolve(max_output_tokens=2000 - tokens)
    text = "no size of auto meets the request: it needs 2,000 tokens of context, the largest has 128"
    assert caught.value.message == text
    assert caught.value.metadata["field"] == "max_output_tokens"
    with pytest.raises(UnsupportedFeature, match="chat-small needs quality 61, has 0; chat-large needs"):
        await resolve(quality=61)


async def test_a_limit_of_the_tenant_is_no_reason_for_a_larger_size(resolve: Resolve) -> None:
    bounds = RequestBounds(context_tokens=RequestBound(20, "the tenant's limit"))
    with pytest.raises(PromptTooLong, match="the tenant's limit of 20"):
        await resolve(bounds, max_output_tokens=20)


async def test_a_size_that_cannot_serve_is_passed_over(resolve: Resolve, fleet: Any) -> None:
    stopped = Deployment(Meta("chat-small"), "tiny", "v1", SMALL, 0)
    fleet.deployments.put(DEPLOYMENTS + "chat-small", stopped)
    spec = await resolve()
    assert (spec.model, reasons(spec)) == ("chat-large", {"chat-small": "NO_WORKER_AVAILABLE"})
    sizes(fleet, AliasSize("chat-small", 60), AliasSize("chat-large"))
    with pytest.raises(NoWorkerAvailable, match="chat-small has 0 replicas"):
        await resolve(quality=60)
    sizes(fleet, AliasSize("gone"), AliasSize("chat-large"))
    assert reasons(await resolve()) == {"gone": "MODEL_NOT_FOUND"}


async def test_an_alias_opens_no_deployment(resolve: Resolve, validator: Validator, fleet: Any) -> None:
    fleet.keys.put(KEYS + "alpha", ApiKey(Meta("alpha"), KeyRole.TENANT, "", "acme", ("chat-large",)))
    spec = await resolve()
    assert (spec.model, spec.size) == ("chat-large", SizeChoice("auto")), "others are not named to it"
    sizes(fleet, AliasSize("chat-small"))
    with pytest.raises(ModelNotFound) as caught:
        await resolve()
    assert "chat-small" not in caught.value.message
    with pytest.raises(ModelNotFound):
        validator.authorise(WHO, "auto")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("stop_token_ids", [3]),
        ("token_ids", inference_pb2.TokenIds(ids=[3])),
        ("logit_bias", common_pb2.Sampling(logit_bias={3: 1.0})),
    ],
)
async def test_token_ids_need_one_vocabulary(resolve: Resolve, field: str, value: Any) -> None:
    fields: dict[str, Any] = {"sampling" if field == "logit_bias" else field: value}
    with pytest.raises(InvalidInput, match=f"{field} names tokens of one vocabulary"):
        await resolve(**{"prompt": None, **fields} if field == "token_ids" else fields)


async def test_a_deployment_keeps_its_name(resolve: Resolve, fleet: Any) -> None:
    """A control plane refuses such a pair; of two that were written together the deployment counts."""
    fleet.deployments.put(DEPLOYMENTS + "auto", Deployment(Meta("auto"), "tiny", "v1", SMALL, 1))
    spec = await resolve()
    assert (spec.model, spec.size) == ("auto", None)
