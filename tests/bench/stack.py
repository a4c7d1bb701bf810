"""Plait's processes as `plait dev` runs them, with a raw publisher on the same NATS."""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from types import MappingProxyType

from plait.events.settings import Settings
from plait.services.dev.servers import NatsServer, ValkeyServer, free_port
from plait.services.dev.stack import Service, Stack
from tests.bench.baseline import RawPublisher, raw_client

ECHO = "offline:echo"
START_S = 30.0
POLL_S = 0.02


@contextlib.asynccontextmanager
async def whole_stack(
    data: Path, env: Mapping[str, str] = MappingProxyType({})
) -> AsyncIterator[tuple[Stack, RawPublisher]]:
    quiet = {"PLAIT_LOG_LEVEL": "warning", **env}
    async with Stack(data, model=ECHO, env=quiet) as stack, raw_client(stack.nats_url) as nc:
        yield stack, RawPublisher(nc)


def on_stack(stack: Stack) -> Settings:
    """For the bench's own commands. The services have checked the server's durability."""
    return Settings(nats_url=stack.nats_url, allow_lossy_log=True)


@contextlib.asynccontextmanager
async def servers_and_replies(data: Path) -> AsyncIterator[tuple[Settings, dict[str, str]]]:
    """NATS and the service of replies: all that turns need beside their own process, which the
    environment is for."""
    async with NatsServer(data / "nats") as nats:
        settings = Settings(nats_url=nats.url, nats_monitor_url=nats.monitor_url)
        env = {
            **os.environ,
            "PLAIT_NATS_URL": nats.url,
            "PLAIT_NATS_MONITOR_URL": nats.monitor_url,
            "PLAIT_LOG_LEVEL": "warning",
        }
        replies = Service("replies", env, data / "replies.log")
        await replies.start()
        try:
            yield settings, env
        finally:
            await replies.stop()


@contextlib.asynccontextmanager
async def gateway_alone(data: Path) -> AsyncIterator[tuple[str, str, RawPublisher]]:
    """Its URL and key."""
    async with NatsServer(data / "nats") as nats, ValkeyServer(data / "valkey") as valkey:
        settings = Settings(port=free_port())
        env = {
            **os.environ,
            "PLAIT_NATS_URL": nats.url,
            "PLAIT_NATS_MONITOR_URL": nats.monitor_url,
            "PLAIT_REDIS_URL": valkey.url,
            "PLAIT_PORT": str(settings.port),
            "PLAIT_LOG_LEVEL": "warning",
        }
        gateway = Service("gateway", env, data / "gateway.log")
        await gateway.start()
        try:
            await until_listening(settings.port)
            async with raw_client(nats.url) as nc:
                yield f"http://{settings.host}:{settings.port}", settings.key, RawPublisher(nc)
        finally:
            await gateway.stop()


async def until_listening(port: int) -> None:
    async with asyncio.timeout(START_S):
        while True:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", port)
            except OSError:
                await asyncio.sleep(POLL_S)
            else:
                writer.close()
                return
