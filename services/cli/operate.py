"""For whoever runs Plait: is everything as it must be, and build the read models again."""

import asyncio
import contextlib
import time
from collections.abc import Awaitable
from importlib.metadata import version
from typing import Annotated, Literal
from urllib.parse import urlsplit

import msgspec
from cyclopts import Parameter
from msgspec import Struct
from nats.aio.client import Client
from nats.errors import Error as NatsError
from nats.js.errors import NoKeysError, NotFoundError
from redis.asyncio import Redis
from redis.exceptions import RedisError
from rich.table import Table
from rich.text import Text

from plait.events.errors import Misconfigured, PlaitError, Unavailable
from plait.events.jetstream_api import Api, StreamInfo
from plait.events.jetstream_setup import check_durability, connect, open_jetstream
from plait.events.settings import Settings, without_password
from plait.events.subjects import GENERATION, Subjects
from plait.projections.generations import Generations
from plait.projections.rebuild import rebuild as rebuild_read_models
from plait.projections.schema import Names
from plait.projections.scripts import connect as open_redis
from plait.services.cli.logs import log_to_stderr
from plait.services.cli.show import print_json
from plait.services.cli.terminal import Terminal

STEP_S = 5.0  # for each look; a service waits longer, who asks for a diagnosis wants it now
LAG_APPENDS = 1_000  # a live projection is a few appends behind at most
LAG_MOVES_S = 2.0  # in which one that is further behind must have moved
MONITOR_PORT = 8222  # where NATS has its monitoring by custom

State = Literal["ok", "wrong"]
Json = Annotated[bool, Parameter(negative=())]
STYLES: dict[State, tuple[str, str]] = {"ok": ("✓", "green"), "wrong": ("✗", "bold red")}


class Finding(Struct, frozen=True):
    """`todo` says what to do when something is wrong."""

    what: str
    state: State
    found: str
    todo: str = ""


def doctor(*, json: Json = False) -> int:
    """Check configuration, versions, durability and lag; exit code 1 when something is wrong.

    Looks at the servers that PLAIT_NATS_URL and PLAIT_REDIS_URL name, and changes nothing.

    Parameters
    ----------
    json
        Print JSON: a list of {what, state, found, todo}.
    """
    log_to_stderr("critical", process="doctor")  # The findings say it.
    findings = asyncio.run(_examine())
    if json:
        print_json(findings)
    else:
        table = Table.grid(padding=(0, 1))
        table.add_column(width=1)
        table.add_column(no_wrap=True)
        table.add_column()
        for finding in findings:
            mark, style = STYLES[finding.state]
            said = Text(finding.found)
            if finding.todo:
                said.append(f"\n→ {finding.todo}", "bold")
            table.add_row(Text(mark, style), Text(finding.what), said)
        Terminal().print(table)
    return int(any(finding.state == "wrong" for finding in findings))


def rebuild(*, json: Json = False) -> None:
    """Build the read models anew beside the live ones, then swap. Readers notice nothing.

    Parameters
    ----------
    json
        Print one line of JSON: generation, took_s.
    """
    log_to_stderr("warning", process="rebuild")
    console = Terminal(quiet=json)
    began = time.monotonic()
    with console.status("building from the log …"):
        generation = asyncio.run(_rebuild(Settings.from_env()))
    took_s = round(time.monotonic() - began, 2)
    if json:
        print_json({"generation": generation, "took_s": took_s})
    console.print(f"generation {generation} is live after {took_s} s")


async def _rebuild(settings: Settings) -> str:
    redis = _open_redis(settings)
    log = await open_jetstream(settings, "plait-rebuild")
    try:
        async with redis:
            return str(await rebuild_read_models(log.store, redis, settings))
    except (RedisError, OSError) as error:
        raise Unavailable(f"{without_password(settings.redis_url)}: {error}") from error
    finally:
        await log.close()


