"""What a process has of the servers: every call is an await at which anything may happen.

A call may take long, not get there, get there while its answer does not come back, or get there
after its caller has given up; the process may die, freeze or be cut off before it or after it.
A dead process hears nothing and does nothing any more.
"""

import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from plait.events.codec import WorkItem
from plait.events.errors import Unavailable, VersionConflict
from plait.events.memory import Delivery
from plait.events.store import Batch, Recorded, StreamId
from plait.events.types import Append
from plait.projections.scripts import Call

if TYPE_CHECKING:
    from tests.simulation.processes import Process

T = TypeVar("T")
TIMEOUT_S = 2.0  # after which a caller gives up


class Wire:
    def __init__(self, process: "Process") -> None:
        self.process = process

    async def call(self, what: str, effect: Callable[[], Awaitable[T]]) -> T:
        """The effect takes place at one instant, or not at all."""
        process = self.process
        fate = process.fate(what)
        await process.pause(process.wire_s())
        match fate:
            case None:
                done = await effect()
                if process.chance.random() < 0.3:
                    await process.pause(process.wire_s())
                process.check()
                return done
            case "slow":
                before, after = process.chance.random() * 4, process.chance.random() * 4
                await process.pause(before if process.chance.random() < 0.6 else 0)
                done = await effect()
                await process.pause(after)
                return done
            case "refused" | "cut":
                await process.pause(TIMEOUT_S if process.chance.random() < 0.5 else 0.01)
                raise Unavailable(f"{what}: not reached")
            case "lost":
                with contextlib.suppress(VersionConflict, KeyError):
                    await effect()
                await process.pause(TIMEOUT_S if process.chance.random() < 0.5 else 0.01)
                raise Unavailable(f"{what}: no answer came")
            case "late":
                process.world.later(process.chance.random() * 6, process.name, effect)
                await process.pause(TIMEOUT_S * process.chance.random())
                raise Unavailable(f"{what}: no answer came")
            case "kill":
                process.kill()
                process.check()
            case "kill_after":
                with contextlib.suppress(VersionConflict, KeyError):
                    await effect()
                process.kill()
                process.check()
            case "freeze":
                early = process.chance.random() < 0.5
                if early:
                    await process.freeze()
                done = await effect()
                if not early:
                    await process.freeze()
                return done
            case _:
                pass
        raise AssertionError(fate)


class StoreWire(Wire):
    @property
    def generation(self) -> int:
        return self.process.world.store.generation

    async def append(self, stream: StreamId, append: Append, expected: int) -> int:
        return await self.call("append", lambda: self._append(stream, append, expected))

    async def _append(self, stream: StreamId, append: Append, expected: int) -> int:
        return await self.process.world.append(self.process.name, stream, append, expected)

    async def read(self, stream: StreamId, after: int = 0) -> Sequence[Recorded]:
        return await self.call("read", lambda: self.process.world.store.read(stream, after))

    async def read_at(self, sequence: int) -> Recorded | None:
        return await self.call("read", lambda: self.process.world.store.read_at(sequence))

    async def branches(self, tenant: str, session: str) -> Sequence[str]:
        found = [
            *await self.call("read", lambda: self.process.world.store.branches(tenant, session))
        ]
        self.process.chance.shuffle(found)
        return found

    async def last_sequence(self) -> int:
        return await self.call("read", self.process.world.store.last_sequence)

    async def follow(
        self, after: int = 0, *, tenant: str | None = None, session: str | None = None
    ) -> AsyncGenerator[Batch, None]:
        """Late, in pieces of any size, and broken off by a cut: never with a gap or a repeat."""
        process = self.process
        batches = process.world.store.follow(after, tenant=tenant, session=session)
        process.followed = after
        async with contextlib.aclosing(batches):
            async for batch in batches:
                process.check()
                reached = after
                recorded = [*batch.recorded]
                while recorded:
                    await self._carried()
                    size = 1 + int(process.chance.random() * len(recorded))
                    piece, recorded = recorded[:size], recorded[size:]
                    reached = piece[-1].sequence if recorded else batch.up_to
                    yield Batch(piece, reached)
                    process.followed = reached
                if not batch.recorded:
                    yield batch
                    process.followed = batch.up_to

    async def _carried(self) -> None:
        process = self.process
        fate = process.fate("follow")
        await process.pause(process.wire_s())
        match fate:
            case "slow" | "late":
                await process.pause(process.chance.random() * 6)
            case "lost" | "refused":
                if process.chance.random() < 0.2:
                    raise Unavailable("follow: broken off")
            case "cut":
                await process.pause(max(0.0, process.cut_until - process.world.loop.time()))
            case "kill" | "kill_after":
                process.kill()
                process.check()
            case "freeze":
                await process.freeze()
            case _:
                pass

    async def close(self) -> None:
        pass


class BlobWire(Wire):
    async def put(self, name: str, data: bytes) -> None:
        await self.call("blob", lambda: self.process.world.blobs.put(name, data))

    async def get(self, name: str) -> bytes:
        return await self.call("blob", lambda: self.process.world.blobs.get(name))


class KeyWire(Wire):
    async def create(self, tenant: str, session: str) -> tuple[str, bytes]:
        return await self.call("key", lambda: self.process.world.keys.create(tenant, session))

    async def get(self, tenant: str, session: str) -> tuple[str, bytes]:
        return await self.call("key", lambda: self.process.world.keys.get(tenant, session))


class RequestWire(Wire):
    async def get(self, tenant: str, key: str) -> bytes | None:
        return await self.call("request", lambda: self.process.world.requests.get(tenant, key))

    async def create(self, tenant: str, key: str, record: bytes) -> bytes:
        return await self.call(
            "request", lambda: self.process.world.requests.create(tenant, key, record)
        )


class LeaseWire(Wire):
    async def hold(self, name: str, holder: str) -> bool:
        return await self.call("lease", lambda: self.process.world.leases.hold(name, holder))

    async def release(self, name: str, holder: str) -> None:
        await self.call("lease", lambda: self.process.world.leases.release(name, holder))


class WorkWire(Wire):
    async def offer(self, tenant: str, turn_id: str, n: int) -> None:
        async def effect() -> None:
            self.process.world.work.offer(WorkItem(tenant, turn_id, n))

        await self.call("offer", effect)

    async def take(self) -> Delivery:
        delivery = await self.process.world.work.ask()
        self.process.check()
        return delivery

    async def alive(self, work: WorkItem) -> None:
        async def effect() -> None:
            self.process.world.work.alive(work)

        await self.call("alive", effect)

    async def ack(self, work: WorkItem) -> None:
        async def effect() -> None:
            self.process.world.work.ack(work)

        await self.call("ack", effect)


class ViewWire(Wire):
    """What `projections` takes for its client of the store."""

    async def answer(self, calls: Sequence[Call]) -> list[Any]:
        async def effect() -> list[Any]:
            return self.process.world.views.answer(calls)

        return await self.call("view", effect)
