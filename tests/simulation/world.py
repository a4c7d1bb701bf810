"""One run: servers, processes, clients and faults, all from a seed, watched at each append."""

import asyncio
import contextlib
import gc
import hashlib
import random
import secrets
import sys
import traceback
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextvars import copy_context
from typing import Any, NamedTuple
from unittest.mock import patch

import structlog

from plait.events.memory import MemoryBlobs, MemoryKeys, MemoryRequests
from plait.events.store import Recorded, StreamId
from plait.events.types import Append
from plait.projections import generations, view
from plait.projections.scripts import Call
from tests.simulation.loop import LANE, Runaway, SimLoop
from tests.simulation.plan import KILLS, Options, Plan, plan_of
from tests.simulation.processes import Process
from tests.simulation.servers import LeaseServer, LogServer, ViewServer, WorkServer
from tests.simulation.trace import Trace
from tests.simulation.watch import Watch
from tests.simulation.workload import Clients

REST_S = 400.0  # after the last fault, by which everything must have come to rest
LOOK_S = 2.0  # between two looks whether it has


class Violation(NamedTuple):
    invariant: str
    text: str


class Result(NamedTuple):
    seed: int
    violation: Violation | None
    appends: int
    steps: int
    simulated_s: float
    fired: tuple[str, ...]  # the faults that struck, in order
    ops: tuple[int, ...]
    digest: str  # of all that happened: two runs of a seed have the same one
    trace: tuple[str, ...]


