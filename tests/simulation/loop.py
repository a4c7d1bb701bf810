"""An event loop without a world: no sockets, no threads, and a clock that jumps.

Each simulated process has a lane: its callbacks run in the order in which asyncio queued them,
as in a real process; which process goes on next is drawn from the seed. When nothing is ready,
the clock moves to the next timer. A frozen lane keeps its callbacks until it thaws.
"""

import asyncio
import heapq
import random
from collections import deque
from collections.abc import Coroutine
from contextvars import Context, ContextVar, copy_context
from typing import Any

BURST = 64  # callbacks between two looks at the loop's own state
STEPS = 3_000_000  # of one run: above any that comes to rest
STEPS_PER_INSTANT = 200_000  # without the clock moving


class Lane:
    """The callbacks and tasks of one simulated process."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.queue: deque[asyncio.Handle] = deque()
        self.tasks: dict[asyncio.Task[Any], None] = {}
        self.frozen = False

    def living(self) -> list[asyncio.Task[Any]]:
        return [task for task in self.tasks if not task.done()]

    def adopt(self, task: asyncio.Task[Any]) -> None:
        if len(self.tasks) >= 64:
            self.tasks = dict.fromkeys(self.living())
        self.tasks[task] = None


LANE: ContextVar[Lane] = ContextVar("lane")


class Runaway(Exception):
    """The run does not come to an end: something turns in circles."""


class _Ready:
    """Where asyncio puts callbacks: each goes to the lane of its context."""

    def __init__(self, home: Lane) -> None:
        self._home = home
        self.waiting: list[Lane] = []  # lanes with something to run

    def append(self, handle: asyncio.Handle) -> None:
        lane = handle._context.get(LANE, self._home)  # type: ignore[attr-defined]
        if not lane.queue and not lane.frozen:
            self.waiting.append(lane)
        lane.queue.append(handle)

    def __len__(self) -> int:
        return len(self.waiting)

    def clear(self) -> None:
        self.waiting.clear()


class SimLoop(asyncio.BaseEventLoop):
    """`chance` None: the lanes take turns in the order in which they became ready."""

    def __init__(self, chance: random.Random | None) -> None:
        super().__init__()
        self.home = Lane("world")
        self.steps = 0
        self._draw = chance.random if chance is not None else lambda: 0.0
        self._clock = 0.0
        self._instant = 0
        self._lanes = _Ready(self.home)
        self._ready: Any = self._lanes
        self._scheduled: list[asyncio.TimerHandle]
        self.set_debug(False)
        self.set_task_factory(self._task)  # type: ignore[arg-type]

    def time(self) -> float:
        return self._clock

    def start(self, lane: Lane, coro: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """A task of another lane."""
        context = copy_context()
        context.run(LANE.set, lane)
        return self.create_task(coro, context=context)

    def freeze(self, lane: Lane) -> None:
        lane.frozen = True
        if lane in self._lanes.waiting:
            self._lanes.waiting.remove(lane)

    def thaw(self, lane: Lane) -> None:
        if lane.frozen and lane.queue:
            self._lanes.waiting.append(lane)
        lane.frozen = False

    def _task(
        self,
        loop: asyncio.AbstractEventLoop,
        coro: Coroutine[Any, Any, Any],
        context: Context | None = None,
    ) -> asyncio.Task[Any]:
        lane = LANE.get(self.home) if context is None else context.get(LANE, self.home)
        task = asyncio.Task(coro, loop=loop, context=context)
        lane.adopt(task)
        return task

    def _run_once(self) -> None:
        waiting, scheduled, draw = self._lanes.waiting, self._scheduled, self._draw
        self._wake_due()
        if not waiting:
            if not scheduled:
                raise Runaway("nothing is ready and no timer is set: everybody waits for ever")
            self._clock = max(self._clock, scheduled[0].when())
            self._instant = self.steps
            self._wake_due()
        for _ in range(BURST):
            if not waiting or self._stopping:  # type: ignore[attr-defined]
                return
            place = int(draw() * len(waiting))
            lane = waiting[place]
            handle = lane.queue.popleft()
            if not lane.queue:
                del waiting[place]
            self.steps += 1
            if not handle._cancelled:
                handle._run()
        if self.steps > STEPS or self.steps - self._instant > STEPS_PER_INSTANT:
            raise Runaway(f"{self.steps} steps, and no end")

    def _wake_due(self) -> None:
        scheduled = self._scheduled
        while scheduled and (scheduled[0]._cancelled or scheduled[0].when() <= self._clock):
            timer = heapq.heappop(scheduled)
            timer._scheduled = False  # type: ignore[attr-defined]
            if not timer._cancelled:
                self._lanes.append(timer)

    def _process_events(self, event_list: Any) -> None:
        raise AssertionError("there is no I/O here")

    def _write_to_self(self) -> None:
        """Nothing sleeps in a selector."""