async def _examine() -> list[Finding]:
    """In the order in which one thing needs another; stops where nothing more can be seen."""
    findings = [Finding("plait", "ok", version("plait"))]
    try:
        settings = Settings.from_env()
        redis = _open_redis(settings)
    except Misconfigured as error:
        return [*findings, Finding("settings", "wrong", str(error), "correct the variable")]
    end = None
    nats, redis_at = without_password(settings.nats_url), without_password(settings.redis_url)
    work: list[Finding] = []
    try:
        async with asyncio.timeout(STEP_S):
            nc = await connect(settings, "plait-doctor")
    except (PlaitError, ValueError, TimeoutError):
        found = f"nothing answers at {nats}"
        findings.append(Finding("NATS", "wrong", found, "start it, or set PLAIT_NATS_URL"))
    else:
        number = nc.connected_server_version
        found = f"{number.major}.{number.minor}.{number.patch} at {nats}"
        findings.append(Finding("NATS", "ok", found))
        stuck = f"NATS at {nats} stopped answering", "look at its log, and start it again"
        findings += await _bounded("log", _examine_log(nc, settings), *stuck)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STEP_S):
                end = await _log_end(nc, settings)
        work = await _bounded("work", _examine_work(nc, settings), *stuck)
        await _closed(nc.close())
    stuck = f"nothing answers at {redis_at}", "start it (again), or set PLAIT_REDIS_URL"
    findings += await _bounded("Valkey", _examine_views(redis, settings, end), *stuck)
    await _closed(redis.aclose())
    return [*findings, *work]


async def _bounded(
    what: str, look: Awaitable[list[Finding]], found: str, todo: str
) -> list[Finding]:
    """A server that hangs, or goes away meanwhile, is a finding like others."""
    try:
        async with asyncio.timeout(STEP_S):
            return await look
    except TimeoutError:
        return [Finding(what, "wrong", f"{found} within {STEP_S:.0f} s", todo)]
    except (PlaitError, RedisError, NatsError, OSError) as error:
        return [Finding(what, "wrong", f"{found}: {error or type(error).__name__}", todo)]


async def _closed(closing: Awaitable[None]) -> None:
    with contextlib.suppress(TimeoutError, RedisError, NatsError, OSError):
        async with asyncio.timeout(STEP_S):
            await closing


async def _examine_log(nc: Client, settings: Settings) -> list[Finding]:
    subjects = Subjects(settings.prefix)
    try:
        info = await Api(nc).info(subjects.log)
    except PlaitError as error:
        found = f"stream {subjects.log}: {error}"
        return [Finding("log", "wrong", found, "start `plait gateway`, which creates the streams")]
    replicas = info.config.get("num_replicas", 1)
    size = f"{info.state.last_seq} appends, {replicas} replica{'s' * (replicas > 1)}"
    return [Finding("log", "ok", size), await _durability(nc, info, settings)]


async def _durability(nc: Client, info: StreamInfo, settings: Settings) -> Finding:
    """What a service would say of it when it starts, with the same settings."""
    if settings.allow_lossy_log:
        found = "not asked: PLAIT_ALLOW_LOSSY_LOG accepts that events could be lost"
        return Finding("durability", "ok", found)
    try:
        await check_durability(nc, info, settings)
    except PlaitError as error:
        if not settings.nats_monitor_url and (url := await _usual_monitor(nc, info, settings)):
            found = "nothing shows services that the log loses nothing, so they refuse to start"
            todo = f"set PLAIT_NATS_MONITOR_URL={url}, which proves that acknowledged means on disk"
            return Finding("durability", "wrong", found, todo)
        todo = "until then services refuse to start: events could be lost with the machine"
        return Finding("durability", "wrong", str(error), todo)
    return Finding("durability", "ok", "acknowledged means on disk")