class World:
    def __init__(self, plan: Plan, options: Options) -> None:
        self.plan, self.options = plan, options
        self.loop = SimLoop(None if options.in_order else random.Random(f"{plan.seed}/schedule"))
        self.loop.set_exception_handler(self._broke)
        self._home = copy_context()
        self.trace = Trace(options.trace)
        self.chance = random.Random(f"{plan.seed}/world")
        self.violation: Violation | None = None
        self.faulty = True
        self.closing = False
        self.fired: list[str] = []
        self.kills_left = KILLS
        self._counts: Counter[str] = Counter()
        self._coming = 0  # effects that are on their way
        clock = self.loop.time
        self.store = LogServer()
        self.blobs = MemoryBlobs()
        secret = random.Random(f"{plan.seed}/keys")
        self.keys = MemoryKeys(lambda: secret.randbytes(32))
        self.requests = MemoryRequests(clock)
        self.leases = LeaseServer(clock)
        self.work = WorkServer(self.loop, random.Random(f"{plan.seed}/queue"), self._home)
        self.views = ViewServer()
        self.watch = Watch(self)
        self.processes: dict[tuple[str, int], Process | None] = {}
        self.clients = Clients(self)
        self._digest = hashlib.blake2b(digest_size=8)

    # -- what processes and wires ask for ----------------------------------------------------

    async def append(self, who: str, stream: StreamId, append: Append, expected: int) -> int:
        end = await self.store.last_sequence()
        sequence = await self.store.append(stream, append, expected)
        if sequence > end:
            recorded = Recorded(stream, sequence, append)
            self.trace.appended(self.loop.time(), who, recorded)
            self._digest.update(f"{self.loop.time():.6f}{who}{append.command_id}".encode())
            self.watch.appended(recorded, who)
        return sequence

    def strikes(self, kind: str, key: str, text: str) -> bool:
        """Whether a fault that was drawn is to happen."""
        options = self.options
        if kind in options.without or (options.faults is not None and key not in options.faults):
            return False
        if kind.startswith("kill"):
            if not self.kills_left:
                return False
            self.kills_left -= 1
        self.fired.append(key)
        self.trace.note(self.loop.time(), "fault", text)
        return True

    def count(self, what: str) -> int:
        self._counts[what] += 1
        return self._counts[what]

    def later(self, seconds: float, who: str, effect: Callable[[], Awaitable[Any]]) -> None:
        """An effect that its caller no longer waits for."""
        self._coming += 1

        async def arrive() -> None:
            with contextlib.suppress(Exception):  # Refused like any other; nobody hears of it.
                await effect()
            self._coming -= 1

        def start() -> None:
            self.trace.note(self.loop.time(), who, "a call arrives after all")
            self.loop.create_task(arrive())

        self.home_later(seconds, start)

    def home_later(self, seconds: float, what: Callable[[], Any]) -> None:
        self.loop.call_later(seconds, what, context=self._home)

    def died(self, process: Process) -> None:
        if self.closing:
            return
        self.trace.note(self.loop.time(), process.name, "is dead")
        self.processes[process.kind, process.nth] = None
        pause = self.chance.choice((0.0, 0.5, 2.0, 6.0)) if self.faulty else 0.5
        self.home_later(pause, lambda: self._start(process.kind, process.nth, process.life + 1))

    def fail(self, invariant: str, text: str, error: BaseException | None = None) -> None:
        if self.closing:
            return
        if self.violation is None:
            self.violation = Violation(invariant, self.trace.named(text) if self.trace.on else text)
            self.trace.note(self.loop.time(), "VIOLATION", f"{invariant}: {text}")
            if error is not None and self.trace.on:
                self.trace.lines += "".join(traceback.format_exception(error)).splitlines()
        if self.loop.is_running():
            self.loop.stop()

    # -- the run -----------------------------------------------------------------------------

    def _start(self, kind: str, nth: int, life: int) -> None:
        self.processes[kind, nth] = Process(self, kind, nth, life)

    async def main(self) -> None:
        plan = self.plan
        for kind, count in (
            ("gateway", plan.gateways),
            ("turns", plan.workers),
            ("replies", plan.replies),
            ("projections", plan.projections),
        ):
            for nth in range(count):
                self._start(kind, nth, 1)
        events = self.loop.create_task(self._events())
        await self.clients.run()
        await asyncio.sleep(self.chance.choice((0.0, 2.0, 10.0)))
        events.cancel()
        self._heal()
        until = self.loop.time() + REST_S
        while True:
            await asyncio.sleep(LOOK_S)
            left = await self._left()
            if not left:
                self.watch.at_rest()
                return
            if self.loop.time() > until:
                self.fail("all_comes_to_rest", f"still open after {REST_S:.0f} s: {left}")
                return

    def _heal(self) -> None:
        """From here on nothing goes wrong any more."""
        self.trace.note(self.loop.time(), "world", "no more faults")
        self.faulty = False
        self.leases.lying = False
        for process in self.processes.values():
            if process is not None:
                process.cut_until = 0.0

    async def _left(self) -> str:
        """What has not come to rest yet."""
        if self._coming:
            return "calls on their way"
        missing = [key for key, process in self.processes.items() if process is None]
        if missing:
            return f"processes {missing} are down"
        end = await self.store.last_sequence()
        behind = [
            process.name
            for process in self.processes.values()
            if process is not None and process.kind == "replies" and process.followed < end
        ]
        if self.views.position() != end:
            behind.append("the read models")
        return self.watch.open_matters() or (f"{behind} are behind" if behind else "")

    async def _events(self) -> None:
        """What goes wrong by itself, from time to time."""
        chance = self.chance
        nth = 0
        while True:
            await asyncio.sleep(chance.random() * 8)
            kind = chance.choice(("lease", "queue", "again", "flush"))
            nth += 1
            if kind not in self.plan.events or not self.strikes(kind, f"world@{nth}", kind):
                continue
            match kind:
                case "lease":
                    self.leases.lying = not self.leases.lying
                case "queue":
                    self.work.lose()
                case "flush":
                    self.views.flush()
                case "again":
                    for item in list(self.work.items.values()):
                        self.work.again(item.work)
                case _:
                    raise AssertionError(kind)

    def _broke(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """What asyncio would only have logged."""
        error = context.get("exception")
        lane = LANE.get(self.loop.home)
        if not any(p is not None and p.lane is lane for p in self.processes.values()):
            return  # A dead one's.
        self.fail("nothing_breaks_off", f"{context['message']}: {error!r}", error)

    def _close(self) -> None:
        """Ends all that is left, so that nothing of this run outlives it."""
        self.closing, self.faulty = True, False
        for process in self.processes.values():
            if process is not None:
                process.dead = True
                self.loop.thaw(process.lane)
        with contextlib.suppress(Runaway):
            while tasks := [task for task in asyncio.all_tasks(self.loop) if not task.done()]:
                for task in tasks:
                    task.cancel()
                ended = self.loop.create_task(_ended(tasks))
                while not ended.done():
                    self.loop.run_forever()  # A stop that the run left behind ends it early.
        self.loop.close()


async def _ended(tasks: list[asyncio.Task[Any]]) -> None:
    await asyncio.wait(tasks)
    for task in tasks:
        if not task.cancelled():
            task.exception()
    asyncio.get_running_loop().stop()


def run(seed: int, options: Options = Options()) -> Result:  # noqa: B008 - frozen
    """One seed from its beginning to rest, or to its first violation."""
    gc.collect()
    gc.disable()  # It ends forgotten generators, which takes a step of the loop, when it likes.
    try:
        return _run(seed, options)
    finally:
        gc.enable()


def _run(seed: int, options: Options) -> Result:
    world = World(plan_of(seed), options)
    with _patched(world):
        try:
            world.loop.run_until_complete(world.main())
        except Runaway as error:
            world.fail("all_comes_to_rest", str(error))
        except RuntimeError:
            if world.violation is None:
                raise
        finally:
            world._close()
    return Result(
        seed,
        world.violation,
        len(world.store._log),
        world.loop.steps,
        world.loop.time(),
        tuple(world.fired),
        tuple(op.place for op in world.plan.ops if options.ops is None or op.place in options.ops),
        world._digest.hexdigest(),
        tuple(world.trace.lines),
    )


@contextlib.contextmanager
def _patched(world: World) -> Iterator[None]:
    """Chance, the read models' store, and the logger are the world's for the time of the run."""
    chance = random.Random(f"{world.plan.seed}/secrets")

    async def evaluate(wire: Any, *calls: Call) -> list[Any]:
        answers: list[Any] = await wire.answer(calls)
        return answers

    def token_hex(nbytes: int | None = None) -> str:
        return chance.randbytes(nbytes or 16).hex()

    def told(_: Any, level: str, entry: Any) -> Any:
        if level in ("error", "exception", "critical"):
            error = sys.exc_info()[1]
            world.fail("nothing_breaks_off", f"{entry}: {error!r}", error)
        elif world.trace.on:
            world.trace.note(world.loop.time(), "log", str(entry))
        raise structlog.DropEvent

    configured = structlog.get_config()
    structlog.configure(
        processors=[told],
        wrapper_class=structlog.make_filtering_bound_logger("debug" if world.trace.on else "error"),
        cache_logger_on_first_use=False,
    )
    collecting = gc.isenabled()
    gc.disable()  # When it runs is no matter of the seed.
    try:
        with (
            patch.object(secrets, "token_hex", token_hex),
            patch.object(view, "evaluate", evaluate),
            patch.object(generations, "evaluate", evaluate),
        ):
            yield
    finally:
        if collecting:
            gc.enable()
        structlog.configure(**configured)
