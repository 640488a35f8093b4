"""Signatures beside versions, and the policy that names who may sign them, through the registry's RPCs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc
import pytest

from fairway.formats.signatures import MAX_BUNDLES, policy_to_proto, sign
from fairway.v1 import registry_pb2 as pb
from services.core.errors import (
    EtagMismatch,
    FailedPrecondition,
    InvalidInput,
    ModelNotFound,
    NotFound,
    SignatureInvalid,
)
from services.core.manifest import canonical_json, sha256_of
from services.core.records import signatures_key, version_key
from services.rpc.status import from_rpc_error
from tests.integration.registry.harness import Registry, file_of, manifest_of, store_blobs
from tests.support.registry import ADMIN
from tests.support.signing import key_file, policy_of

MANIFEST = manifest_of(file_of("config.json", b"{}"))
BODY = canonical_json(MANIFEST)


async def call(registry: Registry, method: str, request: object) -> Any:
    try:
        return await getattr(registry.stub, method)(request, metadata=ADMIN, timeout=10)
    except grpc.aio.AioRpcError as exc:
        raise from_rpc_error(exc) from exc


async def publish(registry: Registry) -> str:
    await store_blobs(registry, b"{}")
    record, _ = await registry.service.create_version("tiny", MANIFEST)
    return record.digest


async def add(registry: Registry, digest: str, bundle: str, model: str = "tiny") -> bool:
    request = pb.AddSignatureRequest(model=model, digest=digest, bundle=bundle)
    return bool((await call(registry, "AddSignature", request)).added)


async def bundles(registry: Registry, digest: str) -> list[str]:
    found = await call(registry, "GetVersion", pb.GetVersionRequest(model="tiny", version=digest))
    return list(found.version.signatures)


async def test_signatures_are_listed_with_a_version_that_stays_as_it_is(
    registry: Registry, tmp_path: Path
) -> None:
    digest = await publish(registry)
    before = await registry.store.get(version_key("tiny", digest))
    first, second = (sign(BODY, key_file(tmp_path, name)) for name in ("a", "b"))
    added = [await add(registry, digest, bundle) for bundle in (first, second, first)]
    assert added == [True, True, False]
    assert await bundles(registry, digest) == [first, second]
    assert await registry.store.get(version_key("tiny", digest)) == before
    await registry.service.delete_version("tiny", digest)
    assert await registry.store.get(signatures_key("tiny", digest)) is None


async def test_bundles_of_other_versions_giants_and_too_many_are_refused(
    registry: Registry, tmp_path: Path
) -> None:
    digest = await publish(registry)
    key = key_file(tmp_path, "a")
    with pytest.raises(SignatureInvalid, match="of another version"):
        await add(registry, digest, sign(b"another manifest", key))
    with pytest.raises(SignatureInvalid, match="malformed"):
        await add(registry, digest, "{" * 9000)
    with pytest.raises(InvalidInput, match="bundle"):
        await add(registry, digest, "x" * 32_769)
    with pytest.raises(ModelNotFound):
        await add(registry, digest, sign(BODY, key), model="other")
    for _ in range(MAX_BUNDLES):
        assert await add(registry, digest, sign(BODY, key))  # ECDSA draws a number for each
    with pytest.raises(FailedPrecondition, match="has 8 signatures"):
        await add(registry, digest, sign(BODY, key))
    assert len(await bundles(registry, digest)) == MAX_BUNDLES


async def test_the_manifest_that_is_signed_can_be_downloaded_by_its_digest(registry: Registry) -> None:
    digest = await publish(registry)
    body = b"".join([piece async for piece in registry.service.download(digest)])
    assert body == BODY
    assert sha256_of(body) == digest


async def test_a_policy_has_an_etag_and_a_repeated_request_one_answer(
    registry: Registry, tmp_path: Path
) -> None:
    policy = policy_to_proto(policy_of("tiny", key_file(tmp_path, "a")))
    with pytest.raises(NotFound, match="no signer policy"):
        await call(registry, "GetSignerPolicy", pb.GetSignerPolicyRequest(model="tiny"))
    request = pb.UpdateSignerPolicyRequest(policy=policy, etag="0", request_id="one")
    made = await call(registry, "UpdateSignerPolicy", request)
    assert (await call(registry, "UpdateSignerPolicy", request)).etag == made.etag
    stored = await call(registry, "GetSignerPolicy", pb.GetSignerPolicyRequest(model="tiny"))
    assert (stored.policy, stored.etag) == (policy, made.etag)
    with pytest.raises(EtagMismatch):
        await call(registry, "UpdateSignerPolicy", pb.UpdateSignerPolicyRequest(policy=policy, etag="999999"))
    with pytest.raises(InvalidInput, match="no signer is named"):
        empty = pb.SignerPolicy(model="tiny", required=True)
        await call(registry, "UpdateSignerPolicy", pb.UpdateSignerPolicyRequest(policy=empty))
    nobody = pb.UpdateSignerPolicyRequest(policy=pb.SignerPolicy(model="tiny"), etag=made.etag)
    await call(registry, "UpdateSignerPolicy", nobody)
    with pytest.raises(NotFound):
        await call(registry, "GetSignerPolicy", pb.GetSignerPolicyRequest(model="tiny"))
