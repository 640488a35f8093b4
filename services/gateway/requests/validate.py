"""The validator of every face: its output can run, every other request is rejected.

Order: bounds of every field, permissions, then the model. These checks are cheap and run before the tenant's
quotas. Tokenisation and token limits follow, within the quotas. Sizes are checked before anything of that
size is allocated. Every error names its ``field``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from random import Random
from typing import Final

from msgspec import Struct

from fairway.v1 import common_pb2, inference_pb2
from services.core.aliases import Alias, AliasSize, Capability, SizeChoice, SizeNeeds
from services.core.errors import (
    FairwayError,
    InvalidInput,
    ModelNotFound,
    NoWorkerAvailable,
    PermissionDenied,
    PromptTooLong,
    ResidencyUnavailable,
    UnsupportedFeature,
)
from services.core.generation import GenerationSpec, OutputLimits, Principal, Prompt, Sampling
from services.core.outputs.forms import OutputForm
from services.core.records import Priority
from services.core.rollouts.routes import SplitCaller
from services.gateway.catalog import ModelCatalog, PinnedVersion, Route
from services.gateway.policy.claims import NO_BOUNDS, RequestBound, RequestBounds
from services.gateway.requests.scoring import check_scores, check_scoring
from services.gateway.requests.tool_use import (
    OutputForms,
    ResolvedForm,
    ToolUse,
    check_tools,
    conversation_of,
    declared_form,
    spelled_ids,
    tool_use,
)
from services.gateway.service_types import AnyRequest, RowsMessage
from services.gateway.text.text_model import SamplingDefaults, TextModel
from services.gateway.text.tokenise import INLINE_TOKENS, PrefixNames, Tokeniser
from services.rpc import bounds
from services.rpc.convert.inference import PRIORITY_OF, constraint_from_proto
from services.runtime.identity import KeyDirectory

# A nucleus without mass means the most likely token alone.
_LEAST_TOP_P: Final = 1e-6
_MAX_FANOUT_TOKENS: Final = 1_048_576
# Longer conversations are not looked up before their request is admitted.
_MAX_SHORT_MESSAGES: Final = 64
_MAX_DECODED: Final = 1_048_576


class Checked(Struct, frozen=True):
    """A generation with valid fields: its route and its class."""

    route: Route
    priority: Priority
    # Set where the request named an alias of several sizes: the one of the route, and the smaller ones.
    size: AliasSize | None = None
    chosen: SizeChoice | None = None


class Validator:
    """Converts a client's generation into a GenerationSpec."""

    def __init__(
        self,
        catalog: ModelCatalog,
        identity: KeyDirectory,
        rng: Random,
        *,
        max_fanout_tokens: int = _MAX_FANOUT_TOKENS,
        prefixes: PrefixNames | None = None,
    ) -> None:
        """``max_fanout_tokens`` bounds the output of all choices together. Without ``prefixes`` the specs
        name no cached prefix.
        """
        self._catalog = catalog
        self._identity = identity
        self._rng = rng
        self._tokeniser = Tokeniser(catalog.texts)
        self._forms = OutputForms(self._tokeniser)
        self._max_fanout_tokens = max_fanout_tokens
        self._prefixes = prefixes

    def of(self, identity: KeyDirectory) -> Validator:
        """Return the validator of another directory's callers, with texts cached apart."""
        return Validator(
            self._catalog,
            identity,
            self._rng,
            max_fanout_tokens=self._max_fanout_tokens,
            prefixes=self._prefixes,
        )

    def check(
        self,
        principal: Principal,
        generation: inference_pb2.Generation,
        *,
        pinned: PinnedVersion | None = None,
    ) -> Checked:
        """Return the route and class of the generation, before its text is processed.

        ``pinned`` is the version of an earlier run. Raises VersionGone when it is no longer served,
        InvalidInput, ModelNotFound, PermissionDenied, NoWorkerAvailable without a replica that can serve.
        Of an alias of several sizes: the first that meets what is known of the generation without its tokens.
        """
        bounds.check(generation)
        alias = self._catalog.alias(generation.model) if pinned is None else None
        route = None if alias is not None else self._servable(principal, generation, pinned)
        priority = self.priority(principal, generation.priority)
        _check_stop(generation.stop)
        _check_input(generation)
        check_scoring(generation)
        check_tools(generation)
        if route is not None:
            return Checked(route, priority)
        assert alias is not None, "a request without a route names an alias"
        _check_vocabulary(generation)
        return self._sized(principal, generation, alias, priority, SizeChoice(generation.model))

    def _sized(
        self,
        principal: Principal,
        generation: inference_pb2.Generation,
        alias: Alias,
        priority: Priority,
        chosen: SizeChoice,
        refusal: FairwayError | None = None,
    ) -> Checked:
        """Return the route of the next size of an alias that meets the generation.

        ``chosen`` has those before it, ``refusal`` why the last of them cannot serve it, which is raised
        where no other does.
        """
        needs = _needs(generation)
        for size in self._usable(principal, generation.model, alias)[len(chosen.passed) :]:
            unmet = size.unmet(needs)
            if not unmet:
                try:
                    route = self._servable(principal, generation, name=size.deployment)
                    return Checked(route, priority, size, chosen)
                except (ModelNotFound, NoWorkerAvailable, ResidencyUnavailable) as error:
                    unmet, refusal = error.reason, error
            chosen = chosen.after(size.deployment, unmet)
        raise refusal or UnsupportedFeature(
            f"no size of {generation.model} meets the request: {chosen.unmet}",
            field="quality" if generation.quality else "model",
        )

    def _servable(
        self,
        principal: Principal,
        generation: AnyRequest,
        pinned: PinnedVersion | None = None,
        name: str = "",
    ) -> Route:
        """Return what ``_route`` does. Raises as it, and as ``ModelCatalog.require_servable``."""
        route = self._route(principal, generation, pinned, name)
        self._catalog.require_servable(route, self._identity.residency(principal.tenant_id))
        return route

    def _usable(self, principal: Principal, name: str, alias: Alias) -> list[AliasSize]:
        """Return the sizes that the caller may use. Raises ModelNotFound where it may use none."""
        found = [one for one in alias.sizes if self._identity.may_use(principal, one.deployment)]
        if not found:
            raise self._identity.not_found(principal, name, self._catalog.names())
        return found

    async def resolve(
        self,
        principal: Principal,
        generation: inference_pb2.Generation,
        request_id: str,
        checked: Checked,
        request_bounds: RequestBounds = NO_BOUNDS,
        accepted: OutputForm | None = None,
    ) -> GenerationSpec:
        """Return the generation with its version pinned, prompt tokenised and every default applied.

        Within ``request_bounds``: an output limit that is absent is capped, another one is rejected.
        ``accepted``: the form of an earlier run's outputs. Raises
        InvalidInput, PromptTooLong, ConstraintRefused, or the errors of fetching the model's tokenizer.
        Of an alias: for its next size, where the prompt and its output are too long for that of the route.
        """
        while True:
            try:
                return await self._resolved(
                    principal, generation, request_id, checked, request_bounds, accepted
                )
            except PromptTooLong as error:
                checked = self._larger(principal, generation, checked, request_bounds, error)

    def _larger(
        self,
        principal: Principal,
        generation: inference_pb2.Generation,
        checked: Checked,
        request_bounds: RequestBounds,
        error: PromptTooLong,
    ) -> Checked:
        """Return the route of a larger size. Raises ``error`` where no size would help."""
        alias = self._catalog.alias(generation.model)
        context = int(error.metadata["max_context_tokens"])
        if checked.chosen is None or checked.size is None or alias is None:
            raise error
        if request_bounds.context_tokens.exceeded(context + 1):
            raise error
        needed = _needed(generation, error)
        chosen = checked.chosen.after(checked.size.deployment, f"{needed}, has {context:,}")
        refusal = PromptTooLong(
            f"no size of {generation.model} meets the request: it {needed}, the largest has {context:,}"
        )
        refusal.metadata = error.metadata
        return self._sized(principal, generation, alias, checked.priority, chosen, refusal)

    async def _resolved(
        self,
        principal: Principal,
        generation: inference_pb2.Generation,
        request_id: str,
        checked: Checked,
        request_bounds: RequestBounds,
        accepted: OutputForm | None,
    ) -> GenerationSpec:
        route = checked.route
        model = await self._catalog.text_model(route.version_digest)
        context = self._context(route, model)
        _check_ids(generation, model.vocab_size)
        ids = await self._prompt_ids(principal, generation, model)
        limits = self._limits(generation, len(ids), context, request_bounds)
        asked, constraint = generation.sampling, None
        if asked.HasField("constraint"):
            constraint = constraint_from_proto(asked.constraint)
        written = await self._forms.resolve(
            generation, constraint, principal.tenant_id, route.deployment, model, ids, accepted
        )
        prompt = Prompt(ids)
        # Cached KV has no logits: with log-probabilities of the prompt nothing of it is taken from a cache.
        if self._prefixes is not None and not generation.HasField("prompt_logprobs"):
            prompt = await self._prefixes.prompt(ids, principal.tenant_id, route.version_digest)
        spec = self._spec(principal, generation, request_id, checked, prompt, limits, model)
        return _written(spec, written)

    def resolve_short(
        self,
        principal: Principal,
        generation: inference_pb2.Generation,
        request_id: str,
        checked: Checked,
        request_bounds: RequestBounds,
    ) -> GenerationSpec | None:
        """Return what ``resolve`` returns, if that takes no work: a short prompt of ids, or a cached one,
        without a constraint.

        Raises InvalidInput or PromptTooLong.
        """
        route = checked.route
        model = self._catalog.loaded_text_model(route.version_digest)
        if model is None or model.signature is not None or generation.sampling.HasField("constraint"):
            return None
        if tool_use(generation).tools:
            return None
        ids = self._known_ids(principal, generation, model)
        if not 0 < len(ids) <= INLINE_TOKENS:
            return None
        _check_ids(generation, model.vocab_size)
        limits = self._limits(generation, len(ids), self._context(route, model), request_bounds)
        prompt = Prompt(ids)
        if self._prefixes is not None and not generation.HasField("prompt_logprobs"):
            prompt = self._prefixes.short_prompt(ids, principal.tenant_id, route.version_digest)
        spec = self._spec(principal, generation, request_id, checked, prompt, limits, model)
        if not generation.parts:
            return spec
        form = declared_form(generation, ToolUse(), route.deployment, model, ids)
        return _written(spec, ResolvedForm(form, None, spelled_ids(form, model)))

    def _spec(
        self,
        principal: Principal,
        generation: inference_pb2.Generation,
        request_id: str,
        checked: Checked,
        prompt: Prompt,
        limits: OutputLimits,
        model: TextModel,
    ) -> GenerationSpec:
        check_scores(generation, len(prompt.ids))
        _check_size(generation, checked.size, len(prompt.ids))
        route = checked.route
        return GenerationSpec(
            request_id=request_id,
            model=route.model,
            version_digest=route.version_digest,
            route_revision=route.route_revision,
            prompt=prompt,
            sampling=self._sampling(generation, model.defaults),
            limits=limits,
            choices=_choices(generation),
            priority=checked.priority,
            session_key=session_key_of(principal, generation),
            step=route.step,
            # A message has a text of its own.
            continues_prompt=generation.WhichOneof("input") != "chat" and limits.max_tokens > 0,
            weights_digest=model.weights_digest,
            base_digest=model.base_digest,
            exact=route.exact,
            size=checked.chosen,
        )

    def check_count(
        self, principal: Principal, request: inference_pb2.CountTokensRequest
    ) -> tuple[Route, inference_pb2.Generation]:
        """Return the route and the generation whose tokens are to be counted. Raises as ``check`` does."""
        bounds.check(request)
        generation = inference_pb2.Generation(model=request.model)
        route = self._route(principal, generation)
        if request.HasField("chat"):
            generation.chat.CopyFrom(request.chat)
        elif request.HasField("prompt"):
            generation.prompt = request.prompt
        _check_input(generation)
        check_tools(generation)
        return route, generation

    async def count_tokens(
        self, principal: Principal, generation: inference_pb2.Generation, route: Route
    ) -> int:
        """Return the number of prompt tokens of a checked generation."""
        model = await self._catalog.text_model(route.version_digest)
        try:
            return len(await self._prompt_ids(principal, generation, model))
        except PromptTooLong as error:
            if (counted := error.metadata.get("prompt_tokens")) is None:
                raise
            return int(counted)  # a count beyond the context is valid too

    async def token_ids(
        self, principal: Principal, generation: inference_pb2.Generation, route: Route
    ) -> Sequence[int]:
        """Return the prompt tokens of a checked generation. Raises PromptTooLong beyond the context."""
        model = await self._catalog.text_model(route.version_digest)
        return await self._prompt_ids(principal, generation, model)

    async def text_of(self, principal: Principal, name: str, ids: Sequence[int]) -> str:
        """Return the text of token ids of a model. Raises InvalidInput, ModelNotFound, UnsupportedFeature."""
        if len(ids) > _MAX_DECODED:
            raise InvalidInput(f"at most {_MAX_DECODED} tokens are decoded at once", field="tokens")
        route = self._route(principal, inference_pb2.Generation(model=name))
        model = await self._catalog.text_model(route.version_digest)
        if model.signature is not None:
            raise _generates_nothing(name, model.signature.operation)
        _check_within("tokens", ids, model.vocab_size)
        return await self._tokeniser.decode(model, principal.tenant_id, ids)

    async def decoded(self, tenant_id: str, version_digest: str, ids: Sequence[int]) -> str:
        """Return the text of token ids of a version, however many. Raises InvalidInput."""
        model = await self._catalog.text_model(version_digest)
        _check_within("token_ids", ids, model.vocab_size)
        parts = [ids[at : at + _MAX_DECODED] for at in range(0, len(ids), _MAX_DECODED)]
        return "".join([await self._tokeniser.decode(model, tenant_id, part) for part in parts])

    def check_rows(self, principal: Principal, request: RowsMessage) -> Checked:
        """Return the route and class of a request of a fixed-cost model, before its inputs are processed.

        Raises as ``check`` does.
        """
        bounds.check(request)
        route = self._servable(principal, request)
        return Checked(route, self.priority(principal, request.priority))

    def authorise(self, principal: Principal, asked: str) -> None:
        """Return if the caller may use a model by the name that it sent. Raises ModelNotFound."""
        alias, model, names = self._catalog.alias(asked), self._catalog.named(asked), self._catalog.names
        if alias is not None:
            model = self._usable(principal, asked, alias)[0].deployment
        self._identity.authorise_model(principal, model, requested_name=asked, names=names)

    def _route(
        self,
        principal: Principal,
        generation: AnyRequest,
        pinned: PinnedVersion | None = None,
        name: str = "",
    ) -> Route:
        """Return the route of ``name``, by default the request's; of an alias the smallest size's.

        The model of an earlier run is not authorised again: a smaller model may answer for the permitted
        one. The caller's permission to continue was checked before the record was read.
        """
        if pinned is not None:
            return self._catalog.resolve_pinned(generation.model, pinned)
        name = name or generation.model
        self.authorise(principal, name)
        if (alias := self._catalog.alias(name)) is not None:
            name = self._usable(principal, name, alias)[0].deployment
        tenant = self._identity.tenant(principal.tenant_id)
        session = session_key_of(principal, generation)
        caller = SplitCaller(principal.tenant_id, session, tenant.max_priority, generation.version)
        try:
            return self._catalog.resolve(name, caller)
        except ModelNotFound:
            raise self._identity.not_found(principal, name, self._catalog.names()) from None

    def priority(self, principal: Principal, asked: int) -> Priority:
        """The requested class; by default the standard one, or the tenant's highest if that is lower."""
        highest = self._identity.tenant(principal.tenant_id).max_priority
        if asked == common_pb2.PRIORITY_UNSPECIFIED:
            return min(Priority.STANDARD, highest, key=lambda priority: priority.rank)
        priority = PRIORITY_OF[asked]
        if priority.rank > highest.rank:
            raise PermissionDenied(
                f"priority {priority} is above {highest}, the highest of this tenant",
                field="priority",
                priority=priority,
                max_priority=highest,
            )
        return priority

    def _context(self, route: Route, model: TextModel) -> int:
        known = self._catalog.max_context_tokens(route.version_digest)
        return min(known, model.max_context_tokens) if known else model.max_context_tokens

    async def _prompt_ids(
        self, principal: Principal, generation: inference_pb2.Generation, model: TextModel
    ) -> Sequence[int]:
        if model.signature is not None:
            raise _generates_nothing(generation.model, model.signature.operation)
        kind = generation.WhichOneof("input")
        if kind == "token_ids":
            return tuple(generation.token_ids.ids)
        if kind == "chat":
            ids = await self._tokeniser.chat(model, principal.tenant_id, conversation_of(generation))
        else:
            ids = await self._tokeniser.prompt(model, principal.tenant_id, generation.prompt)
        if not ids:
            raise InvalidInput("the prompt has no tokens", field="prompt")
        return ids

    def _known_ids(
        self, principal: Principal, generation: inference_pb2.Generation, model: TextModel
    ) -> Sequence[int]:
        """Return the ids of a prompt without text work; empty if it needs some."""
        kind = generation.WhichOneof("input")
        if kind == "token_ids":
            return tuple(generation.token_ids.ids) if len(generation.token_ids.ids) <= INLINE_TOKENS else ()
        if kind == "chat" and len(generation.chat.messages) > _MAX_SHORT_MESSAGES:
            return ()
        text = conversation_of(generation) if kind == "chat" else generation.prompt
        return self._tokeniser.known(model, principal.tenant_id, text)

    def _limits(
        self,
        generation: inference_pb2.Generation,
        prompt_tokens: int,
        context: int,
        request_bounds: RequestBounds,
    ) -> OutputLimits:
        what = "the model's context"
        if request_bounds.context_tokens.exceeded(context):
            context, what = int(request_bounds.context_tokens.value), request_bounds.context_tokens.name
        room, choices = context - prompt_tokens, _choices(generation)
        asked = generation.max_output_tokens if generation.HasField("max_output_tokens") else None
        if room < (asked != 0):
            raise PromptTooLong(
                f"the prompt has {prompt_tokens} tokens; {what} of {context} leaves no room for output",
                field=_input_field(generation),
                prompt_tokens=prompt_tokens,
                max_context_tokens=context,
            )
        if asked is not None and asked > room:
            raise PromptTooLong(
                f"max_output_tokens {asked} and {prompt_tokens} prompt tokens exceed {what} of {context}: "
                f"at most {room} are left",
                field="max_output_tokens",
                max_output_tokens=asked,
                prompt_tokens=prompt_tokens,
                max_context_tokens=context,
                room_tokens=room,
            )
        if asked is not None:
            _check_output(asked, request_bounds.output_tokens)
        share = max(1, self._max_fanout_tokens // choices)
        if asked is not None and asked > share:
            raise InvalidInput(
                f"max_output_tokens {asked} times {choices} choices exceed {self._max_fanout_tokens} tokens",
                field="max_output_tokens",
                max_output_tokens=asked,
                choices=choices,
                max_fanout_tokens=self._max_fanout_tokens,
            )
        if asked is not None:
            longest = asked
        else:
            longest = request_bounds.output_tokens.cap(min(room, share))
            if generation.HasField("default_output_tokens"):
                longest = min(longest, generation.default_output_tokens)
        if generation.min_output_tokens > longest:
            raise InvalidInput(
                f"min_output_tokens {generation.min_output_tokens} is above the {longest} that may be made",
                field="min_output_tokens",
                min_output_tokens=generation.min_output_tokens,
                max_output_tokens=longest,
            )
        return OutputLimits(
            longest,
            generation.min_output_tokens,
            tuple(generation.stop),
            tuple(generation.stop_token_ids),
            generation.ignore_eos,
        )

    def _sampling(self, generation: inference_pb2.Generation, defaults: SamplingDefaults) -> Sampling:
        asked = generation.sampling
        top_p = asked.top_p if asked.HasField("top_p") else defaults.top_p
        repetition, scored = asked.HasField("repetition_penalty"), generation.HasField("prompt_logprobs")
        return Sampling(
            seed=asked.seed if asked.HasField("seed") else self._rng.getrandbits(63),
            temperature=asked.temperature if asked.HasField("temperature") else defaults.temperature,
            top_p=max(top_p, _LEAST_TOP_P),
            top_k=asked.top_k if asked.HasField("top_k") else defaults.top_k,
            min_p=asked.min_p if asked.HasField("min_p") else defaults.min_p,
            presence_penalty=asked.presence_penalty,
            frequency_penalty=asked.frequency_penalty,
            repetition_penalty=asked.repetition_penalty if repetition else defaults.repetition_penalty,
            logit_bias=tuple(sorted(asked.logit_bias.items())),
            logprobs=generation.logprobs if generation.HasField("logprobs") or scored else None,
            prompt_logprobs=generation.prompt_logprobs if scored else None,
        )


def _written(spec: GenerationSpec, written: ResolvedForm) -> GenerationSpec:
    """Return a generation whose outputs are written so."""
    return replace(
        spec,
        sampling=replace(spec.sampling, constraint=written.constraint),
        limits=replace(spec.limits, spelled_ids=written.spelled_ids),
        form=written.form,
        constrained_form=written.constrained_form,
    )


def _generates_nothing(name: str, operation: str) -> UnsupportedFeature:
    return UnsupportedFeature(
        f"{name} is a fixed-cost model of the operation {operation}: it generates no text",
        field="model",
        operation=operation,
    )


def _check_vocabulary(generation: inference_pb2.Generation) -> None:
    """Return if no token is named by its id, which differs between the sizes of an alias."""
    ids: dict[str, Collection[int]] = {
        "token_ids": generation.token_ids.ids,
        "stop_token_ids": generation.stop_token_ids,
        "logit_bias": generation.sampling.logit_bias,
    }
    for field, found in ids.items():
        if found:
            raise InvalidInput(
                f"{field} names tokens of one vocabulary, and {generation.model} has several sizes: "
                "name one of its deployments",
                field=field,
            )


def _needs(generation: inference_pb2.Generation) -> SizeNeeds:
    """Return what the generation needs of a model, apart from its tokens."""
    asked = {
        Capability.TOOLS: bool(tool_use(generation).tools),
        Capability.SCHEMAS: generation.sampling.HasField("constraint"),
    }
    return SizeNeeds(generation.quality, tuple(one for one, needed in asked.items() if needed))


def _tokens_of(generation: inference_pb2.Generation, prompt_tokens: int) -> int:
    """Return the context that the generation needs at least."""
    return prompt_tokens + (generation.max_output_tokens if generation.HasField("max_output_tokens") else 1)


def _check_size(generation: inference_pb2.Generation, size: AliasSize | None, prompt_tokens: int) -> None:
    """Return if the size of an alias declares enough context. Raises PromptTooLong."""
    needed = _tokens_of(generation, prompt_tokens)
    if size is not None and 0 < size.context_tokens < needed:
        raise PromptTooLong(
            f"{size.deployment} is for {size.context_tokens} tokens of context, and {needed} are needed",
            field=_input_field(generation),
            prompt_tokens=prompt_tokens,
            max_context_tokens=size.context_tokens,
        )


def _needed(generation: inference_pb2.Generation, error: PromptTooLong) -> str:
    """Return what a model's context is too short for."""
    counted = error.metadata.get("prompt_tokens")
    if counted is None:
        return f"needs context for {error.metadata['size_bytes']} bytes"
    return f"needs {_tokens_of(generation, int(counted)):,} tokens of context"


def _check_output(asked: int, longest: RequestBound) -> None:
    if longest.exceeded(asked):
        raise InvalidInput(
            f"max_output_tokens {asked} is above {longest.name}, {longest.value:.0f}",
            field="max_output_tokens",
            max_output_tokens=asked,
            limit=round(longest.value),
        )


def _choices(generation: inference_pb2.Generation) -> int:
    return generation.choices if generation.HasField("choices") else 1


def _input_field(generation: inference_pb2.Generation) -> str:
    return {"chat": "messages", "token_ids": "token_ids"}.get(generation.WhichOneof("input") or "", "prompt")


def _check_input(generation: inference_pb2.Generation) -> None:
    kind = generation.WhichOneof("input")
    if kind is None:
        raise InvalidInput("the prompt is missing", field="prompt")
    empty = {
        "prompt": not generation.prompt,
        "chat": not generation.chat.messages,
        "token_ids": not generation.token_ids.ids,
    }
    if empty[kind]:
        field = _input_field(generation)
        raise InvalidInput(f"{field} is empty", field=field)


def session_key_of(principal: Principal, generation: AnyRequest) -> str:
    """Return what makes a version split sticky: the client's session, its end user, or the API key."""
    return generation.session_key or generation.user or principal.key_id


def _check_stop(stop: Sequence[str]) -> None:
    for index, text in enumerate(stop):
        if not text:
            raise InvalidInput("a stop string is empty", field=f"stop[{index}]")


def _check_ids(generation: inference_pb2.Generation, vocab_size: int) -> None:
    """Check that every id that will index the vocabulary is within it."""
    for field, ids in (
        ("token_ids", generation.token_ids.ids),
        ("stop_token_ids", generation.stop_token_ids),
        ("logit_bias", generation.sampling.logit_bias),
    ):
        _check_within(field, ids, vocab_size)


def _check_within(field: str, ids: Iterable[int], vocab_size: int) -> None:
    largest = max(ids, default=0)
    if largest >= vocab_size:
        raise InvalidInput(
            f"{field} holds token {largest}; the model's vocabulary has {vocab_size}",
            field=field,
            token=largest,
            vocab_size=vocab_size,
        )
