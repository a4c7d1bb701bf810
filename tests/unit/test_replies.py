"""replies on the in-memory log: what one branch owes another reaches it, once, in any order of
crashes. Turns are driven by hand."""

import contextlib
from collections.abc import AsyncGenerator

from plait.events import ids
from plait.events.branch import Branch
from plait.events.store import Batch
from plait.events.subjects import stream_of
from plait.events.types import AnyEvent, MessageReceived, WaitEnded
from tests.waiting import until
from tests.world import TENANT, World


async def state(world: World, branch: str) -> Branch:
    return await world.handler.branch(TENANT, branch)


async def events_of(world: World, branch: str) -> list[AnyEvent]:
    recorded = await world.store.read(stream_of(TENANT, branch))
    return [event for one in recorded for event in one.append.events]


async def has_turn(world: World, branch: str) -> bool:
    return (await state(world, branch)).turn is not None


async def turn_is(world: World, branch: str, status: str) -> bool:
    turn = (await state(world, branch)).turn
    return turn is not None and turn.status == status


async def asking(world: World, words: str = "asks", session: str | None = None) -> str:
    """A branch whose turn is running."""
    branch = await world.branch(session or await world.session(), words=words, run=True)
    await world.claim(branch)
    return branch


async def test_a_branch_asks_another_and_goes_on_with_its_answer() -> None:
    world = World()
    session = await world.session()
    a, b = await asking(world, session=session), await world.branch(session)
    async with world.replies():
        message = await world.send(a, b, "how?", wait_s=60)
        await until(lambda: has_turn(world, b))
        await world.claim(b)
        await world.answer(b, "like this")
        await until(lambda: turn_is(world, a, "requested"))
    (ended,) = [event for event in await events_of(world, a) if isinstance(event, WaitEnded)]
    assert ended.outcome == "replied" and ended.wait_id == ids.wait_id(message)
    assert ended.content is not None
    assert await world.contents.read(ended.content) == "like this"


async def test_what_crosses_sessions_is_sealed_again_under_the_receivers_key() -> None:
    world = World()
    a, b = await asking(world), await world.branch(await world.session())
    async with world.replies():
        await world.send(a, b, "how?", wait_s=60)
        await until(lambda: has_turn(world, b))
    (received,) = [
        event
        for event in await events_of(world, b)
        if isinstance(event, MessageReceived) and event.source == "from_branch"
    ]
    assert await world.contents.read(received.content) == "how?"
    own = await world.contents.write("how?", TENANT, ids.session_of(b))
    assert received.content == own


async def test_a_wait_that_nobody_answers_expires_and_the_turn_goes_on() -> None:
    world = World()
    a = await asking(world)
    b = await world.branch(ids.session_of(a))
    async with world.replies():
        message = await world.send(a, b, "how?", wait_s=60)
        await until(lambda: has_turn(world, b))
        assert await turn_is(world, a, "suspended")
        world.ms += 61_000
        await until(lambda: turn_is(world, a, "requested"))
        assert (await state(world, a)).waits[ids.wait_id(message)].outcome == "expired"
        await world.claim(b)
        await world.answer(b, "too late")

        async def late() -> bool:
            return (await state(world, a)).waits[ids.wait_id(message)].late

        await until(late)


async def test_a_message_to_a_branch_archived_meanwhile_comes_back_as_a_note() -> None:
    world = World()
    a = await asking(world)
    b = await world.branch(ids.session_of(a))
    await world.send(a, b, "news")
    await world.archive(b)
    async with world.replies():
        await world.answer(a, "done")

        async def noted() -> bool:
            return bool((await state(world, a)).notes)

        await until(noted)
    assert not await has_turn(world, a)


async def test_a_wait_on_a_branch_archived_meanwhile_is_refused() -> None:
    world = World()
    a = await asking(world)
    b = await world.branch(ids.session_of(a))
    message = await world.send(a, b, "how?", wait_s=60)
    await world.archive(b)
    async with world.replies():
        await until(lambda: turn_is(world, a, "requested"))
    assert (await state(world, a)).waits[ids.wait_id(message)].outcome == "refused"


