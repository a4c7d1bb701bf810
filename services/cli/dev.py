"""`plait dev`: everything in one process tree until it is told to stop."""

import asyncio
import shlex
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import msgspec
from cyclopts import Parameter
from cyclopts.validators import Number
from rich.markup import escape

from plait.events.settings import Settings
from plait.services.cli.api import Gateway
from plait.services.cli.logs import log_to_stderr
from plait.services.cli.terminal import Terminal
from plait.services.dev.stack import SERVICES, Stack


def dev(
    *,
    port: Annotated[int | None, Parameter(validator=Number(gte=0, lte=65_535))] = None,
    data: Path = Path(".plait"),
    model: str | None = None,
    json: Annotated[bool, Parameter(negative=())] = False,
) -> None:
    """Run everything, with embedded NATS and Valkey; keeps its data.

    Logs go to standard error. Whatever dies is started again. Ctrl-C stops it. NATS takes its
    usual ports 4222 and 8222, Valkey its 6379, where those are free, and others where not.

    Parameters
    ----------
    port
        Port of the gateway (PLAIT_PORT; 8080), 0 for a free one.
    data
        Where the log and the read models are kept.
    model
        Model of sessions that name none (PLAIT_MODEL), such as `offline:demo`.
    json
        Print one line of JSON when ready: url, key, nats, valkey.
    """
    settings = Settings.from_env(port=port or None, model=model)
    log_to_stderr(settings.log_level, process="dev")
    console = Terminal(quiet=json)
    shown = escape(str(data))
    console.print(f"starting NATS, Valkey and {len(SERVICES)} services on {shown}/ …", style="dim")
    asyncio.run(_dev(settings, data, 0 if port == 0 else settings.port, json=json))
    console.print("stopped", style="dim")


async def _dev(settings: Settings, data: Path, port: int, *, json: bool) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    running = asyncio.create_task(_run(settings, data, port, json=json))
    stopped = asyncio.create_task(stop.wait())
    await asyncio.wait((running, stopped), return_when=asyncio.FIRST_COMPLETED)
    if not running.done():
        running.cancel()
    stopped.cancel()
    await asyncio.wait((running,))
    if not running.cancelled():
        running.result()


async def _run(settings: Settings, data: Path, port: int, *, json: bool) -> None:
    async with Stack(
        data,
        port=port,
        model=settings.model,
        usual_ports=True,
        log_to_stderr=True,
    ) as stack:
        _announce(stack, data, settings, json=json)
        await stack.until_lost()


def _announce(stack: Stack, data: Path, settings: Settings, *, json: bool) -> None:
    where = {
        "url": stack.url,
        "key": stack.key,
        "nats": stack.nats_url,
        "valkey": stack.redis_url,
    }
    if json:
        sys.stdout.write(msgspec.json.encode(where).decode() + "\n")
        sys.stdout.flush()
        return
    console = Terminal()
    console.print(
        f"[bold green]●[/] plait is running at [bold]{escape(stack.url)}[/], "
        f"key [bold]{escape(stack.key)}[/]"
    )
    about = f"  model {settings.model} · data in {data}/ · Ctrl-C stops it"
    console.print(escape(about), style="dim")
    console.print("  try [bold]plait chat[/] in another terminal", end="\n\n")
    console.print("  in other terminals, before [bold]plait[/] commands and workers:", style="dim")
    for line in _exports(stack, data, settings):
        console.print(escape(f"  export {line}"), soft_wrap=True)
    console.print()


def _exports(stack: Stack, data: Path, settings: Settings) -> Iterator[str]:
    """What other processes need to find this stack, where it is not their default."""
    usual = Settings()
    for name, value, default in (
        ("PLAIT_URL", stack.url, Gateway.url),
        ("PLAIT_KEY", stack.key, Gateway.key),
        ("PLAIT_NATS_URL", stack.nats_url, usual.nats_url),
        ("PLAIT_NATS_MONITOR_URL", stack.monitor_url, usual.nats_monitor_url),
        ("PLAIT_REDIS_URL", stack.redis_url, usual.redis_url),
        ("PLAIT_PREFIX", settings.prefix, usual.prefix),
    ):
        if value != default:
            yield f"{name}={shlex.quote(value)}"
    if not settings.secret:  # by its file: a secret is not for the screen
        yield f'PLAIT_SECRET="$(cat {shlex.quote(str(data.absolute() / "secret"))})"'
