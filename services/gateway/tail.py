"""The gateway's one reader of the log, however many clients listen.

What it sees wakes the calls that wait, and feeds the event streams.
"""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import aclosing, contextmanager

import structlog

from plait.events.errors import Retryable, Unavailable
from plait.events.store import Batch, EventStore, Recorded
from plait.events.types import MessageRefused, TurnEnded, WaitEnded

WAITING = 50_000  # calls that may wait at once
LISTENERS = 10_000  # event streams that may be open at once
QUEUE = 256  # appends that a slow reader may be behind
RETRY_S = 0.5

STOPPING = "the server is stopping"

log = structlog.get_logger("gateway")


class Subscription:
    """The appends of one session after sequence `joined`, until it is `ended`."""

    def __init__(self, joined: int) -> None:
        self.joined = joined
        self.ended: str | None = None
        self.stopped = False  # with the server
        self._queue: asyncio.Queue[Recorded | None] = asyncio.Queue(QUEUE)

    async def next(self, timeout_s: float) -> Recorded | None:
        """None when nothing came in time, when it was woken, or has ended and all was read."""
        if self.ended is not None and self._queue.empty():
            return None
        try:
            async with asyncio.timeout(timeout_s):
                return await self._queue.get()
        except TimeoutError:
            return None

    @property
    def over(self) -> bool:
        return self.ended is not None and self._queue.empty()

    def offer(self, recorded: Recorded) -> None:
        if self._queue.full():
            self.ended = "you read too slowly"
        else:
            self._queue.put_nowait(recorded)

    @property
    def idle(self) -> bool:
        """Everything that came was read."""
        return self._queue.empty()

    def wake(self) -> None:
        """Lets a reader that waits look around: `next` gives it None."""
        if self._queue.empty():
            self._queue.put_nowait(None)

    def stop(self, why: str) -> None:
        self.ended, self.stopped = why, True
        self.wake()


class Tail:
    def __init__(self, store: EventStore, see: Callable[[Recorded], None] | None = None) -> None:
        """`see` gets every append before any listener does."""
        self._see = see
        self.seen = 0  # everything up to this sequence was handed out
        self._store = store
        self._listening: dict[tuple[str, str], set[Subscription]] = {}
        self._listeners = 0
        self._waiting: dict[str, set[asyncio.Future[int]]] = {}
        self._waiters = 0
        self._stopping = False

    @property
    def waiters(self) -> int:
        return self._waiters

    @property
    def listeners(self) -> int:
        return self._listeners

    async def start(self) -> None:
        """Begins at the log's present end. Raises Unavailable."""
        self.seen = await self._store.last_sequence()

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            try:
                async with aclosing(self._store.follow(self.seen)) as batches:
                    async for batch in batches:
                        self._hand_out(batch)
            except Retryable as error:
                log.warning("the tail lost the log for a moment", why=str(error))
                await asyncio.sleep(RETRY_S)

    def stop(self) -> None:
        """Ends every stream and every wait, so that the server can close."""
        self._stopping = True
        for subscriptions in self._listening.values():
            for subscription in subscriptions:
                subscription.stop(STOPPING)
        for waiting in self._waiting.values():
            for future in waiting:
                future.cancel()

    @contextmanager
    def watch(self, *names: str) -> Iterator[asyncio.Future[int]]:
        """The sequence of the append that ends the turn or the wait of that id, or that refuses
        the node of that id. Cancelled when the server stops."""
        if self._stopping or self._waiters >= WAITING:
            raise Unavailable("too many calls wait here already: try again, or poll")
        future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._waiters += 1
        for name in names:
            self._waiting.setdefault(name, set()).add(future)
        try:
            yield future
        finally:
            self._waiters -= 1
            future.cancel()
            for name in names:
                waiting = self._waiting[name]
                waiting.discard(future)
                if not waiting:
                    del self._waiting[name]

    def check_room(self) -> None:
        """Raises Unavailable when no more event streams may be opened."""
        if self._stopping or self._listeners >= LISTENERS:
            raise Unavailable("too many event streams are open here: try again")

    def listen(self, tenant: str, session: str) -> Subscription:
        """Everything of the session that the tail hands out from here on. `leave` it."""
        self._listeners += 1
        subscription = Subscription(self.seen)
        if self._stopping:
            subscription.stop(STOPPING)
        self._listening.setdefault((tenant, session), set()).add(subscription)
        return subscription

    def leave(self, tenant: str, session: str, subscription: Subscription) -> None:
        self._listeners -= 1
        listening = self._listening[tenant, session]
        listening.discard(subscription)
        if not listening:
            del self._listening[tenant, session]

    def _hand_out(self, batch: Batch) -> None:
        # Without an await: a subscription begins between two batches, never inside one.
        for recorded in batch.recorded:
            if self._see is not None:
                self._see(recorded)
            if self._listening:
                stream = recorded.stream
                for subscription in self._listening.get((stream.tenant, stream.session), ()):
                    if subscription.ended is None:
                        subscription.offer(recorded)
            if self._waiting:
                self._wake(recorded)
        self.seen = batch.up_to

    def _wake(self, recorded: Recorded) -> None:
        for event in recorded.append.events:
            match event:
                case TurnEnded(turn_id=name):
                    pass
                case WaitEnded(wait_id=name):
                    pass
                case MessageRefused(node_id=name):
                    pass
                case _:
                    continue
            for future in self._waiting.get(name, ()):
                if not future.done():
                    future.set_result(recorded.sequence)
