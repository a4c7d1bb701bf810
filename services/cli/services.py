"""One service as a process: settings from the environment, logs as JSON lines on standard error."""

import asyncio
import importlib
import signal
from collections.abc import Callable, Coroutine

import structlog
import uvloop

from plait.events.settings import Settings
from plait.services.cli.logs import log_to_stderr


def gateway() -> None:
    """Run the HTTP API. Settings come from PLAIT_… variables."""
    _run("plait.services.gateway.worker")


def turns() -> None:
    """Run model turns. Settings come from PLAIT_… variables."""
    _run("plait.services.turns.worker")


def replies() -> None:
    """Run what carries messages and replies between branches. Settings: PLAIT_… variables."""
    _run("plait.services.replies.worker")


def projections() -> None:
    """Run what builds the read models. Settings come from PLAIT_… variables."""
    _run("plait.projections.worker")


def _run(module: str) -> None:
    settings = Settings.from_env()
    log_to_stderr(settings.log_level, process=module.split(".")[-2])
    worker = importlib.import_module(module)  # imports what this service needs, and no other
    uvloop.run(_until_stopped(worker.run, settings))


async def _until_stopped(
    run: Callable[[Settings], Coroutine[None, None, None]], settings: Settings
) -> None:
    """SIGTERM and SIGINT cancel the worker, which closes what it holds."""
    work = asyncio.create_task(run(settings))
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, work.cancel)
    try:
        await work
    except asyncio.CancelledError:
        structlog.get_logger().info("stopped")
