"""What only the real log can show: lost consumers, a killed server, lost answers, and refusals at
the start."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from itertools import chain
from pathlib import Path

import msgspec
import pytest
import pytest_asyncio
from nats.aio.client import Client
from nats.errors import TimeoutError as NatsTimeout

from plait.events import jetstream_setup
from plait.events.codec import WorkItem, decode_item
from plait.events.errors import Misconfigured, Unavailable, VersionConflict
from plait.events.jetstream_setup import JetStream, connect, ensure, open_jetstream
from plait.events.settings import Settings
from plait.services.dev.servers import NatsServer
from tests.conftest import Address, Prefixes
from tests.contract.test_store import (
    an_append,
    branch,
    fill,
    sequences,
    take,
)
from tests.waiting import until


def settings_of(server: NatsServer | Address, prefix: str = "plait", **more: object) -> Settings:
    settings = Settings(nats_url=server.url, nats_monitor_url=server.monitor_url, prefix=prefix)
    return msgspec.structs.replace(settings, **more)


@pytest_asyncio.fixture
async def own_server(tmp_path: Path) -> AsyncIterator[NatsServer]:
    """A server to kill."""
    async with NatsServer(tmp_path / "nats") as server:
        yield server


async def consumers(js: JetStream) -> list[str]:
    found = await js.nc.jetstream().consumers_info(js.subjects.log)
    return [info.name for info in found]


# -- following -------------------------------------------------------------------------------


async def test_a_closed_follower_leaves_no_consumer_behind(jetstream: JetStream) -> None:
    async with aclosing(jetstream.store.follow()) as batches:
        await anext(batches)
        assert len(await consumers(jetstream)) == 1

    async def gone() -> bool:
        return await consumers(jetstream) == []

    await until(gone)


async def test_a_follower_whose_consumer_is_deleted_goes_on_without_gap_or_repeat(
    jetstream: JetStream,
) -> None:
    stop = asyncio.Event()

    async def delete() -> int:
        deleted = 0
        while not stop.is_set():
            for name in await consumers(jetstream):
                deleted += await jetstream.nc.jetstream().delete_consumer(
                    jetstream.subjects.log, name
                )
            await asyncio.sleep(0.05)
        return deleted

    async with aclosing(jetstream.store.follow()) as batches:
        await anext(batches)
        deleting = asyncio.create_task(delete())
        taking = asyncio.create_task(take(batches, 1_500))
        written = await asyncio.gather(
            *(fill(jetstream.store, branch(f"b{i}"), 50) for i in range(30))
        )
        found = await taking
        stop.set()
        assert await deleting > 0
    assert sequences(found) == sorted(chain.from_iterable(written))


async def test_a_message_lost_on_the_way_is_fetched_again(jetstream: JetStream) -> None:
    """The connection drops what a slow client does not take; here one message is dropped."""
    written = await fill(jetstream.store, branch(), 300)
    process, dropped = jetstream.nc._process_msg, 0

    async def drop_one(sid: int, subject: bytes, reply: bytes, data: bytes, headers: bytes) -> None:
        nonlocal dropped
        if reply.startswith(b"$JS.ACK.") and not dropped and f".{written[99]}." in reply.decode():
            dropped += 1
            return
        await process(sid, subject, reply, data, headers)

    jetstream.nc._process_msg = drop_one  # type: ignore[method-assign]
    async with aclosing(jetstream.store.follow()) as batches:
        assert sequences(await take(batches, 300)) == written
    assert dropped == 1


async def test_following_needs_no_client_of_ours(
    nats_server: Address, prefixes: Prefixes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ours is only quicker, and rests on a method that the library does not promise to keep."""
    monkeypatch.setattr(jetstream_setup, "FollowingClient", Client)
    js = await open_jetstream(settings_of(nats_server, prefixes.next()))
    written = await fill(js.store, branch(), 600)
    async with aclosing(js.store.follow(written[0])) as batches:
        assert sequences(await take(batches, 599)) == written[1:]
    await js.close()


