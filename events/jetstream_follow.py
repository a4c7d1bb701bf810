"""Follows the log: a pull consumer in the server's memory, replaced whenever it is lost.

Two things make it quick: a callback subscription instead of one wait per message, and enough
requested ahead that the server never waits for us. What is requested bounds what is buffered.
"""

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable
from uuid import uuid4

import msgspec
from nats import errors as nats_errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from plait.events import codec
from plait.events.errors import Misconfigured, Unavailable, UnknownEvent
from plait.events.jetstream_api import Api
from plait.events.store import Batch, Recorded, StreamId
from plait.events.subjects import GENERATION, Subjects

BATCH = 512  # appends handed out at once
AHEAD = 4_000  # appends requested and not yet handed out
AHEAD_BYTES = 16 * 1024 * 1024
EXPIRES_S = 30.0  # of one request
HEARTBEAT_S = 5.0
SILENCE_S = 12.0  # without even a heartbeat: the consumer is lost
ABANDONED_S = 60.0  # the server removes a consumer that nobody asks for so long
QUIET_S = 0.05  # without an append: ask how far the log goes
FIRST_QUIET_S = 0.01  # likewise, the first time
CHECK_S = 0.5  # where each append tells how far the log goes: only to see that all is well
RETRY_S = (0.05, 2.0)  # the first pause before a lost consumer is replaced, and the longest

STREAMS_KEPT = 10_000  # parsed subjects

_Message = tuple[bytes, bytes, bytes]  # subject, reply, data

_log = logging.getLogger(__name__)


class Follower:
    """One `follow`: what it has seen, over all the consumers that it needed for that."""

    def __init__(
        self,
        api: Api,
        subjects: Subjects,
        generation: int,
        filtered: str | None,
        after: int,
        end_lately: Callable[[], Awaitable[int]],
    ) -> None:
        self._api, self._subjects, self._generation = api, subjects, generation
        self._filter = filtered or subjects.events()
        self._all = filtered is None
        self._seen = after
        self._found = 0  # the last append that we got ourselves
        self._told = False  # that everything up to the log's end has been seen
        self._end_lately = end_lately
        self._losses = 0  # of consumers, without an append or a quiet moment in between
        self._streams: dict[bytes, StreamId] = {}
        self._consumer: _Consumer | None = None

    async def batches(self) -> AsyncGenerator[Batch, None]:
        try:
            while True:
                consumer = self._consumer or await self._connect()
                messages = await consumer.take(self._quiet_s())
                if messages:
                    self._losses = 0
                    recorded, error = self._decode(consumer, messages)
                    if recorded:
                        yield Batch(recorded, self._seen)
                    if error:
                        raise error
                elif consumer.lost:
                    _log.warning("following %s: %s", self._filter, consumer.lost)
                    await self._drop()
                    if self._losses:  # one after the other: something keeps removing them
                        await asyncio.sleep(min(RETRY_S[0] * 2**self._losses, RETRY_S[1]))
                    self._losses = min(self._losses + 1, 10)
                else:
                    self._losses = 0
                    end = await self._reached()
                    if end is not None:
                        self._seen, self._told = end, True
                        yield Batch((), end)
        finally:
            await self._drop()

    def _decode(
        self, consumer: "_Consumer", messages: list[_Message]
    ) -> tuple[list[Recorded], UnknownEvent | None]:
        recorded: list[Recorded] = []
        seen, decode = self._seen, codec.decode
        try:
            for subject, reply, data in messages:
                # $JS.ACK.<stream>.<consumer>.<deliveries>.<sequence>.<consumer's>.<time>.<pending>
                # and with a domain and an account in front, and one more token behind
                tokens = reply.split(b".")
                at = 5 if len(tokens) == 9 else 7
                sequence = int(tokens[at])
                consumer.received += 1
                if int(tokens[at + 1]) != consumer.received:
                    consumer.fail("a message did not arrive")
                    break
                if sequence > seen:
                    stream = self._streams.get(subject) or self._stream(subject)
                    recorded.append(Recorded(stream, sequence, decode(data)))
                    seen = sequence
        except UnknownEvent as error:
            return recorded, error
        finally:
            self._seen = self._found = seen
        return recorded, None

    def _stream(self, subject: bytes) -> StreamId:
        if len(self._streams) >= STREAMS_KEPT:
            self._streams.clear()
        stream = self._streams[subject] = self._subjects.parse_event(subject.decode())
        return stream

    def _quiet_s(self) -> float:
        if not self._told:
            return FIRST_QUIET_S
        return CHECK_S if self._all else QUIET_S

    async def _reached(self) -> int | None:
        """The log's end, when nothing of ours is left before it and that is news."""
        if self._all and self._told:
            return None  # each append tells it by itself
        try:
            end = await self._end_lately()
            if end <= self._seen:
                return None if self._told else self._seen
            if await self._api.next(self._subjects.log, self._seen + 1, self._filter) is None:
                return end
        except Unavailable:
            pass  # the consumer's silence will tell
        return None

    async def _connect(self) -> "_Consumer":
        pause = RETRY_S[0]
        while True:
            try:
                if self._found:
                    await self._check_same_log()
                consumer = _Consumer(self._api, self._subjects.log)
                self._consumer = consumer
                await consumer.start(self._filter, self._seen + 1)
                return consumer
            except (Unavailable, nats_errors.Error) as error:
                await self._drop()
                if self._api.nc.is_closed:
                    raise Unavailable("the connection to NATS is closed") from error
                _log.warning("following %s: %s", self._filter, error)
            await asyncio.sleep(pause)
            pause = min(2 * pause, RETRY_S[1])

    async def _check_same_log(self) -> None:
        info = await self._api.info(self._subjects.log)
        if info.metadata.get(GENERATION) != str(self._generation):
            raise Misconfigured(
                "the log was restored or made anew while this process followed it: restart it"
            )
        if info.state.last_seq < self._found:
            raise Misconfigured(
                f"the log ends at {info.state.last_seq}, but {self._found} was read from it: "
                "acknowledged appends are lost. Restore it from a backup or another replica"
            )

    async def _drop(self) -> None:
        consumer, self._consumer = self._consumer, None
        if consumer is not None:
            await consumer.close()


