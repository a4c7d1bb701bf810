"""Reads from one whole generation, as of a minimum position: what every query rests on.

Order matters: the partition's position is read before the session, which may hold more, and the
pointer after it. A pointer that still names the generation says that nothing of it was missing.
"""

import asyncio
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
from redis.asyncio import Redis
from redis.exceptions import RedisError

from plait.events.errors import ReadModelBehind, Unavailable
from plait.events.store import Position
from plait.projections.schema import POSITION, Generation, Key, Names
from plait.projections.scripts import Call, Script, evaluate

POLL_S = (0.002, 0.02)
BUILDING = "the read models are being built: try again in a few seconds"

# KEYS: META, then those that are read. ARGV: packed list of {command, key index, arguments}.
# Reads nothing where nothing was written.
_READ = Script("""
local position = redis.call('HGET', KEYS[1], 'position')
local answers = {position}
if position then
  for i, want in ipairs(cmsgpack.unpack(ARGV[1])) do
    answers[i + 1] = redis.call(want[1], KEYS[want[2]], unpack(want[3]))
  end
end
return answers
""")
assert POSITION in _READ.text

# KEYS: position, live.
_WHERE = Script("return {redis.call('GET', KEYS[1]), redis.call('GET', KEYS[2])}")

_encode = msgspec.msgpack.Encoder().encode


class Want(NamedTuple):
    """One read command on a key, e.g. ("HMGET", Key.TEXTS, ("a", "b"))."""

    command: str
    key: Key
    arguments: tuple[str | int, ...] = ()


class Answer(NamedTuple):
    """`sequence` None: nothing was ever written there, and `values` is empty."""

    generation: Generation
    sequence: int | None
    values: Sequence[Any]

    def position(self, seq: int) -> str:
        """Where a seq of this generation's log stands."""
        return str(Position(self.generation.log, seq >> 10, seq & 1023))


class Swapped(Exception):
    """The generation that earlier reads of the same query came from is gone: ask anew."""


class Reader:
    def __init__(self, redis: Redis, names: Names, timeout_s: float) -> None:
        self._redis, self._names, self._timeout_s = redis, names, timeout_s
        self._generation: Generation | None = None
        self._waiting: dict[asyncio.Future[None], Position] = {}
        self._watching: asyncio.Task[None] | None = None
        self._pause = POLL_S[0]

    async def read(
        self,
        tenant: str,
        wants: Sequence[tuple[str, Sequence[Want]]],
        at_least: Position | None = None,
        within: Generation | None = None,
    ) -> list[Answer]:
        """Reads keys of sessions, or without a session those of the tenant's list: one answer
        each, which is of one moment.

        `within` ties several reads together: Swapped is raised when that generation is gone.
        Raises Unavailable when no generation is whole (and with `at_least` does not become so in
        time), and when the store does not answer; ReadModelBehind when `at_least` is not reached.
        """
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._read(tenant, wants, at_least, within)
        except TimeoutError:
            if self._generation is None:
                raise Unavailable(BUILDING) from None
            what = "answered" if at_least is None else f"reached position {at_least}"
            raise ReadModelBehind(
                f"the read models have not {what} within {self._timeout_s:g} s: try again"
            ) from None
        except (RedisError, OSError) as error:
            raise Unavailable(
                f"the read models do not answer ({type(error).__name__}): try again"
            ) from error

    async def _read(
        self,
        tenant: str,
        wants: Sequence[tuple[str, Sequence[Want]]],
        at_least: Position | None,
        within: Generation | None,
    ) -> list[Answer]:
        while True:
            generation = within or self._generation or await self._live(wait=at_least is not None)
            where: Call = (_WHERE, (self._names.position(generation), self._names.live), ())
            reads = [self._call(generation, tenant, session, asked) for session, asked in wants]
            before, *found, after = await evaluate(self._redis, where, *reads, where)
            if after[1] != str(generation).encode():
                if within is not None:
                    raise Swapped
                self._generation = None
                continue
            answers = [
                Answer(generation, int(values[0]), values[1:])
                if values and values[0] is not None
                else Answer(generation, None, ())
                for values in found
            ]
            if at_least is not None:
                partition = int(before[0] or 0)
                sessions = min(answer.sequence or 0 for answer in answers)
                covered = max(partition, sessions) >= at_least.sequence
                if not covered or generation.log != at_least.generation:
                    await self._reaches(at_least)
                    continue
            return answers

    def _call(
        self, generation: Generation, tenant: str, session: str, wants: Sequence[Want]
    ) -> Call:
        keys = list(dict.fromkeys((Key.META, *(want.key for want in wants))))
        packed = _encode(
            [(want.command, keys.index(want.key) + 1, want.arguments) for want in wants]
        )
        names = self._names.of(generation, tenant, session, keys)
        return _READ, names, (packed,)

    async def _live(self, *, wait: bool) -> Generation:
        while True:
            [found] = await evaluate(self._redis, ("GET", (self._names.live,), ()))
            if found is not None:
                self._generation = Generation.parse(found)
                return self._generation
            if not wait:
                raise Unavailable(BUILDING)
            await asyncio.sleep(POLL_S[1])

    async def _reaches(self, at_least: Position) -> None:
        """Returns when the partition has come there, or the generation may be another."""
        done = asyncio.get_running_loop().create_future()
        self._waiting[done] = at_least
        self._pause = POLL_S[0]
        if self._watching is None or self._watching.done():
            self._watching = asyncio.create_task(self._watch())
        try:
            await done
        finally:
            self._waiting.pop(done, None)

    async def _watch(self) -> None:
        """Looks at the partition's position for all who wait, as long as anybody does."""
        while self._waiting:
            generation, position, live = self._generation, None, None
            if generation is not None:
                place = (self._names.position(generation), self._names.live)
                try:
                    [[position, live]] = await evaluate(self._redis, (_WHERE, place, ()))
                except (RedisError, OSError) as error:
                    for done in self._waiting:
                        if not done.done():
                            done.set_exception(error)
                    return
            swapped = generation is None or live != str(generation).encode()
            for done, at_least in self._waiting.items():
                here = generation is not None and generation.log == at_least.generation
                if (swapped or (here and int(position or 0) >= at_least.sequence)) and (
                    not done.done()
                ):
                    done.set_result(None)
            if swapped:
                return  # They read anew, from the generation that is live then.
            await asyncio.sleep(self._pause)
            self._pause = min(2 * self._pause, POLL_S[1])
