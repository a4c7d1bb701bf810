"""Providers of tenants: what is sealed, where it opens, what is refused, and what is never said."""

import base64
from pathlib import Path

import pytest

from plait.events.errors import (
    BudgetExceeded,
    Invalid,
    Misconfigured,
    NoSecret,
    UnknownProvider,
    WrongSecret,
)
from plait.events.memory import MemoryProviderRecords
from plait.events.model_names import check_model
from plait.events.providers import PROVIDERS_MAX, Kind, ProviderSettings, TenantProviders
from plait.events.settings import Settings
from plait.events.vault import Vault, new_secret
from plait.services.dev.stack import secret_of
from plait.services.gateway.shapes import NewProvider
from plait.services.turns.models import ModelError
from plait.services.turns.tenants import providers_of

SECRET, OTHER = new_secret(), new_secret()
KEY = "planted-key-0123456789"


def mine(
    name: str = "mine",
    kind: Kind = "openai",
    base_url: str | None = "http://models.test/v1",
    key: str | None = KEY,
    headers: tuple[tuple[str, str], ...] = (("Authorization", f"Basic {KEY}"),),
    stall_s: float | None = 5.0,
) -> ProviderSettings:
    return ProviderSettings(
        name=name, kind=kind, base_url=base_url, key=key, headers=headers, stall_s=stall_s
    )


# -- the vault -------------------------------------------------------------------------------


def test_what_is_sealed_opens_under_the_same_secret_in_the_same_place() -> None:
    vault = Vault(SECRET)
    sealed = vault.seal(b"a key", "acme", "mine")
    assert b"a key" not in sealed
    assert sealed != vault.seal(b"a key", "acme", "mine")
    assert Vault(SECRET).open(sealed, "acme", "mine") == b"a key"


def test_what_is_sealed_opens_nowhere_else() -> None:
    vault = Vault(SECRET)
    sealed = vault.seal(b"a key", "acme", "mine")
    for where in (("other", "mine"), ("acme", "yours"), ("acmemine",), ("acmem", "ine"), ()):
        with pytest.raises(WrongSecret, match="another place"):
            vault.open(sealed, *where)
    with pytest.raises(WrongSecret, match="was changed"):
        vault.open(sealed[:-1] + bytes([sealed[-1] ^ 1]), "acme", "mine")


def test_another_secret_is_told_from_a_change_and_says_what_to_do() -> None:
    sealed = Vault(SECRET).seal(b"a key", "acme", "mine")
    with pytest.raises(WrongSecret, match=r"another PLAIT_SECRET.*store the key again"):
        Vault(OTHER).open(sealed, "acme", "mine")


@pytest.mark.parametrize(
    "secret", ["short", base64.b64encode(b"x" * 31).decode(), "ä" * 44, "!" * 44]
)
def test_what_is_no_secret_is_refused_without_repeating_it(secret: str) -> None:
    with pytest.raises(Misconfigured, match="PLAIT_SECRET is not 32 bytes in base64") as refused:
        Vault(secret)
    assert secret not in str(refused.value)


def test_without_a_secret_nothing_is_sealed_and_the_refusal_says_what_to_set() -> None:
    with pytest.raises(NoSecret, match="set PLAIT_SECRET"):
        Vault("").seal(b"a key")


def test_a_data_directory_has_one_secret_that_only_its_owner_reads(tmp_path: Path) -> None:
    secret = secret_of(tmp_path)
    assert secret_of(tmp_path) == secret
    Vault(secret)
    assert (tmp_path / "secret").stat().st_mode & 0o777 == 0o600
    (tmp_path / "secret").write_text("")  # as a crash could leave it
    Vault(secret_of(tmp_path))


# -- a tenant's providers --------------------------------------------------------------------


async def test_a_provider_comes_back_whole_to_who_calls_it_and_without_secrets_to_who_looks() -> (
    None
):
    records = MemoryProviderRecords()
    providers = TenantProviders(records, Vault(SECRET))
    view = await providers.put("acme", mine())
    assert await providers.get("acme", "mine") == mine()
    assert await providers.views("acme") == [view]
    assert (view.key_set, view.headers, view.stall_s) == (True, ("Authorization",), 5.0)
    stored = await records.get("acme", "mine")
    assert stored is not None
    for told in (repr(view), repr(mine()), stored.decode(errors="replace")):
        assert KEY not in told


async def test_a_record_opens_only_for_its_tenant_name_and_address() -> None:
    records = MemoryProviderRecords()
    providers = TenantProviders(records, Vault(SECRET))
    await providers.put("acme", mine())
    stored = await records.get("acme", "mine")
    assert stored is not None
    await records.put("other", "mine", stored)
    await records.put("acme", "yours", stored)
    await records.put("acme", "moved", stored.replace(b"models.test", b"thief.testt"))
    for tenant, name in (("other", "mine"), ("acme", "yours"), ("acme", "moved")):
        with pytest.raises(WrongSecret):
            await providers.get(tenant, name)
    await records.put("acme", "mine", stored.replace(b"models.test", b"thief.testt"))
    with pytest.raises(WrongSecret):
        await providers.get("acme", "mine")


async def test_without_a_secret_a_provider_without_a_key_can_be_set() -> None:
    providers = TenantProviders(MemoryProviderRecords(), Vault(""))
    with pytest.raises(NoSecret):
        await providers.put("acme", mine(headers=()))
    with pytest.raises(NoSecret):
        await providers.put("acme", mine(key=None))
    await providers.put("acme", mine(key=None, headers=()))
    assert await providers.get("acme", "mine") == mine(key=None, headers=())


