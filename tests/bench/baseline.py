"""What Plait is held against: the same server, used as raw as its client library allows."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path

import msgspec
import nats
from nats.aio.client import Client
from nats.aio.msg import Msg

from plait.events import codec, ids
from plait.events.content import seal
from plait.events.jetstream_api import EXPECTED
from plait.events.jetstream_setup import JetStream, ensure, open_jetstream
from plait.events.settings import Settings
from plait.events.store import StreamId
from plait.events.subjects import Subjects
from plait.events.types import Append, BranchOpened, MessageReceived
from plait.services.dev.servers import NatsServer

TENANT = "bench"
RAW = "raw"  # the prefix of the streams that only baselines write to
CONSUMED_AT_ONCE = 1_000  # messages of one pull; two are outstanding


@contextlib.asynccontextmanager
async def log_on_disk(data: Path) -> AsyncIterator[tuple[Settings, JetStream, Client]]:
    """A server of its own that syncs each append: its log, and the baseline's connection."""
    async with NatsServer(data / "nats") as server:
        settings = Settings(nats_url=server.url, nats_monitor_url=server.monitor_url)
        jetstream = await open_jetstream(settings, "plait-bench")
        try:
            async with raw_client(server.url) as raw:
                yield settings, jetstream, raw
        finally:
            await jetstream.close()


@contextlib.asynccontextmanager
async def raw_client(nats_url: str) -> AsyncIterator[Client]:
    """The library's own client, and under `RAW` the same streams as Plait's."""
    nc = await nats.connect(nats_url)
    try:
        # Who opened Plait's log on this server has checked its durability.
        await ensure(nc, Settings(prefix=RAW, allow_lossy_log=True))
        yield nc
    finally:
        await nc.close()


def an_append(branch: str, place: int, text: str = "x" * 200) -> Append:
    """A user's message as it is appended: one event, and on a new branch its opening."""
    command = f"{branch}.{place}"
    received = MessageReceived(
        node_id=ids.node_id(branch, command),
        content=seal(text, "key", b"secret"),
        root=command,
        after=ids.root_id(ids.session_of(branch)) if place == 0 else ids.node_id(branch, "before"),
    )
    opened = BranchOpened(ids.root_id(ids.session_of(branch)))
    return Append(
        command_id=command,
        at=1_700_000_000_000,
        events=(opened, received) if place == 0 else (received,),
        root=command,
    )


class RawPublisher:
    """`request` with bytes, headers and the expected sequence. Of the answer only the sequence is
    looked at, which the next append to the same subject names."""

    def __init__(self, nc: Client) -> None:
        self._nc, self._subjects = nc, Subjects(RAW)
        self._made = 0

    def subject(self, stream: StreamId) -> str:
        return self._subjects.event(stream)

    async def publish(
        self, subject: str, data: bytes, headers: dict[str, str], expected: int
    ) -> int:
        guarded = {EXPECTED: str(expected), **headers}
        answer = await self._nc.request(subject, data, timeout=10.0, headers=guarded)
        return _ack(answer.data).seq

    async def once_s(self) -> float:
        """Seconds for a user's message on a new branch, with nothing else in flight."""
        self._made += 1
        session = ids.session_id(f"raw.{self._made}")
        branch = ids.branch_id(session, "raw")
        append = an_append(branch, 0)
        subject = self.subject(StreamId(TENANT, session, ids.token_of(branch)))
        data, headers = codec.encode(append), codec.headers(append)
        began = time.perf_counter()
        await self.publish(subject, data, headers, 0)
        return time.perf_counter() - began


async def one_by_one(
    count: int, once_s: Callable[[], Awaitable[float]], *, pause_s: float = 0.0
) -> list[float]:
    """The seconds that each took. Whoever follows the log still works on what was done when it is
    acknowledged: without a pause, the next one shares the cores with that."""
    took: list[float] = []
    for _ in range(count):
        if pause_s:
            await asyncio.sleep(pause_s)
        took.append(await once_s())
    return took


class _Ack(msgspec.Struct):
    seq: int  # missing in a refusal, which then raises


_ack = msgspec.json.Decoder(_Ack).decode


async def consume(nc: Client, stream: str, count: int) -> float:
    """Seconds to receive the stream's first `count` messages, and to do nothing with them."""
    inbox, name = nc.new_inbox(), f"raw-{time.perf_counter_ns()}"
    done = asyncio.Event()
    received = asked = 0

    async def ask() -> None:
        nonlocal asked
        asked += CONSUMED_AT_ONCE
        body = msgspec.json.encode({"batch": CONSUMED_AT_ONCE, "expires": 30 * 10**9})
        await nc.publish(f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{name}", body, reply=inbox)

    async def receive(message: Msg) -> None:
        nonlocal received
        if not message.reply:
            raise RuntimeError(f"the raw consumer ended: {message.headers}")
        received += 1
        if received >= count:
            done.set()
        elif received % CONSUMED_AT_ONCE == 0:
            await ask()

    began = time.perf_counter()
    subscription = await nc.subscribe(
        inbox, cb=receive, pending_msgs_limit=0, pending_bytes_limit=0
    )
    config = {
        "name": name,
        "deliver_policy": "all",
        "ack_policy": "none",
        "mem_storage": True,
        "num_replicas": 1,
    }
    await nc.request(
        f"$JS.API.CONSUMER.CREATE.{stream}.{name}",
        msgspec.json.encode({"stream_name": stream, "config": config}),
        timeout=5.0,
    )
    await ask()
    await ask()
    async with asyncio.timeout(120):
        await done.wait()
    took = time.perf_counter() - began
    await subscription.unsubscribe()
    await nc.request(f"$JS.API.CONSUMER.DELETE.{stream}.{name}", timeout=5.0)
    return took


async def many(
    at_once: int, each: Callable[[int], Awaitable[None]], jobs: Sequence[int] | range
) -> None:
    """Runs all jobs, so many at once."""
    left = iter(jobs)

    async def one_after_another() -> None:
        for job in left:
            await each(job)

    async with asyncio.TaskGroup() as tasks:
        for _ in range(at_once):
            tasks.create_task(one_after_another())
