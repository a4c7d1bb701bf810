"""The log on JetStream: one append is one message, guarded by its subject's last sequence.

What decides anything is read from the stream's leader; the rest of a branch comes in batches
from any replica, and the chain of expected sequences shows that nothing is missing.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import ParamSpec, TypeVar

from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from plait.events import codec
from plait.events.errors import LogGone, Unavailable, VersionConflict
from plait.events.ids import SESSION_TOKEN
from plait.events.jetstream_api import (
    EXPECTED,
    PATIENCE_S,
    REQUEST_S,
    RETRY_S,
    STREAM_NOT_FOUND,
    Api,
    ApiError,
    StoredMessage,
    WrongSequence,
    patiently,
)
from plait.events.jetstream_follow import Follower
from plait.events.store import Batch, Recorded, StreamId
from plait.events.subjects import Subjects
from plait.events.types import Append

BATCH = 1_000  # messages of one direct get
BATCH_BYTES = 8 * 1024 * 1024
END_AGE_S = 0.05  # how old the log's end may be that quiet followers advance to
T = TypeVar("T")
P = ParamSpec("P")

LISTED = 100_000  # subjects in one answer of STREAM.INFO: the server's own limit


class JetStreamStore:
    """`generation` is the one that `jetstream_setup.ensure` found in the log."""

    def __init__(self, nc: Client, subjects: Subjects, generation: int) -> None:
        self._api = Api(nc)
        self._nc, self._subjects, self._generation = nc, subjects, generation
        self._log = subjects.log
        self._gets = _DirectGets(nc, self._log)
        self._end = _End(self._api, self._log)

    @property
    def generation(self) -> int:
        return self._generation

    async def append(self, stream: StreamId, append: Append, expected: int) -> int:
        data = codec.encode(append)
        subject = self._subjects.event(stream)
        headers = {EXPECTED: str(expected), **codec.headers(append)}
        try:
            sequence = await self._api.publish(subject, data, headers)
        except (WrongSequence, Unavailable):
            sequence = await self._settle(subject, data, headers, append.command_id, expected)
        self._end.saw(sequence)
        return sequence

    async def read(self, stream: StreamId, after: int = 0) -> Sequence[Recorded]:
        subject = self._subjects.event(stream)
        last = await self._ask(self._api.last, self._log, subject)
        if last is None or last.seq <= after:
            return []
        previous = last.expected()
        if previous is not None and previous <= after:
            return [Recorded(stream, last.seq, codec.decode(last.data))]
        return [
            Recorded(stream, message.seq, codec.decode(message.data))
            for message in await self._between(subject, after, last)
        ]

    async def read_at(self, sequence: int) -> Recorded | None:
        if sequence < 1:
            return None
        message = await self._ask(self._api.at, self._log, sequence)
        if message is None:
            return None
        stream = self._subjects.parse_event(message.subject)
        return Recorded(stream, sequence, codec.decode(message.data))

    async def branches(self, tenant: str, session: str) -> Sequence[str]:
        found: list[str] = []
        offset = 0
        while True:
            info = await self._ask(
                self._api.info,
                self._log,
                subjects_filter=self._subjects.events(tenant, session),
                offset=offset,
            )
            tokens = [self._subjects.parse_event(subject).branch for subject in info.state.subjects]
            found += [f"{session}-{token}" for token in tokens if token != SESSION_TOKEN]
            offset += LISTED
            if offset >= info.total:
                return found

    async def last_sequence(self) -> int:
        return await self._ask(self._end.now)

    def follow(
        self, after: int = 0, *, tenant: str | None = None, session: str | None = None
    ) -> AsyncGenerator[Batch, None]:
        assert session is None or tenant is not None, "a session belongs to a tenant"
        filtered = None if tenant is None else self._subjects.events(tenant, session)
        follower = Follower(
            self._api, self._subjects, self._generation, filtered, after, self._end.lately
        )
        return follower.batches()

    async def close(self) -> None:
        """Frees the store's own subscription; the connection is its opener's."""
        await self._gets.close()

    async def _ask(self, call: Callable[P, Awaitable[T]], *args: P.args, **kwargs: P.kwargs) -> T:
        """Patiently. Raises Unavailable, and LogGone when there is no log to ask."""
        try:
            return await patiently(call, *args, **kwargs)
        except ApiError as error:
            if error.err_code == STREAM_NOT_FOUND:
                raise LogGone(self._log) from error
            raise

    async def _settle(
        self, subject: str, data: bytes, headers: dict[str, str], command_id: str, expected: int
    ) -> int:
        """What became of an append without an answer, or with one that a retry would get, too.

        Its subject's last message on the leader tells: it is there, another one is, or neither
        yet; then it is safe to send it again, since its guard lets in only one.
        """
        loop = asyncio.get_running_loop()
        until = loop.time() + PATIENCE_S
        pause = RETRY_S[0]
        while True:
            try:
                last = await self._api.last(self._log, subject)
                sequence = last.seq if last else 0
                # A twin's append counts only where it stands exactly where ours would: after
                # others that the caller has not seen, it has to read first.
                if (
                    last
                    and last.expected() == expected
                    and codec.command_of(last.data) == command_id
                ):
                    return sequence
                if sequence != expected or loop.time() > until:
                    raise VersionConflict(sequence)
                return await self._api.publish(subject, data, headers)
            except WrongSequence:
                pass
            except Unavailable as error:
                if loop.time() > until:
                    if isinstance(error, ApiError) and error.err_code == STREAM_NOT_FOUND:
                        raise LogGone(self._log) from error
                    raise Unavailable(
                        f"the log does not answer ({error}): whether the append is in it is "
                        "unknown; the same command can be sent again"
                    ) from error
            await asyncio.sleep(pause)
            pause = min(2 * pause, RETRY_S[1])

    async def _between(
        self, subject: str, after: int, last: StoredMessage
    ) -> Sequence[StoredMessage]:
        """The subject's messages above `after` up to the leader's `last`, without gap."""
        found: list[StoredMessage] = []
        reached = after
        fast = True
        while reached < last.seq:
            batch = await self._gets.batch(subject, reached + 1) if fast else []
            for message in batch:
                previous = message.expected()
                if previous is None or (previous != reached if found else previous > reached):
                    break  # something is missing before it
                found.append(message)
                reached = message.seq
            else:
                if batch:
                    continue
            # A replica that lags, or an answer with a hole: the leader has all of it.
            fast = False
            following = await self._ask(self._api.next, self._log, reached + 1, subject)
            assert following is not None, "the leader has the last message, so also one before it"
            found.append(following)
            reached = following.seq
        return found


class _End:
    """The log's last sequence, asked for once for all quiet followers of this process."""

    def __init__(self, api: Api, log: str) -> None:
        self._api, self._log = api, log
        self._sequence = 0
        self._asked_at = float("-inf")
        self._asking = asyncio.Lock()

    def saw(self, sequence: int) -> None:
        self._sequence = max(self._sequence, sequence)

    async def now(self) -> int:
        """From the leader. Raises Unavailable."""
        asked_at = asyncio.get_running_loop().time()
        sequence = (await self._api.info(self._log)).state.last_seq
        self._asked_at = max(self._asked_at, asked_at)
        self.saw(sequence)
        return sequence

    async def lately(self) -> int:
        """Where the log ended at most END_AGE_S ago. Raises Unavailable."""
        async with self._asking:
            if asyncio.get_running_loop().time() - self._asked_at > END_AGE_S:
                await self.now()
        return self._sequence


