"""Writes a batch of appends: one atomic Lua call per session, with its position in the same call.

A guard skips what is in already, so a batch may come again, overlap with another or be written
by two processes: each append takes effect once.
"""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import msgspec
from redis.asyncio import Redis

from plait.events.store import Recorded
from plait.projections.dag import Writes, creates_session, fold, fold_tenant
from plait.projections.schema import POSITION, Generation, Key, Names
from plait.projections.scripts import Call, Script, evaluate

# KEYS: META, then those that the batch touches. ARGV: packed {first, last, writes}, where writes
# has one {put, once, add, rank} per key. Answers the position that stood: the appends up to there
# were in. If that is inside the batch nothing is written, and the rest must come by itself.
_WRITE = Script("""
local batch = cmsgpack.unpack(ARGV[1])
local stood = redis.call('HGET', KEYS[1], 'position') or '0'
if tonumber(stood) >= tonumber(batch[1]) then return stood end
for i, key in ipairs(KEYS) do
  local put, once, add, rank = unpack(batch[3][i])
  local flat = {}
  for name, value in pairs(put) do
    flat[#flat + 1] = name
    flat[#flat + 1] = value
    if #flat == 1000 then
      redis.call('HSET', key, unpack(flat))
      flat = {}
    end
  end
  if #flat > 0 then redis.call('HSET', key, unpack(flat)) end
  for name, value in pairs(once) do redis.call('HSETNX', key, name, value) end
  for name, count in pairs(add) do redis.call('HINCRBY', key, name, count) end
  for name, score in pairs(rank) do redis.call('ZADD', key, score, name) end
end
redis.call('HSET', KEYS[1], 'position', batch[2])
return stood
""")
assert POSITION in _WRITE.text

PACE = 32  # appends folded, or sessions packed, before the loop goes on with what is being sent

_Group = tuple[str, str]  # tenant and session; no session: the tenant's list
_Groups = dict[_Group, list[Recorded]]
_Fold = Callable[[Recorded, Writes], None]

_encode = msgspec.msgpack.Encoder().encode


class Packed(NamedTuple):
    """A batch ready to be sent, with what it was made of: an overlap has to be cut off it."""

    generation: Generation
    sessions: _Groups
    tenants: _Groups
    calls: Sequence[Call]


class View:
    def __init__(self, redis: Redis, names: Names) -> None:
        self._redis, self._names = redis, names

    async def pack(self, generation: Generation, recorded: Iterable[Recorded]) -> Packed:
        """Folds a batch; meanwhile another one may be sent. Raises UnknownEvent."""
        sessions: _Groups = {}
        tenants: _Groups = {}
        for item in recorded:
            stream = item.stream
            sessions.setdefault((stream.tenant, stream.session), []).append(item)
            if creates_session(item):
                tenants.setdefault((stream.tenant, ""), []).append(item)
        calls = await self._calls(generation, sessions, fold)
        return Packed(generation, sessions, tenants, calls)

    async def send(self, packed: Packed) -> None:
        """Returns when all of it is in. Raises what the store raises."""
        generation, sessions, tenants, calls = packed
        await self._send(generation, sessions, fold, calls)
        # A session is listed only when it can be read.
        calls = await self._calls(generation, tenants, fold_tenant)
        await self._send(generation, tenants, fold_tenant, calls)

    async def _send(
        self, generation: Generation, groups: _Groups, folding: _Fold, calls: Sequence[Call]
    ) -> None:
        while groups:
            overlapping: _Groups = {}
            answers = await evaluate(self._redis, *calls)
            for (group, items), answer in zip(groups.items(), answers, strict=True):
                stood = int(answer)
                if items[0].sequence <= stood < items[-1].sequence:
                    overlapping[group] = [item for item in items if item.sequence > stood]
            groups = overlapping
            calls = await self._calls(generation, groups, folding)

    async def _calls(self, generation: Generation, groups: _Groups, folding: _Fold) -> list[Call]:
        calls: list[Call] = []
        steps = 0
        for (tenant, session), items in groups.items():
            writes = Writes(session)
            for item in items:
                folding(item, writes)
                steps += 1
                if steps % PACE == 0:
                    await asyncio.sleep(0)
            calls.append(self._call(generation, tenant, writes))
        return calls

    def _call(self, generation: Generation, tenant: str, writes: Writes) -> Call:
        put, once, add, rank = writes.put, writes.once, writes.add, writes.rank
        keys = list(dict.fromkeys((Key.META, *put, *once, *add, *rank)))
        none: dict[str, Any] = {}
        batch = (
            str(writes.first),
            str(writes.last),
            [
                (
                    {name: _packed(value) for name, value in put.get(key, none).items()},
                    {name: _packed(value) for name, value in once.get(key, none).items()},
                    add.get(key, none),
                    rank.get(key, none),
                )
                for key in keys
            ],
        )
        names = self._names.of(generation, tenant, writes.session, keys)
        return _WRITE, names, (_encode(batch),)


_HEADS = [bytes((0xA0 | n,)) if n < 32 else bytes((0xD9, n)) for n in range(256)]


def _packed(value: Any) -> msgspec.Raw:
    """A value's own MessagePack as a string inside the batch: Lua hands it on as it is. Its
    cmsgpack knows no binary type, so the string's head is made here."""
    data = _encode(value)
    size = len(data)
    if size < 256:
        return msgspec.Raw(_HEADS[size] + data)
    return msgspec.Raw(b"\xdb" + size.to_bytes(4, "big") + data)
