"""docs/status.md names proofs that exist, and its "not yet" rows name RPCs that answer UNIMPLEMENTED."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Final

import pytest
from google.protobuf.descriptor import ServiceDescriptor

from fairway.inference import v2_pb2
from fairway.v1 import controlplane_pb2, inference_pb2, registry_pb2, scheduler_pb2, worker_pb2
from services.controlplane.servicer import ControlPlaneServicer
from services.core.errors import Unimplemented
from services.gateway.faces.grpc.servicer import InferenceServicer

ROOT: Final = Path(__file__).parents[3]
STATES: Final = ("works", "partly", "not yet")
SERVICERS: Final[dict[str, type[Any]]] = {
    "ControlPlaneService": ControlPlaneServicer,
    "InferenceService": InferenceServicer,
}


def _rows() -> list[tuple[str, str, tuple[str, ...]]]:
    """Return capability, state and proofs of each row of the table."""
    page = (ROOT / "docs" / "status.md").read_text()
    cells = [re.split(r"\s*\|\s*", line.strip("| ")) for line in page.splitlines() if line.startswith("|")]
    return [(row[0], row[1], tuple(re.findall(r"`([^`]+)`", row[-1]))) for row in cells[2:]]


def _rpcs() -> set[str]:
    files = (v2_pb2, controlplane_pb2, inference_pb2, registry_pb2, scheduler_pb2, worker_pb2)
    services: list[ServiceDescriptor] = [
        one for each in files for one in each.DESCRIPTOR.services_by_name.values()
    ]
    return {f"{service.name}.{method.name}" for service in services for method in service.methods}


def _exists(proof: str) -> bool:
    kind, _, name = proof.partition(" ")
    if kind == "make":
        return re.search(rf"^{re.escape(name)}:", (ROOT / "Makefile").read_text(), re.MULTILINE) is not None
    if kind in ("GET", "POST"):
        return f"`{proof}`" in (ROOT / "docs" / "reference" / "http.md").read_text()
    if proof.startswith("tests/"):
        return (ROOT / proof).is_file()
    return proof in _rpcs()


ROWS: Final = _rows()


def test_the_table_is_read() -> None:
    assert len(ROWS) > 20
    assert {state for _, state, _ in ROWS} <= set(STATES)


@pytest.mark.parametrize(("capability", "proofs"), [(row[0], row[2]) for row in ROWS])
def test_each_row_names_proofs_that_exist(capability: str, proofs: tuple[str, ...]) -> None:
    assert proofs, capability
    assert [proof for proof in proofs if not _exists(proof)] == []


async def test_not_yet_answers_unimplemented() -> None:
    for proof in (proof for row in ROWS if row[1] == "not yet" for proof in row[2]):
        service, _, method = proof.partition(".")
        servicer_class = SERVICERS[service]
        servicer: Any = object.__new__(servicer_class)  # these methods use no state
        with pytest.raises(Unimplemented):
            await getattr(servicer, method)(None, None)


@pytest.mark.parametrize("proof", ["make no-such-target", "POST /v1/none", "tests/none.py", "None.Embed"])
def test_a_proof_that_is_missing_is_found(proof: str) -> None:
    assert not _exists(proof)
