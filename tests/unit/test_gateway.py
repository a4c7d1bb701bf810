"""What of the gateway needs no server: its tail of the log, its records, its problems."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from msgspec import Struct

from plait.events import ids
from plait.events.errors import Code, IdempotencyMismatch, Invalid, SelfSend, UnknownBranch
from plait.events.memory import MemoryProviderRecords, MemoryRequests
from plait.events.providers import TenantProviders
from plait.events.vault import Vault
from plait.services.gateway.addresses import PostPlan
from plait.services.gateway.commands import Commands
from plait.services.gateway.idempotency import asked, settled
from plait.services.gateway.problems import STATUS
from plait.services.gateway.shapes import NewMessage
from plait.services.gateway.tail import QUEUE, Tail
from tests.waiting import until
from tests.world import TENANT, World


@asynccontextmanager
async def tailing(world: World) -> AsyncIterator[Tail]:
    tail = Tail(world.store)
    await tail.start()
    task = asyncio.create_task(tail.run())
    try:
        yield tail
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


# -- the tail --------------------------------------------------------------------------------


async def test_a_listener_gets_its_session_from_where_it_joined_on() -> None:
    world = World()
    session, other = await world.session(), await world.session()
    branch = await world.branch(session)
    async with tailing(world) as tail:
        subscription = tail.listen(TENANT, session)
        await world.branch(other)
        await world.post(branch, "next", run=False)
        recorded = await subscription.next(5)
        assert recorded is not None
        assert recorded.sequence == await world.store.last_sequence()
        assert recorded.sequence > subscription.joined
        assert await subscription.next(0.001) is None


async def test_a_listener_that_reads_too_slowly_gets_what_it_had_room_for_and_then_its_end() -> (
    None
):
    world = World()
    session = await world.session()
    async with tailing(world) as tail:
        subscription = tail.listen(TENANT, session)
        for _ in range(QUEUE + 10):
            await world.branch(session)
        end = await world.store.last_sequence()
        await until(lambda: tail.seen >= end)
        got = 0
        while not subscription.over:
            assert await subscription.next(5) is not None
            got += 1
        assert got == QUEUE
        assert subscription.ended is not None
        assert not subscription.stopped


async def test_a_watch_is_told_where_the_turn_ended_and_leaves_nothing_behind() -> None:
    world = World()
    session = await world.session()
    branch = await world.branch(session, run=True)
    async with tailing(world) as tail:
        turn = await world.claim(branch)
        with tail.watch(turn, "another name") as ended:
            await world.answer(branch, "done")
            assert await asyncio.wait_for(ended, 5) == await world.store.last_sequence()
        assert tail.waiters == 0


# -- idempotency -----------------------------------------------------------------------------


class Where(Struct, frozen=True):
    branch: str


def message(text: str = "hi") -> NewMessage:
    return NewMessage(text=text)


async def accepted(_: Where) -> None:
    return None


async def test_a_retry_takes_the_plan_of_the_first_call() -> None:
    requests, plans = MemoryRequests(lambda: 0.0), iter(["first", "second"])

    async def resolve() -> Where:
        return Where(next(plans))

    call = asked("t", "key", "POST", "/x", message())
    first = await settled(requests, "t", call, Where, resolve, accepted)
    again = asked("t", "key", "POST", "/x", message())
    assert again == call
    assert await settled(requests, "t", again, Where, resolve, accepted) == first == Where("first")


async def test_a_refused_call_leaves_no_record() -> None:
    requests = MemoryRequests(lambda: 0.0)

    async def resolve() -> Where:
        return Where("here")

    async def refused(_: Where) -> None:
        raise SelfSend("here")

    call = asked("t", "key", "POST", "/x", message())
    with pytest.raises(SelfSend):
        await settled(requests, "t", call, Where, resolve, refused)
    other = asked("t", "key", "POST", "/x", message("another"))
    await settled(requests, "t", other, Where, resolve, accepted)
    with pytest.raises(IdempotencyMismatch):
        await settled(requests, "t", call, Where, resolve, accepted)


def test_a_key_names_one_command_of_its_tenant() -> None:
    one, two = (asked(tenant, "key", "POST", "/x", message()) for tenant in ("a", "b"))
    assert one.command_id != two.command_id
    assert one.command_id == ids.derive("command", "a", "key")
    without = [asked("a", None, "POST", "/x", message()).command_id for _ in range(2)]
    assert without[0] != without[1]
    with pytest.raises(Invalid):
        asked("a", "x" * 256, "POST", "/x", message())


# -- problems --------------------------------------------------------------------------------


def test_every_code_has_its_status() -> None:
    assert set(STATUS) == set(Code)


def test_an_unknown_branch_lists_a_bounded_number_of_names() -> None:
    told = str(UnknownBranch("x", tuple(f"name{number}" for number in range(50))))
    assert "name19 and 30 more" in told
    assert "name20" not in told


# -- posts that go on after a node (found by the simulation) -----------------------------------


def posting(world: World) -> Commands:
    providers = TenantProviders(MemoryProviderRecords(), Vault(world.settings.secret))
    return Commands(
        world.handler,
        world.contents,
        MemoryRequests(lambda: world.ms / 1000),
        providers,
        world.settings,
        lambda: world.ms,
    )


async def test_a_post_that_forked_is_answered_again_after_its_nodes_branch_was_archived() -> None:
    world = World()
    session = await world.session()
    branch = await world.branch(session)
    tip = (await world.handler.branch(TENANT, branch)).tip
    body = NewMessage(text="go on", after=tip)
    call = asked(TENANT, "k", "POST", f"/v1/sessions/{session}/messages", body)
    commands = posting(world)
    create = commands._requests.create

    async def slowly(tenant: str, key: str, record: bytes) -> bytes:
        await world.post(branch, "first", run=False)  # somebody goes on there meanwhile
        return await create(tenant, key, record)

    commands._requests.create = slowly  # type: ignore[method-assign]
    made = await commands.post(TENANT, session, body, call)
    assert made.branch_id != branch
    await world.archive(branch)
    again = await commands.post(TENANT, session, body, call)
    assert (again.node_id, again.branch_id) == (made.node_id, made.branch_id)


async def test_a_tip_that_moves_while_it_is_looked_at_makes_a_fork_and_no_refusal() -> None:
    world = World()
    session = await world.session()
    branch = await world.branch(session)
    tip = (await world.handler.branch(TENANT, branch)).tip
    body = NewMessage(text="go on", after=tip)
    call = asked(TENANT, "k", "POST", f"/v1/sessions/{session}/messages", body)
    commands = posting(world)
    found = commands._addresses.of_post

    async def resolved(*given: str | NewMessage) -> PostPlan:
        plan = await found(*given)  # type: ignore[arg-type]
        await world.post(branch, "first", run=False)
        return plan

    commands._addresses.of_post = resolved  # type: ignore[method-assign,assignment]
    made = await commands.post(TENANT, session, body, call)
    assert made.branch_id != branch
    assert (await world.handler.branch(TENANT, made.branch_id)).fork == tip
