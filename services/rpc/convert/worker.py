"""Worker messages to and from domain types.

The two converters of frames are on the token path: columns are copied as lists, without an object per token.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final, TypeVar

from google.protobuf.duration_pb2 import Duration

from fairway.v1 import common_pb2, worker_pb2
from services.core.errors import InvalidInput
from services.core.generation import (
    AnyGrant,
    FallbackGrant,
    GenerationSpec,
    NotAdmittedReason,
    OutputLimits,
    Prompt,
    Sampling,
    SequenceEnd,
    StartSpec,
)
from services.core.poison.suspicion import LossCause, StepRole
from services.core.records import LoadedVersion, VersionState
from services.ports.streams.worker_stream import StepFrame
from services.rpc.convert.inference import (
    FINISH_REASONS,
    FINISH_REASONS_BACK,
    LOGPROBS,
    PRIORITIES,
    PRIORITY_OF,
    constraint_from_proto,
    constraint_to_proto,
    timestamp,
    token_logprobs,
)
from services.rpc.convert.mirror import Mirror, Pair
from services.rpc.convert.rows import row_end_from_proto, row_end_to_proto
from services.rpc.convert.scheduler import grant_from_proto, grant_to_proto

NOT_ADMITTED_REASONS: Final = {
    reason: worker_pb2.NotAdmittedReason.Value(f"NOT_ADMITTED_REASON_{reason.name}")
    for reason in NotAdmittedReason
}
VERSION_STATES: Final = {
    state: worker_pb2.VersionState.Value(f"VERSION_STATE_{state.name}") for state in VersionState
}
_LOSS_CAUSES: Final = {cause: worker_pb2.LossCause.Value(f"LOSS_CAUSE_{cause.name}") for cause in LossCause}
_LOSS_CAUSE_OF: Final = {value: key for key, value in _LOSS_CAUSES.items()}
_STEP_ROLES: Final = {role: worker_pb2.StepRole.Value(f"STEP_ROLE_{role.name}") for role in StepRole}
_STEP_ROLE_OF: Final = {value: key for key, value in _STEP_ROLES.items()}
_NOT_ADMITTED_OF: Final = {value: key for key, value in NOT_ADMITTED_REASONS.items()}
Value = TypeVar("Value")


def _value_of(table: Mapping[Any, Value], number: int) -> Value:
    value = table.get(number)
    if value is None:
        raise InvalidInput(f"unknown enum value {number}", number=number)
    return value


_END: Final = Mirror(
    SequenceEnd,
    worker_pb2.SequenceFinished,
    {
        "reason": Pair(
            "reason", FINISH_REASONS.__getitem__, lambda number: _value_of(FINISH_REASONS_BACK, number)
        ),
        # A worker of an earlier release sends neither: nobody is a suspect.
        "loss_cause": Pair(
            "loss_cause",
            _LOSS_CAUSES.__getitem__,
            lambda number: _LOSS_CAUSE_OF.get(number, LossCause.OUTSIDE),
        ),
        "step_role": Pair(
            "step_role", _STEP_ROLES.__getitem__, lambda number: _STEP_ROLE_OF.get(number, StepRole.NONE)
        ),
    },
)


# --- starting ------------------------------------------------------------------------------------


def start_to_proto(handle: int, spec: StartSpec) -> worker_pb2.StartSequence:
    generation, grant = spec.generation, spec.grant
    prompt, limits, constraint = generation.prompt, generation.limits, generation.sampling.constraint
    message = worker_pb2.StartSequence(
        handle=handle,
        request_id=generation.request_id,
        choice=spec.choice,
        tenant_id=spec.tenant_id,
        prompt_ids=prompt.ids,
        produced_ids=spec.produced_ids,
        delivered_chars=spec.delivered_chars,
        sampling=sampling_to_proto(generation.sampling),
        max_output_tokens=limits.max_tokens,
        min_output_tokens=limits.min_tokens,
        stop=limits.stop,
        stop_token_ids=limits.stop_token_ids,
        logprobs=generation.sampling.logprobs,
        ignore_eos=limits.ignore_eos,
        priority=PRIORITIES[generation.priority],
        initial_credit_tokens=spec.initial_credit_tokens,
        route_revision=generation.route_revision,
        traceparent=spec.traceparent,
        prefix_hashes=prompt.prefix_hashes,
        prefix_root=prompt.prefix_root,
        apart_tokens=spec.apart_tokens,
        embed=spec.embed,
        spelled_token_ids=limits.spelled_ids,
        prompt_logprobs=generation.sampling.prompt_logprobs,
        exact_constraint=constraint is not None and constraint.exact,
        scored_tokens=spec.scored_tokens,
        continues_prompt=generation.continues_prompt,
    )
    if isinstance(grant, FallbackGrant):
        message.fallback.CopyFrom(_fallback_to_proto(grant))
    else:
        message.grant.CopyFrom(grant_to_proto(grant))
    if spec.time_left_s is not None:
        message.time_left.FromNanoseconds(max(0, round(spec.time_left_s * 1e9)))
    return message


def start_from_proto(message: worker_pb2.StartSequence) -> StartSpec:
    """Return the start. Raises InvalidInput for a start without a grant of either kind."""
    grant = _admission_from_proto(message)
    generation = GenerationSpec(
        request_id=message.request_id,
        model="",  # implied by the version
        version_digest=grant.version_digest,
        route_revision=message.route_revision,
        prompt=Prompt(list(message.prompt_ids), tuple(message.prefix_hashes), message.prefix_root),
        sampling=sampling_from_proto(message),
        limits=OutputLimits(
            message.max_output_tokens,
            message.min_output_tokens,
            tuple(message.stop),
            tuple(message.stop_token_ids),
            message.ignore_eos,
            tuple(message.spelled_token_ids),
        ),
        priority=PRIORITY_OF[message.priority],
        continues_prompt=message.continues_prompt,
    )
    return StartSpec(
        generation=generation,
        choice=message.choice,
        tenant_id=message.tenant_id,
        grant=grant,
        initial_credit_tokens=message.initial_credit_tokens,
        produced_ids=tuple(message.produced_ids),
        delivered_chars=message.delivered_chars,
        embed=message.embed,
        scored_tokens=message.scored_tokens,
        time_left_s=_seconds(message.time_left) if message.HasField("time_left") else None,
        traceparent=message.traceparent,
        apart_tokens=message.apart_tokens,
    )


def _admission_from_proto(message: worker_pb2.StartSequence) -> AnyGrant:
    match message.WhichOneof("admission"):
        case "grant":
            return grant_from_proto(message.grant)
        case "fallback":
            fallback = message.fallback
            return FallbackGrant(
                worker_id="",
                address="",
                incarnation=fallback.incarnation,
                last_epoch=fallback.last_epoch,
                kv_blocks=fallback.kv_blocks,
                version_digest=fallback.version_digest,
            )
    raise InvalidInput("a start needs a grant", field="admission")


def _fallback_to_proto(grant: FallbackGrant) -> worker_pb2.FallbackGrant:
    return worker_pb2.FallbackGrant(
        incarnation=grant.incarnation,
        last_epoch=grant.last_epoch,
        kv_blocks=grant.kv_blocks,
        version_digest=grant.version_digest,
    )


def sampling_to_proto(params: Sampling) -> common_pb2.Sampling:
    return common_pb2.Sampling(
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        min_p=params.min_p,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        repetition_penalty=params.repetition_penalty,
        logit_bias=dict(params.logit_bias),
        seed=params.seed,
        constraint=None if params.constraint is None else constraint_to_proto(params.constraint),
    )


def sampling_from_proto(start: worker_pb2.StartSequence) -> Sampling:
    """Every field that is absent has the default of ``Sampling``."""
    message, constraint = start.sampling, None
    if message.HasField("constraint"):
        constraint = replace(constraint_from_proto(message.constraint), exact=start.exact_constraint)
    return Sampling(
        seed=message.seed,
        temperature=message.temperature if message.HasField("temperature") else 1.0,
        top_p=message.top_p if message.HasField("top_p") else 1.0,
        top_k=message.top_k,
        min_p=message.min_p,
        presence_penalty=message.presence_penalty,
        frequency_penalty=message.frequency_penalty,
        repetition_penalty=message.repetition_penalty if message.HasField("repetition_penalty") else 1.0,
        logit_bias=tuple(sorted(message.logit_bias.items())),
        logprobs=start.logprobs if start.HasField("logprobs") else None,
        constraint=constraint,
        prompt_logprobs=start.prompt_logprobs if start.HasField("prompt_logprobs") else None,
    )


# --- frames --------------------------------------------------------------------------------------


def frame_to_proto(frame: StepFrame) -> worker_pb2.ExecuteResponse:
    message = worker_pb2.ExecuteResponse(
        accepted=[worker_pb2.SequenceAccepted(handle=handle) for handle in frame.accepted],
        not_admitted=[
            worker_pb2.NotAdmitted(handle=handle, reason=NOT_ADMITTED_REASONS[reason])
            for handle, reason in frame.not_admitted
        ],
        finished=[end_to_proto(handle, end) for handle, end in frame.finished],
        rows=[row_end_to_proto(handle, end) for handle, end in frame.rows],
    )
    if frame.handles:
        tokens = message.tokens
        tokens.handles.extend(frame.handles)
        tokens.offsets.extend(frame.offsets)
        tokens.counts.extend(frame.counts)
        tokens.ids.extend(frame.ids)
        tokens.texts.extend(frame.texts)
        for entry, logprobs in frame.logprobs.items():
            tokens.logprobs.add(entry=entry, tokens=token_logprobs(logprobs))
    return message


def frame_from_proto(message: worker_pb2.ExecuteResponse) -> StepFrame:
    """Raises InvalidInput when the columns differ in length or a reason is unknown."""
    frame = StepFrame(
        accepted=[accepted.handle for accepted in message.accepted],
        not_admitted=[
            (entry.handle, _value_of(_NOT_ADMITTED_OF, entry.reason)) for entry in message.not_admitted
        ],
        finished=[(entry.handle, end_from_proto(entry)) for entry in message.finished],
        rows=[(entry.handle, row_end_from_proto(entry)) for entry in message.rows],
    )
    if message.HasField("tokens"):
        _take_tokens(frame, message.tokens)
    return frame


def _take_tokens(frame: StepFrame, tokens: common_pb2.TokenFrame) -> None:
    frame.handles = list(tokens.handles)
    frame.offsets = list(tokens.offsets)
    frame.counts = list(tokens.counts)
    frame.ids = list(tokens.ids)
    frame.texts = list(tokens.texts)
    if tokens.logprobs:
        frame.logprobs = {
            entry.entry: [LOGPROBS.from_proto(one) for one in entry.tokens] for entry in tokens.logprobs
        }
    if not (len(frame.handles) == len(frame.offsets) == len(frame.counts) == len(frame.texts)):
        raise InvalidInput("the columns of a token frame differ in length", field="tokens")
    if sum(frame.counts) != len(frame.ids):
        raise InvalidInput("the counts of a token frame do not add up", field="tokens.counts")


def end_to_proto(handle: int, end: SequenceEnd) -> worker_pb2.SequenceFinished:
    return _END.to_proto(end, handle=handle)


def end_from_proto(message: worker_pb2.SequenceFinished) -> SequenceEnd:
    return _END.from_proto(message)


def version_to_proto(version: LoadedVersion) -> worker_pb2.LoadedVersion:
    """The engine's live numbers are added by the caller."""
    return worker_pb2.LoadedVersion(
        deployment=version.deployment,
        model=version.model,
        version_digest=version.version_digest,
        state=VERSION_STATES[version.state],
        message=version.message,
        progress_ratio=version.progress_ratio,
        kv_blocks_total=version.kv_blocks_total,
        engine_restarts=version.engine_restarts,
        reason=version.reason,
        failed_attempts=version.failed_attempts,
        retry_time=timestamp(version.retry_unix_s) if version.retry_unix_s else None,
        weight_bytes=version.weight_bytes,
        kv_bytes=version.kv_bytes,
        needed_bytes=version.needed_bytes,
        working_bytes=version.working_bytes,
        spare_bytes=version.spare_bytes,
    )


def _seconds(duration: Duration) -> float:
    return duration.ToNanoseconds() / 1e9