async def _usual_monitor(nc: Client, info: StreamInfo, settings: Settings) -> str | None:
    """The monitoring address by custom, if it proves what the setting would have to prove."""
    host = urlsplit(settings.nats_url.partition(",")[0]).hostname or "127.0.0.1"
    url = f"http://{f'[{host}]' if ':' in host else host}:{MONITOR_PORT}"
    try:
        # Within what this step has: a machine that swallows packets must not cost the finding.
        async with asyncio.timeout(STEP_S / 2):
            there = msgspec.structs.replace(settings, nats_monitor_url=url)
            await check_durability(nc, info, there)
    except (PlaitError, TimeoutError):
        return None
    return url


async def _examine_views(
    redis: Redis, settings: Settings, end: tuple[int, int] | None
) -> list[Finding]:
    info = await redis.info("server")
    name = "Valkey" if "valkey_version" in info else "Redis"
    number = info.get("valkey_version", info.get("redis_version"))
    findings = [Finding(name, "ok", f"{number} at {without_password(settings.redis_url)}")]
    if end is None:
        return findings
    return [*findings, await _lag(Generations(redis, Names(settings.prefix)), *end)]


def _open_redis(settings: Settings) -> Redis:
    try:
        return open_redis(settings.redis_url)
    except ValueError as error:
        shown = without_password(settings.redis_url)
        raise Misconfigured(f"PLAIT_REDIS_URL={shown!r} is no address: {error}") from None


async def _lag(generations: Generations, last: int, log: int) -> Finding:
    live = await generations.live()
    if live is None or live.log != log:
        return Finding(
            "read models",
            "wrong",
            "nothing whole to read yet",
            "start `plait projections` and look again; its log tells how far it is",
        )
    before = await generations.position(live) or 0
    behind = last - before
    if behind <= LAG_APPENDS:
        return Finding("read models", "ok", f"generation {live}, {max(behind, 0)} appends behind")
    await asyncio.sleep(LAG_MOVES_S)
    moved = (await generations.position(live) or 0) - before
    if moved > 0:
        found = f"{behind} appends behind, {moved / LAG_MOVES_S:.0f} a second"
        return Finding("read models", "ok", found)
    return Finding(
        "read models",
        "wrong",
        f"{behind} appends behind and not moving",
        "start `plait projections`",
    )


async def _examine_work(nc: Client, settings: Settings) -> list[Finding]:
    subjects = Subjects(settings.prefix)
    leases = await _leases(nc, subjects)
    waiting = await _messages(nc, subjects.work)
    parked = await _messages(nc, subjects.parked)
    return [
        Finding("replies", "ok", f"{leases} partitions are held")
        if leases
        else Finding("replies", "wrong", "nobody holds a partition", "start `plait replies`"),
        await _workers(nc, subjects, waiting or 0),
        Finding("parked", "wrong", f"{parked} items failed for good", f"read {subjects.parked}")
        if parked
        else Finding("parked", "ok", "nothing"),
    ]


async def _workers(nc: Client, subjects: Subjects, items: int) -> Finding:
    try:
        durable = await nc.jetstream().consumer_info(subjects.work, subjects.turns_durable)
    except NotFoundError:
        return Finding("turns", "wrong", "no worker was ever here", "start `plait turns`")
    found = f"{items} runnable or running"
    if durable.num_waiting or not items:
        return Finding("turns", "ok", found)
    return Finding("turns", "wrong", f"{found}, and no worker asks for any", "start `plait turns`")


async def _leases(nc: Client, subjects: Subjects) -> int:
    """How many are held: a released one stays for a moment, and is empty."""
    try:
        bucket = await nc.jetstream().key_value(subjects.leases)
        return sum([bool((await bucket.get(key)).value) for key in await bucket.keys()])
    except (NoKeysError, NotFoundError):
        return 0


async def _log_end(nc: Client, settings: Settings) -> tuple[int, int] | None:
    """Its last sequence and its generation."""
    try:
        info = await Api(nc).info(Subjects(settings.prefix).log)
    except PlaitError:
        return None
    return info.state.last_seq, int(info.metadata.get(GENERATION, 0))


async def _messages(nc: Client, stream: str) -> int | None:
    try:
        return (await nc.jetstream().stream_info(stream)).state.messages
    except NotFoundError:
        return None
