"""The processes of a Plait: each with its own handler, caches and clock, and nothing that it
shares with another but what goes over its wires. Killed, it starts anew from the log alone."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, TypeVar

from plait.events.codec import WorkItem
from plait.events.content import Contents
from plait.events.errors import Retryable, Unavailable
from plait.events.handler import Handler
from plait.events.memory import MemoryProviderRecords
from plait.events.providers import TenantProviders
from plait.events.transcripts import Transcripts
from plait.events.vault import Vault
from plait.projections.runner import Runner
from plait.services.gateway.commands import Commands
from plait.services.replies.service import Replies
from plait.services.turns.runner import TurnRunner
from tests.simulation.loop import Lane
from tests.simulation.models import Actor, tools
from tests.simulation.wires import (
    BlobWire,
    KeyWire,
    LeaseWire,
    RequestWire,
    StoreWire,
    ViewWire,
    WorkWire,
)

if TYPE_CHECKING:
    from tests.simulation.world import World

T = TypeVar("T")
SLOTS = 3  # turns at once in one worker
ALIVE_S = 1.0
START_MS = 1_700_000_000_000


class Process:
    """`kind` says what runs in it; `life` counts how often it was started."""

    def __init__(self, world: "World", kind: str, nth: int, life: int) -> None:
        self.world, self.kind, self.nth, self.life = world, kind, nth, life
        self.name = f"{kind}-{nth}.{life}"
        self.chance = random.Random(f"{world.plan.seed}/{self.name}")
        self.lane = Lane(self.name)
        self.dead = False
        self.calls = 0
        self.cut_until = 0.0
        self.followed = 0
        self._skew_ms = int((self.chance.random() * 2 - 1) * world.plan.skew_s * 1000)
        self.store = StoreWire(self)
        self.contents = Contents(KeyWire(self), BlobWire(self), world.plan.limits)
        self.handler: Handler | None = None  # until it has started
        self.commands: Commands | None = None
        self.ready = asyncio.Event()
        self.replies: Replies | None = None
        start = {
            "gateway": self._gateway,
            "turns": self._turns,
            "replies": self._replies,
            "projections": self._projections,
        }[kind]
        self.main = world.loop.start(self.lane, self._supervised(start))

    def now(self) -> int:
        """This process's clock in ms: early or late by its own amount."""
        return START_MS + int(self.world.loop.time() * 1000) + self._skew_ms

    # -- what can go wrong -------------------------------------------------------------------

    def check(self) -> None:
        if self.dead:
            raise asyncio.CancelledError

    def wire_s(self) -> float:
        return self.chance.random() * self.world.plan.wire_s

    def fate(self, what: str) -> str | None:
        """What becomes of the next call; None: it goes well."""
        self.check()
        self.calls += 1
        drawn = self.chance.random()
        if not self.world.faulty:
            return None
        if self.world.loop.time() < self.cut_until:
            return "cut"
        kind = self._kind(drawn)
        if kind is None or not self.world.strikes(
            kind, f"{self.name}@{self.calls}", f"{self.name} {kind} {what}"
        ):
            return None
        if kind == "cut":
            self.cut_until = self.world.loop.time() + self.chance.random() * 12
        return kind

    def _kind(self, drawn: float) -> str | None:
        for kind, rate in self.world.plan.rates:
            drawn -= rate
            if drawn < 0:
                return kind
        return None

    async def pause(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
        self.check()

    async def freeze(self) -> None:
        """As SIGSTOP does: its timers go on and are found past when it wakes."""
        seconds = self.chance.choice((0.5, 2.0, 5.0, 14.0))
        self.world.loop.freeze(self.lane)
        self.world.home_later(seconds, lambda: self.world.loop.thaw(self.lane))
        await self.pause(0)

    def kill(self) -> None:
        """As SIGKILL does: whatever its tasks still do has no effect."""
        if self.dead:
            return
        self.dead = True
        for task in self.lane.living():
            task.cancel()
        self.world.died(self)

    # -- what runs ---------------------------------------------------------------------------

    async def _supervised(self, start: Callable[[], Awaitable[None]]) -> None:
        try:
            await start()
        except Exception as error:  # noqa: BLE001 - whatever ends a process
            if not _retryable(error):
                self.world.fail("processes_live", f"{self.name} died of {error!r}", error)
            self.world.trace.note(self.world.loop.time(), self.name, f"ends: {error!r}")
        self.kill()

    def _new_handler(self, store: StoreWire) -> Handler:
        handler = Handler(store, self.world.plan.limits, cached=self.world.plan.cached)
        self.handler = handler
        return handler

    async def _gateway(self) -> None:
        self.commands = Commands(
            self._new_handler(self.store),
            self.contents,
            RequestWire(self),
            TenantProviders(MemoryProviderRecords(), Vault(self.world.plan.settings.secret)),
            self.world.plan.settings,
            self.now,
        )
        self.ready.set()
        await asyncio.Event().wait()

    async def _replies(self) -> None:
        world = self.world
        self.replies = Replies(
            self.store,
            self._new_handler(self.store),
            self.contents,
            WorkWire(self),
            LeaseWire(self),
            world.plan.settings,
            self.name,
            self.now,
        )
        await self.replies.run()

    async def _projections(self) -> None:
        runner = Runner(self.store, ViewWire(self), self.world.plan.settings)  # type: ignore[arg-type]
        await runner.run()

    async def _turns(self) -> None:
        world, queue = self.world, WorkWire(self)
        transcripts = Transcripts(self.store, self.contents, cached_bytes=world.plan.cached * 5_000)
        runner = TurnRunner(
            self._new_handler(transcripts.watching()),  # type: ignore[arg-type]
            transcripts,
            self.contents,
            {"offline:echo": Actor(self), "offline:demo": Actor(self)},
            tools(self),
            world.plan.settings,
            self.name,
            self.now,
        )
        slots = asyncio.Semaphore(SLOTS)
        while True:
            await slots.acquire()
            work, delivery = await queue.take()
            asyncio.get_running_loop().create_task(self._turn(runner, queue, slots, work, delivery))

    async def _turn(
        self,
        runner: TurnRunner,
        queue: WorkWire,
        slots: asyncio.Semaphore,
        work: WorkItem,
        delivery: int,
    ) -> None:
        alive = asyncio.get_running_loop().create_task(_alive(queue, work))
        try:
            if await runner.run(work.tenant, work.turn_id, work.n, delivery):
                await queue.ack(work)
        except Unavailable:
            pass  # The ack did not get there: the item comes again.
        finally:
            alive.cancel()
            slots.release()


async def _alive(queue: WorkWire, work: WorkItem) -> None:
    while True:
        await asyncio.sleep(ALIVE_S)
        try:
            await queue.alive(work)
        except Unavailable:
            continue


def _retryable(error: Exception) -> bool:
    """The log's trouble: a process ends with it and is started again."""
    if isinstance(error, ExceptionGroup):
        return all(_retryable(one) for one in error.exceptions)
    return isinstance(error, Retryable)