async def test_two_branches_that_ask_each_other_both_go_on_the_later_told_of_the_cycle() -> None:
    world = World()
    a = await asking(world)
    b = await asking(world, session=ids.session_of(a))
    first = await world.send(a, b, "how?", wait_s=60)
    second = await world.send(b, a, "how?", wait_s=60)
    async with world.replies():
        await until(lambda: turn_is(world, b, "requested"))
        assert (await state(world, b)).waits[ids.wait_id(second)].outcome == "refused"
        await world.claim(b)
        await world.answer(b, "alone then")
        await until(lambda: turn_is(world, b, "requested"))  # a's question was in its inbox
        await world.claim(b)
        await world.answer(b, "so")
        await until(lambda: turn_is(world, a, "requested"))
    assert (await state(world, a)).waits[ids.wait_id(first)].outcome == "replied"


async def test_messages_of_one_branch_arrive_in_its_order() -> None:
    world = World()
    a = await asking(world)
    b = await world.branch(ids.session_of(a))
    sent = [await world.send(a, b, f"{number}") for number in range(20)]
    async with world.replies():

        async def all_there() -> bool:
            return len((await state(world, b)).settled) == len(sent)

        await until(all_there)
    arrived = [
        event.message_id
        for event in await events_of(world, b)
        if isinstance(event, MessageReceived) and event.message_id
    ]
    assert arrived == sent


async def test_a_restarted_replies_finds_what_is_owed_in_the_log() -> None:
    world = World()
    a = await asking(world)
    b = await world.branch(ids.session_of(a))
    await world.send(a, b, "how?", wait_s=60)
    async with world.replies("first"):
        await until(lambda: has_turn(world, b))
    await world.claim(b)
    await world.answer(b, "so")
    async with world.replies("second"):
        await until(lambda: turn_is(world, a, "requested"))


async def test_two_that_act_at_once_do_nothing_twice() -> None:
    world = World()
    world.leases.hold = _everyone_holds  # type: ignore[method-assign]
    a = await asking(world)
    b = await world.branch(ids.session_of(a))
    async with world.replies("one"), world.replies("two"):
        for number in range(10):
            await world.send(a, b, f"{number}")
        await world.send(a, b, "how?", wait_s=60)
        await until(lambda: has_turn(world, b))
        await world.claim(b)
        await world.answer(b, "so")
        await until(lambda: turn_is(world, a, "requested"))
    events = [*await events_of(world, a), *await events_of(world, b)]
    messages = [
        event.message_id
        for event in events
        if isinstance(event, MessageReceived) and event.message_id
    ]
    assert len(messages) == len(set(messages)) == 11
    assert len([event for event in events if isinstance(event, WaitEnded)]) == 1


async def _everyone_holds(name: str, holder: str) -> bool:
    return True


async def test_only_the_holder_of_a_lease_acts_and_another_takes_over_when_it_lapses() -> None:
    world = World()
    a = await asking(world)
    b = await world.branch(ids.session_of(a))
    for partition in range(world.settings.replies_partitions):
        await world.leases.hold(f"replies.{partition}", "gone")
    async with world.replies() as replies:
        await until(lambda: bool(replies.ledgers))
        await world.send(a, b, "news")
        assert not (await state(world, b)).settled
        world.ms += 10_000

        async def there() -> bool:
            return bool((await state(world, b)).settled)

        await until(there)


async def test_what_was_owed_at_the_start_goes_before_what_comes_next() -> None:
    """Found by the simulation: a message overtook the one that was sent while replies was down."""
    world = World()
    a = await asking(world)
    b = await world.branch(ids.session_of(a))
    first = await world.send(a, b, "first")
    follow, hold, second = world.store.follow, world.leases.hold, ""
    held: set[str] = set()

    async def holding(name: str, holder: str) -> bool:
        held.add(name)
        return await hold(name, holder)

    async def following(after: int = 0) -> AsyncGenerator[Batch, None]:
        """The second message comes at once after what stood in the log at the start."""
        nonlocal second
        async with contextlib.aclosing(follow(after)) as batches:
            stood = await anext(batches)
            await until(lambda: len(held) == world.settings.replies_partitions)
            yield stood
            second = await world.send(a, b, "second")
            async for batch in batches:
                yield batch

    world.leases.hold = holding  # type: ignore[method-assign]
    world.store.follow = following  # type: ignore[method-assign,assignment]
    async with world.replies():

        async def both_there() -> bool:
            return len((await state(world, b)).settled) == 2

        await until(both_there)
    arrived = [e.message_id for e in await events_of(world, b) if isinstance(e, MessageReceived)]
    assert [message for message in arrived if message] == [first, second]
