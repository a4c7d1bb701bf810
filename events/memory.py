"""The log and its companions in memory: real, shipped, and the same contract as JetStream's.

The simulation and short-lived Plaits run on it. All of it belongs to one event loop.
"""

import asyncio
import secrets
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import NamedTuple

from plait.events import codec
from plait.events.codec import WorkItem
from plait.events.content import key_id
from plait.events.errors import UnknownEvent, VersionConflict
from plait.events.ids import SESSION_TOKEN
from plait.events.store import Batch, Recorded, StreamId
from plait.events.types import Append

BATCH = 512
LEASE_S = 3.0
REQUEST_S = 24 * 3600.0


class MemoryStore:
    """The log as a list of bytes: what the codec or the size limit refuses does not get in."""

    def __init__(self, generation: int = 1) -> None:
        self._generation = generation
        self._log: list[tuple[StreamId, bytes]] = []
        self._streams: dict[StreamId, list[int]] = {}
        self._sessions: dict[tuple[str, str], list[str]] = {}
        self._grown = asyncio.Event()

    @property
    def generation(self) -> int:
        return self._generation

    async def append(self, stream: StreamId, append: Append, expected: int) -> int:
        data = codec.encode(append)
        sequences = self._streams.get(stream)
        last = sequences[-1] if sequences else 0
        if last == expected:
            return self.write(stream, data)
        # A twin's append counts only where it stands exactly where ours would.
        before = sequences[-2] if sequences and len(sequences) > 1 else 0
        if (
            last
            and before == expected
            and codec.command_of(self._log[last - 1][1]) == append.command_id
        ):
            return last
        raise VersionConflict(last)

    def write(self, stream: StreamId, data: bytes) -> int:
        """Puts bytes at the log's end as they are: for logs that another version wrote."""
        self._log.append((stream, data))
        sequence = len(self._log)
        sequences = self._streams.setdefault(stream, [])
        if not sequences and stream.branch != SESSION_TOKEN:
            opened = self._sessions.setdefault((stream.tenant, stream.session), [])
            opened.append(f"{stream.session}-{stream.branch}")
        sequences.append(sequence)
        self._grown.set()
        self._grown = asyncio.Event()
        return sequence

    async def read(self, stream: StreamId, after: int = 0) -> Sequence[Recorded]:
        found: list[Recorded] = []
        for sequence in reversed(self._streams.get(stream, ())):
            if sequence <= after:
                break
            found.append(self._recorded(sequence))
        return found[::-1]

    async def read_at(self, sequence: int) -> Recorded | None:
        return self._recorded(sequence) if 0 < sequence <= len(self._log) else None

    async def branches(self, tenant: str, session: str) -> Sequence[str]:
        return list(self._sessions.get((tenant, session), ()))

    async def last_sequence(self) -> int:
        return len(self._log)

    async def follow(
        self, after: int = 0, *, tenant: str | None = None, session: str | None = None
    ) -> AsyncGenerator[Batch, None]:
        assert session is None or tenant is not None, "a session belongs to a tenant"
        seen, told = after, False
        while True:
            before, grown, end = seen, self._grown, len(self._log)
            recorded: list[Recorded] = []
            while seen < end and len(recorded) < BATCH:
                stream = self._log[seen][0]
                if tenant in (None, stream.tenant) and session in (None, stream.session):
                    try:
                        recorded.append(self._recorded(seen + 1))
                    except UnknownEvent:
                        if not recorded:
                            raise
                        break  # what came before it is handed out first
                seen += 1
            if recorded:
                yield Batch(recorded, seen)
            elif seen != before or not told:
                told = True
                yield Batch((), seen)
            else:
                await grown.wait()

    async def close(self) -> None:
        pass

    def _recorded(self, sequence: int) -> Recorded:
        stream, data = self._log[sequence - 1]
        return Recorded(stream, sequence, codec.decode(data))


class MemoryBlobs:
    def __init__(self) -> None:
        self._blobs: dict[str, bytes] = {}

    async def put(self, name: str, data: bytes) -> None:
        self._blobs.setdefault(name, data)

    async def get(self, name: str) -> bytes:
        return self._blobs[name]


