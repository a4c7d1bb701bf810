"""The process of the gateway: opens the log and the read models, then serves until cancelled."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import structlog
from granian.constants import Interfaces
from granian.server.embed import Server

from plait.events.content import Contents
from plait.events.handler import Handler
from plait.events.jetstream_setup import open_jetstream
from plait.events.providers import TenantProviders
from plait.events.settings import Settings
from plait.events.transcripts import Transcripts
from plait.events.vault import Vault
from plait.projections.queries import Queries
from plait.projections.scripts import connect
from plait.services.gateway.app import create_app
from plait.services.gateway.call import Gateway
from plait.services.gateway.commands import Commands
from plait.services.gateway.tail import Tail
from plait.services.gateway.tokens import Feeds

BACKLOG = 1_024  # connections that wait to be accepted
AT_ONCE = 20_000  # requests under way: event streams and waits count, too
STOP_S = 10.0  # for requests under way, once streams and waits have ended

log = structlog.get_logger("gateway")


async def run(settings: Settings) -> None:
    """Until cancelled. Raises Unavailable without a log, and Misconfigured for one that will not
    do. The read models may come and go."""
    async with opened(settings) as gateway:
        await serve(gateway)


@asynccontextmanager
async def opened(settings: Settings) -> AsyncIterator[Gateway]:
    vault = Vault(settings.secret)
    jetstream = await open_jetstream(settings, "plait-gateway")
    try:
        store = jetstream.store
        contents = Contents(jetstream.keys, jetstream.blobs, settings.limits)
        handler = Handler(store, settings.limits)
        providers = TenantProviders(jetstream.providers, vault)
        commands = Commands(
            handler,
            contents,
            jetstream.requests,
            providers,
            settings,
            lambda: time.time_ns() // 1_000_000,
        )
        feeds = Feeds(jetstream.nc, jetstream.subjects)
        async with connect(settings.redis_url) as redis:
            yield Gateway(
                settings=settings,
                store=store,
                handler=handler,
                contents=contents,
                transcripts=Transcripts(store, contents),
                queries=Queries(redis, contents, settings),
                commands=commands,
                tail=Tail(store, feeds.see),
                feeds=feeds,
                providers=providers,
            )
    finally:
        await jetstream.close()


async def serve(gateway: Gateway) -> None:
    settings, tail = gateway.settings, gateway.tail
    await tail.start()
    server = Server(
        create_app(gateway),
        address=settings.host,
        port=settings.port,
        interface=Interfaces.ASGINL,
        backlog=BACKLOG,
        backpressure=AT_ONCE,
        websockets=False,
        log_enabled=False,
    )
    following = asyncio.create_task(tail.run(), name="tail")
    serving = asyncio.create_task(server.serve(), name="http")
    log.info("serving", host=settings.host, port=settings.port)
    try:
        done, _ = await asyncio.wait((following, serving), return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        # granian waits for open connections without end, so ours end first.
        tail.stop()
        server.stop()  # type: ignore[no-untyped-call]
        await asyncio.wait((serving,), timeout=STOP_S)
        for task in (serving, following):
            task.cancel()
        await asyncio.gather(serving, following, return_exceptions=True)
