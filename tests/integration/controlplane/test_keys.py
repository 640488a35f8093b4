"""API keys: shown once, stored as a hash, rotated with a grace, narrowed."""

from __future__ import annotations

import pytest

from fairway.v1 import controlplane_pb2 as pb
from services.core.errors import EtagMismatch, FailedPrecondition, InvalidInput, ModelNotFound
from services.core.records import KEYS, ApiKey, load
from services.runtime import secrets
from tests.integration.controlplane.plane import Plane


async def test_key_is_shown_once_and_stored_as_a_hash(plane: Plane) -> None:
    await plane.tenant("acme")
    await plane.deployment("tiny")
    made = await plane.key("team-a", "acme", models=["tiny"])
    name, secret = secrets.parse_key(made.secret)
    assert name == "team-a"
    entry = await plane.store.get(KEYS + "team-a")
    assert entry is not None
    assert secret.encode() not in entry.value
    assert secrets.verify(secret, load(entry.value, ApiKey).secret_hash)
    got = await plane.call("GetKey", pb.GetKeyRequest(name="team-a"))
    for answer in (got, await plane.call("ListKeys", pb.ListKeysRequest())):
        body = answer.SerializeToString()  # type: ignore[attr-defined]
        assert secret.encode() not in body
        assert load(entry.value, ApiKey).secret_hash.encode() not in body


async def test_rotation_keeps_the_old_secret_for_its_grace(plane: Plane) -> None:
    await plane.tenant("acme")
    old = secrets.parse_key((await plane.key("k", "acme")).secret)[1]
    request = pb.RotateKeyRequest(name="k")
    request.grace.FromSeconds(60)
    before_s = plane.clock.unix_s()
    new = secrets.parse_key((await plane.call("RotateKey", request)).secret)[1]  # type: ignore[attr-defined]
    after_s = plane.clock.unix_s()
    stored = await plane.stored_key("k")
    assert old != new
    assert secrets.verify(new, stored.secret_hash)
    assert secrets.verify(old, stored.previous_secret_hash)
    assert before_s + 60 <= stored.previous_expire_unix_s <= after_s + 60
    await plane.call("RotateKey", pb.RotateKeyRequest(name="k"))
    stored = await plane.stored_key("k")
    assert (stored.previous_secret_hash, stored.previous_expire_unix_s) == ("", 0.0)
    assert not secrets.verify(new, stored.secret_hash)


async def test_a_key_is_narrowed_and_keeps_its_secret_role_and_tenant(plane: Plane) -> None:
    await plane.tenant("acme")
    await plane.tenant("other")
    await plane.deployment("m")
    before = (await plane.key("k.1", "acme")).key
    hashed = (await plane.stored_key("k.1")).secret_hash
    wanted = pb.Key(
        metadata=pb.Metadata(name="k.1", labels={"team": "a"}),
        role=pb.KEY_ROLE_TENANT,
        tenant="acme",
        models=["m"],
    )
    await plane.call("UpdateKey", pb.UpdateKeyRequest(key=wanted))
    stored = await plane.stored_key("k.1")
    assert (stored.models, stored.secret_hash) == (("m",), hashed)
    assert stored.meta.labels == {"team": "a"}
    with pytest.raises(EtagMismatch):
        wanted.metadata.etag = before.metadata.etag
        await plane.call("UpdateKey", pb.UpdateKeyRequest(key=wanted))
    wanted.metadata.etag, wanted.tenant = "", "other"
    with pytest.raises(InvalidInput):
        await plane.call("UpdateKey", pb.UpdateKeyRequest(key=wanted))


@pytest.mark.parametrize("model", ["nope", "../keys/k", "M", ""])
async def test_a_key_names_deployments_that_exist(plane: Plane, model: str) -> None:
    await plane.tenant("acme")
    await plane.deployment("chat")
    with pytest.raises((ModelNotFound, InvalidInput)) as caught:
        await plane.key("k", "acme", models=["chat", model])
    if isinstance(caught.value, ModelNotFound):
        assert caught.value.metadata == {"model": model, "field": "key.models"}
        assert "create it first" in caught.value.message
    made = (await plane.key("k", "acme", request_id="once", models=["chat"])).key
    made.models.append(model)
    with pytest.raises((ModelNotFound, InvalidInput)):
        await plane.call("UpdateKey", pb.UpdateKeyRequest(key=made))
    await plane.call("DeleteDeployment", pb.DeleteDeploymentRequest(name="chat"))
    made.models[:] = ["chat"]
    made.metadata.labels["still"] = "named"
    await plane.call("UpdateKey", pb.UpdateKeyRequest(key=made))  # what it has stays, deployed or not
    await plane.key("k", "acme", request_id="once", models=["chat"])  # answered as it was


async def test_keys_need_a_role_and_an_owner(plane: Plane) -> None:
    with pytest.raises(FailedPrecondition):
        await plane.key("k", "nobody")
    await plane.tenant("acme")
    for key in (
        pb.Key(metadata=pb.Metadata(name="k"), tenant="acme"),
        pb.Key(metadata=pb.Metadata(name="k"), role=pb.KEY_ROLE_TENANT),
        pb.Key(metadata=pb.Metadata(name="k"), role=pb.KEY_ROLE_ADMIN, tenant="acme"),
    ):
        with pytest.raises(InvalidInput):
            await plane.call("CreateKey", pb.CreateKeyRequest(key=key))
    past = pb.Key(metadata=pb.Metadata(name="k"), role=pb.KEY_ROLE_ADMIN)
    past.expire_time.FromSeconds(1)
    with pytest.raises(InvalidInput):
        await plane.call("CreateKey", pb.CreateKeyRequest(key=past))
    admin = await plane.key("ops")
    assert admin.key.role == pb.KEY_ROLE_ADMIN