class FollowingClient(Client):
    """A client that hands appends to their follower as they come off the wire.

    The library's own way (parsing headers that nobody reads, a message object, a queue, a task)
    takes twice the time of all the rest. It remains the way of everything else, and of appends
    as well, should a later version of the library no longer pass here.
    """

    def __init__(self) -> None:
        super().__init__()
        self.direct: dict[int, Callable[[bytes, bytes, bytes], None]] = {}

    async def _process_msg(
        self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: bytes
    ) -> None:
        direct = self.direct.get(sid)
        if direct is None or not reply:
            await super()._process_msg(sid, subject, reply, data, headers)
        else:
            direct(subject, reply, data)


class _Consumer:
    """One consumer on the server, and what has arrived from it."""

    def __init__(self, api: Api, log: str) -> None:
        self._api, self._nc = api, api.nc
        self._log, self._name = log, f"follow-{uuid4().hex}"
        self._inbox = self._nc.new_inbox()
        self._subscription: Subscription | None = None
        self._arrived: deque[_Message] = deque()
        self._arriving = asyncio.Event()
        self._requested = 0  # appends that the server may still send
        self._connection = self._nc.stats["reconnects"]
        self._heard_at = asyncio.get_running_loop().time()
        self.received = 0  # the consumer's own count of what it delivered
        self.lost = ""  # why, when it is

    async def start(self, subject: str, sequence: int) -> None:
        """Raises Unavailable."""
        self._subscription = await self._nc.subscribe(
            self._inbox,
            cb=self._receive,
            # What is requested is the bound: the client must not drop anything on its own.
            pending_msgs_limit=0,
            pending_bytes_limit=0,
        )
        config = {
            "name": self._name,
            "filter_subject": subject,
            "deliver_policy": "by_start_sequence",
            "opt_start_seq": sequence,
            "ack_policy": "none",
            "mem_storage": True,
            "num_replicas": 1,
            "inactive_threshold": _ns(ABANDONED_S),
        }
        await self._api.call(
            f"CONSUMER.CREATE.{self._log}.{self._name}.{subject}",
            {"stream_name": self._log, "config": config, "action": "create"},
            msgspec.Raw,
        )
        if isinstance(self._nc, FollowingClient):
            self._nc.direct[self._subscription._id] = self._append
        await self._request()

    async def take(self, quiet_s: float) -> list[_Message]:
        """What has arrived, at most BATCH; nothing when nothing arrives for so long."""
        await self._request()
        if not self._arrived and not self.lost:
            self._arriving.clear()
            try:
                async with asyncio.timeout(quiet_s):
                    await self._arriving.wait()
            except TimeoutError:
                self._check()
        arrived = self._arrived
        if arrived:
            self._heard_at = asyncio.get_running_loop().time()
        return [arrived.popleft() for _ in range(min(len(arrived), BATCH))]

    async def _request(self) -> None:
        buffered = len(self._arrived)
        if self._requested + buffered > AHEAD // 2 or self.lost:
            return
        batch = AHEAD - self._requested - buffered
        body = {
            "batch": batch,
            "max_bytes": max(AHEAD_BYTES * batch // AHEAD, 2 * self._nc.max_payload),
            "expires": _ns(EXPIRES_S),
            "idle_heartbeat": _ns(HEARTBEAT_S),
        }
        self._requested += batch
        self._heard_at = asyncio.get_running_loop().time()
        await self._nc.publish(
            f"$JS.API.CONSUMER.MSG.NEXT.{self._log}.{self._name}",
            msgspec.json.encode(body),
            reply=self._inbox,
        )

    async def _receive(self, message: Msg) -> None:
        if message.reply:
            self._append(message.subject.encode(), message.reply.encode(), message.data)
        else:
            self._heard_at = asyncio.get_running_loop().time()
            self._status(message.headers or {})
            self._arriving.set()

    def _append(self, subject: bytes, reply: bytes, data: bytes) -> None:
        self._arrived.append((subject, reply, data))
        self._requested -= 1
        if not self._arriving.is_set():
            self._arriving.set()

    def _status(self, headers: dict[str, str]) -> None:
        status, description = headers.get("Status"), headers.get("Description", "")
        if status == "100":  # a heartbeat
            return
        pending = headers.get("Nats-Pending-Messages")
        ended = status == "408" or "MaxBytes" in description or "Completed" in description
        if ended and pending is not None:
            self._requested -= int(pending)  # of the request that ended
        else:
            self.lost = f"the consumer ended: {status} {description}"

    def fail(self, why: str) -> None:
        """Nothing that arrived from here on counts."""
        self.lost = why
        self._arrived.clear()

    def _check(self) -> None:
        if self._nc.is_closed:
            self.lost = "the connection is closed"
        elif self._nc.stats["reconnects"] != self._connection:
            self.lost = "the connection was lost"  # and with it what was requested on it
        elif asyncio.get_running_loop().time() - self._heard_at > SILENCE_S:
            self.lost = "the consumer is silent"

    async def close(self) -> None:
        if self._subscription is None:
            return
        if isinstance(self._nc, FollowingClient):
            self._nc.direct.pop(self._subscription._id, None)
        if self._nc.is_closed:
            return
        try:
            await self._subscription.unsubscribe()
            # No answer is waited for: if it gets lost, the server forgets the consumer by itself.
            await self._nc.publish(f"$JS.API.CONSUMER.DELETE.{self._log}.{self._name}")
        except nats_errors.Error:
            _log.debug("could not remove consumer %s", self._name, exc_info=True)


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)
