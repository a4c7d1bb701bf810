"""What ten thousand waits cost while nothing happens: no worker, no thread, no connection, and
only a little memory. Made by real workers: each branch's model asks another branch."""

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

from msgspec import Struct
from redis.asyncio import Redis

from plait.events.ids import short
from plait.events.types import TurnSuspended
from plait.services.dev.stack import SERVICES, Stack
from tests.bench.baseline import many
from tests.bench.driver import Driver, driver
from tests.bench.report import Bar, Figure, mib, ms, percentile
from tests.bench.stack import on_stack, whole_stack

WAITS = 10_000
SESSIONS = 50  # an inbox holds 256 messages, and each session's waits are for one branch
ASKING = "offline:demo"
AT_ONCE = 64
CALM_TICKS = 3  # of a hundredth of a second, per process and look: nothing is being worked on
LOOK_S = 1.0
CALM_S = 120.0
GROWTH_BYTES = 20 * 10**6
LATER = {"PLAIT_LIMIT_WAIT_DEFAULT_S": "3600"}  # no wait expires while it is measured


class Process(Struct):
    rss_bytes: int
    threads: int
    connections: int


class State(Struct):
    processes: dict[str, Process]
    work_items: int
    nats_bytes: int
    valkey_bytes: int


async def waits(data: Path) -> AsyncIterator[Figure]:
    async with whole_stack(data, LATER) as (stack, _), driver(on_stack(stack)) as plait:
        warm = await _asking(plait, 1)  # so that no first use counts as growth
        await _answered(plait, warm[0])
        before = await _calm(stack, plait)
        began = time.perf_counter()
        sessions = await _asking(plait, SESSIONS)
        made_s = time.perf_counter() - began
        after = await _calm(stack, plait)
        for name in SERVICES:
            yield _grown(name, before.processes[name], after.processes[name])
        held = after.work_items - SESSIONS  # the turns that the bench itself holds stay on it
        yield Figure(
            group="waits",
            what=f"{WAITS:,} suspended: items that the work queue keeps for them",
            measured=str(held),
            value=held,
            bar=Bar("≤", 0, "items"),
        )
        for what, grown in (
            (
                "NATS, whole branch: post, turn, send, delivery",
                after.nats_bytes - before.nats_bytes,
            ),
            ("Valkey, used_memory", after.valkey_bytes - before.valkey_bytes),
        ):
            yield Figure(
                group="waits",
                what=f"bytes per wait, {what}",
                measured=f"{grown / WAITS:,.0f}",
            )
        took = await _answered(plait, sessions[0])
        yield Figure(
            group="waits",
            what=f"suspended in {made_s:.0f} s; a sample of {len(took)} answered: all resumed",
            measured=f"p50 {ms(percentile(took, 50))}, last {ms(max(took))}",
        )


class _Session(Struct):
    held: str  # the turn of the branch that all others ask
    turns: list[str]


async def _asking(plait: Driver, count: int) -> list[_Session]:
    """Sessions whose branches all wait for one of them, WAITS / SESSIONS in each."""
    sessions: list[_Session] = []
    branches: list[tuple[_Session, str, str]] = []
    for _ in range(count):
        session = await plait.session(ASKING)
        target = plait.new_branch(session)
        made = _Session(held=await plait.hold(target), turns=[])
        sessions.append(made)
        branches += [(made, plait.new_branch(session), target) for _ in range(WAITS // SESSIONS)]

    async def ask(job: int) -> None:
        made, branch, target = branches[job]
        turn = await plait.post(branch, f"ask {target}: what does {short(branch)} need to know?")
        made.turns.append(turn)
        await plait.until(TurnSuspended, turn)

    await many(AT_ONCE, ask, range(len(branches)))
    return sessions


async def _answered(plait: Driver, session: _Session) -> list[float]:
    """Seconds from the answer's way being free to each asking turn's end."""
    freed = time.perf_counter()
    await plait.let_go(session.held)
    ends = await asyncio.gather(*map(plait.completed, session.turns))
    return [end.at - freed for end in ends]


def _grown(name: str, before: Process, after: Process) -> Figure:
    grown = after.rss_bytes - before.rss_bytes
    threads = f"threads {before.threads} → {after.threads}"
    connections = f"connections {before.connections} → {after.connections}"
    return Figure(
        group="waits",
        what=f"{WAITS:,} suspended: {name}; {threads}, {connections}",
        measured=f"{mib(before.rss_bytes)} → {mib(after.rss_bytes)}",
        value=grown / 2**20,
        bar=Bar("<", GROWTH_BYTES / 2**20, "MiB"),
    )


async def _calm(stack: Stack, plait: Driver) -> State:
    """The state once no process of ours does more than tick."""
    async with asyncio.timeout(CALM_S):
        ticks = _ticks(stack.pids)
        while True:
            await asyncio.sleep(LOOK_S)
            now = _ticks(stack.pids)
            if all(now[name] - ticks[name] <= CALM_TICKS for name in SERVICES):
                break
            ticks = now
    nats, subjects = plait.jetstream.nc.jetstream(), plait.jetstream.subjects
    log, work = await nats.stream_info(subjects.log), await nats.stream_info(subjects.work)
    async with Redis.from_url(stack.redis_url) as redis:
        memory = await redis.info("memory")
    return State(
        processes={name: _look(stack.pids[name]) for name in SERVICES},
        work_items=work.state.messages,
        nats_bytes=log.state.bytes,
        valkey_bytes=memory["used_memory"],
    )


def _ticks(pids: Mapping[str, int]) -> dict[str, int]:
    return {name: _spent(pids[name]) for name in SERVICES}


def _spent(pid: int) -> int:
    """Processor time, in hundredths of a second."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def _look(pid: int) -> Process:
    status = dict(
        line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines()
    )
    sockets = sum(
        str(link.readlink()).startswith("socket:") for link in Path(f"/proc/{pid}/fd").iterdir()
    )
    return Process(
        rss_bytes=int(status["VmRSS"].split()[0]) * 1024,
        threads=int(status["Threads"]),
        connections=sockets,
    )
