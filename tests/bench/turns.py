"""Turns: what Plait costs around a model, alone, in a crowd, and while many wait for a slow one."""

import asyncio
import contextlib
import sys
import time
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from statistics import median

from plait.services.dev.child import Child
from tests.bench.baseline import RawPublisher, many, one_by_one
from tests.bench.driver import Driver, driver
from tests.bench.report import Bar, Figure, Rounds, ms, rate
from tests.bench.stack import ECHO, on_stack, servers_and_replies, whole_stack
from tests.bench.worker import MODEL_S

ROUNDS = 15
CALLS = 20  # one after another, in one round
PAUSE_S = 0.01

BRANCHES = 64
ECHO_ROUNDS = 5
ECHO_TURNS = 5  # on each branch, one after another

THOUSAND = 1_000
SLOW = "bench:2s"
TEXT = "What did the other branch find out about this, and does it change the plan?"


async def turn(data: Path) -> AsyncIterator[Figure]:
    """From the acknowledged command to the turn's end in the log, one turn at a time. Back to
    back, each turn shares the cores with what projections still do for the last one."""
    async with whole_stack(data) as (stack, raw), driver(on_stack(stack)) as plait:
        session = await plait.session(ECHO)
        await _compared(plait, raw, session, 0.0)
        for what, pause_s, bar in (
            ("back to back", 0.0, Bar("≤", 10)),
            ("with pauses in between", PAUSE_S, None),
        ):
            rounds = Rounds()
            for _ in range(ROUNDS):
                rounds.add(*await _compared(plait, raw, session, pause_s))
            measured, baseline = rounds.medians
            yield Figure(
                group="turn",
                what=f"{ECHO}, command accepted → reply durable, p50, in raw publishes; {what}",
                measured=ms(measured),
                baseline=ms(baseline),
                value=rounds.ratio,
                bar=bar,
            )


async def _compared(
    plait: Driver, raw: RawPublisher, session: str, pause_s: float
) -> tuple[float, float]:
    publish_s = median(await one_by_one(CALLS, raw.once_s, pause_s=pause_s))
    run = partial(_turn_s, plait, plait.new_branch(session))
    return median(await one_by_one(CALLS, run, pause_s=pause_s)), publish_s


async def _turn_s(plait: Driver, branch: str) -> float:
    asked = await plait.post(branch, TEXT)
    accepted = time.perf_counter()
    return (await plait.completed(asked)).at - accepted


async def echo(data: Path) -> AsyncIterator[Figure]:
    async with whole_stack(data) as (stack, raw), driver(on_stack(stack)) as plait:
        session = await plait.session(ECHO)
        await _crowd_s(plait, session)
        rounds = Rounds()
        for _ in range(ECHO_ROUNDS):
            publishes_s = await _publishes_s(raw)
            rounds.add(await _crowd_s(plait, session), publishes_s)
    count = BRANCHES * ECHO_TURNS
    measured, baseline = rounds.medians
    yield Figure(
        group="echo",
        what=f"turns with {ECHO} on {BRANCHES} branches, durable; ratio: raw publishes per turn",
        measured=rate(count / measured),
        baseline=rate(count / baseline),
        value=rounds.ratio,
    )


async def _crowd_s(plait: Driver, session: str) -> float:
    branches = [plait.new_branch(session) for _ in range(BRANCHES)]

    async def converse(job: int) -> None:
        for _ in range(ECHO_TURNS):
            await plait.completed(await plait.post(branches[job], TEXT))

    began = time.perf_counter()
    await many(BRANCHES, converse, range(BRANCHES))
    return time.perf_counter() - began


async def _publishes_s(raw: RawPublisher) -> float:
    async def publish(_: int) -> None:
        await raw.once_s()

    began = time.perf_counter()
    await many(BRANCHES, publish, range(BRANCHES * ECHO_TURNS))
    return time.perf_counter() - began


async def thousand(data: Path) -> AsyncIterator[Figure]:
    """From the first post to the last reply in the log."""
    async with contextlib.AsyncExitStack() as stack:
        settings, env = await stack.enter_async_context(servers_and_replies(data))
        plait = await stack.enter_async_context(driver(settings))
        child = await Child.start([sys.executable, "-m", "tests.bench.worker"], env=env)
        stack.push_async_callback(child.stop)
        session = await plait.session(SLOW)
        await plait.completed(await plait.post(plait.new_branch(session), TEXT))  # it is up
        branches = [plait.new_branch(session) for _ in range(THOUSAND)]
        ends: list[asyncio.Task[object]] = []

        async def ask(job: int) -> None:
            turn = await plait.post(branches[job], TEXT)
            ends.append(asyncio.create_task(plait.completed(turn)))

        began = time.perf_counter()
        await many(BRANCHES, ask, range(THOUSAND))
        posted_s = time.perf_counter() - began
        await asyncio.gather(*ends)
        took = time.perf_counter() - began
    yield Figure(
        group="thousand",
        what=f"{THOUSAND:,} turns at once, one worker process, a model that takes 2 s",
        measured=f"{took:.1f} s (posted after {posted_s:.1f} s)",
        baseline=f"{MODEL_S[SLOW]:.1f} s",
        value=took / MODEL_S[SLOW],
        bar=Bar("≤", 3),
    )
