"""The process of turns: takes work items from the queue, and runs as many turns at once as it may.

FastStream's pull subscriber waits for all handlers of a batch before it fetches the next, and its
concurrent one fetches more than can run and holds it back without a sign of life (it would come
again, and use up its attempts). So the handler here only starts the turn as a task and returns as
soon as another could run, and each fetch asks for no more than that: a full process holds nothing
that another could run.
"""

import asyncio
import contextlib
import os
import secrets
import socket
import time
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import msgspec
import structlog
from faststream import AckPolicy, FastStream
from faststream.nats import JStream, NatsBroker, NatsMessage, PullSub
from nats.aio.msg import Msg
from nats.js.api import AckPolicy as ConsumerAck
from nats.js.api import ConsumerConfig
from nats.js.errors import APIError

from plait.events import codec, ids
from plait.events.content import Contents
from plait.events.errors import Misconfigured, PlaitError
from plait.events.handler import Handler
from plait.events.jetstream_api import Api
from plait.events.jetstream_setup import JetStream, open_jetstream
from plait.events.providers import TenantProviders
from plait.events.settings import Settings
from plait.events.transcripts import Transcripts
from plait.events.vault import Vault
from plait.projections.queries import Queries
from plait.projections.scripts import connect
from plait.services.turns.models import ChatModel, offline_models
from plait.services.turns.providers import Providers, http_models
from plait.services.turns.runner import TurnRunner
from plait.services.turns.tenants import providers_of
from plait.services.turns.tokens import TokenStreams
from plait.services.turns.tools import Reading, Tool

ACK_WAIT_S = 3.0  # a dead worker's items come again after this
ALIVE_S = 1.0  # between two signs of life
FETCHED_AT_ONCE = 64  # items of one fetch
FETCH_S = 1.0
UNACKED = 1_000_000  # in flight in all processes: above whatever is admitted
DRAIN_S = 10.0  # what running turns get when the process is stopped; the rest goes on elsewhere

log = structlog.get_logger("turns")


async def run(
    settings: Settings,
    models: Mapping[str, ChatModel] = MappingProxyType({}),
    tools: Sequence[Tool] = (),
    providers: Providers | None = None,
) -> None:
    """Until cancelled; then it takes no more items, and gives running turns DRAIN_S to end.

    `models` come on top of the offline ones and of those behind HTTP, which are called as
    `providers` says (default: as the tenant has set, else as the environment says). Raises
    Unavailable without a log, and Misconfigured for one that will not do.
    """
    vault = Vault(settings.secret)
    jetstream = await open_jetstream(settings, "plait-turns")
    redis = connect(settings.redis_url)  # Connects when a model first reads a branch.
    if providers is None:
        providers = providers_of(TenantProviders(jetstream.providers, vault))
    behind_http = http_models(settings.limits, providers)
    try:
        await _ensure_consumer(jetstream)
        contents = Contents(jetstream.keys, jetstream.blobs, settings.limits)
        transcripts = Transcripts(jetstream.store, contents)
        handler = Handler(transcripts.watching(), settings.limits)
        streams = TokenStreams(jetstream.nc, jetstream.subjects)
        runner = TurnRunner(
            handler,
            transcripts,
            contents,
            {**offline_models(), **behind_http, **models},
            tools,
            settings,
            f"{socket.gethostname()}.{os.getpid()}.{secrets.token_hex(4)}",
            lambda: time.time_ns() // 1_000_000,
            streams.speak,
            Reading(Queries(redis, contents, settings), handler),
        )
        speaking = asyncio.create_task(streams.run())
        try:
            await _serve(jetstream, runner, settings)
        finally:
            speaking.cancel()
            await asyncio.gather(speaking, return_exceptions=True)
    finally:
        for model in behind_http.values():
            await model.close()
        await redis.aclose()
        await jetstream.close()


