"""For whoever runs Plait: is everything as it must be, and build the read models again."""

import asyncio
import time
from importlib.metadata import version
from typing import Annotated, Literal
from urllib.parse import urlsplit

import msgspec
from cyclopts import Parameter
from msgspec import Struct
from nats.aio.client import Client
from nats.js.errors import NoKeysError, NotFoundError
from redis.exceptions import RedisError
from rich.console import Console
from rich.table import Table
from rich.text import Text

from plait.events.errors import Misconfigured, PlaitError, Unavailable
from plait.events.jetstream_api import Api
from plait.events.jetstream_setup import check_durability, connect, open_jetstream
from plait.events.settings import Settings
from plait.events.subjects import GENERATION, Subjects
from plait.projections.generations import Generations
from plait.projections.rebuild import rebuild as rebuild_read_models
from plait.projections.schema import Names
from plait.projections.scripts import connect as open_redis
from plait.services.cli.logs import log_to_stderr
from plait.services.cli.show import print_json

CONNECT_S = 5.0  # a service waits longer; who asks for a diagnosis wants it now
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
        Console(highlight=False).print(table)
    return int(any(finding.state == "wrong" for finding in findings))


def rebuild(*, json: Json = False) -> None:
    """Build the read models anew beside the live ones, then swap. Readers notice nothing.

    Parameters
    ----------
    json
        Print one line of JSON: generation, took_s.
    """
    log_to_stderr("warning", process="rebuild")
    console = Console(highlight=False, quiet=json)
    began = time.monotonic()
    with console.status("building from the log …"):
        generation = asyncio.run(_rebuild(_settings()))
    took_s = round(time.monotonic() - began, 2)
    if json:
        print_json({"generation": generation, "took_s": took_s})
    console.print(f"generation {generation} is live after {took_s} s")


async def _rebuild(settings: Settings) -> str:
    log = await open_jetstream(settings, "plait-rebuild")
    try:
        async with open_redis(settings.redis_url) as redis:
            return str(await rebuild_read_models(log.store, redis, settings))
    except RedisError as error:
        raise Unavailable(f"{settings.redis_url}: {error}") from error
    finally:
        await log.close()


async def _examine() -> list[Finding]:
    """In the order in which one thing needs another; stops where nothing more can be seen."""
    findings = [Finding("plait", "ok", version("plait"))]
    try:
        settings = _settings()
    except Misconfigured as error:
        return [*findings, Finding("settings", "wrong", str(error), "correct the variable")]
    try:
        async with asyncio.timeout(CONNECT_S):
            nc = await connect(settings, "plait-doctor")
    except (Unavailable, TimeoutError):
        found = f"nothing answers at {settings.nats_url}"
        finding = Finding("NATS", "wrong", found, "start it, or set PLAIT_NATS_URL")
        return [*findings, finding, *await _examine_views(settings, None)]
    try:
        number = nc.connected_server_version
        found = f"{number.major}.{number.minor}.{number.patch} at {settings.nats_url}"
        findings.append(Finding("NATS", "ok", found))
        findings += await _examine_log(nc, settings)
        end = await _log_end(nc, settings)
        return [*findings, *await _examine_views(settings, end), *await _examine_work(nc, settings)]
    finally:
        await nc.close()


async def _examine_log(nc: Client, settings: Settings) -> list[Finding]:
    subjects = Subjects(settings.prefix)
    try:
        info = await Api(nc).info(subjects.log)
    except PlaitError as error:
        found = f"stream {subjects.log}: {error}"
        return [Finding("log", "wrong", found, "start `plait gateway`, which creates the streams")]
    replicas = info.config.get("num_replicas", 1)
    size = f"{info.state.last_seq} appends, {replicas} replica{'s' * (replicas > 1)}"
    findings = [Finding("log", "ok", size)]
    try:
        await check_durability(nc, info, settings)
        findings.append(Finding("durability", "ok", "acknowledged means on disk"))
    except Misconfigured as error:
        todo = "until then, an acknowledged event could be lost with the machine"
        findings.append(Finding("durability", "wrong", str(error), todo))
    return findings


async def _examine_views(settings: Settings, end: tuple[int, int] | None) -> list[Finding]:
    async with open_redis(settings.redis_url) as redis:
        try:
            info = await redis.info("server")
        except (RedisError, OSError) as error:
            found = f"nothing answers at {settings.redis_url}: {error}"
            return [Finding("Valkey", "wrong", found, "start it, or set PLAIT_REDIS_URL")]
        name = "Valkey" if "valkey_version" in info else "Redis"
        number = info.get("valkey_version", info.get("redis_version"))
        findings = [Finding(name, "ok", f"{number} at {settings.redis_url}")]
        if end is None:
            return findings
        return [*findings, await _lag(Generations(redis, Names(settings.prefix)), *end)]


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


def _settings() -> Settings:
    """From the environment; where it does not name the monitoring of NATS, the usual place."""
    settings = Settings.from_env()
    if settings.nats_monitor_url:
        return settings
    host = urlsplit(settings.nats_url.partition(",")[0]).hostname or "127.0.0.1"
    return msgspec.structs.replace(settings, nats_monitor_url=f"http://{host}:{MONITOR_PORT}")
