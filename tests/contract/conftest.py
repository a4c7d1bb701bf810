"""Every adapter of the write side behind one face, so that one suite runs on all of them."""

from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass

import pytest
import pytest_asyncio

from plait.events.jetstream_setup import JetStream, open_jetstream
from plait.events.memory import (
    MemoryBlobs,
    MemoryKeys,
    MemoryLeases,
    MemoryProviderRecords,
    MemoryRequests,
    MemoryStore,
    MemoryWorkQueue,
)
from plait.events.settings import Settings
from plait.events.store import (
    Blobs,
    EventStore,
    Keys,
    Leases,
    ProviderRecords,
    Requests,
    StreamId,
    WorkQueue,
)
from tests.conftest import Address, Prefixes
from tests.waiting import until


@dataclass
class Adapter:
    """`put` writes bytes to the log as another version of Plait would; `lapse` lets leases lapse;
    `queued` is what lies on the work queue or is in flight."""

    store: EventStore
    blobs: Blobs
    keys: Keys
    requests: Requests
    providers: ProviderRecords
    leases: Leases
    work: WorkQueue
    put: Callable[[StreamId, bytes], Awaitable[object]]
    lapse: Callable[[], Awaitable[None]]
    queued: Callable[[], Awaitable[int]]


@dataclass
class Clock:
    now: float = 1_000_000.0

    def __call__(self) -> float:
        return self.now


def memory_adapter() -> Adapter:
    store, clock, work = MemoryStore(), Clock(), MemoryWorkQueue()

    async def put(stream: StreamId, data: bytes) -> object:
        return store.write(stream, data)

    async def lapse() -> None:
        clock.now += 60

    async def queued() -> int:
        return len(work)

    return Adapter(
        store=store,
        blobs=MemoryBlobs(),
        keys=MemoryKeys(),
        requests=MemoryRequests(clock),
        providers=MemoryProviderRecords(),
        leases=MemoryLeases(clock),
        work=work,
        put=put,
        lapse=lapse,
        queued=queued,
    )


def jetstream_adapter(js: JetStream) -> Adapter:
    async def put(stream: StreamId, data: bytes) -> object:
        return await js.nc.request(js.subjects.event(stream), data)

    async def lapse() -> None:
        async def no_leases() -> bool:
            info = await js.nc.jetstream().stream_info(f"KV_{js.subjects.leases}")
            return info.state.messages == 0

        await until(no_leases)

    async def queued() -> int:
        return (await js.nc.jetstream().stream_info(js.subjects.work)).state.messages

    return Adapter(
        store=js.store,
        blobs=js.blobs,
        keys=js.keys,
        requests=js.requests,
        providers=js.providers,
        leases=js.leases,
        work=js.work,
        put=put,
        lapse=lapse,
        queued=queued,
    )


@pytest_asyncio.fixture
async def jetstream(nats_server: Address, prefixes: Prefixes) -> AsyncIterator[JetStream]:
    js = await open_jetstream(
        Settings(
            nats_url=nats_server.url,
            nats_monitor_url=nats_server.monitor_url,
            prefix=prefixes.next(),
        )
    )
    yield js
    await js.close()


@pytest.fixture(params=["memory", "jetstream"])
def adapter(request: pytest.FixtureRequest) -> Adapter:
    if request.param == "memory":
        return memory_adapter()
    return jetstream_adapter(request.getfixturevalue("jetstream"))
