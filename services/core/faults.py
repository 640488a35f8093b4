"""Fault of each error reason: the one table behind metrics, alerts and docs/reference/errors.md.

``ours``: the platform failed; the error counts against availability. ``client``: the caller has to change
what it sends, or how much; a tenant's limits are of this kind. ``none``: neither is at fault, as for a
request that its client cancelled.

A reason with several causes is ``ours`` if any cause is the platform's, so that an outage is not counted as a
client's mistake. A test fails when a reason of the error tree is missing in the table.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final

FINISHED: Final = "FINISHED"  # the reason that counts requests without an error


class Fault(StrEnum):
    OURS = "ours"
    CLIENT = "client"
    NONE = "none"


# Each reason's fault, and what a client does next.
ERRORS: Final[dict[str, tuple[Fault, str]]] = {
    "INVALID_INPUT": (Fault.CLIENT, "Change the field that the message names"),
    "PROMPT_TOO_LONG": (Fault.CLIENT, "Shorten the prompt or request fewer tokens"),
    "CONSTRAINT_REFUSED": (Fault.CLIENT, "Correct or simplify the schema, expression or grammar"),
    "CONTENT_FILTERED": (Fault.CLIENT, "Remove what the named category of the safety pack blocks"),
    "UNSUPPORTED_FEATURE": (Fault.CLIENT, "Leave the option out"),
    "UNIMPLEMENTED": (Fault.CLIENT, "Call another method; this server does not offer this one"),
    "HTTP_PROBLEM": (Fault.CLIENT, "Change the HTTP request as the message describes"),
    "UNAUTHENTICATED": (Fault.CLIENT, "Send a valid key"),
    "PERMISSION_DENIED": (Fault.CLIENT, "Use a key with the right to do this"),
    "NOT_FOUND": (Fault.CLIENT, "Correct the name"),
    "MODEL_NOT_FOUND": (Fault.CLIENT, "Use a model that ListModels returns for this key"),
    "THREAD_NOT_FOUND": (Fault.CLIENT, "Send all messages of the conversation, without the thread"),
    "CONFLICT": (Fault.CLIENT, "Read the present state and decide again"),
    "ALREADY_EXISTS": (Fault.CLIENT, "Use another name"),
    "ETAG_MISMATCH": (Fault.CLIENT, "Read the resource again and repeat the change"),
    "IDEMPOTENCY_CONFLICT": (Fault.CLIENT, "Use another idempotency key for another request"),
    "RESULT_EXPIRED": (Fault.CLIENT, "Use another idempotency key; fetch results sooner"),
    # A tenant's limits. Other tenants are served meanwhile.
    "OVER_QUOTA": (Fault.CLIENT, "Wait, or send less"),
    "REQUEST_RATE_EXCEEDED": (Fault.CLIENT, "Wait for the time in retry-after"),
    "TOKEN_RATE_EXCEEDED": (Fault.CLIENT, "Wait for the time in retry-after, or send a shorter prompt"),
    "BUDGET_EXCEEDED": (Fault.CLIENT, "Wait for the next period, raise the budget, or allow fewer tokens"),
    "CONCURRENCY_EXCEEDED": (Fault.CLIENT, "Wait until a request of the tenant has ended"),
    "IDEMPOTENCY_KEYS_EXCEEDED": (Fault.CLIENT, "Send without a key, or wait until old keys expire"),
    "OVER_COMMITMENT": (Fault.CLIENT, "Wait, or stay within the committed rate"),
    "SHARE_EXCEEDED": (Fault.CLIENT, "Wait until some of the tenant's own requests have ended"),
    "KV_BUDGET_EXCEEDED": (
        Fault.CLIENT,
        "Request fewer tokens, or raise the tenant's share of KV",
    ),
    "RESIDENCY_UNAVAILABLE": (Fault.CLIENT, "Use a gateway and a deployment of the tenant's region"),
    "KEY_DESTROYED": (Fault.CLIENT, "Nothing: the tenant was erased"),
    "SLOW_READER": (Fault.CLIENT, "Read the stream"),
    # The platform.
    "FAILED_PRECONDITION": (Fault.OURS, "The operator repairs the named resource, such as a model version"),
    "INTEGRITY_ERROR": (Fault.OURS, "The operator restores the damaged bytes"),
    "DOES_NOT_FIT": (Fault.OURS, "The operator adds memory"),
    "ENGINE_NOT_INSTALLED": (Fault.OURS, "The operator installs the engine"),
    "NOT_REPLACEABLE": (Fault.OURS, "The operator updates the deployment without in_place"),
    "SIGNATURE_MISSING": (Fault.OURS, "The operator signs the version, or deploys a signed one"),
    "SIGNER_NOT_ALLOWED": (
        Fault.OURS,
        "The operator has an allowed signer sign the version",
    ),
    "SIGNATURE_INVALID": (Fault.OURS, "The operator signs the version again"),
    "VERSION_GONE": (Fault.OURS, "Send the request again from the beginning"),
    "POISONED_INPUT": (
        Fault.OURS,
        "Change the input, or use another version; the operator repairs the version",
    ),
    "VERSION_FAILING": (Fault.OURS, "Wait for the time in retry-after"),
    "UNAVAILABLE": (Fault.OURS, "Send it again later"),
    "NO_WORKER_AVAILABLE": (Fault.OURS, "Send it again later"),
    "ISOLATION_UNAVAILABLE": (Fault.OURS, "The operator assigns a node to the tenant, or waits for one"),
    "KEY_UNAVAILABLE": (Fault.OURS, "Wait for the time in retry-after; the operator repairs the key service"),
    "NO_LEADER": (Fault.OURS, "Send it again later"),
    "QUEUE_FULL": (Fault.OURS, "Wait for the time in retry-after, or use another gateway"),
    "QUEUE_TIMEOUT": (Fault.OURS, "Wait for the time in retry-after"),
    "OVERLOADED": (Fault.OURS, "Wait for the time in retry-after"),
    "DEADLINE_UNMEETABLE": (Fault.OURS, "Allow more time, or wait for the time in retry-after"),
    "DEADLINE_EXCEEDED": (Fault.OURS, "Allow more time, or request fewer tokens"),
    "AUDIT_BACKLOG": (Fault.OURS, "See /readyz of the leading control plane; nothing was changed"),
    "USAGE_UNRECORDED": (Fault.OURS, "Send it to another gateway, or again later"),
    "DRAINING": (Fault.OURS, "Send it to another gateway"),
    "STORE_UNAVAILABLE": (Fault.OURS, "Send it again later"),
    "STORE_REPLACED": (Fault.OURS, "The operator restores the store"),
    "STORAGE_FULL": (Fault.OURS, "Delete files, or wait"),
    "STREAM_BROKEN": (Fault.OURS, "Send it again"),
    "STALE_ROUTE": (Fault.OURS, "Send it again"),
    "TICKET_EXPIRED": (Fault.OURS, "Send it to another gateway; the operator corrects a clock"),
    "INTERNAL": (Fault.OURS, "Quote the incident id to the operator"),
    # No fault.
    "CANCELLED": (Fault.NONE, "Nothing: the client cancelled the request"),
    FINISHED: (Fault.NONE, "Nothing: no error"),
}


def fault_of(reason: str) -> Fault:
    """Return the fault of a reason. A reason that is not in the table is the platform's."""
    found = ERRORS.get(reason)
    return Fault.OURS if found is None else found[0]
