"""Records refused calls in the audit log: failed authentications, denials, and changes that were refused."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Final

from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.message import Message

from fairway.v1 import options_pb2
from services.core.audit import Actor, AuditEntry
from services.core.errors import FairwayError, InternalError, PermissionDenied, Unauthenticated
from services.rpc.interceptors.access import bearer_token, peer_address, short_method
from services.rpc.interceptors.base import AroundInterceptor, Call, Context
from services.runtime.audit import AuditRecorder, audited_call
from services.runtime.secrets import claimed_key

_READS: Final = ("Get", "List", "Watch", "Explain", "Find", "Download", "Export")
# Fields that name what a request is about, where the request is not a resource with metadata.
_NAMES: Final = ("name", "model", "tag", "version_digest", "digest", "fingerprint")


def changes_of(services: Iterable[ServiceDescriptor]) -> frozenset[str]:
    """Return the methods "/service/method" by which operators change something."""
    return frozenset(
        f"/{service.full_name}/{method.name}"
        for service in services
        for method in service.methods
        if options_pb2.ACCESS_ADMIN in method.GetOptions().Extensions[options_pb2.access]
        and not method.name.startswith(_READS)
    )


def note_request(message: Message) -> None:
    """Note for the entry of the present call what its request is about."""
    call = audited_call()
    if call is None:
        return
    metadata = [
        value.metadata
        for field, value in message.ListFields()
        if field.message_type is not None
        and not field.is_repeated
        and "metadata" in field.message_type.fields_by_name
    ]
    texts = [*(each.name for each in metadata), *(getattr(message, name, "") for name in _NAMES)]
    resource = "/".join(text for text in texts if text and isinstance(text, str))
    call.entry = replace(call.entry, resource=resource, request_id=getattr(message, "request_id", ""))


class AuditRefusals(AroundInterceptor):
    """Placed around the access control. A refused read is recorded only if the caller may not read."""

    def __init__(self, recorder: AuditRecorder, changes: frozenset[str]) -> None:
        super().__init__()
        self._recorder = recorder
        self._changes = changes

    async def around(self, method: str, call: Call, context: Context) -> Any:
        try:
            return await call()
        except (Unauthenticated, PermissionDenied) as error:
            self._add(method, error.reason, context)
            raise
        except Exception as error:
            if method in self._changes and audited_call() is not None:
                reason = error.reason if isinstance(error, FairwayError) else InternalError.reason
                self._add(method, reason, context)
            raise

    def _add(self, method: str, reason: str, context: Context) -> None:
        if (found := audited_call()) is not None:
            entry = found.entry
        else:
            claimed = claimed_key(bearer_token(context.invocation_metadata()))
            entry = AuditEntry(short_method(method), Actor(claimed, address=peer_address(context.peer())))
        self._recorder.add(replace(entry, outcome=reason))
