"""Worker messages to and from domain types.

The two converters of frames are on the token path: columns are copied as lists, without an object per token.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final, TypeVar

from google.protobuf.duration_pb2 import Duration

from fairway.mirror import Mirror, Pair, enum_pair, numbers_of
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
from services.core.rollouts.routes import Withdrawal
from services.ports.streams import StepFrame
from services.rpc.convert.inference import (
    FINISH_REASONS,
    FINISH_REASONS_BACK,
    LOGPROBS,
    PRIORITY,
    constraint_from_proto,
    constraint_to_proto,
    seconds_of,
    timestamp,
    token_logprobs,
)
from services.rpc.convert.rows import row_end_from_proto, row_end_to_proto
from services.rpc.convert.scheduler import grant_from_proto, grant_to_proto
from services.rpc.convert.slis import RUN_FACTS

NOT_ADMITTED_REASONS: Final = numbers_of(NotAdmittedReason, worker_pb2.NotAdmittedReason)
VERSION_STATES: Final = numbers_of(VersionState, worker_pb2.VersionState)
_LOSS_CAUSES: Final = numbers_of(LossCause, worker_pb2.LossCause)
_LOSS_CAUSE_OF: Final = {value: key for key, value in _LOSS_CAUSES.items()}
_STEP_ROLES: Final = numbers_of(StepRole, worker_pb2.StepRole)
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
        "run": RUN_FACTS.one("run", unset=True),
    },
)


# --- starting ------------------------------------------------------------------------------------


def _time_left(seconds: float) -> Duration:
    found = Duration()
    found.FromNanoseconds(max(0, round(seconds * 1e9)))
    return found


_START: Final = Mirror(
    StartSpec,
    worker_pb2.StartSequence,
    {"time_left_s": Pair("time_left", _time_left, lambda left: left.ToNanoseconds() / 1e9, unset=True)},
    apart=("generation", "grant"),
)
_GENERATION: Final = Mirror(
    GenerationSpec,
    worker_pb2.StartSequence,
    {
        "prompt": Mirror(
            Prompt,
            worker_pb2.StartSequence,
            {"ids": Pair("prompt_ids", read=list)},
        ),
        "limits": Mirror(
            OutputLimits,
            worker_pb2.StartSequence,
            {
                "max_tokens": Pair("max_output_tokens"),
                "min_tokens": Pair("min_output_tokens"),
                "spelled_ids": Pair("spelled_token_ids"),
            },
        ),
        "priority": PRIORITY,
    },
    # Model and version are implied by the grant; the gateway alone uses the others.
    apart=(
        "model",
        "version_digest",
        "sampling",
        "choices",
        "session_key",
        "step",
        "weights_digest",
        "safety",
        "size",
        "base_digest",
        "exact",
        "form",
        "constrained_form",
    ),
)
_SAMPLING: Final = Mirror(
    Sampling,
    common_pb2.Sampling,
    {"logit_bias": Pair("logit_bias", dict, lambda bias: tuple(sorted(bias.items())))},
    apart=("logprobs", "prompt_logprobs", "constraint"),
)
_FALLBACK: Final = Mirror(FallbackGrant, worker_pb2.FallbackGrant, apart=("worker_id", "address"))


def start_to_proto(handle: int, spec: StartSpec) -> worker_pb2.StartSequence:
    grant, sampling = spec.grant, spec.generation.sampling
    constraint = sampling.constraint
    message = _GENERATION.to_proto(
        spec.generation,
        handle=handle,
        sampling=_SAMPLING.to_proto(
            sampling, constraint=None if constraint is None else constraint_to_proto(constraint)
        ),
        logprobs=sampling.logprobs,
        prompt_logprobs=sampling.prompt_logprobs,
        exact_constraint=constraint is not None and constraint.exact,
        **_START.as_fields(spec),
    )
    if isinstance(grant, FallbackGrant):
        message.fallback.CopyFrom(_FALLBACK.to_proto(grant))
    else:
        message.grant.CopyFrom(grant_to_proto(grant))
    return message


def start_from_proto(message: worker_pb2.StartSequence) -> StartSpec:
    """Return the start. Raises InvalidInput for a start without a grant of either kind."""
    grant = _admission_from_proto(message)
    generation = _GENERATION.from_proto(
        message, model="", version_digest=grant.version_digest, sampling=_sampling_from_proto(message)
    )
    return _START.from_proto(message, generation=generation, grant=grant)


def _admission_from_proto(message: worker_pb2.StartSequence) -> AnyGrant:
    match message.WhichOneof("admission"):
        case "grant":
            return grant_from_proto(message.grant)
        case "fallback":
            return _FALLBACK.from_proto(message.fallback, worker_id="", address="")
    raise InvalidInput("a start needs a grant", field="admission")


def _sampling_from_proto(start: worker_pb2.StartSequence) -> Sampling:
    message, constraint = start.sampling, None
    if message.HasField("constraint"):
        constraint = replace(constraint_from_proto(message.constraint), exact=start.exact_constraint)
    return _SAMPLING.from_proto(
        message,
        logprobs=start.logprobs if start.HasField("logprobs") else None,
        prompt_logprobs=start.prompt_logprobs if start.HasField("prompt_logprobs") else None,
        constraint=constraint,
    )


# --- frames --------------------------------------------------------------------------------------

_WITHDRAWAL: Final = Mirror(Withdrawal, worker_pb2.Withdrawal)


def frame_to_proto(frame: StepFrame) -> worker_pb2.ExecuteResponse:
    message = worker_pb2.ExecuteResponse(
        accepted=[worker_pb2.SequenceAccepted(handle=handle) for handle in frame.accepted],
        not_admitted=[
            worker_pb2.NotAdmitted(handle=handle, reason=NOT_ADMITTED_REASONS[reason])
            for handle, reason in frame.not_admitted
        ],
        withdrawn=list(map(_WITHDRAWAL.to_proto, frame.withdrawn)),
        finished=[_END.to_proto(end, handle=handle) for handle, end in frame.finished],
        rows=[row_end_to_proto(handle, end) for handle, end in frame.rows],
    )
    if frame.handles:
        tokens = message.tokens
        tokens.handles.extend(frame.handles)
        tokens.offsets.extend(frame.offsets)
        tokens.counts.extend(frame.counts)
        tokens.ids.extend(frame.ids)
        tokens.texts.extend(frame.texts)
        tokens.probe_scores.extend(frame.probe_scores)
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
        withdrawn=list(map(_WITHDRAWAL.from_proto, message.withdrawn)),
        finished=[(entry.handle, _END.from_proto(entry)) for entry in message.finished],
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
    frame.probe_scores = list(tokens.probe_scores)
    if not (len(frame.handles) == len(frame.offsets) == len(frame.counts) == len(frame.texts)):
        raise InvalidInput("the columns of a token frame differ in length", field="tokens")
    if sum(frame.counts) != len(frame.ids):
        raise InvalidInput("the counts of a token frame do not add up", field="tokens.counts")
    if frame.probe_scores and len(frame.probe_scores) != len(frame.ids):
        raise InvalidInput("a token frame has a score for each token or none", field="tokens.probe_scores")


LOADED: Final = Mirror(
    LoadedVersion,
    worker_pb2.LoadedVersion,
    {
        "state": enum_pair("state", VERSION_STATES),
        "retry_unix_s": Pair("retry_time", timestamp, seconds_of, unset=True),
    },
    apart=("block_size", "max_model_len", "least_route_revision"),
)