REFUSED: list[tuple[ProviderSettings, str]] = [
    (mine(""), "name"),
    (mine("Mine"), "name"),
    (mine("a.b"), "name"),
    (mine("a" * 33), "name"),
    (mine("offline"), "own models"),
    (mine("openai", "anthropic"), "kind 'openai'"),
    (mine(base_url="ftp://h"), "http"),
    (mine(base_url="http://"), "http"),
    (mine(base_url="models.test/v1"), "http"),
    (mine(base_url="http://h:99999"), "http"),
    (mine(base_url=f"http://user:{KEY}@h"), "credentials"),
    (mine(base_url=f"http://h/?key={KEY}"), "http"),
    (mine(base_url="http://h/a b"), "http"),
    (mine(key=""), "key"),
    (mine(key=KEY + "\n"), "key"),
    (mine(key=KEY + "ä"), "key"),
    (mine(key=KEY * 1000), "key"),
    (mine(headers=(("Host", KEY),)), "header"),
    (mine(headers=(("a b", KEY),)), "header"),
    (mine(headers=(("X-A", KEY), ("x-a", KEY))), "twice"),
    (mine(headers=(("X-A", f"{KEY}\r\nX-B: 1"),)), "X-A"),
    (mine(headers=tuple((f"X-{n}", KEY) for n in range(33))), "32"),
    (mine(stall_s=0.0), "stall_s"),
    (mine(stall_s=float("nan")), "stall_s"),
    (mine(stall_s=1e9), "stall_s"),
]


@pytest.mark.parametrize(("settings", "hint"), REFUSED)
async def test_what_is_no_provider_is_refused_and_no_secret_is_repeated(
    settings: ProviderSettings, hint: str
) -> None:
    records = MemoryProviderRecords()
    with pytest.raises(Invalid, match=hint) as refused:
        await TenantProviders(records, Vault(SECRET)).put("acme", settings)
    assert KEY not in str(refused.value)
    assert await records.names("acme") == []


async def test_a_tenant_has_a_bounded_number_of_providers() -> None:
    providers = TenantProviders(MemoryProviderRecords(), Vault(""))
    for number in range(PROVIDERS_MAX):
        await providers.put("acme", mine(f"p{number}", key=None, headers=()))
    await providers.put("acme", mine("p0", key=None, headers=(), stall_s=1.0))
    with pytest.raises(BudgetExceeded, match="64"):
        await providers.put("acme", mine("one-more", key=None, headers=()))
    await providers.put("other", mine(key=None, headers=()))


async def test_removing_what_is_not_there_says_what_is() -> None:
    providers = TenantProviders(MemoryProviderRecords(), Vault(SECRET))
    await providers.put("acme", mine())
    for tenant, name, hint in (
        ("acme", "yours", "there are mine"),
        ("other", "mine", "no provider"),
        ("acme", "a.>", "no provider"),
    ):
        with pytest.raises(UnknownProvider, match=hint):
            await providers.remove(tenant, name)
    await providers.remove("acme", "mine")
    assert await providers.get("acme", "mine") is None


def test_a_model_may_be_named_by_a_provider_of_the_tenant() -> None:
    check_model("mine:m", ["mine"])
    with pytest.raises(Invalid, match=r"there is no model 'yours:m'.*mine:<model>"):
        check_model("yours:m", ["mine"])


def test_settings_and_bodies_do_not_show_their_secrets() -> None:
    body = NewProvider(kind="openai", key=KEY, headers={"Authorization": KEY})
    for told in (repr(Settings(secret=SECRET, key=KEY)), repr(body)):
        assert KEY not in told and SECRET not in told


# -- what a worker does with them ------------------------------------------------------------


async def test_a_tenants_own_provider_goes_before_the_environments_and_gets_none_of_its_key() -> (
    None
):
    tenants = TenantProviders(MemoryProviderRecords(), Vault(SECRET))
    provider = providers_of(tenants, {"OPENAI_API_KEY": "the operator's"}, kept_s=0)
    assert (await provider("acme", "openai")).key == "the operator's"
    await tenants.put("acme", mine("openai", key=None, headers=()))
    own = await provider("acme", "openai")
    assert (own.base_url, own.key, own.kind) == ("http://models.test/v1", None, "openai")
    assert (await provider("other", "openai")).key == "the operator's"
    await tenants.remove("acme", "openai")
    assert (await provider("acme", "openai")).key == "the operator's"


async def test_a_provider_that_is_gone_or_does_not_open_ends_the_turn_and_says_why() -> None:
    records = MemoryProviderRecords()
    await TenantProviders(records, Vault(OTHER)).put("acme", mine())
    provider = providers_of(TenantProviders(records, Vault(SECRET)), {}, kept_s=0)
    with pytest.raises(ModelError, match=r"provider mine: .*another PLAIT_SECRET") as failed:
        await provider("acme", "mine")
    assert failed.value.failure == "bad_key"
    with pytest.raises(ModelError, match="no provider 'yours'") as failed:
        await provider("acme", "yours")
    assert failed.value.failure == "unknown_model"


async def test_what_was_read_is_used_for_a_while() -> None:
    records = MemoryProviderRecords()
    tenants = TenantProviders(records, Vault(SECRET))
    provider = providers_of(tenants, {}, kept_s=60)
    await tenants.put("acme", mine())
    first = await provider("acme", "mine")
    await tenants.put("acme", mine(key="another"))
    assert await provider("acme", "mine") is first