async def _serve(jetstream: JetStream, runner: TurnRunner, settings: Settings) -> None:
    subjects = jetstream.subjects
    pool = _Pool(jetstream, runner, settings)
    broker = NatsBroker(
        settings.nats_url.split(","),
        name="plait-turns-queue",
        max_reconnect_attempts=-1,
        graceful_timeout=None,  # Our own drain knows the turns; a handler has long returned.
        apply_types=False,
        logger=None,
    )
    subscriber = broker.subscriber(
        subjects.work_items,
        stream=JStream(subjects.work, declare=False),
        durable=subjects.turns_durable,
        pull_sub=_AsManyAsCanRun(pool),
        ack_policy=AckPolicy.MANUAL,
        decoder=_undecoded,
    )
    subscriber(pool.take)
    app = FastStream(broker, logger=None)
    alive = asyncio.create_task(pool.keep_alive())
    try:
        await app.start()
        log.info("ready", turns_at_once=settings.turns_at_once)
        await asyncio.wait([alive])  # Not awaited itself: it must outlive our cancellation.
        alive.result()
    finally:
        try:
            await subscriber.stop()
            await pool.drain()
            await app.stop()
        finally:
            alive.cancel()
            await asyncio.gather(alive, return_exceptions=True)


async def _undecoded(message: NatsMessage) -> NatsMessage:
    return message


async def _ensure_consumer(jetstream: JetStream) -> None:
    """FastStream would take an existing consumer as it is: create it, or bring it up to date."""
    subjects = jetstream.subjects
    try:
        await jetstream.nc.jetstream().add_consumer(
            subjects.work,
            ConsumerConfig(
                durable_name=subjects.turns_durable,
                ack_policy=ConsumerAck.EXPLICIT,
                ack_wait=ACK_WAIT_S,
                max_deliver=-1,  # A bounded one leaves a phantom; the runner ends such turns (P11).
                max_ack_pending=UNACKED,
                filter_subject=subjects.work_items,
            ),
        )
    except APIError as error:
        raise Misconfigured(
            f"consumer {subjects.turns_durable} of stream {subjects.work} cannot be made what it "
            f"must be ({error.description}): delete it while no worker runs"
        ) from error


class _Pool:
    """The items in this process, from fetch to ack, and the turns that run for them."""

    def __init__(self, jetstream: JetStream, runner: TurnRunner, settings: Settings) -> None:
        self._jetstream, self._runner = jetstream, runner
        self._api = Api(jetstream.nc)
        self._attempts = settings.limits.turn_attempts
        self._at_once = settings.turns_at_once
        self._held: dict[asyncio.Task[None], Msg] = {}
        self._ended = asyncio.Event()

    @property
    def free(self) -> int:
        return self._at_once - len(self._held)

    async def take(self, message: NatsMessage) -> None:
        """Starts the item's turn. Returns when another could run."""
        task = asyncio.create_task(self._run(message.raw_message))
        self._held[task] = message.raw_message
        task.add_done_callback(self._let_go)
        while self.free < 1:
            self._ended.clear()
            await self._ended.wait()

    def _let_go(self, task: asyncio.Task[None]) -> None:
        del self._held[task]
        self._ended.set()

    async def _run(self, item: Msg) -> None:
        try:
            try:
                work = codec.decode_item(item.data)
            except msgspec.DecodeError as error:
                await self._park(item, f"no work item: {error}")
                await item.ack()
                return
            delivery = item.metadata.num_delivered
            if await self._runner.run(work.tenant, work.turn_id, work.n, delivery):
                if delivery > self._attempts:
                    await self._park(item, f"given up after {self._attempts} attempts")
                await item.ack()
        except Exception:
            log.exception("work item left to its next delivery", subject=item.subject)

    async def _park(self, item: Msg, why: str) -> None:
        """Keeps a copy for people to look at; without one, the item goes all the same."""
        log.error("work item parked", subject=item.subject, why=why)
        subject = self._jetstream.subjects.parked_item("work", ids.derive("work", item.subject))
        with contextlib.suppress(PlaitError):
            await self._api.publish(
                subject, item.data, {"Plait-Error": why, "Plait-Subject": item.subject}
            )

    async def keep_alive(self) -> None:
        """Tells the queue each second that the items are in hand."""
        while True:
            for item in list(self._held.values()):
                await item.in_progress()
            await asyncio.sleep(ALIVE_S)

    async def drain(self) -> None:
        """Turns that do not end in time are dropped: another process goes on with them."""
        if self._held:
            log.info("draining", turns=len(self._held))
            _, left = await asyncio.wait(self._held, timeout=DRAIN_S)
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)


class _AsManyAsCanRun(PullSub[bool]):
    """FastStream looks at `batch_size` before each fetch."""

    def __init__(self, pool: _Pool) -> None:
        self._pool = pool
        super().__init__(timeout=FETCH_S)

    @property
    def batch_size(self) -> int:
        return max(1, min(FETCHED_AT_ONCE, self._pool.free))

    @batch_size.setter
    def batch_size(self, _: int) -> None:
        pass