class _DirectGets:
    """Batched direct gets: many replies to one request, on one subscription for all of them."""

    def __init__(self, nc: Client, log: str) -> None:
        self._nc, self._subject = nc, f"$JS.API.DIRECT.GET.{log}"
        self._inbox = nc.new_inbox()
        self._subscription: Subscription | None = None
        self._waiting: dict[str, tuple[list[StoredMessage], asyncio.Future[None]]] = {}
        self._asked = 0

    async def batch(self, subject: str, start: int) -> Sequence[StoredMessage]:
        """Messages of the subject from sequence `start` on, as far as a replica has them and a
        batch goes; what came until an answer failed to."""
        if self._subscription is None:
            self._subscription = await self._nc.subscribe(f"{self._inbox}.*", cb=self._receive)
        self._asked += 1
        inbox = f"{self._inbox}.{self._asked}"
        found: list[StoredMessage] = []
        done = asyncio.get_running_loop().create_future()
        self._waiting[inbox] = (found, done)
        body = (
            f'{{"seq":{start},"next_by_subj":"{subject}",'
            f'"batch":{BATCH},"max_bytes":{BATCH_BYTES}}}'
        )
        try:
            async with asyncio.timeout(REQUEST_S):
                await self._nc.publish(self._subject, body.encode(), reply=inbox)
                await done
        except TimeoutError:
            pass
        finally:
            del self._waiting[inbox]
        return found

    async def _receive(self, message: Msg) -> None:
        waiting = self._waiting.get(message.subject)
        if waiting is None:
            return
        found, done = waiting
        headers = message.headers or {}
        if "Status" in headers:  # 204: the end; 404: none; 503: no direct gets here
            if not done.done():
                done.set_result(None)
            return
        expected = headers.get(EXPECTED)
        found.append(
            StoredMessage(
                subject=headers["Nats-Subject"],
                seq=int(headers["Nats-Sequence"]),
                data=message.data,
                hdrs=f"{EXPECTED}:{expected}".encode() if expected is not None else b"",
            )
        )

    async def close(self) -> None:
        if self._subscription is not None and not self._nc.is_closed:
            await self._subscription.unsubscribe()
        self._subscription = None
