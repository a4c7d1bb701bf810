"""A worker killed in a model call: how soon another one goes on with the turn."""

import contextlib
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

from plait.events.types import TurnClaimed
from plait.services.dev.child import Child
from tests.bench.driver import Seen, driver
from tests.bench.report import Bar, Figure, percentile
from tests.bench.stack import servers_and_replies

KILLS = 10
WORKERS = 2
MODEL = "bench:8s"  # longer than any take-over, and over before its turn is looked at again


async def takeover(data: Path) -> AsyncIterator[Figure]:
    """Absolute, as the design states it: it is made of a time-out, not of speed."""
    workers: dict[int, Child] = {}
    async with contextlib.AsyncExitStack() as stack:
        settings, env = await stack.enter_async_context(servers_and_replies(data))
        plait = await stack.enter_async_context(driver(settings))
        stack.push_async_callback(_stop, workers)
        for _ in range(WORKERS):
            await _start(workers, env)
        session = await plait.session(MODEL)
        took: list[float] = []
        for _ in range(KILLS):
            turn = await plait.post(plait.new_branch(session), "a question")
            victim = _pid(await plait.until(TurnClaimed, turn))
            child = workers.pop(victim)
            killed = time.perf_counter()
            os.kill(victim, signal.SIGKILL)
            await child.wait()
            await _start(workers, env)
            took.append((await plait.until(TurnClaimed, turn, times=2)).at - killed)
    p50, p90 = percentile(took, 50), percentile(took, 90)
    yield Figure(
        group="takeover",
        what=f"kill -9 in a model call → claimed by another worker, p90 of {KILLS}",
        measured=f"p50 {p50:.2f} s, p90 {p90:.2f} s",
        value=p90,
        bar=Bar("<", 5, "s"),
    )


async def _start(workers: dict[int, Child], env: Mapping[str, str]) -> None:
    child = await Child.start([sys.executable, "-m", "tests.bench.worker"], env=env)
    workers[child.pid] = child


async def _stop(workers: Mapping[int, Child]) -> None:
    for child in workers.values():
        await child.kill()


def _pid(seen: Seen) -> int:
    """A worker's name is `host.pid.token`; a host may have dots."""
    assert isinstance(seen.event, TurnClaimed)
    return int(seen.event.worker.rsplit(".", 2)[1])
