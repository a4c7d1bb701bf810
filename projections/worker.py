"""The process of projections: opens log and store, then builds the read models until cancelled."""

from plait.events.jetstream_setup import open_jetstream
from plait.events.settings import Settings
from plait.projections.runner import Runner
from plait.projections.scripts import connect


async def run(settings: Settings) -> None:
    """Raises Unavailable without a log, Misconfigured for one that will not do, and UnknownEvent
    for one that a newer version wrote. The store may come and go."""
    jetstream = await open_jetstream(settings, "plait-projections")
    try:
        async with connect(settings.redis_url) as redis:
            await Runner(jetstream.store, redis, settings).run()
    finally:
        await jetstream.close()
