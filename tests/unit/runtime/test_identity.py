"""Who may come in, and that nothing tells which keys exist."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from services.core.errors import ModelNotFound, PermissionDenied, Unauthenticated
from services.core.generation import Principal
from services.core.limits import UsageLimits
from services.core.records import KEYS, TENANTS, ApiKey, KeyRole, Meta, Tenant
from services.runtime import secrets
from services.runtime.fleet_state.informer import Versioned
from services.runtime.identity import KeyDirectory, model_not_found

NOW_S = 1_800_000_000.0
TEXT, HASH = secrets.new_key("alpha", b"\x01" * 32)
OLD_TEXT, OLD_HASH = secrets.new_key("alpha", b"\x02" * 32)
OTHER_TEXT, _ = secrets.new_key("beta", b"\x01" * 32)


class Wall:
    def monotonic_s(self) -> float:
        return 0.0

    def unix_s(self) -> float:
        return NOW_S

    async def sleep(self, seconds: float) -> None:
        raise AssertionError("nothing here waits")


class View:
    def __init__(self, records: Mapping[str, Any]) -> None:
        self.view = {key: Versioned(record, 1, 1) for key, record in records.items()}


def directory(*, disabled: bool = False, tenant: bool = True, **changes: Any) -> KeyDirectory:
    values: dict[str, Any] = {"role": KeyRole.TENANT, "tenant": "acme", "secret_hash": HASH, **changes}
    tenants = {TENANTS + "acme": Tenant(Meta("acme"), disabled=disabled)} if tenant else {}
    return KeyDirectory(View({KEYS + "alpha": ApiKey(Meta("alpha"), **values)}), View(tenants), Wall())


@pytest.mark.parametrize("credentials", [f"Bearer {TEXT}", f"bearer  {TEXT}", TEXT])
def test_a_valid_key_names_its_holder(credentials: str) -> None:
    principal = directory(models=("m",)).authenticate(credentials)
    assert principal == Principal("alpha", KeyRole.TENANT, "acme", ("m",))


@pytest.mark.parametrize(
    "credentials",
    [
        OTHER_TEXT,  # no such key
        OLD_TEXT,  # the key exists, the secret is another
        TEXT[:-1],
        TEXT + "a",
        "fw_alpha_",
        "fw_../../alpha_" + "a" * 52,
        "Bearer " + "x" * 5000,
        "Bearer " + TEXT + " " + TEXT,
        "Bearer \x00",
    ],
)
def test_every_wrong_key_gets_one_answer(credentials: str) -> None:
    with pytest.raises(Unauthenticated) as caught:
        directory().authenticate(credentials)
    assert caught.value.message == "the API key is not valid"
    assert not caught.value.metadata


@pytest.mark.parametrize("credentials", [None, ""])
def test_a_missing_key_is_told_what_to_send(credentials: str | None) -> None:
    with pytest.raises(Unauthenticated, match="Bearer"):
        directory().authenticate(credentials)


def test_another_scheme_is_refused() -> None:
    with pytest.raises(Unauthenticated, match="scheme"):
        directory().authenticate(f"Basic {TEXT}")


def test_an_expired_key_opens_nothing() -> None:
    with pytest.raises(Unauthenticated, match="expired"):
        directory(expire_unix_s=NOW_S).authenticate(TEXT)
    assert directory(expire_unix_s=NOW_S + 1).authenticate(TEXT).key_id == "alpha"


def test_expiry_is_told_only_to_who_holds_the_secret() -> None:
    with pytest.raises(Unauthenticated, match="not valid"):
        directory(expire_unix_s=NOW_S - 1).authenticate(OLD_TEXT)


def test_a_rotated_secret_works_until_its_own_end() -> None:
    held = directory(previous_secret_hash=OLD_HASH, previous_expire_unix_s=NOW_S + 1)
    assert held.authenticate(OLD_TEXT) == held.authenticate(TEXT)
    with pytest.raises(Unauthenticated, match="rotated"):
        directory(previous_secret_hash=OLD_HASH, previous_expire_unix_s=NOW_S).authenticate(OLD_TEXT)
    # A rotation without an end has none.
    with pytest.raises(Unauthenticated, match="rotated"):
        directory(previous_secret_hash=OLD_HASH).authenticate(OLD_TEXT)


@pytest.mark.parametrize("stored", ["", "0" * 64, secrets.secret_hash("")])
def test_an_empty_or_filler_hash_matches_no_secret(stored: str) -> None:
    with pytest.raises(Unauthenticated):
        directory(secret_hash=stored).authenticate(TEXT)


@pytest.mark.parametrize("state", [{"disabled": True}, {"tenant": False}])
def test_a_key_of_an_inactive_tenant_opens_nothing(state: dict[str, bool]) -> None:
    with pytest.raises(Unauthenticated, match="not active"):
        directory(**state).authenticate(TEXT)


def test_an_admin_key_needs_no_tenant_and_runs_no_model() -> None:
    keys = View({KEYS + "alpha": ApiKey(Meta("alpha"), KeyRole.ADMIN, HASH)})
    held = KeyDirectory(keys, View({}), Wall())
    principal = held.authenticate(TEXT)
    assert principal.role is KeyRole.ADMIN
    with pytest.raises(PermissionDenied):
        held.authorise_model(principal, "m")


def test_a_foreign_model_looks_like_a_missing_one() -> None:
    held = directory(models=("mine",))
    principal = held.authenticate(TEXT)
    held.authorise_model(principal, "mine")
    with pytest.raises(ModelNotFound) as caught:
        held.authorise_model(principal, "theirs")
    assert caught.value.message == model_not_found("theirs").message
    directory().authorise_model(principal, "theirs")
    with pytest.raises(ModelNotFound):  # narrowed since the stream was opened
        held.authorise_model(directory().authenticate(TEXT), "theirs")


def test_only_models_that_the_key_may_use_are_suggested() -> None:
    names = ("chat-large", "chat-small", "chat-secret", "embed")
    keys = {models: directory(models=models) for models in (("chat-large", "embed"), ("chat-secret",), ())}
    found = {
        models: held.not_found(held.authenticate(TEXT), "chat-larg", names).message
        for models, held in keys.items()
    }
    assert found["chat-large", "embed"].endswith("; did you mean 'chat-large'?")
    assert found["chat-secret",].endswith("; did you mean 'chat-secret'?")
    assert "'chat-large' or " in found[()]
    held = keys["chat-secret",]
    assert "did you mean" not in held.not_found(held.authenticate(TEXT), "zzz", names).message
    assert "chat-secret" not in found["chat-large", "embed"]


@pytest.mark.parametrize(
    "changes",
    [
        {"disabled": True},
        {"expire_unix_s": NOW_S},
        {"tenant": False},
        {"role": KeyRole.ADMIN},
    ],
)
def test_a_caller_of_long_ago_is_looked_at_again(changes: dict[str, Any]) -> None:
    principal = directory().authenticate(TEXT)
    assert directory().still_valid(principal).meta.name == "acme"
    with pytest.raises(Unauthenticated):
        directory(**changes).still_valid(principal)


def test_a_stream_ends_with_the_grace_of_the_secret_that_opened_it() -> None:
    opened = directory().authenticate(TEXT)
    new, others = OLD_HASH, secrets.secret_hash("another")
    in_grace: dict[str, Any] = {"previous_secret_hash": HASH, "previous_expire_unix_s": NOW_S + 1}
    assert directory(secret_hash=new, **in_grace).still_valid(opened).meta.name == "acme"
    late: tuple[dict[str, Any], ...] = (
        {"secret_hash": new},
        {"secret_hash": new, **in_grace, "previous_expire_unix_s": NOW_S},
        {"secret_hash": new, **in_grace, "previous_secret_hash": others},  # rotated twice
    )
    for changes in late:
        with pytest.raises(Unauthenticated, match="rotated"):
            directory(**changes).still_valid(opened)
    assert HASH not in repr(opened)


def test_an_operators_stream_needs_its_key_and_no_tenant() -> None:
    def held(**changes: Any) -> KeyDirectory:
        key = ApiKey(Meta("alpha"), KeyRole.ADMIN, **{"secret_hash": HASH, **changes})
        return KeyDirectory(View({KEYS + "alpha": key}), View({}), Wall())

    opened = held().authenticate(TEXT)
    held().require_current(opened)
    for changes in ({"expire_unix_s": NOW_S}, {"secret_hash": OLD_HASH}):
        with pytest.raises(Unauthenticated):
            held(**changes).require_current(opened)


def test_a_deleted_key_opens_nothing_on_an_open_stream() -> None:
    principal = Principal("gone", KeyRole.TENANT, "acme")
    with pytest.raises(Unauthenticated):
        directory().still_valid(principal)


def of_token(role: KeyRole = KeyRole.TENANT, **fields: Any) -> Principal:
    tenant = "acme" if role.of_tenant else ""
    return Principal("token:ann", role, tenant, subject="ann", issuer="https://id.example.com", **fields)


def tokens_of(found: Principal, *, disabled: bool = False) -> KeyDirectory:
    key = ApiKey(Meta("alpha"), KeyRole.TENANT, HASH, tenant="acme")
    tenants = {TENANTS + "acme": Tenant(Meta("acme"), disabled=disabled)}

    def verify(text: str) -> Principal:
        if text != "valid.to.ken":
            raise Unauthenticated("no")
        return found

    return KeyDirectory(View({KEYS + "alpha": key}), View(tenants), Wall(), verify_token=verify)


def test_a_token_and_a_key_open_beside_each_other() -> None:
    found = of_token()
    held = tokens_of(found)
    assert held.authenticate("Bearer valid.to.ken") is found
    assert held.authenticate(f"Bearer {TEXT}").key_id == "alpha"
    for text in (
        "Bearer other.to.ken",
        f"Bearer {OTHER_TEXT}",
        f"Bearer {TEXT}.a.b",
        "Bearer fw_valid.to.ken",
    ):
        with pytest.raises(Unauthenticated):
            held.authenticate(text)
    with pytest.raises(Unauthenticated):  # without a provider there are no tokens
        directory().authenticate("Bearer valid.to.ken")


@pytest.mark.parametrize("role", KeyRole)
def test_only_roles_of_tenants_run_models(role: KeyRole) -> None:
    found = of_token(role)
    held = tokens_of(found)
    assert held.authenticate("valid.to.ken") is found
    if role.of_tenant:
        held.authorise_model(found, "any")
        tenant, key = held.tenant_and_key(found)
        assert (tenant.meta.name, key.meta.name, key.limits) == ("acme", "token:ann", UsageLimits())
    else:
        with pytest.raises(PermissionDenied, match=role):
            held.authorise_model(found, "any")


def test_a_token_needs_its_tenant_and_ends_at_its_time() -> None:
    with pytest.raises(Unauthenticated, match="not active"):
        tokens_of(of_token(), disabled=True).authenticate("valid.to.ken")
    with pytest.raises(Unauthenticated, match="not active"):
        tokens_of(of_token(), disabled=True).still_valid(of_token())
    tokens_of(of_token()).require_current(of_token(expire_unix_s=NOW_S + 1))
    tokens_of(of_token()).require_current(of_token())  # of work that outlives its token
    with pytest.raises(Unauthenticated, match="log in again"):
        tokens_of(of_token()).require_current(of_token(expire_unix_s=NOW_S))


def test_a_batch_of_a_tenants_admin_goes_on_as_its_tenants() -> None:
    held = directory(role=KeyRole.TENANT_ADMIN)
    assert held.authenticate(TEXT).role is KeyRole.TENANT_ADMIN
    held.still_valid(Principal("alpha", KeyRole.TENANT, "acme"))
