"""Deployments and rollouts of a model that has a signer policy."""

from __future__ import annotations

from pathlib import Path

import pytest

from fairway.formats.signatures import sign
from fairway.v1 import controlplane_pb2 as pb
from services.core.errors import SignatureMissing, SignerNotAllowed
from services.core.manifest import sha256_of
from services.core.records import SIGNERS, Signatures, VersionRecord, signatures_key, version_key
from tests.integration.controlplane.plane import DIGEST, OTHER, Plane
from tests.integration.controlplane.test_rollouts import create, message, ready
from tests.support.signing import key_file, policy_of

BODIES = {DIGEST: b"1", OTHER: b"2"}  # what these digests are of


async def put_signature(plane: Plane, digest: str, key: Path) -> None:
    await plane.put(signatures_key("tiny", digest), Signatures((sign(BODIES[digest], key),)))


async def test_only_signed_versions_are_deployed(plane: Plane, tmp_path: Path) -> None:
    key, foreign = key_file(tmp_path, "release"), key_file(tmp_path, "foreign")
    await plane.put(SIGNERS + "tiny", policy_of("tiny", key))
    with pytest.raises(SignatureMissing, match="has no signature: key"):
        await plane.deployment("chat", DIGEST)
    await put_signature(plane, DIGEST, foreign)
    with pytest.raises(SignerNotAllowed):
        await plane.deployment("chat", DIGEST)
    await put_signature(plane, DIGEST, key)
    made = await plane.deployment("chat", DIGEST)
    assert made.version_digest == DIGEST

    made.version = OTHER
    with pytest.raises(SignatureMissing):
        await plane.call("UpdateDeployment", pb.UpdateDeploymentRequest(deployment=made))
    await ready(plane, DIGEST)
    with pytest.raises(SignatureMissing):
        await create(plane, message())


async def test_a_deployment_of_a_removed_signer_can_still_be_changed(plane: Plane, tmp_path: Path) -> None:
    key = key_file(tmp_path, "release")
    await plane.put(SIGNERS + "tiny", policy_of("tiny", key))
    await put_signature(plane, DIGEST, key)
    made = await plane.deployment("chat", DIGEST)
    await plane.put(SIGNERS + "tiny", policy_of("tiny", key_file(tmp_path, "next")))
    made.replicas = 0
    await plane.call("UpdateDeployment", pb.UpdateDeploymentRequest(deployment=made))
    with pytest.raises(SignerNotAllowed):
        await plane.deployment("other", DIGEST)


async def test_an_adapter_needs_a_base_that_may_be_loaded(plane: Plane, tmp_path: Path) -> None:
    adapter = sha256_of(b"adapter")
    record = VersionRecord("lora", adapter, 1, 0.0, base_model="tiny", base_digest=DIGEST)
    await plane.put(version_key("lora", adapter), record)
    key = key_file(tmp_path, "release")
    await plane.put(SIGNERS + "tiny", policy_of("tiny", key))
    message = pb.Deployment(metadata=pb.Metadata(name="lora"), model="lora", version=adapter, replicas=1)
    request = pb.CreateDeploymentRequest(deployment=message)
    with pytest.raises(SignatureMissing, match=DIGEST):
        await plane.call("CreateDeployment", request)
    await put_signature(plane, DIGEST, key)
    await plane.call("CreateDeployment", request)
