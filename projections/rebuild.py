"""A new generation beside the live one, then a swap of the pointer: readers notice nothing.

A changed schema needs no call: its keys have another version, so its workers find nothing live and
build. This is for read models that are doubted.
"""

from redis.asyncio import Redis

from plait.events.settings import Settings
from plait.events.store import EventStore
from plait.projections.generations import Generations
from plait.projections.runner import Runner
from plait.projections.schema import Generation, Names


async def rebuild(store: EventStore, redis: Redis, settings: Settings) -> Generation:
    """Builds, swaps and sweeps; workers go on with the new generation by themselves.

    Joins a building that is under way. Raises Lost when the store loses it meanwhile, and what
    log and store raise: call it again, it goes on.
    """
    place = await Runner(store, redis, settings).build()
    await Generations(redis, Names(settings.prefix)).sweep()
    return place.generation
