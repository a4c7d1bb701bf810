"""Which generation of the read models is read, which is being built, and how they change over.

The pointer is set only when a generation has caught up with the log once. So a missing pointer
says that there is nothing whole to read: after a flush, or before the first building.
"""

import secrets
from collections.abc import AsyncIterator
from enum import IntEnum
from typing import NamedTuple

from redis.asyncio import Redis

from plait.projections.schema import VERSION, Generation, Names
from plait.projections.scripts import Script, evaluate

BUILDING_S = 60  # a building that nobody works on is given up and swept
SCAN_COUNT = 1000


class Moved(Exception):
    """Another generation is live: follow that one."""


class Lost(Exception):
    """The store lost this generation, or a part of it, or went back in time."""


class _State(IntEnum):
    KEPT = 0
    GONE = 1
    BEHIND = 2


# KEYS: position, live, building. ARGV: the position as the writer knows it, the new one, the
# generation, how long its building stays registered.
_ADVANCE = Script("""
local stored = redis.call('GET', KEYS[1])
local live = redis.call('GET', KEYS[2])
if not stored then return {1, live} end
if tonumber(stored) < tonumber(ARGV[1]) then return {2, live} end
if tonumber(stored) < tonumber(ARGV[2]) then redis.call('SET', KEYS[1], ARGV[2]) end
if live ~= ARGV[3] and redis.call('GET', KEYS[3]) == ARGV[3] then
  redis.call('EXPIRE', KEYS[3], ARGV[4])
end
return {0, live}
""")

# KEYS: building, live, position. ARGV: the generation. A generation that was lost meanwhile must
# not become live.
_PROMOTE = Script("""
if redis.call('EXISTS', KEYS[3]) == 0 then return 0 end
redis.call('SET', KEYS[2], ARGV[1])
if redis.call('GET', KEYS[1]) == ARGV[1] then redis.call('DEL', KEYS[1]) end
return 1
""")

# KEYS: building, live. ARGV: the generation.
_DROP = Script("""
for _, key in ipairs(KEYS) do
  if redis.call('GET', key) == ARGV[1] then redis.call('DEL', key) end
end
return 1
""")


class Place(NamedTuple):
    """Up to where a generation has been written, and whether readers read it."""

    generation: Generation
    sequence: int
    live: bool


class Generations:
    def __init__(self, redis: Redis, names: Names) -> None:
        self._redis, self._names = redis, names

    async def current(self, log: int) -> Place:
        """Where to go on writing: the live generation of this log, else the one being built,
        else a new one."""
        live = await self._read(self._names.live)
        if live is not None and live.log == log:
            sequence = await self.position(live)
            if sequence is not None:
                return Place(live, sequence, live=True)
            await self.drop(live)
        return await self.begin(log)

    async def begin(self, log: int) -> Place:
        """Joins the generation that is being built from this log, or begins one."""
        building = await self._read(self._names.building)
        if building is not None and building.log == log:
            sequence = await self.position(building)
            if sequence is not None:
                return Place(building, sequence, live=False)
        if building is not None:
            await self.drop(building)
        fresh = Generation(log, secrets.token_hex(4))
        # The position comes first: whoever joins must find it.
        _, first = await evaluate(
            self._redis,
            ("SET", (self._names.position(fresh),), (0,)),
            ("SET", (self._names.building,), (str(fresh), "NX", "EX", BUILDING_S)),
        )
        if first:
            return Place(fresh, 0, live=False)
        return await self.begin(log)  # Somebody else was quicker: join.

    async def advance(self, place: Place, sequence: int) -> Place:
        """Moves the position on. Raises Moved and Lost."""
        names = self._names
        keys = (names.position(place.generation), names.live, names.building)
        arguments = (place.sequence, sequence, str(place.generation), BUILDING_S)
        [[state, pointer]] = await evaluate(self._redis, (_ADVANCE, keys, arguments))
        live = None if pointer is None else Generation.parse(pointer)
        if state == _State.GONE:
            await self.drop(place.generation)
            raise Lost(f"generation {place.generation} is gone")
        if state == _State.BEHIND:
            raise Lost(f"generation {place.generation} was set back")
        if place.live and live != place.generation:
            raise Moved(f"{live} is live, no longer {place.generation}")
        return place._replace(sequence=sequence, live=live == place.generation)

    async def promote(self, place: Place) -> Place:
        """Readers read this generation from now on. Raises Lost."""
        names, generation = self._names, place.generation
        keys = (names.building, names.live, names.position(generation))
        [done] = await evaluate(self._redis, (_PROMOTE, keys, (str(generation),)))
        if not done:
            raise Lost(f"generation {generation} is gone")
        return place._replace(live=True)

    async def drop(self, generation: Generation) -> None:
        """Takes back what says that this generation is whole, or will be."""
        keys = (self._names.building, self._names.live)
        await evaluate(self._redis, (_DROP, keys, (str(generation),)))

    async def sweep(self) -> int:
        """Removes what belongs to older versions, and to generations neither live nor building.
        Returns how many keys. The server frees them in the background."""
        names, removed = self._names, 0
        kept = {str(await self._read(key)) for key in (names.live, names.building)}
        pattern = _escaped(names.prefix) + ":*"
        unlinking: list[bytes] = []
        async for name in self._scan(pattern):
            text = name.decode()
            version, generation = names.version_of(text), names.generation_of(text)
            if version is None or version > VERSION:
                continue  # Not ours to judge.
            if version == VERSION and (generation is None or generation in kept):
                continue
            unlinking.append(name)
            if len(unlinking) == SCAN_COUNT:
                removed += await self._unlink(unlinking)
        return removed + await self._unlink(unlinking)

    async def position(self, generation: Generation) -> int | None:
        [found] = await evaluate(self._redis, ("GET", (self._names.position(generation),), ()))
        return None if found is None else int(found)

    async def live(self) -> Generation | None:
        return await self._read(self._names.live)

    async def _read(self, key: str) -> Generation | None:
        [found] = await evaluate(self._redis, ("GET", (key,), ()))
        return None if found is None else Generation.parse(found)

    async def _scan(self, pattern: str) -> AsyncIterator[bytes]:
        cursor = 0
        while True:
            arguments = (cursor, "MATCH", pattern, "COUNT", SCAN_COUNT)
            [[cursor, names]] = await evaluate(self._redis, ("SCAN", (), arguments))
            for name in names:
                yield name
            if cursor == 0:
                return

    async def _unlink(self, keys: list[bytes]) -> int:
        """One by one in a pipeline: they are of many slots. Empties the list."""
        if not keys:
            return 0
        removed = await evaluate(self._redis, *(("UNLINK", (), (key,)) for key in keys))
        keys.clear()
        return sum(removed)


def _escaped(text: str) -> str:
    return "".join(f"\\{char}" if char in "*?[]\\" else char for char in text)
