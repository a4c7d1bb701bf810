"""How a branch is addressed: names, nodes, ids, and what is refused with what advice."""

import pytest

from plait.events import ids
from plait.events.addressing import label, resolve
from plait.events.commands import NameBranch, RequestTurn
from plait.events.errors import (
    AmbiguousBranch,
    BranchArchived,
    Invalid,
    UnknownBranch,
    UnknownNode,
    UnknownSession,
)
from tests.unit.test_context import fork, tip, turn
from tests.world import TENANT, World


async def named(world: World, session: str, name: str) -> str:
    branch = await world.branch(session)
    await world.do(
        NameBranch(
            command_id=world.id(), at=world.ms, session_id=session, branch_id=branch, name=name
        )
    )
    return branch


async def found(world: World, session: str, text: str) -> str:
    return await resolve(world.handler, TENANT, session, text)


async def test_a_name_reaches_its_branch_here_and_in_another_session() -> None:
    world = World()
    here, there = await world.session(), await world.session()
    ours, theirs = await named(world, here, "research"), await named(world, there, "research")
    assert await found(world, here, "research") == ours
    assert await found(world, here, f"{there}:research") == theirs


async def test_the_beginning_of_a_name_is_enough_if_only_one_begins_so() -> None:
    world = World()
    session = await world.session()
    research, _ = await named(world, session, "research"), await named(world, session, "review")
    assert await found(world, session, "rese") == research
    assert await found(world, session, f"{session}:rese") == research
    with pytest.raises(AmbiguousBranch, match=r"'re' could be research .* review"):
        await found(world, session, "re")


async def test_an_exact_name_goes_before_a_longer_one_that_begins_so() -> None:
    world = World()
    session = await world.session()
    await named(world, session, "researcher")
    assert await found(world, session, "research") != ""
    exact = await named(world, session, "research")
    assert await found(world, session, "research") == exact


async def test_an_archived_branch_does_not_make_a_beginning_ambiguous() -> None:
    world = World()
    session = await world.session()
    live, archived = await named(world, session, "research"), await named(world, session, "review")
    await world.archive(archived)
    assert await found(world, session, "re") == live
    with pytest.raises(BranchArchived, match="restore it first"):
        await found(world, session, "review")


async def test_an_unknown_name_is_told_the_live_ones() -> None:
    world = World()
    session = await world.session()
    await named(world, session, "research")
    await world.archive(await named(world, session, "old"))
    with pytest.raises(UnknownBranch) as refused:
        await found(world, session, "nobody")
    assert str(refused.value) == ("there is no branch 'nobody'; the live branches are research")
    with pytest.raises(UnknownBranch):
        await found(world, session, "")


async def test_a_branch_is_reached_by_its_id_a_tip_and_an_old_head() -> None:
    world = World()
    session = await world.session()
    branch = await world.branch(session)
    old = await tip(world, branch)
    new = await turn(world, branch, "two", "TWO")
    for text in (branch, old, new, f"{session}:{old}", f"{session}:{branch}"):
        assert await found(world, session, text) == branch


async def test_a_node_in_the_middle_of_several_branches_is_ambiguous_a_tip_is_not() -> None:
    world = World()
    session = await world.session()
    branch = await named(world, session, "main")
    shared = await turn(world, branch, "two", "TWO")
    child = await fork(world, shared, "another way")
    assert await found(world, session, shared) == branch, "still its own branch's tip"
    later = await turn(world, branch, "three", "THREE")
    with pytest.raises(AmbiguousBranch) as refused:
        await found(world, session, shared)
    head = await tip(world, child)
    assert set(refused.value.candidates) == {("main", later), (ids.short(head), head)}
    assert await found(world, session, later) == branch
    assert await found(world, session, head) == child
    await world.archive(child)
    assert await found(world, session, shared) == branch


async def test_a_node_before_a_fork_lies_on_the_fork_and_one_after_it_does_not() -> None:
    world = World()
    session = await world.session()
    branch = await world.branch(session)
    first = await turn(world, branch, "two", "TWO")
    second = await turn(world, branch, "three", "THREE")
    grandchild = await fork(world, await tip(world, await fork(world, first, "b")), "c")
    await turn(world, branch, "four", "FOUR")
    assert await found(world, session, second) == branch
    await world.archive(branch)
    with pytest.raises(AmbiguousBranch):
        await found(world, session, first)
    await world.archive(ids.branch_of((await world.handler.branch(TENANT, grandchild)).fork))
    assert await found(world, session, first) == grandchild
    with pytest.raises(BranchArchived):
        await found(world, session, second)


async def test_a_tool_call_reaches_the_branch_that_made_it() -> None:
    world = World()
    session = await world.session()
    branch = await world.branch(session, run=True)
    await world.claim(branch)
    (call,) = await world.answer(branch, "", "look")
    assert await found(world, session, call) == branch


async def test_a_branch_opened_at_a_tip_without_a_node_does_not_take_it_away() -> None:
    world = World()
    session = await world.session()
    branch = await world.branch(session)
    at = await tip(world, branch)
    await world.do(
        RequestTurn(
            command_id=world.id(), at=world.ms, branch_id=ids.branch_id(session, "r"), fork=at
        )
    )
    assert await found(world, session, at) == branch


async def test_an_unnamed_branch_is_reached_by_what_it_is_shown_as_now_and_before() -> None:
    world = World()
    session = await world.session()
    branch, _ = await world.branch(session), await world.branch(session)
    before = await label(world.handler, TENANT, branch)
    assert await found(world, session, before) == branch
    await turn(world, branch, "two", "TWO")
    now = await label(world.handler, TENANT, branch)
    assert now != before
    assert await found(world, session, now) == branch
    assert await found(world, session, before) == branch


async def test_a_label_from_another_session_can_be_used_as_an_address_there() -> None:
    world = World()
    here, there = await world.session(), await world.session()
    branch = await named(world, here, "research")
    shown = await label(world.handler, TENANT, branch, seen_from=there)
    assert shown == f"{here}:research"
    assert await found(world, there, shown) == branch


async def test_a_branch_that_head_only_reserves_says_that_it_has_no_message() -> None:
    world = World()
    session = await world.session()
    reserved = (await world.handler.session(TENANT, session)).head
    with pytest.raises(UnknownBranch, match="has no message yet"):
        await found(world, session, reserved)


async def test_what_does_not_exist_or_is_anothers_is_unknown() -> None:
    world = World()
    session = await world.session()
    branch = await world.branch(session)
    with pytest.raises(UnknownBranch):
        await found(world, session, ids.branch_id(session, "x"))
    with pytest.raises(UnknownNode):
        await found(world, session, ids.node_id(branch, "x"))
    with pytest.raises(UnknownSession):
        await found(world, session, f"{ids.session_id('x')}:research")
    with pytest.raises(UnknownSession):
        await resolve(world.handler, "other", session, branch)
    with pytest.raises(Invalid, match="is a session: name one of its branches"):
        await found(world, session, session)
    other = await world.session()
    with pytest.raises(UnknownBranch):
        await found(world, session, f"{other}:{branch}")
