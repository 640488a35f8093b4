"""The one validator: what passes can run, what cannot is refused by field, with the reason."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from random import Random
from typing import Any

import pytest
from google.protobuf.duration_pb2 import Duration

from fairway.v1 import common_pb2, inference_pb2
from services.core.errors import (
    FairwayError,
    InvalidInput,
    ModelNotFound,
    PermissionDenied,
    PromptTooLong,
    Unauthenticated,
)
from services.core.generation import GenerationSpec, Principal
from services.core.records import TENANTS, KeyRole, Meta, Priority, Tenant
from services.gateway.policy.claims import RequestBounds
from services.gateway.requests.validate import Validator

DIGEST = "sha256:" + "ab" * 32
CONTEXT = 96  # the worker's; the model's own is 128
WHO = Principal("alpha", KeyRole.TENANT, "acme")

Resolve = Callable[..., Any]


@pytest.fixture
def validator(fleet: Any, executor: ThreadPoolExecutor) -> Validator:
    return Validator(fleet.catalog, fleet.identity, Random(7), max_fanout_tokens=256)


@pytest.fixture
def resolve(validator: Validator) -> Resolve:
    async def run(who: Principal = WHO, **fields: Any) -> GenerationSpec:
        values: dict[str, Any] = {"model": "chat-small", **fields}
        if not {"prompt", "chat", "token_ids"} & values.keys():
            values["prompt"] = "the quick"
        generation = inference_pb2.Generation(**values)
        return await validator.resolve(who, generation, "req_1", validator.check(who, generation))

    return run


def sampling(**fields: Any) -> common_pb2.Sampling:
    return common_pb2.Sampling(**fields)


def ids(*values: int) -> inference_pb2.TokenIds:
    return inference_pb2.TokenIds(ids=values)


def chat(*contents: str, role: str = "user") -> inference_pb2.Chat:
    return inference_pb2.Chat(
        messages=[inference_pb2.ChatMessage(role=role, content=text) for text in contents]
    )


async def test_everything_is_resolved(resolve: Resolve) -> None:
    spec = await resolve(stop=["\n"], logprobs=0, choices=2, session_key="s", stop_token_ids=[5])
    assert (spec.request_id, spec.model, spec.version_digest, spec.route_revision) == (
        "req_1",
        "chat-small",
        DIGEST,
        42,
    )
    assert spec.prompt.ids[0] == 0
    assert spec.limits.max_tokens == CONTEXT - len(spec.prompt.ids)
    assert (spec.limits.stop, spec.limits.stop_token_ids) == (("\n",), (5,))
    assert (spec.choices, spec.sampling.logprobs) == (2, 0)
    assert spec.priority is Priority.STANDARD
    assert spec.session_key == "s"
    # The version's own defaults, neutral where it has none.
    found = spec.sampling
    assert (found.temperature, found.top_k, found.repetition_penalty) == (0.5, 7, 1.25)
    assert (found.top_p, found.min_p, found.presence_penalty) == (1.0, 0.0, 0.0)


async def test_what_is_asked_for_wins_over_the_defaults_even_at_zero(resolve: Resolve) -> None:
    asked = sampling(
        temperature=0, top_k=0, repetition_penalty=1, seed=0, top_p=0, logit_bias={9: 2.0, 3: -1.0}
    )
    found = (await resolve(sampling=asked)).sampling
    assert (found.temperature, found.top_k, found.repetition_penalty, found.seed) == (0.0, 0, 1.0, 0)
    assert 0.0 < found.top_p < 1e-5
    assert found.logit_bias == ((3, -1.0), (9, 2.0))


async def test_a_seed_is_drawn_once_per_request(resolve: Resolve) -> None:
    drawn = [(await resolve()).sampling.seed for _ in range(3)]
    assert len(set(drawn)) == 3
    assert all(0 <= seed < 2**63 for seed in drawn)
    assert (await resolve(sampling=sampling(seed=2**64 - 1))).sampling.seed == 2**64 - 1


async def test_without_a_session_key_the_api_key_makes_the_split_sticky(resolve: Resolve) -> None:
    assert (await resolve()).session_key == "alpha"


async def test_a_completion_goes_on_from_its_prompt_and_a_message_does_not(resolve: Resolve) -> None:
    assert (await resolve()).continues_prompt
    assert (await resolve(token_ids=ids(5, 6))).continues_prompt
    assert not (await resolve(chat=chat("hi"))).continues_prompt


async def test_logprobs_absent_differs_from_zero(resolve: Resolve) -> None:
    assert (await resolve()).sampling.logprobs is None


BAD: dict[str, tuple[dict[str, Any], type[FairwayError], str]] = {
    "no model": ({"model": ""}, InvalidInput, "model"),
    "long model": ({"model": "m" * 129}, InvalidInput, "model"),
    "unknown model": ({"model": "other"}, ModelNotFound, "model"),
    "empty prompt": ({"prompt": ""}, InvalidInput, "prompt"),
    "no turns": ({"chat": inference_pb2.Chat()}, InvalidInput, "messages"),
    "no ids": ({"token_ids": ids()}, InvalidInput, "token_ids"),
    "id outside": ({"token_ids": ids(1, 5000)}, InvalidInput, "token_ids"),
    "largest id": ({"token_ids": ids(2**32 - 1)}, InvalidInput, "token_ids"),
    "stop id outside": ({"stop_token_ids": [5000]}, InvalidInput, "stop_token_ids"),
    "bias outside": ({"sampling": sampling(logit_bias={5000: 1.0})}, InvalidInput, "logit_bias"),
    "bias nan": (
        {"sampling": sampling(logit_bias={1: float("nan")})},
        InvalidInput,
        "sampling.logit_bias[1]",
    ),
    "bias large": ({"sampling": sampling(logit_bias={1: 101.0})}, InvalidInput, "sampling.logit_bias[1]"),
    "many choices": ({"choices": 10**9}, InvalidInput, "choices"),
    "no choices": ({"choices": 0}, InvalidInput, "choices"),
    "hot": ({"sampling": sampling(temperature=2.5)}, InvalidInput, "sampling.temperature"),
    "cold": ({"sampling": sampling(temperature=-0.1)}, InvalidInput, "sampling.temperature"),
    "nan": ({"sampling": sampling(temperature=float("nan"))}, InvalidInput, "sampling.temperature"),
    "infinite": (
        {"sampling": sampling(presence_penalty=float("inf"))},
        InvalidInput,
        "sampling.presence_penalty",
    ),
    "penalty": ({"sampling": sampling(frequency_penalty=-2.1)}, InvalidInput, "sampling.frequency_penalty"),
    "repetition": ({"sampling": sampling(repetition_penalty=0)}, InvalidInput, "sampling.repetition_penalty"),
    "logprobs": ({"logprobs": 21}, InvalidInput, "logprobs"),
    "no output": ({"max_output_tokens": 0}, InvalidInput, "max_output_tokens"),
    "long output": ({"max_output_tokens": 95}, PromptTooLong, "max_output_tokens"),
    "min above max": ({"max_output_tokens": 5, "min_output_tokens": 6}, InvalidInput, "min_output_tokens"),
    "min above room": ({"min_output_tokens": 96}, InvalidInput, "min_output_tokens"),
    "fan-out": ({"max_output_tokens": 50, "choices": 16}, InvalidInput, "max_output_tokens"),
    "long prompt": ({"prompt": "x" * 300}, PromptTooLong, "prompt"),
    "prompt that fills": ({"token_ids": ids(*[5] * CONTEXT)}, PromptTooLong, "token_ids"),
    "huge prompt": ({"prompt": "x" * 1_000_000}, PromptTooLong, "prompt"),
    "empty stop": ({"stop": ["a", ""]}, InvalidInput, "stop[1]"),
    "many stops": ({"stop": ["a"] * 17}, InvalidInput, "stop"),
    "long stop": ({"stop": ["a" * 257]}, InvalidInput, "stop[0]"),
    "priority": ({"priority": common_pb2.PRIORITY_INTERACTIVE}, PermissionDenied, "priority"),
    "unknown priority": ({"priority": 99}, InvalidInput, "priority"),
    "long key": ({"idempotency_key": "k" * 129}, InvalidInput, "idempotency_key"),
    "role": ({"chat": chat("x", role="root")}, InvalidInput, "chat.messages[0].role"),
    "unknown role": ({"chat": chat("x", role="tool")}, InvalidInput, "messages"),
    "timeout": ({"timeout": Duration(seconds=90_000)}, InvalidInput, "timeout"),
}


@pytest.mark.parametrize("name", BAD)
async def test_what_cannot_run_names_its_field(resolve: Resolve, name: str) -> None:
    fields, kind, field = BAD[name]
    with pytest.raises(kind) as caught:
        await resolve(**fields)
    assert caught.value.metadata["field"] == field
    assert type(caught.value) is kind


async def test_the_vocabulary_ends_where_it_ends(resolve: Resolve, fleet: Any) -> None:
    size = (await fleet.catalog.text_model(fleet.catalog.resolve("chat-small").version_digest)).vocab_size
    assert (await resolve(token_ids=ids(size - 1), stop_token_ids=[size - 1])).prompt.ids == (size - 1,)
    for fields in ({"token_ids": ids(size)}, {"stop_token_ids": [size]}):
        with pytest.raises(InvalidInput, match=str(size)):
            await resolve(**fields)


async def test_a_missing_input_is_refused(validator: Validator) -> None:
    with pytest.raises(InvalidInput, match="missing"):
        validator.check(WHO, inference_pb2.Generation(model="chat-small"))


async def test_numbers_are_in_the_refusal(resolve: Resolve) -> None:
    with pytest.raises(PromptTooLong) as caught:
        await resolve(token_ids=ids(*[5] * 90), max_output_tokens=7)
    assert caught.value.metadata == {
        "field": "max_output_tokens",
        "max_output_tokens": "7",
        "prompt_tokens": "90",
        "max_context_tokens": "96",
        "room_tokens": "6",
    }


@pytest.mark.parametrize(("prompt_tokens", "most"), [(3, 16), (90, 6)])
async def test_a_default_of_the_output_ends_with_the_context(
    resolve: Resolve, prompt_tokens: int, most: int
) -> None:
    spec = await resolve(token_ids=ids(*[5] * prompt_tokens), default_output_tokens=16)
    assert spec.limits.max_tokens == most


async def test_the_context_can_be_filled_to_the_last_token(resolve: Resolve) -> None:
    spec = await resolve(token_ids=ids(*[5] * 90), max_output_tokens=6, min_output_tokens=6)
    assert (spec.limits.max_tokens, spec.limits.min_tokens) == (6, 6)
    assert (await resolve(token_ids=ids(*[5] * 95))).limits.max_tokens == 1


async def test_a_default_length_shrinks_to_the_fan_out_bound(resolve: Resolve) -> None:
    assert (await resolve(token_ids=ids(5), choices=16)).limits.max_tokens == 256 // 16


async def test_priorities_are_capped_by_the_tenant(resolve: Resolve, fleet: Any) -> None:
    assert (await resolve(priority=common_pb2.PRIORITY_BATCH)).priority is Priority.BATCH
    fleet.tenants.put(TENANTS + "acme", Tenant(Meta("acme"), max_priority=Priority.BATCH))
    assert (await resolve()).priority is Priority.BATCH
    fleet.tenants.put(TENANTS + "acme", Tenant(Meta("acme"), max_priority=Priority.INTERACTIVE))
    assert (await resolve()).priority is Priority.STANDARD
    assert (await resolve(priority=common_pb2.PRIORITY_INTERACTIVE)).priority is Priority.INTERACTIVE


async def test_a_tenant_that_was_disabled_meanwhile_runs_nothing(resolve: Resolve, fleet: Any) -> None:
    fleet.tenants.put(TENANTS + "acme", Tenant(Meta("acme"), disabled=True))
    with pytest.raises(Unauthenticated):
        await resolve()


async def test_a_key_for_other_models_gets_not_found(resolve: Resolve) -> None:
    with pytest.raises(ModelNotFound):
        await resolve(Principal("alpha", KeyRole.TENANT, "acme", ("another",)))


async def test_a_key_permits_the_deployment_behind_an_alias(resolve: Resolve) -> None:
    permitted = Principal("alpha", KeyRole.TENANT, "acme", ("chat-small",))
    assert (await resolve(permitted, model="org/Chat-Small")).model == "chat-small"
    with pytest.raises(ModelNotFound, match="org/Chat-Small"):
        await resolve(Principal("alpha", KeyRole.TENANT, "acme", ("another",)), model="org/Chat-Small")


async def test_an_operator_s_key_runs_nothing(resolve: Resolve) -> None:
    with pytest.raises(PermissionDenied):
        await resolve(Principal("root", KeyRole.ADMIN))


async def test_bounds_are_checked_before_anything_is_fetched(resolve: Resolve, fleet: Any) -> None:
    for name in ("many choices", "nan", "empty stop", "empty prompt", "long key"):
        with pytest.raises(FairwayError):
            await resolve(**BAD[name][0])
    assert fleet.files.fetched == []


async def test_counting_agrees_with_running(resolve: Resolve, validator: Validator) -> None:
    turns = chat("hello there")
    route, generation = validator.check_count(
        WHO, inference_pb2.CountTokensRequest(model="chat-small", chat=turns)
    )
    counted = await validator.count_tokens(WHO, generation, route)
    assert counted == len((await resolve(chat=turns)).prompt.ids)
    assert route.version_digest == DIGEST
    with pytest.raises(InvalidInput):
        validator.check_count(WHO, inference_pb2.CountTokensRequest(model="chat-small"))


async def test_a_chat_prompt_is_the_rendered_template(resolve: Resolve) -> None:
    spec = await resolve(chat=chat("<|end|>"))
    assert [token for token in spec.prompt.ids if token < 5] == [0, 3, 1, 4]


async def test_a_constraint_is_never_taken_without_its_check(validator: Validator, resolve: Resolve) -> None:
    def short(generation: inference_pb2.Generation) -> GenerationSpec | None:
        return validator.resolve_short(
            WHO, generation, "req_1", validator.check(WHO, generation), RequestBounds()
        )

    await resolve()  # its prompt is known from now on
    broken = sampling(constraint=common_pb2.Constraint(regex="["))
    assert short(inference_pb2.Generation(model="chat-small", prompt="the quick")) is not None
    assert short(inference_pb2.Generation(model="chat-small", prompt="the quick", sampling=broken)) is None
    with pytest.raises(InvalidInput) as caught:
        await resolve(sampling=broken)
    assert caught.value.metadata["field"].startswith("sampling.constraint")
