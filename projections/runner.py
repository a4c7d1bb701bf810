"""Follows the log and writes the read models: position → consume → fold → write → position.

The position is written after what it covers, and read again after every failure. So nothing is
skipped, and what comes again is skipped by the guard in the view. When the store lost its data the
position is gone with it: a new generation is built, and readers wait for it.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence

import structlog
from redis.asyncio import Redis
from redis.exceptions import RedisError

from plait.events.errors import Retryable
from plait.events.settings import Settings
from plait.events.store import Batch, EventStore, Recorded
from plait.events.types import Content
from plait.projections.generations import Generations, Lost, Moved, Place
from plait.projections.schema import Names
from plait.projections.view import Packed, View

BATCH_APPENDS = 512  # a longer call blocks the store for its readers
BATCH_BYTES = 4 * 1024 * 1024
WATCH_S = 0.5  # how often the generation is looked after while the log is quiet
BACKOFF_S = (0.05, 5.0)

_log = structlog.get_logger(__name__)


class Runner:
    """One follower of the whole log. Several at once do no harm."""

    def __init__(self, store: EventStore, redis: Redis, settings: Settings) -> None:
        names = Names(settings.prefix)
        self._store = store
        self._view = View(redis, names)
        self._generations = Generations(redis, names)

    async def run(self) -> None:
        """Until it is cancelled. Raises UnknownEvent: this process is too old for the log."""
        pause, longest = BACKOFF_S
        while True:
            try:
                place = await self._generations.current(self._store.generation)
                async with (
                    contextlib.aclosing(self._places(place)) as places,
                    self._sweeping() as sweep,
                ):
                    async for reached in places:
                        pause = BACKOFF_S[0]
                        if reached.live and not sweep.is_set():
                            _log.info("read models are whole", generation=str(place.generation))
                            sweep.set()
            except (Lost, Moved) as change:
                _log.warning("read models changed", why=str(change))
            except (RedisError, Retryable, OSError) as error:
                _log.warning(
                    "read models wait", why=type(error).__name__, text=str(error)[:200], s=pause
                )
                await asyncio.sleep(pause)
                pause = min(2 * pause, longest)

    async def build(self) -> Place:
        """Builds a generation beside the live one until it has caught up and is live itself.
        Raises Lost, UnknownEvent, and what log and store raise."""
        place = await self._generations.begin(self._store.generation)
        async with contextlib.aclosing(self._places(place)) as places:
            async for moved in places:
                if moved.live:
                    return moved
        raise AssertionError("the log is followed without end")

    @contextlib.asynccontextmanager
    async def _sweeping(self) -> AsyncIterator[asyncio.Event]:
        """Removes what is no longer read, beside the following, once the event is set."""
        begin = asyncio.Event()

        async def sweep() -> None:
            await begin.wait()
            try:
                removed = await self._generations.sweep()
            except (RedisError, OSError) as error:  # The next start sweeps again.
                _log.warning("old read models stay", why=type(error).__name__)
            else:
                if removed:
                    _log.info("old read models are removed", keys=removed)

        task = asyncio.create_task(sweep())
        try:
            yield begin
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _places(self, place: Place) -> AsyncGenerator[Place, None]:
        """Each place that the generation reaches: live once it has come to what was the log's
        end at the start. A batch is fetched and folded while the one before it is written."""
        end = 0 if place.live else await self._store.last_sequence()
        place = await self._promote(place, end)
        yield place
        async with contextlib.aclosing(self._store.follow(place.sequence)) as batches:
            coming = asyncio.ensure_future(anext(batches))
            writing: asyncio.Task[Place] | None = None
            try:
                while True:
                    busy = {coming} if writing is None else {coming, writing}
                    done, _ = await asyncio.wait(
                        busy, timeout=WATCH_S, return_when=asyncio.FIRST_COMPLETED
                    )
                    if not done:
                        place = await self._generations.advance(place, place.sequence)
                        yield place
                        continue
                    if writing in done:
                        place = await self._promote(await writing, end)
                        writing = None
                        yield place
                    if coming not in done:
                        continue
                    if writing is not None and coming.exception() is not None:
                        await writing  # What came before the failure gets in.
                    batch = coming.result()
                    coming = asyncio.ensure_future(anext(batches))
                    for recorded, up_to in _bounded(batch):
                        packed = await self._view.pack(place.generation, recorded)
                        if writing is not None:
                            place = await writing
                        writing = asyncio.create_task(self._write(place, packed, up_to))
            finally:
                ending = [coming] if writing is None else [coming, writing]
                for task in ending:
                    task.cancel()
                await asyncio.gather(*ending, return_exceptions=True)

    async def _write(self, place: Place, packed: Packed, up_to: int) -> Place:
        await self._view.send(packed)
        return await self._generations.advance(place, up_to)

    async def _promote(self, place: Place, end: int) -> Place:
        if place.live or place.sequence < end:
            return place
        return await self._generations.promote(place)


def _bounded(batch: Batch) -> Iterator[tuple[Sequence[Recorded], int]]:
    """Parts of a batch that are not too long, each with the position that it reaches."""
    start, size = 0, 0
    for index, item in enumerate(batch.recorded):
        size += _size(item)
        if index + 1 - start == BATCH_APPENDS or size >= BATCH_BYTES:
            yield batch.recorded[start : index + 1], item.sequence
            start, size = index + 1, 0
    yield batch.recorded[start:], batch.up_to


def _size(item: Recorded) -> int:
    """Bytes of the texts in an append: what is not bounded by its number of events."""
    size = 0
    for event in item.append.events:
        for name in ("content", "text", "result"):
            content = getattr(event, name, None)
            if isinstance(content, Content) and content.data is not None:
                size += len(content.data)
    return size
