"""What stands beside the log, on memory and on a real JetStream: blobs, keys, idempotency records,
providers, leases and work items."""

import asyncio

import pytest

from plait.events import ids
from tests.contract.conftest import Adapter

SESSION = ids.session_id("a session")
TURN = ids.turn_id(ids.branch_id(SESSION, "one"), "c1")


@pytest.mark.parametrize("size", [0, 1, 512 * 1024, 512 * 1024 + 1, 3_000_000])
async def test_a_blob_is_read_back_whole(adapter: Adapter, size: int) -> None:
    data = bytes(range(256)) * (size // 256 + 1)
    await adapter.blobs.put(f"acme.{SESSION}.d", data[:size])
    assert await adapter.blobs.get(f"acme.{SESSION}.d") == data[:size]


async def test_a_blob_that_was_never_put_is_a_key_error(adapter: Adapter) -> None:
    with pytest.raises(KeyError):
        await adapter.blobs.get(f"acme.{SESSION}.none")


async def test_putting_a_blob_again_changes_nothing(adapter: Adapter) -> None:
    data = b"x" * 1_500_000
    await asyncio.gather(*(adapter.blobs.put(f"acme.{SESSION}.d", data) for _ in range(4)))
    assert await adapter.blobs.get(f"acme.{SESSION}.d") == data


async def test_a_session_has_one_key_whoever_creates_it(adapter: Adapter) -> None:
    made = await asyncio.gather(*(adapter.keys.create("acme", SESSION) for _ in range(8)))
    assert len(set(made)) == 1
    assert await adapter.keys.get("acme", SESSION) == made[0]
    key_id, secret = made[0]
    assert len(secret) == 32
    assert secret.hex() not in key_id


async def test_sessions_and_tenants_have_keys_of_their_own(adapter: Adapter) -> None:
    with pytest.raises(KeyError):
        await adapter.keys.get("acme", SESSION)
    keys = {
        await adapter.keys.create(tenant, session)
        for tenant in ("acme", "other")
        for session in (SESSION, ids.session_id("another"))
    }
    assert len(keys) == 4


async def test_of_two_requests_with_one_key_the_first_record_stands(adapter: Adapter) -> None:
    assert await adapter.requests.get("acme", "k") is None
    assert await adapter.requests.create("acme", "k", b"first") == b"first"
    assert await adapter.requests.create("acme", "k", b"second") == b"first"
    assert await adapter.requests.get("acme", "k") == b"first"
    assert await adapter.requests.create("other", "k", b"third") == b"third"


async def test_a_request_key_may_be_any_text(adapter: Adapter) -> None:
    key = "any thing > * . \r\n ü" * 20
    await adapter.requests.create("acme", key, b"record")
    assert await adapter.requests.get("acme", key) == b"record"


async def test_of_a_providers_records_the_last_stands_until_it_is_removed(
    adapter: Adapter,
) -> None:
    records = adapter.providers
    assert await records.get("acme", "mine") is None
    for record in (b"first", b"second"):
        await records.put("acme", "mine", record)
        assert await records.get("acme", "mine") == record
    await records.put("acme", "more-of_mine", b"third")
    assert sorted(await records.names("acme")) == ["mine", "more-of_mine"]
    for _ in range(2):
        await records.remove("acme", "mine")
        assert await records.get("acme", "mine") is None
    assert await records.names("acme") == ["more-of_mine"]
    await records.put("acme", "mine", b"again")
    assert await records.get("acme", "mine") == b"again"


async def test_a_tenant_has_only_its_own_providers(adapter: Adapter) -> None:
    await adapter.providers.put("acme", "mine", b"acme's")
    assert await adapter.providers.names("other") == []
    assert await adapter.providers.get("other", "mine") is None
    await adapter.providers.remove("other", "mine")
    assert await adapter.providers.get("acme", "mine") == b"acme's"


async def test_a_lease_has_one_holder_at_a_time(adapter: Adapter) -> None:
    assert await adapter.leases.hold("p0", "a")
    assert await adapter.leases.hold("p0", "a")
    assert not await adapter.leases.hold("p0", "b")
    assert await adapter.leases.hold("p1", "b")
    await adapter.leases.release("p0", "b")
    assert not await adapter.leases.hold("p0", "b")
    await adapter.leases.release("p0", "a")
    assert await adapter.leases.hold("p0", "b")
    assert not await adapter.leases.hold("p0", "a")


async def test_of_many_who_want_a_lease_one_gets_it(adapter: Adapter) -> None:
    got = await asyncio.gather(*(adapter.leases.hold("p0", f"h{i}") for i in range(16)))
    assert got.count(True) == 1


async def test_a_lease_that_is_not_renewed_lapses(adapter: Adapter) -> None:
    assert await adapter.leases.hold("p0", "a")
    await adapter.lapse()
    assert await adapter.leases.hold("p0", "b")
    assert not await adapter.leases.hold("p0", "a")


async def test_an_item_is_queued_once_however_often_it_is_offered(adapter: Adapter) -> None:
    await asyncio.gather(*(adapter.work.offer("acme", TURN, 1) for _ in range(5)))
    assert await adapter.queued() == 1
    await adapter.work.offer("acme", TURN, 2)
    assert await adapter.queued() == 2
