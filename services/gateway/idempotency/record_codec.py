"""The format of a request's record, in chunks of MessagePack: acceptance, resumptions, tokens, the end.

A chunk is a sequence of entries; all entries between two writes form one chunk. An entry may repeat an
earlier one, as after a write whose answer was lost: each entry carries its offsets.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final, TypeVar

import msgspec
from msgspec.structs import replace

from services.core.aliases import SizeChoice
from services.core.errors import FairwayError, IntegrityError
from services.core.generation import FinishReason, GenerationSpec, StageClock, TokenLogprobs, Usage
from services.core.outputs.forms import OutputForm
from services.core.safety import SafetyPins
from services.gateway.events import ChoiceResult, Finished
from services.gateway.policy.degrade import Degradation, DegradationKind


class Degraded(msgspec.Struct, array_like=True, frozen=True):
    """One difference between the request and how it is served."""

    kind: str
    original: str
    applied: str
    pressure_ratio: float


class AcceptedTerms(msgspec.Struct, array_like=True, tag="a", frozen=True):
    """The acceptance of a request, which every later run of it keeps.

    New fields are added at the end, with a default: gateways of two releases read each other's records.
    """

    request_id: str
    # The served model.
    model: str
    version_digest: str
    route_revision: int
    seed: int
    prompt_tokens: int
    # The served limit.
    max_output_tokens: int
    received_unix_us: int
    # How the served values differ from the request.
    degraded: tuple[Degraded, ...] = ()
    # How the outputs are split.
    form: OutputForm | None = None
    # Of calls in outputs that are not split.
    constrained_form: OutputForm | None = None
    weights_digest: str = ""  # digest of the weights; an adapter has that of its base
    base_digest: str = ""  # version that an adapter changes; empty: the version is none
    # Promise of all replicas that are ready: neither company nor a move changes the output.
    exact: bool = False
    size: SizeChoice | None = None  # choice of its model among the sizes of an alias
    safety: SafetyPins | None = None  # safety packs that it obeys; None: none


class Resumed(msgspec.Struct, array_like=True, tag="r", frozen=True):
    """Another run continues from this position."""


class Logprobs(msgspec.Struct, array_like=True, frozen=True):
    sampled: float
    top_ids: tuple[int, ...]
    top_logprobs: tuple[float, ...]
    top_tokens: tuple[str, ...]
    token: str
    text: str | None = None  # None: of the release before, whose texts are the tokens'
    rank: int = 0
    token_bytes: bytes = b""
    top_bytes: tuple[bytes, ...] = ()


class Output(msgspec.Struct, array_like=True, tag="t", frozen=True):
    """Tokens of one choice from output offset ``offset`` on, preceded by ``chars`` characters of its text."""

    choice: int
    offset: int
    chars: int
    ids: Sequence[int]
    text: str
    logprobs: tuple[Logprobs, ...] = ()


class End(msgspec.Struct, array_like=True, tag="f", frozen=True):
    choices: tuple[tuple[int, str, str, int], ...]
    usage: tuple[int, int, int]
    clock: StageClock
    resumes: int
    device_s: float = 0.0
    # The encoded outputs of a fixed-cost model.
    answer: bytes = b""


class RecordedFailure(msgspec.Struct, array_like=True, tag="e", frozen=True):
    """An error that every retry would meet again."""

    reason: str
    message: str
    metadata: dict[str, str]


T = TypeVar("T")
_LOGPROBS: Final = Logprobs.__struct_fields__
_KINDS: Final = frozenset(kind.value for kind in DegradationKind)

Entry = AcceptedTerms | Resumed | Output | End | RecordedFailure
_encode: Final = msgspec.msgpack.Encoder().encode
_decoder: Final = msgspec.msgpack.Decoder(tuple[Entry, ...])


def encode(entries: Iterable[Entry]) -> bytes:
    """Return a chunk; an empty one for no entries."""
    found = tuple(entries)
    return _encode(found) if found else b""


def decode(chunk: bytes) -> tuple[Entry, ...]:
    """Return the entries of a chunk. Raises IntegrityError for anything that is not one."""
    try:
        return _decoder.decode(chunk)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise IntegrityError("the record of this idempotency key cannot be read; use another key") from error


def logprobs_in(values: Sequence[TokenLogprobs]) -> tuple[Logprobs, ...]:
    return tuple(Logprobs(*(getattr(value, name) for name in _LOGPROBS)) for value in values)


def logprobs_out(values: Sequence[Logprobs]) -> tuple[TokenLogprobs, ...]:
    written = (value if value.text is not None else replace(value, text=value.token) for value in values)
    return tuple(TokenLogprobs(*(getattr(value, name) for name in _LOGPROBS)) for value in written)


def with_fields_of(value: object, kind: type[T], /, **more: Any) -> T:
    """Return a ``kind`` with the fields that ``value`` has under the same names, and ``more``."""
    names: tuple[str, ...] = getattr(kind, "__match_args__")  # noqa: B009 - of structs and dataclasses alike
    shared = {name: getattr(value, name) for name in names if hasattr(value, name)}
    return kind(**shared | more)


def degraded_in(values: Sequence[Degradation]) -> tuple[Degraded, ...]:
    return tuple(with_fields_of(one, Degraded, kind=one.kind.value) for one in values)


def degraded_out(values: Sequence[Degraded]) -> tuple[Degradation, ...]:
    """Return the entries of a supported kind; a later release may write other kinds."""
    return tuple(
        with_fields_of(one, Degradation, kind=DegradationKind(one.kind))
        for one in values
        if one.kind in _KINDS
    )


def end_in(finished: Finished) -> End:
    usage = finished.usage
    return End(
        tuple((c.choice, c.finish_reason.value, c.stop, c.output_tokens) for c in finished.choices),
        (usage.prompt_tokens, usage.output_tokens, usage.cached_tokens),
        finished.clock,
        finished.resumes,
        usage.device_s,
        finished.answer,
    )


def end_out(end: End) -> Finished:
    return Finished(
        choices=tuple(
            ChoiceResult(choice, FinishReason(reason), stop, tokens)
            for choice, reason, stop, tokens in end.choices
        ),
        usage=Usage(*end.usage, end.device_s),
        clock=end.clock,
        resumes=end.resumes,
        answer=end.answer,
    )


def failure_in(error: FairwayError) -> RecordedFailure:
    return RecordedFailure(error.reason, error.message, error.metadata)


def terms_of(spec: GenerationSpec, degradations: Sequence[Degradation], unix_s: float) -> AcceptedTerms:
    """Return the record's acceptance of a request as it is served."""
    return with_fields_of(
        spec,
        AcceptedTerms,
        seed=spec.sampling.seed,
        prompt_tokens=len(spec.prompt.ids),
        max_output_tokens=spec.limits.max_tokens,
        received_unix_us=int(unix_s * 1e6),
        degraded=degraded_in(degradations),
    )
