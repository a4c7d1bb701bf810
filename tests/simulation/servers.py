"""What stands outside of our processes: the log, the work queue, leases, the read models' store.

The log and its companions are the shipped in-memory ones. The work queue obeys the real one's
rules (P5): one item per turn and n, endless redelivery after `ack_wait`, a delivery count, and a
late ack that removes the item whoever runs it.
"""

import asyncio
import fnmatch
import random
from collections.abc import Callable, Sequence
from contextvars import Context
from typing import Any

import msgspec

from plait.events.codec import WorkItem
from plait.events.memory import Delivery, MemoryLeases, MemoryStore
from plait.events.settings import Settings
from plait.events.store import Recorded
from plait.projections import generations as gen
from plait.projections import view
from plait.projections.schema import Generation, Names
from plait.projections.scripts import Call

ACK_WAIT_S = 3.0
NAMES = Names(Settings().prefix)


_Hash = dict[str, msgspec.Raw]  # values are strings of any bytes: kept as they are
_batch = msgspec.msgpack.Decoder(
    tuple[str, str, list[tuple[_Hash, _Hash, dict[str, int], dict[str, int]]]]
).decode


class _Item:
    def __init__(self, work: WorkItem) -> None:
        self.work, self.deliveries, self.in_flight, self.until = work, 0, False, 0.0


class LogServer(MemoryStore):
    """The in-memory log; each append is decoded once, and shared by its readers."""

    def __init__(self) -> None:
        super().__init__()
        self._decoded: dict[int, Recorded] = {}

    def _recorded(self, sequence: int) -> Recorded:
        recorded = self._decoded.get(sequence)
        if recorded is None:
            recorded = self._decoded[sequence] = super()._recorded(sequence)
        return recorded


class WorkServer:
    def __init__(
        self, loop: asyncio.AbstractEventLoop, chance: random.Random, home: Context
    ) -> None:
        self._loop, self._chance, self._home = loop, chance, home
        self.items: dict[tuple[str, int], _Item] = {}
        self._takers: list[asyncio.Future[Delivery]] = []
        self.most_deliveries: int | None = None  # endless; a mutant bounds it

    def offer(self, work: WorkItem) -> None:
        self.items.setdefault((work.turn_id, work.n), _Item(work))
        self._hand_out()

    def ask(self) -> "asyncio.Future[Delivery]":
        """The next delivery for whoever asked."""
        taker: asyncio.Future[Delivery] = self._loop.create_future()
        self._takers.append(taker)
        self._hand_out()
        return taker

    def alive(self, work: WorkItem) -> None:
        item = self.items.get((work.turn_id, work.n))
        if item is not None and item.in_flight:
            item.until = self._loop.time() + ACK_WAIT_S

    def ack(self, work: WorkItem) -> None:
        self.items.pop((work.turn_id, work.n), None)

    def again(self, work: WorkItem) -> None:
        """Delivers an item a second time while it is in flight."""
        item = self.items.get((work.turn_id, work.n))
        if item is not None and item.in_flight:
            item.in_flight = False
            self._hand_out()

    def lose(self) -> bool:
        """The stream is lost with all that is in it."""
        lost = bool(self.items)
        self.items.clear()
        return lost

    def _hand_out(self) -> None:
        self._takers = [taker for taker in self._takers if not taker.done()]
        while self._takers:
            queued = [item for item in self.items.values() if not item.in_flight]
            if not queued:
                return
            item = queued[int(self._chance.random() * len(queued))]
            taker = self._takers.pop(int(self._chance.random() * len(self._takers)))
            item.in_flight = True
            item.deliveries += 1
            item.until = self._loop.time() + ACK_WAIT_S
            self._loop.call_later(ACK_WAIT_S, self._check, item, context=self._home)
            taker.set_result(Delivery(item.work, item.deliveries))

    def _check(self, item: _Item) -> None:
        if not item.in_flight or self.items.get((item.work.turn_id, item.work.n)) is not item:
            return
        left = item.until - self._loop.time()
        if left > 0.001:
            self._loop.call_later(left, self._check, item, context=self._home)
        elif self.most_deliveries is None or item.deliveries < self.most_deliveries:
            item.in_flight = False
            self._hand_out()


class LeaseServer:
    """While `lying`, everybody is told that they hold it."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._leases = MemoryLeases(clock)
        self.lying = False

    async def hold(self, name: str, holder: str) -> bool:
        return await self._leases.hold(name, holder) or self.lying

    async def release(self, name: str, holder: str) -> None:
        await self._leases.release(name, holder)


class ViewServer:
    """Valkey for the read models: the scripts of `projections`, done here as their Lua does."""

    def __init__(self) -> None:
        self.keys: dict[str, Any] = {}

    def flush(self) -> None:
        self.keys.clear()

    def position(self) -> int | None:
        """What readers would be told that the read models cover."""
        live = self.keys.get(NAMES.live)
        position = NAMES.position(Generation.parse(live)) if live is not None else ""
        return int(self.keys[position]) if position in self.keys else None

    def answer(self, calls: Sequence[Call]) -> list[Any]:
        return [self._one(*call) for call in calls]

    def _one(self, what: Any, names: Sequence[str], arguments: Sequence[Any]) -> Any:
        keys = self.keys
        if what is view._WRITE:
            return self._write(names, _batch(arguments[0]))
        if what is gen._ADVANCE:
            position, live, _ = names
            known, new = arguments[:2]
            stored, pointer = keys.get(position), keys.get(live)
            if stored is None:
                return [1, pointer]
            if int(stored) < known:
                return [2, pointer]
            keys[position] = b"%d" % max(int(stored), new)
            return [0, pointer]
        if what is gen._PROMOTE:
            building, live, position = names
            if position not in keys:
                return 0
            keys[live] = arguments[0].encode()
            if keys.get(building) == arguments[0].encode():
                del keys[building]
            return 1
        if what is gen._DROP:
            for name in names:
                if keys.get(name) == arguments[0].encode():
                    del keys[name]
            return 1
        match what:
            case "GET":
                return keys.get(names[0])
            case "SET":
                if "NX" in arguments and names[0] in keys:
                    return None
                keys[names[0]] = str(arguments[0]).encode()
                return b"OK"
            case "SCAN":
                return [0, [n.encode() for n in keys if fnmatch.fnmatchcase(n, arguments[2])]]
            case "UNLINK":
                gone: Any = (*names, *arguments)[0]  # bytes, as SCAN gave it
                return int(keys.pop(gone.decode(), None) is not None)
            case _:
                raise AssertionError(f"the store is asked for {what}")

    def _write(self, names: Sequence[str], batch: Any) -> bytes:
        first, last, writes = int(batch[0]), int(batch[1]), batch[2]
        meta: dict[str, Any] = self.keys.setdefault(names[0], {})
        stood = int(meta.get("position", 0))
        if stood >= first:
            return b"%d" % stood
        for name, (put, once, add, rank) in zip(names, writes, strict=True):
            held: dict[str, Any] = self.keys.setdefault(name, {})
            held.update((field, bytes(value)) for field, value in put.items())
            for field, value in once.items():
                held.setdefault(field, bytes(value))
            for field, count in add.items():
                held[field] = held.get(field, 0) + count
            held.update(rank)
        meta["position"] = last
        return b"%d" % stood
