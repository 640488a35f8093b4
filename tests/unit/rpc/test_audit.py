"""What the audit log notes of a request: names, whatever else the request contains."""

from __future__ import annotations

from contextvars import copy_context
from typing import Any, Final

import pytest
from google.protobuf import message_factory
from hypothesis import given, settings
from hypothesis import strategies as st

from fairway.v1 import controlplane_pb2, registry_pb2, worker_pb2
from services.core.generation import Principal
from services.core.records import KeyRole
from services.rpc.interceptors.audit import changes_of, note_request
from services.runtime.audit import AuditedCall, audited_call, begin_call
from tests.support.drawn_messages import messages

SERVICES: Final = [
    controlplane_pb2.DESCRIPTOR.services_by_name["ControlPlaneService"],
    registry_pb2.DESCRIPTOR.services_by_name["RegistryService"],
    worker_pb2.DESCRIPTOR.services_by_name["WorkerService"],
]
METHODS: Final = {
    f"/{service.full_name}/{method.name}": method for service in SERVICES for method in service.methods
}
CHANGES: Final = changes_of(SERVICES)


def test_each_method_is_a_change_unless_it_reads() -> None:
    verbs = {name.rpartition("/")[2] for name in CHANGES}
    assert {"CreateTenant", "RotateKey", "AbortRollout", "CordonNode", "SetTag", "DrainWorker"} <= verbs
    assert not verbs & {"GetTenant", "ListAuditEvents", "ExportAuditLog", "WatchResources", "DownloadChunk"}
    assert "/fairway.v1.WorkerService/Execute" not in CHANGES


def _noted(message: Any) -> AuditedCall:
    """Return a call with this request. It is the call of the present context, which must end with it."""
    begin_call("Service/Method", Principal("root", KeyRole.ADMIN), "127.0.0.1")
    note_request(message)
    call = audited_call()
    assert call is not None
    return call


@pytest.mark.parametrize("method", sorted(CHANGES))
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_a_request_is_noted_by_its_names_alone(method: str, data: st.DataObject) -> None:
    kind: Any = message_factory.GetMessageClass(METHODS[method].input_type)
    message = data.draw(messages(kind))
    call = copy_context().run(_noted, message)
    names = {
        each.name
        for field, value in message.ListFields()
        if not field.is_repeated and (each := getattr(value, "metadata", None)) is not None
    }
    names |= {getattr(message, name, "") for name in ("name", "model", "tag", "version_digest", "digest")}
    names |= {getattr(message, "fingerprint", "")}
    assert all(part in "/".join(map(str, names)) for part in call.entry.resource.split("/"))
