"""replies: folds the log into ledgers and carries out what they owe.

Every process folds everything; of each partition of tenants, the holder of its lease acts.
Effects are driven by the fold and by a sweep over the rows that are still open, never by
redelivery: a lost effect is only late (P13).
"""

import asyncio
import contextlib
from collections import OrderedDict, deque
from collections.abc import Callable

import structlog

from plait.events.content import Contents
from plait.events.errors import PlaitError, Retryable
from plait.events.handler import Handler
from plait.events.settings import Settings
from plait.events.store import Batch, EventStore, Leases, Recorded, WorkQueue
from plait.events.subjects import slot
from plait.services.replies.carrier import Carrier
from plait.services.replies.ledger import Effect, Ledger

LEASE_RENEWAL_S = 1.0  # a lease lapses after three
SWEEP_S = 0.25  # how late a deadline may be noticed
OFFER_AGAIN_MS = 10_000  # an open row is tried again when nothing was heard of it for so long
RETRY_S = 0.5  # an effect that failed for now
AT_ONCE = 64  # branches whose effects are carried out at the same time
RECENT = 1_024  # appends kept at hand, so that a fresh effect reads nothing

log = structlog.get_logger("replies")


class Replies:
    """`now` is a clock in ms; `holder` names this process in the leases."""

    def __init__(
        self,
        store: EventStore,
        handler: Handler,
        contents: Contents,
        work: WorkQueue,
        leases: Leases,
        settings: Settings,
        holder: str,
        now: Callable[[], int],
    ) -> None:
        self._store, self._leases, self._settings = store, leases, settings
        self._carrier = Carrier(store, handler, contents, work)
        self._holder, self._now = holder, now
        self.ledgers: dict[str, Ledger] = {}
        self._held: set[int] = set()
        self._live = False  # has folded what the log held at the start
        self._recent: OrderedDict[int, Recorded] = OrderedDict()
        self._queues: dict[tuple[str, str], deque[Effect]] = {}  # per tenant and source branch
        self._queued: set[tuple[str, tuple[str, str]]] = set()  # tenant and key of an effect
        self._again: dict[tuple[str, tuple[str, str]], int] = {}  # when to try an open one again
        self._slots = asyncio.Semaphore(AT_ONCE)
        self._running: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Until cancelled; gives its leases back then."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._follow())
                tasks.create_task(self._keep_leases())
                tasks.create_task(self._sweep())
        finally:
            for task in self._running:
                task.cancel()
            for partition in sorted(self._held):
                with contextlib.suppress(PlaitError):
                    await self._leases.release(f"replies.{partition}", self._holder)

    # -- fold --------------------------------------------------------------------------------

    async def _follow(self) -> None:
        end = await self._store.last_sequence()
        seen = 0
        if not end:
            self._go_live()
        async with contextlib.aclosing(self._store.follow(after=0)) as batches:
            async for batch in batches:
                self.fold(batch)
                seen = max(seen, batch.up_to)
                if not self._live and seen >= end:
                    self._go_live()

    def fold(self, batch: Batch) -> None:
        for recorded in batch.recorded:
            tenant = recorded.stream.tenant
            ledger = self.ledgers.get(tenant)
            if ledger is None:
                ledger = self.ledgers[tenant] = Ledger(self._settings.turns_admitted)
            ledger.fold(recorded)
            if ledger.opened:
                if self._live:
                    self._recent[recorded.sequence] = recorded
                    if len(self._recent) > RECENT:
                        self._recent.popitem(last=False)
                    if self._acts_for(tenant):
                        for effect in ledger.opened:
                            self._start(tenant, effect)
                ledger.opened.clear()

    def _go_live(self) -> None:
        self._live = True
        log.info("ledger folded", tenants=len(self.ledgers))
        self.sweep()  # What is owed already goes before what comes now.

    def _acts_for(self, tenant: str) -> bool:
        return self._live and self._partition(tenant) in self._held

    def _partition(self, tenant: str) -> int:
        return slot(tenant, self._settings.replies_partitions)

    # -- carry out ---------------------------------------------------------------------------

    def _start(self, tenant: str, effect: Effect) -> None:
        """Puts the effect behind the others of its source, and starts the source if it rests."""
        if (tenant, effect.key) in self._queued:
            return
        self._queued.add((tenant, effect.key))
        source = (tenant, effect.source)
        queue = self._queues.get(source)
        if queue is not None:
            queue.append(effect)
            return
        self._queues[source] = deque([effect])
        task = asyncio.create_task(self._drain(source))
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def _drain(self, source: tuple[str, str]) -> None:
        tenant, queue = source[0], self._queues[source]
        try:
            while queue and self._acts_for(tenant):
                effect = queue[0]
                if self.ledgers[tenant].effects.get(effect.key) == effect:  # Not settled yet.
                    async with self._slots:
                        done = await self._carry(tenant, effect)
                    if not done:
                        # What its branch said later waits for it: order is kept.
                        await asyncio.sleep(RETRY_S)
                        continue
                    self._again[tenant, effect.key] = self._now() + OFFER_AGAIN_MS
                queue.popleft()
                self._queued.discard((tenant, effect.key))
        finally:
            for effect in queue:
                self._queued.discard((tenant, effect.key))
            del self._queues[source]

    async def _carry(self, tenant: str, effect: Effect) -> bool:
        try:
            await self._carrier.carry(
                tenant, effect, self._now(), self._recent.get(effect.sequence)
            )
        except Retryable as error:
            log.warning("effect delayed", effect=effect.key, error=str(error))
            return False
        except Exception:
            # One effect that always fails must hold up nobody else; the sweep tries it again.
            log.exception("effect failed", effect=effect.key)
        return True

    # -- clocks ------------------------------------------------------------------------------

    async def _keep_leases(self) -> None:
        while True:
            for partition in range(self._settings.replies_partitions):
                try:
                    held = await self._leases.hold(f"replies.{partition}", self._holder)
                except PlaitError as error:
                    log.warning("lease not renewed", partition=partition, error=str(error))
                    held = False
                if held and partition not in self._held:
                    log.info("partition taken", partition=partition)
                    self._held.add(partition)
                    self.sweep()
                elif not held and partition in self._held:
                    log.info("partition lost", partition=partition)
                    self._held.discard(partition)
            await asyncio.sleep(LEASE_RENEWAL_S)

    async def _sweep(self) -> None:
        while True:
            self.sweep()
            await asyncio.sleep(SWEEP_S)

    def sweep(self) -> None:
        """Starts what is due: waits past their deadline, open rows not heard of for long."""
        if not self._live:
            return
        now = self._now()
        for tenant, ledger in self.ledgers.items():
            if not self._acts_for(tenant):
                continue
            for expired in ledger.due(now):
                self._start(tenant, expired)
            for effect in ledger.effects.values():
                if self._again.get((tenant, effect.key), 0) <= now:
                    self._start(tenant, effect)
        settled = [
            (tenant, key) for tenant, key in self._again if key not in self.ledgers[tenant].effects
        ]
        for tenant_and_key in settled:
            del self._again[tenant_and_key]
