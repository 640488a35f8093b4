"""The asyncio client of Fairway.

    import fairway.client

    async with fairway.client.Client("127.0.0.1:50051", api_key=key) as client:
        async for text in client.generate("tiny", "Once upon a time").text():
            ...

It handles deadlines, retries with a budget, idempotency keys, several gateways and one multiplexed session;
docs/client.md describes its use and its guarantees. AdminClient is the operators' client.
"""

from fairway.client.admin.admin import AdminClient
from fairway.client.admin.watch import Changed, Deleted, Missed, Snapshot
from fairway.client.client import Client
from fairway.client.errors import (
    Cancelled,
    Closed,
    Conflict,
    ConnectionLost,
    DeadlineExceeded,
    FailedPrecondition,
    FairwayError,
    InvalidRequest,
    KeysUnsupported,
    NoGateway,
    NotFound,
    OverQuota,
    PermissionDenied,
    ResultExpired,
    ServerBug,
    StreamDiverged,
    Unauthenticated,
    Unavailable,
    Unimplemented,
    WaitFailed,
)
from fairway.client.generation import GenerationStream
from fairway.client.policy import RetryPolicy
from fairway.client.rows import (
    Embeddings,
    Inference,
    RankedDocument,
    Ranking,
    RowOptions,
    RowsAccepted,
    Tensor,
)
from fairway.client.session import Session
from fairway.client.values import (
    Accepted,
    ChoiceResult,
    ClientOptions,
    CompletedChoice,
    Completion,
    Degradation,
    Event,
    Finished,
    FinishReason,
    Grammar,
    JsonSchema,
    Message,
    OneOf,
    Options,
    Priority,
    Regex,
    ServedModel,
    SessionOptions,
    StageClock,
    TokenCount,
    TokenLogprobs,
    Tokens,
    Tool,
    Usage,
)
from fairway.formats.answers import CallDelta, ContentText, OutputPart, ReasoningText, ToolCall

__all__ = [
    "Accepted",
    "AdminClient",
    "CallDelta",
    "Cancelled",
    "Changed",
    "ChoiceResult",
    "Client",
    "ClientOptions",
    "Closed",
    "CompletedChoice",
    "Completion",
    "Conflict",
    "ConnectionLost",
    "ContentText",
    "DeadlineExceeded",
    "Degradation",
    "Deleted",
    "Embeddings",
    "Event",
    "FailedPrecondition",
    "FairwayError",
    "FinishReason",
    "Finished",
    "GenerationStream",
    "Grammar",
    "Inference",
    "InvalidRequest",
    "JsonSchema",
    "KeysUnsupported",
    "Message",
    "Missed",
    "NoGateway",
    "NotFound",
    "OneOf",
    "Options",
    "OutputPart",
    "OverQuota",
    "PermissionDenied",
    "Priority",
    "RankedDocument",
    "Ranking",
    "ReasoningText",
    "Regex",
    "ResultExpired",
    "RetryPolicy",
    "RowOptions",
    "RowsAccepted",
    "ServedModel",
    "ServerBug",
    "Session",
    "SessionOptions",
    "Snapshot",
    "StageClock",
    "StreamDiverged",
    "Tensor",
    "TokenCount",
    "TokenLogprobs",
    "Tokens",
    "Tool",
    "ToolCall",
    "Unauthenticated",
    "Unavailable",
    "Unimplemented",
    "Usage",
    "WaitFailed",
]
