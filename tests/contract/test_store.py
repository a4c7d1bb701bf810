"""What every log must do: the same cases on memory and on a real JetStream."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from itertools import chain

import msgspec
import pytest

from plait.events import ids
from plait.events.codec import APPEND_BYTES
from plait.events.errors import AppendTooLarge, UnknownEvent, VersionConflict
from plait.events.store import Batch, EventStore, Recorded, StreamId
from plait.events.types import Append, BranchNamed, BranchOpened
from tests.contract.conftest import Adapter

SESSION = ids.session_id("a session")
OTHER = ids.session_id("another session")


@pytest.fixture
def store(adapter: Adapter) -> EventStore:
    return adapter.store


def branch(name: str = "one", session: str = SESSION, tenant: str = "acme") -> StreamId:
    return StreamId(tenant, session, ids.token_of(ids.branch_id(session, name)))


def session_stream(session: str = SESSION, tenant: str = "acme") -> StreamId:
    return StreamId(tenant, session, ids.SESSION_TOKEN)


def an_append(command_id: str = "c1", fork: str = "n") -> Append:
    return Append(command_id=command_id, at=1, events=(BranchOpened(fork),), root=command_id)


def sized(command_id: str, size: int) -> Append:
    return an_append(command_id, "x" * size)


def unknown() -> bytes:
    return msgspec.msgpack.encode(
        {"command_id": "c", "at": 1, "events": [{"t": "FromTheFuture", "x": 1}]}
    )


async def fill(store: EventStore, stream: StreamId, count: int, *, first: int = 1) -> list[int]:
    """Appends `count` times; the sequences."""
    sequences = [recorded.sequence for recorded in await store.read(stream)][-1:] or [0]
    for i in range(first, first + count):
        sequences.append(await store.append(stream, an_append(f"c{i}"), sequences[-1]))
    return sequences[1:]


async def take(batches: AsyncIterator[Batch], count: int) -> list[Recorded]:
    """The next `count` appends of a follower."""
    found: list[Recorded] = []
    async with asyncio.timeout(30):
        while len(found) < count:
            found.extend((await anext(batches)).recorded)
    return found


async def up_to(batches: AsyncIterator[Batch], sequence: int) -> list[Recorded]:
    """All appends until the follower says that it has seen that sequence."""
    found: list[Recorded] = []
    async with asyncio.timeout(30):
        async for batch in batches:
            found.extend(batch.recorded)
            if batch.up_to >= sequence:
                break
    return found


async def follow_into(found: list[Recorded], store: EventStore) -> None:
    async with aclosing(store.follow()) as batches:
        async for batch in batches:
            found.extend(batch.recorded)


def sequences(recorded: list[Recorded]) -> list[int]:
    return [each.sequence for each in recorded]


# -- append ----------------------------------------------------------------------------------


async def test_an_append_is_read_back_as_it_was_written(store: EventStore) -> None:
    append = Append(
        command_id="c1",
        at=5,
        events=(BranchOpened("n"), BranchNamed("b", "x")),
        root="r",
        cause="t",
    )
    sequence = await store.append(branch(), append, 0)
    assert await store.read(branch()) == [Recorded(branch(), sequence, append)]


async def test_an_append_on_a_wrong_version_names_the_last(store: EventStore) -> None:
    first = await store.append(branch(), an_append("c1"), 0)
    with pytest.raises(VersionConflict) as refused:
        await store.append(branch(), an_append("c2"), 0)
    assert refused.value.last == first


async def test_an_append_on_a_version_that_never_was_is_a_conflict(store: EventStore) -> None:
    with pytest.raises(VersionConflict) as refused:
        await store.append(branch(), an_append(), 41)
    assert refused.value.last == 0
    assert await store.read(branch()) == []


async def test_a_lost_answer_is_recognised_by_its_command(store: EventStore) -> None:
    first = await store.append(branch(), an_append("c1"), 0)
    assert await store.append(branch(), an_append("c1"), 0) == first
    second = await store.append(branch(), an_append("c2"), first)
    assert await store.append(branch(), an_append("c2"), first) == second
    assert len(await store.read(branch())) == 2


async def test_a_twins_append_after_something_unseen_is_a_conflict(store: EventStore) -> None:
    """Else its writer would fold its own events onto a state that lacks what came between."""
    first = await store.append(branch(), an_append("c1"), 0)
    between = await store.append(branch(), an_append("c2"), first)
    twin = await store.append(branch(), an_append("c3"), between)
    with pytest.raises(VersionConflict) as refused:
        await store.append(branch(), an_append("c3"), first)
    assert refused.value.last == twin


async def test_of_64_writers_with_the_same_version_one_wins(store: EventStore) -> None:
    start = await store.append(branch(), an_append("c0"), 0)

    async def write(i: int) -> int | VersionConflict:
        try:
            return await store.append(branch(), an_append(f"w{i}"), start)
        except VersionConflict as conflict:
            return conflict

    results = await asyncio.gather(*map(write, range(64)))
    [winner] = [result for result in results if isinstance(result, int)]
    assert [r.sequence for r in await store.read(branch(), start)] == [winner]
    assert {r.last for r in results if isinstance(r, VersionConflict)} == {winner}


async def test_branches_do_not_disturb_each_other(store: EventStore) -> None:
    streams = [branch(f"b{i}") for i in range(64)]
    await asyncio.gather(*(fill(store, stream, 3) for stream in streams))
    for stream in streams:
        assert [r.append.command_id for r in await store.read(stream)] == ["c1", "c2", "c3"]


async def test_the_largest_append_fits_and_a_larger_one_is_refused(store: EventStore) -> None:
    room = APPEND_BYTES - 200
    sequence = await store.append(branch(), sized("big", room), 0)
    with pytest.raises(AppendTooLarge, match="ask for less"):
        await store.append(branch(), sized("bigger", APPEND_BYTES), sequence)
    [found] = await store.read(branch())
    assert found.append == sized("big", room)


# -- read ------------------------------------------------------------------------------------


async def test_reading_after_a_sequence_gives_only_what_is_newer(store: EventStore) -> None:
    written = await fill(store, branch(), 20)
    await fill(store, branch("two"), 3)
    for known in (0, 1, 18, 19, 20):
        after = written[known - 1] if known else 0
        assert sequences(list(await store.read(branch(), after))) == written[known:]


async def test_reading_takes_any_sequence_not_only_the_streams_own(store: EventStore) -> None:
    first = await store.append(branch("other"), an_append("c1"), 0)
    [second] = await fill(store, branch(), 1)
    between = await store.append(branch("other"), an_append("c2"), first)
    third = await store.append(branch(), an_append("c9"), second)
    assert sequences(list(await store.read(branch(), first))) == [second, third]
    assert sequences(list(await store.read(branch(), between))) == [third]
    assert await store.read(branch(), third + 100) == []


async def test_a_stream_that_has_not_opened_is_empty(store: EventStore) -> None:
    assert await store.read(branch()) == []


async def test_a_long_stream_and_a_heavy_one_are_read_whole(store: EventStore) -> None:
    written = await fill(store, branch(), 2_100)
    assert sequences(list(await store.read(branch()))) == written
    last = 0
    for i in range(20):
        last = await store.append(branch("heavy"), sized(f"c{i}", 900_000), last)
    heavy = await store.read(branch("heavy"))
    assert [r.append.command_id for r in heavy] == [f"c{i}" for i in range(20)]


async def test_an_append_is_found_at_its_sequence(store: EventStore) -> None:
    [first, second] = await fill(store, branch(), 2)
    assert await store.read_at(second) == Recorded(branch(), second, an_append("c2"))
    assert await store.read_at(first) == Recorded(branch(), first, an_append("c1"))
    assert await store.read_at(second + 1) is None
    assert await store.read_at(0) is None


async def test_the_last_sequence_is_the_logs_end(store: EventStore) -> None:
    assert await store.last_sequence() == 0
    await fill(store, branch(), 2)
    [last] = await fill(store, branch("two"), 1)
    assert await store.last_sequence() == last


async def test_the_branches_of_a_session_are_those_that_opened_in_it(store: EventStore) -> None:
    assert await store.branches("acme", SESSION) == []
    await fill(store, session_stream(), 1)
    await fill(store, branch("one"), 2)
    await fill(store, branch("two"), 1)
    await fill(store, branch("three", session=OTHER), 1)
    await fill(store, branch("four", tenant="other"), 1)
    assert sorted(await store.branches("acme", SESSION)) == sorted(
        [ids.branch_id(SESSION, "one"), ids.branch_id(SESSION, "two")]
    )


# -- follow ----------------------------------------------------------------------------------


async def test_following_gives_everything_and_then_says_where_the_log_ends(
    store: EventStore,
) -> None:
    written = await fill(store, branch(), 700)
    async with aclosing(store.follow()) as batches:
        found = await up_to(batches, written[-1])
    assert sequences(found) == written
    assert found[0] == Recorded(branch(), written[0], an_append("c1"))


async def test_following_from_the_middle_gives_the_rest(store: EventStore) -> None:
    written = await fill(store, branch(), 10)
    async with aclosing(store.follow(written[6])) as batches:
        assert sequences(await take(batches, 3)) == written[7:]


async def test_a_follower_at_the_end_hears_so_at_once(store: EventStore) -> None:
    async with aclosing(store.follow()) as batches:
        async with asyncio.timeout(5):
            first = await anext(batches)
    assert (list(first.recorded), first.up_to) == ([], 0)
    [last] = await fill(store, branch(), 1)
    async with aclosing(store.follow(last)) as batches:
        async with asyncio.timeout(5):
            first = await anext(batches)
    assert (list(first.recorded), first.up_to) == ([], last)


async def test_a_follower_that_has_caught_up_says_so_with_an_empty_batch(store: EventStore) -> None:
    [*_, last] = await fill(store, branch(), 3)
    await fill(store, branch("foreign", tenant="other"), 1)
    for tenant, end in ((None, last + 1), ("acme", last + 1)):
        async with aclosing(store.follow(tenant=tenant)) as batches, asyncio.timeout(5):
            batch = await anext(batches)
            while batch.recorded:
                batch = await anext(batches)
        assert batch.up_to == end


async def test_new_appends_reach_a_follower_that_waits(store: EventStore) -> None:
    async with aclosing(store.follow()) as batches:
        await anext(batches)
        waiting = asyncio.create_task(take(batches, 3))
        written = await fill(store, branch(), 3)
        assert sequences(await waiting) == written


async def test_a_follower_sees_only_its_tenant_or_session(store: EventStore) -> None:
    mine = await fill(store, branch(), 2)
    mine += await fill(store, session_stream(), 1)
    tenants = mine + await fill(store, branch("x", session=OTHER), 2)
    [foreign] = await fill(store, branch("y", tenant="other"), 1)
    async with aclosing(store.follow(tenant="acme", session=SESSION)) as batches:
        assert sequences(await up_to(batches, foreign)) == mine
    async with aclosing(store.follow(tenant="acme")) as batches:
        assert sequences(await up_to(batches, foreign)) == tenants


async def test_a_quiet_follower_advances_while_others_write(store: EventStore) -> None:
    [mine] = await fill(store, branch(), 1)
    async with aclosing(store.follow(tenant="acme")) as batches:
        assert sequences(await up_to(batches, mine)) == [mine]
        for i in range(3):
            [foreign] = await fill(store, branch(f"b{i}", tenant="other"), 1)
            assert await up_to(batches, foreign) == []
        [mine] = await fill(store, branch("more"), 1)
        assert sequences(await up_to(batches, mine)) == [mine]


async def test_followers_see_concurrent_appends_once_and_in_order(store: EventStore) -> None:
    async def follow() -> list[Recorded]:
        async with aclosing(store.follow(tenant="acme")) as batches:
            return await take(batches, 600)

    followers = [asyncio.create_task(follow()) for _ in range(3)]
    written = await asyncio.gather(*(fill(store, branch(f"b{i}"), 20) for i in range(30)))
    for follower in followers:
        assert sequences(await follower) == sorted(chain.from_iterable(written))


async def test_a_slow_follower_loses_nothing(store: EventStore) -> None:
    last = 0
    for i in range(60):
        last = await store.append(branch(), sized(f"c{i}", 600_000), last)
    async with aclosing(store.follow()) as batches:
        found = list((await anext(batches)).recorded)
        await fill(store, branch("other"), 500)  # meanwhile it takes nothing
        found += await up_to(batches, await store.last_sequence())
    assert sequences(found) == list(range(found[0].sequence, found[0].sequence + 560))


# -- events of another version ---------------------------------------------------------------


async def test_an_unknown_event_stops_readers_and_loses_nothing(adapter: Adapter) -> None:
    store = adapter.store
    [known] = await fill(store, branch(), 1)
    await adapter.put(branch(), unknown())
    with pytest.raises(UnknownEvent, match=r"FromTheFuture.*upgrade"):
        await store.read(branch())
    with pytest.raises(UnknownEvent):
        await store.read_at(known + 1)
    for _ in range(2):
        found: list[Recorded] = []
        with pytest.raises(UnknownEvent, match="FromTheFuture"):
            await follow_into(found, store)
        assert sequences(found) == [known]


async def test_a_conflict_with_an_unknown_event_is_still_a_conflict(adapter: Adapter) -> None:
    await adapter.put(branch(), unknown())
    with pytest.raises(VersionConflict):
        await adapter.store.append(branch(), an_append("mine"), 0)