async def test_a_killed_server_loses_nothing_acknowledged_and_repeats_nothing(
    own_server: NatsServer,
) -> None:
    js = await open_jetstream(settings_of(own_server))
    try:
        written: list[int] = []
        killed = asyncio.Event()

        async def write(name: str) -> None:
            last = 0
            for i in range(200):
                last = await js.store.append(branch(name), an_append(f"{name}-{i}"), last)
                written.append(last)
                if len(written) == 400:
                    killed.set()
                if i % 20 == 0:
                    [found] = await js.store.read(branch(name), last - 1)
                    assert found.sequence == last

        async def kill() -> None:
            await killed.wait()
            await own_server.kill()
            await own_server.start()

        async with aclosing(js.store.follow()) as batches:
            taking = asyncio.create_task(take(batches, 1_600))
            await asyncio.gather(kill(), *(write(f"b{i}") for i in range(8)))
            found = await taking
        assert sequences(found) == sorted(written)
        assert len({each.append.command_id for each in found}) == 1_600
    finally:
        await js.close()


# -- lost answers ----------------------------------------------------------------------------


async def test_an_append_whose_answer_is_lost_is_found_and_not_repeated(
    jetstream: JetStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = Client.request
    lost = 0

    async def lose_answers(self: Client, subject: str, *args: object, **kwargs: object) -> object:
        nonlocal lost
        answer = await request(self, subject, *args, **kwargs)  # type: ignore[arg-type]
        if ".event." in subject and not subject.startswith("$"):
            lost += 1
            raise NatsTimeout
        return answer

    monkeypatch.setattr(Client, "request", lose_answers)
    first = await jetstream.store.append(branch(), an_append("c1"), 0)
    second = await jetstream.store.append(branch(), an_append("c2"), first)
    with pytest.raises(VersionConflict):
        await jetstream.store.append(branch(), an_append("c3"), first)
    assert lost == 3
    assert sequences(list(await jetstream.store.read(branch()))) == [first, second]


async def test_a_log_that_does_not_answer_is_unavailable(
    own_server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("plait.events.jetstream.PATIENCE_S", 0.5)
    monkeypatch.setattr("plait.events.jetstream_api.PATIENCE_S", 0.5)
    monkeypatch.setattr("plait.events.jetstream_api.REQUEST_S", 0.2)
    js = await open_jetstream(settings_of(own_server))
    try:
        await own_server.kill()
        with pytest.raises(Unavailable, match="same command can be sent again"):
            await js.store.append(branch(), an_append(), 0)
        with pytest.raises(Unavailable):
            await js.store.read(branch())
        await own_server.start()
        monkeypatch.undo()
        sequence = await js.store.append(branch(), an_append(), 0)
        assert sequences(list(await js.store.read(branch()))) == [sequence]
    finally:
        await js.close()


async def test_replicas_that_lag_are_made_up_for_by_the_leader(
    jetstream: JetStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = await fill(jetstream.store, branch(), 10)
    batch = jetstream.store._gets.batch

    async def behind(subject: str, start: int) -> object:
        return [m for m in await batch(subject, start) if m.seq != written[6]]

    monkeypatch.setattr(jetstream.store._gets, "batch", behind)
    assert sequences(list(await jetstream.store.read(branch()))) == written


# -- at the start ----------------------------------------------------------------------------


async def test_opening_again_keeps_the_log_and_its_generation(
    nats_server: Address, prefixes: Prefixes
) -> None:
    settings = settings_of(nats_server, prefixes.next())
    first, second = await asyncio.gather(open_jetstream(settings), open_jetstream(settings))
    [sequence] = await fill(first.store, branch(), 1)
    await first.close()
    third = await open_jetstream(settings)
    assert first.store.generation == second.store.generation == third.store.generation
    assert third.store.generation > 1_600_000_000_000
    assert sequences(list(await third.store.read(branch()))) == [sequence]
    await second.close()
    await third.close()


async def test_the_log_can_neither_be_deleted_from_nor_purged(jetstream: JetStream) -> None:
    [sequence] = await fill(jetstream.store, branch(), 1)
    js = jetstream.nc.jetstream()
    with pytest.raises(Exception, match="delete not permitted"):
        await js.delete_msg(jetstream.subjects.log, sequence)
    with pytest.raises(Exception, match="purge not permitted"):
        await js.purge_stream(jetstream.subjects.log)


async def test_a_stream_that_differs_is_changed_where_it_can_be_and_refused_where_not(
    jetstream: JetStream, nats_server: Address
) -> None:
    settings = settings_of(nats_server, jetstream.subjects.prefix)
    js = jetstream.nc.jetstream()
    parked = (await js.stream_info(jetstream.subjects.parked)).config
    parked.max_msgs = 5
    await js.update_stream(parked)
    await ensure(jetstream.nc, settings)
    assert (await js.stream_info(jetstream.subjects.parked)).config.max_msgs == 100_000

    await js.delete_stream(jetstream.subjects.work)
    await js.add_stream(name=jetstream.subjects.work, subjects=[jetstream.subjects.work_items])
    with pytest.raises(Misconfigured, match=r"retention.*cannot be changed"):
        await ensure(jetstream.nc, settings)


async def test_a_log_without_proof_of_its_durability_is_refused(
    nats_server: Address, prefixes: Prefixes
) -> None:
    settings = settings_of(nats_server, prefixes.next(), nats_monitor_url="")
    with pytest.raises(Misconfigured, match="PLAIT_NATS_MONITOR_URL"):
        await open_jetstream(settings)
    accepted = msgspec.structs.replace(settings, allow_lossy_log=True)
    await (await open_jetstream(accepted)).close()


async def test_a_server_that_syncs_late_is_refused(
    nats_server: Address, prefixes: Prefixes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The monitor's answer is real but for the one flag."""

    async def lazy(url: str) -> object:
        server = await monitored(url)
        assert server.jetstream.config.sync_always
        server.jetstream.config.sync_always = False
        return server

    monitored = jetstream_setup._monitored
    monkeypatch.setattr(jetstream_setup, "_monitored", lazy)
    with pytest.raises(Misconfigured, match="sync_interval: always"):
        await open_jetstream(settings_of(nats_server, prefixes.next()))


async def test_the_monitor_of_another_server_proves_nothing(
    nats_server: Address, own_server: NatsServer, prefixes: Prefixes
) -> None:
    settings = settings_of(nats_server, prefixes.next(), nats_monitor_url=own_server.monitor_url)
    with pytest.raises(Misconfigured, match="but the log is on"):
        await open_jetstream(settings)
    settings = msgspec.structs.replace(settings, nats_monitor_url=nats_server.url)
    with pytest.raises(Misconfigured, match="PLAIT_NATS_MONITOR_URL"):
        await open_jetstream(settings)


async def test_a_monitor_that_does_not_answer_may_only_be_starting(
    nats_server: Address, prefixes: Prefixes
) -> None:
    settings = settings_of(nats_server, prefixes.next(), nats_monitor_url="http://127.0.0.1:1")
    with pytest.raises(Unavailable, match="start it"):
        await open_jetstream(settings)


async def test_without_a_server_the_error_says_which_setting_to_change(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("plait.events.jetstream_setup.CONNECT_S", 0.3)
    with pytest.raises(Unavailable, match="PLAIT_NATS_URL"):
        await connect(Settings(nats_url="nats://127.0.0.1:9"))


async def test_items_are_offered_again_only_after_their_ack(jetstream: JetStream) -> None:
    js = jetstream.nc.jetstream()
    worker = await js.pull_subscribe(
        jetstream.subjects.work_items, "w", stream=jetstream.subjects.work
    )
    await jetstream.work.offer("acme", "t1", 1)
    [message] = await worker.fetch(1)
    assert decode_item(message.data) == WorkItem("acme", "t1", 1)
    await jetstream.work.offer("acme", "t1", 1)
    assert (await js.stream_info(jetstream.subjects.work)).state.messages == 1
    await message.ack_sync()
    await jetstream.work.offer("acme", "t1", 1)
    [message] = await worker.fetch(1)
    assert message.metadata.num_delivered == 1