class MemoryKeys:
    """`secret` makes the secrets; a simulation passes its own."""

    def __init__(self, secret: Callable[[], bytes] = lambda: secrets.token_bytes(32)) -> None:
        self._keys: dict[tuple[str, str], tuple[str, bytes]] = {}
        self._secret = secret

    async def create(self, tenant: str, session: str) -> tuple[str, bytes]:
        standing = self._keys.get((tenant, session))
        if standing is None:
            secret = self._secret()
            standing = self._keys[tenant, session] = (key_id(secret), secret)
        return standing

    async def get(self, tenant: str, session: str) -> tuple[str, bytes]:
        return self._keys[tenant, session]


class MemoryRequests:
    """`clock` in seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._records: dict[tuple[str, str], tuple[float, bytes]] = {}
        self._clock = clock

    async def get(self, tenant: str, key: str) -> bytes | None:
        until, record = self._records.get((tenant, key), (0.0, None))
        return record if self._clock() < until else None

    async def create(self, tenant: str, key: str, record: bytes) -> bytes:
        standing = await self.get(tenant, key)
        if standing is not None:
            return standing
        self._records[tenant, key] = (self._clock() + REQUEST_S, record)
        return record


class MemoryProviderRecords:
    def __init__(self) -> None:
        self._records: dict[tuple[str, str], bytes] = {}

    async def names(self, tenant: str) -> Sequence[str]:
        return [name for owner, name in self._records if owner == tenant]

    async def get(self, tenant: str, name: str) -> bytes | None:
        return self._records.get((tenant, name))

    async def put(self, tenant: str, name: str, record: bytes) -> None:
        self._records[tenant, name] = record

    async def remove(self, tenant: str, name: str) -> None:
        self._records.pop((tenant, name), None)


class MemoryLeases:
    """`clock` in seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._held: dict[str, tuple[str, float]] = {}
        self._clock = clock

    async def hold(self, name: str, holder: str) -> bool:
        standing, until = self._held.get(name, (holder, 0.0))
        if standing != holder and self._clock() < until:
            return False
        self._held[name] = (holder, self._clock() + LEASE_S)
        return True

    async def release(self, name: str, holder: str) -> None:
        if self._held.get(name, ("", 0.0))[0] == holder:
            del self._held[name]


class Delivery(NamedTuple):
    item: WorkItem
    delivery: int  # 1 for the first: with `item.n` the epoch of a claim


class MemoryWorkQueue:
    """At most one item per turn and n is queued or in flight, as on the real queue (P5)."""

    def __init__(self) -> None:
        self._queued: dict[tuple[str, int], tuple[WorkItem, int]] = {}
        self._in_flight: dict[tuple[str, int], tuple[WorkItem, int]] = {}
        self._filled = asyncio.Event()

    def __len__(self) -> int:
        """Items that are queued or in flight."""
        return len(self._queued) + len(self._in_flight)

    async def offer(self, tenant: str, turn_id: str, n: int) -> None:
        if (turn_id, n) not in self._in_flight:
            item = WorkItem(tenant, turn_id, n)
            self._queued.setdefault((turn_id, n), (item, 0))
            self._filled.set()

    async def take(self) -> Delivery:
        """The oldest queued item, as soon as there is one."""
        while not self._queued:
            self._filled.clear()
            await self._filled.wait()
        key = next(iter(self._queued))
        item, deliveries = self._queued.pop(key)
        self._in_flight[key] = (item, deliveries + 1)
        return Delivery(item, deliveries + 1)

    def ack(self, item: WorkItem) -> None:
        """Removes the item wherever it is: a stale worker's ack does so on the real queue, too."""
        self._queued.pop((item.turn_id, item.n), None)
        self._in_flight.pop((item.turn_id, item.n), None)

    def redeliver(self, item: WorkItem) -> None:
        """What `ack_wait` does when the worker does not report: the item is queued again."""
        key = (item.turn_id, item.n)
        if key in self._in_flight:
            self._queued[key] = self._in_flight.pop(key)
            self._filled.set()
