"""What stands beside the log on JetStream: blobs, keys, idempotency records, providers, leases,
work items.

Each is one guarded publish and one get from the leader, so that what one process was told is
there is there for all others. All but a lease may be repeated, so a lost answer is asked for again.
"""

import asyncio
import contextlib
import math
import secrets
from collections.abc import Sequence

import msgspec

from plait.events import codec
from plait.events.codec import WorkItem
from plait.events.content import key_id
from plait.events.jetstream_api import (
    EXPECTED,
    Api,
    StoredMessage,
    SubjectFull,
    WrongSequence,
    patiently,
)
from plait.events.subjects import Subjects

PART_BYTES = 512 * 1024  # of a blob, in one message
PARTS_AT_ONCE = 8
_PARTS = "Plait-Parts"


class JetStreamBlobs:
    """A blob is one message per part; the first is written last, so a blob is whole or not there.

    Not the client's object store: that one reads through replicas that may lag, and a second
    put of the same name breaks whoever reads the first.
    """

    def __init__(self, api: Api, subjects: Subjects) -> None:
        self._api, self._subjects = api, subjects
        self._at_once = asyncio.Semaphore(PARTS_AT_ONCE)

    async def put(self, name: str, data: bytes) -> None:
        """The same name always has the same data: a second put changes nothing."""
        parts = max(1, math.ceil(len(data) / PART_BYTES))
        await asyncio.gather(*(self._put(name, part, parts, data) for part in range(1, parts)))
        await self._put(name, 0, parts, data)

    async def get(self, name: str) -> bytes:
        first = await self._part(name, 0)
        parts = int(first.header(_PARTS) or "1")
        rest = await asyncio.gather(*(self._part(name, part) for part in range(1, parts)))
        return b"".join([first.data, *(part.data for part in rest)])

    async def _put(self, name: str, part: int, parts: int, data: bytes) -> None:
        subject = self._subjects.blob_part(name, part)
        piece = data[part * PART_BYTES : (part + 1) * PART_BYTES]
        async with self._at_once:
            with contextlib.suppress(SubjectFull, WrongSequence):  # it is there
                headers = {EXPECTED: "0", _PARTS: str(parts)}
                await patiently(self._api.publish, subject, piece, headers)

    async def _part(self, name: str, part: int) -> StoredMessage:
        async with self._at_once:
            subject = self._subjects.blob_part(name, part)
            found = await patiently(self._api.last, self._subjects.blobs, subject)
        if found is None:
            raise KeyError(name)
        return found


class JetStreamKeys:
    def __init__(self, api: Api, subjects: Subjects) -> None:
        self._api, self._subjects = api, subjects

    async def create(self, tenant: str, session: str) -> tuple[str, bytes]:
        secret = secrets.token_bytes(32)
        record = msgspec.msgpack.encode((key_id(secret), secret))
        subject = self._subjects.key(tenant, session)
        try:
            await patiently(self._api.publish, subject, record, {EXPECTED: "0"})
        except WrongSequence:
            return await self.get(tenant, session)
        return _key(record)

    async def get(self, tenant: str, session: str) -> tuple[str, bytes]:
        stream = bucket_stream(self._subjects.keys)
        found = await patiently(self._api.last, stream, self._subjects.key(tenant, session))
        if found is None or not found.data:  # empty: the marker of a deleted key
            raise KeyError(session)
        return _key(found.data)


class JetStreamRequests:
    def __init__(self, api: Api, subjects: Subjects) -> None:
        self._api, self._subjects = api, subjects

    async def get(self, tenant: str, key: str) -> bytes | None:
        subject = self._subjects.request(tenant, key)
        found = await patiently(self._api.last, self._subjects.requests, subject)
        return found.data if found else None

    async def create(self, tenant: str, key: str, record: bytes) -> bytes:
        subject = self._subjects.request(tenant, key)
        while True:
            try:
                await patiently(self._api.publish, subject, record, {EXPECTED: "0"})
            except WrongSequence:
                standing = await self.get(tenant, key)
                if standing is not None:
                    return standing
                # It reached its age in between: try again, once per 24 hours at most.
            else:
                return record


class JetStreamProviderRecords:
    def __init__(self, api: Api, subjects: Subjects) -> None:
        self._api, self._subjects = api, subjects
        self._stream = bucket_stream(subjects.providers)

    async def names(self, tenant: str) -> Sequence[str]:
        everything = self._subjects.provider(tenant, "*")
        info = await patiently(self._api.info, self._stream, subjects_filter=everything)
        return [subject.rpartition(".")[2] for subject in info.state.subjects]

    async def get(self, tenant: str, name: str) -> bytes | None:
        subject = self._subjects.provider(tenant, name)
        found = await patiently(self._api.last, self._stream, subject)
        return found.data if found else None

    async def put(self, tenant: str, name: str, record: bytes) -> None:
        await patiently(self._api.publish, self._subjects.provider(tenant, name), record, {})

    async def remove(self, tenant: str, name: str) -> None:
        # Purged, not marked: the sealed key is gone.
        subject = self._subjects.provider(tenant, name)
        await patiently(
            self._api.call, f"STREAM.PURGE.{self._stream}", {"filter": subject}, msgspec.Raw
        )


class JetStreamLeases:
    """The server forgets a lease that was not renewed; a renewal is guarded by the one before."""

    def __init__(self, api: Api, subjects: Subjects) -> None:
        self._api, self._subjects = api, subjects
        self._held: dict[tuple[str, str], int] = {}

    async def hold(self, name: str, holder: str) -> bool:
        held = self._held.get((name, holder), 0)
        if await self._take(name, holder, held):
            return True
        # Lapsed, taken, or renewed with an answer that was lost.
        subject = self._subjects.lease(name)
        standing = await self._api.last(bucket_stream(self._subjects.leases), subject)
        if standing is None:
            return await self._take(name, holder, 0)
        free = standing.data in (b"", holder.encode())  # released, or ours already
        return free and await self._take(name, holder, standing.seq)

    async def release(self, name: str, holder: str) -> None:
        """Leaves a mark that anybody may replace; the server forgets it, too."""
        held = self._held.pop((name, holder), 0)
        if held:
            with contextlib.suppress(WrongSequence):  # it is no longer ours
                await self._api.publish(self._subjects.lease(name), b"", {EXPECTED: str(held)})

    async def _take(self, name: str, holder: str, expected: int) -> bool:
        self._held.pop((name, holder), None)
        try:
            self._held[name, holder] = await self._api.publish(
                self._subjects.lease(name), holder.encode(), {EXPECTED: str(expected)}
            )
        except WrongSequence:
            return False
        return True


class JetStreamWorkQueue:
    def __init__(self, api: Api, subjects: Subjects) -> None:
        self._api, self._subjects = api, subjects

    async def offer(self, tenant: str, turn_id: str, n: int) -> None:
        item = codec.encode_item(WorkItem(tenant, turn_id, n))
        with contextlib.suppress(SubjectFull):  # queued or in flight
            await patiently(self._api.publish, self._subjects.work_item(turn_id, n), item, {})


def bucket_stream(bucket: str) -> str:
    """The stream of a key-value bucket."""
    return f"KV_{bucket}"


def _key(record: bytes) -> tuple[str, bytes]:
    return msgspec.msgpack.decode(record, type=tuple[str, bytes])
