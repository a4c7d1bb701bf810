"""`plait dev`: everything in one process tree until it is told to stop."""

import asyncio
import signal
import sys
from pathlib import Path
from typing import Annotated

import msgspec
from cyclopts import Parameter
from rich.console import Console

from plait.events.settings import Settings
from plait.services.cli.logs import log_to_stderr
from plait.services.dev.stack import Stack


def dev(
    *,
    port: int | None = None,
    data: Path = Path(".plait"),
    model: str | None = None,
    json: Annotated[bool, Parameter(negative=())] = False,
) -> int:
    """Run everything, with embedded NATS and Valkey; keeps its data.

    Logs go to standard error. Whatever dies is started again. Ctrl-C stops it.

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
    settings = Settings.from_env(port=port, model=model)
    log_to_stderr(settings.log_level, process="dev")
    return asyncio.run(_dev(settings, data, json=json))


async def _dev(settings: Settings, data: Path, *, json: bool) -> int:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    running = asyncio.create_task(_run(settings, data, stop, json=json))
    stopped = asyncio.create_task(stop.wait())
    await asyncio.wait((running, stopped), return_when=asyncio.FIRST_COMPLETED)
    if not running.done():
        running.cancel()
    stopped.cancel()
    await asyncio.wait((running,))
    if not running.cancelled():
        running.result()
    return 0


async def _run(settings: Settings, data: Path, stop: asyncio.Event, *, json: bool) -> None:
    async with Stack(
        data,
        port=settings.port,
        model=settings.model,
        usual_ports=True,
        log_to_stderr=True,
    ) as stack:
        _announce(stack, data, settings.model, json=json)
        await stop.wait()


def _announce(stack: Stack, data: Path, model: str, *, json: bool) -> None:
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
    console = Console(highlight=False)
    console.print(
        f"[bold green]●[/] plait is running at [bold]{stack.url}[/], key [bold]{stack.key}[/]"
    )
    console.print(f"  model {model} · data in {data}/ · Ctrl-C stops it", style="dim")
    elsewhere = {
        "PLAIT_URL": (stack.url, "http://127.0.0.1:8080"),
        "PLAIT_KEY": (stack.key, "dev"),
        "PLAIT_NATS_URL": (stack.nats_url, Settings().nats_url),
        "PLAIT_REDIS_URL": (stack.redis_url, Settings().redis_url),
    }
    exports = [f"{name}={value}" for name, (value, usual) in elsewhere.items() if value != usual]
    if exports:
        console.print("  not the usual places; for other commands:", style="dim")
        console.print("  export " + " ".join(exports), soft_wrap=True)
    console.print("  try [bold]plait chat[/] in another terminal\n")
