"""The process of replies: opens the log, then carries over until it is cancelled."""

import secrets
import time

from plait.events.content import Contents
from plait.events.handler import Handler
from plait.events.jetstream_setup import open_jetstream
from plait.events.settings import Settings
from plait.services.replies.service import Replies


async def run(settings: Settings) -> None:
    """Raises Unavailable without a log, and Misconfigured for one that will not do."""
    jetstream = await open_jetstream(settings, "plait-replies")
    try:
        await Replies(
            jetstream.store,
            Handler(jetstream.store, settings.limits),
            Contents(jetstream.keys, jetstream.blobs, settings.limits),
            jetstream.work,
            jetstream.leases,
            settings,
            holder=secrets.token_hex(8),
            now=lambda: time.time_ns() // 1_000_000,
        ).run()
    finally:
        await jetstream.close()
