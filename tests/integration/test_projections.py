"""Read models on a real Valkey: they show what the log says, once, whole, and after any loss."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio
from redis.asyncio import Redis

from plait.events import ids
from plait.events.commands import CancelTurn, CreateSession, MoveHead, NameBranch
from plait.events.content import Contents
from plait.events.errors import (
    Invalid,
    ReadModelBehind,
    Unavailable,
    UnknownEvent,
    UnknownMessage,
    UnknownNode,
    UnknownSession,
    UnknownTurn,
)
from plait.events.handler import Handler
from plait.events.jetstream_setup import open_jetstream
from plait.events.settings import Settings
from plait.events.store import Position, Recorded, StreamId
from plait.events.types import MessageReceived
from plait.projections import worker
from plait.projections.generations import Generations
from plait.projections.queries import Queries
from plait.projections.rebuild import rebuild
from plait.projections.runner import Runner
from plait.projections.schema import Generation, Key, Names
from plait.projections.scripts import connect
from plait.projections.view import View
from plait.services.dev.servers import ValkeyServer
from tests.waiting import until
from tests.world import TENANT, World


@pytest_asyncio.fixture
async def redis(settings: Settings) -> AsyncIterator[Redis]:
    async with connect(settings.redis_url) as client:
        yield client


@pytest.fixture
def world() -> World:
    return World()


@asynccontextmanager
async def projecting(world: World, redis: Redis, settings: Settings) -> AsyncIterator[None]:
    task = asyncio.create_task(Runner(world.store, redis, settings).run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def asking(world: World, redis: Redis, settings: Settings, read_timeout_s: float = 10) -> Queries:
    changed = msgspec.structs.replace(settings, read_timeout_s=read_timeout_s)
    return Queries(redis, world.contents, changed)


async def now(world: World) -> Position:
    return Position(world.store.generation, await world.store.last_sequence())


async def conversation(world: World) -> tuple[str, str, str]:
    """Two branches; the turn of the first asks the second, gets its answer and ends.
    Returns session, asking branch and message."""
    session = await world.session()
    target = await world.branch(session, words="I know things")
    asker = await world.branch(session, words="find out", run=True)
    async with world.replies():
        await world.claim(asker)
        message = await world.send(asker, target, "what is it?", wait_s=60)
        await until(lambda: has_turn(world, target))
        await world.claim(target)
        await world.answer(target, "it is this")
        await until(lambda: runnable(world, asker))
    await world.claim(asker, delivery=1)
    await world.answer(asker, "it is this, they say")
    return session, asker, message


async def has_turn(world: World, branch: str) -> bool:
    return (await world.handler.branch(TENANT, branch)).turn is not None


async def runnable(world: World, branch: str) -> bool:
    turn = (await world.handler.branch(TENANT, branch)).turn
    return turn is not None and turn.status == "requested" and turn.n > 1


async def everything(redis: Redis, prefix: str) -> dict[str, Any]:
    """All that is stored of all sessions, without what tells one generation from another."""
    found: dict[str, Any] = {}
    async for name in redis.scan_iter(match=f"{prefix}:*"):
        text = name.decode()
        if ":{control}:" in text:
            continue
        what = text[text.index("{") :]
        if what.endswith(f":{Key.SESSIONS}"):
            found[what] = await redis.zrange(name, 0, -1, withscores=True)
        else:
            found[what] = await redis.hgetall(name)
    return found


async def test_a_question_between_branches_can_be_read_from_all_sides(
    world: World, redis: Redis, settings: Settings
) -> None:
    session, asker, message = await conversation(world)
    async with projecting(world, redis, settings):
        queries = asking(world, redis, settings)
        seen = await queries.message(TENANT, message, await now(world))
        dag = await queries.dag(TENANT, session)
        nodes = {node.id: node for node in dag.nodes}
        [tool] = [node for node in dag.nodes if node.role == "tool"]
        assert tool.turn_id is not None
        turn = await queries.turn(TENANT, tool.turn_id)
        whole = await queries.node(TENANT, tool.id)
        view = await queries.session(TENANT, session)
        delivered = await queries.node(TENANT, seen.node_id)
        assert tool.caller is not None
        answer = await queries.node(TENANT, tool.caller)

    assert [receipt.kind for receipt in seen.receipts] == [
        "accepted",
        "delivered",
        "consumed",
        "replied",
    ]
    assert (seen.text, seen.wait_reply, seen.from_) == ("what is it?", True, tool.id)
    assert seen.reply is not None
    assert (seen.reply.text, seen.reply.status) == ("it is this", "replied")
    assert seen.reply.node_id in nodes

    assert (turn.status, turn.text) == ("completed", "it is this, they say")
    assert [step.step for step in turn.steps] == [1, 2]
    assert turn.steps[0].calls == [tool.id]
    assert [(wait.wait_id, wait.call, wait.outcome) for wait in turn.waits] == [
        (ids.wait_id(message), tool.id, "replied")
    ]
    assert (whole.status, whole.text, whole.args) == ("completed", "it is this", "{}")
    assert answer.text == "it is this, they say"
    assert delivered.source == "from_branch"
    assert delivered.metadata["from_branch"] == tool.id

    assert [node.seq for node in dag.nodes] == sorted(node.seq or 0 for node in dag.nodes)
    assert dag.nodes[0].role == "root"
    assert {node.status for node in dag.nodes} == {"completed"}
    assert sorted(line.kind for line in dag.lines) == [
        "call",
        "chain",
        "chain",
        "chain",
        "chain",
        "communication",
        "fork",
    ]
    [crossing] = [line for line in dag.lines if line.kind == "communication"]
    assert crossing.node_ids == (tool.id, delivered.id)

    assert view.nodes == len(dag.nodes) == 7
    by_id = {branch.branch_id: branch for branch in view.branches}
    assert by_id[asker].head_id == answer.id
    assert (by_id[asker].nodes, by_id[asker].busy) == (3, False)
    assert msgspec.json.decode(msgspec.json.encode(by_id[asker]))["from"] == ids.root_id(session)


async def test_a_message_in_the_inbox_is_pending_and_after_an_archiving_refused(
    world: World, redis: Redis, settings: Settings
) -> None:
    session = await world.session()
    branch = await world.branch(session, run=True)
    running = await world.claim(branch)
    done = await world.post(branch, "and then?")
    [queued] = [event for event in done.events if isinstance(event, MessageReceived)]
    assert queued.turn_id is not None
    async with projecting(world, redis, settings):
        queries = asking(world, redis, settings)
        node = await queries.node(TENANT, queued.node_id, await now(world))
        assert (node.status, node.seq, node.predecessor) == ("pending", None, None)
        assert node.text == "and then?"
        assert (await queries.turn(TENANT, queued.turn_id)).status == "requested"
        dag = await queries.dag(TENANT, session)
        assert queued.node_id not in {node.id for node in dag.nodes}
        [view] = [view for view in await queries.branches(TENANT, session) if view.nodes]
        assert (view.busy, view.turn_id, view.status, view.nodes) == (True, running, "live", 2)

        await world.archive(branch)
        assert (await queries.node(TENANT, queued.node_id, await now(world))).status == "refused"
        assert (await queries.turn(TENANT, queued.turn_id)).status == "cancelled"
        [view] = [view for view in await queries.branches(TENANT, session) if view.nodes]
        assert (view.busy, view.status) == (True, "archived")


async def test_what_a_cancelled_turn_leaves_undone_is_cancelled_and_no_error(
    world: World, redis: Redis, settings: Settings
) -> None:
    session = await world.session()
    branch = await world.branch(session, run=True)
    turn_id = await world.claim(branch)
    [call] = await world.answer(branch, "let me look", "look")
    async with projecting(world, redis, settings):
        queries = asking(world, redis, settings)
        assert (await queries.node(TENANT, call, await now(world))).status == "running"
        await world.do(
            CancelTurn(command_id="stop", at=world.ms, branch_id=branch, turn_id=turn_id)
        )
        node = await queries.node(TENANT, call, await now(world))
        turn = await queries.turn(TENANT, turn_id)
        dag = await queries.dag(TENANT, session)
        [view] = [view for view in await queries.branches(TENANT, session) if view.nodes]
    assert (node.status, node.text, node.caller) == ("cancelled", None, turn.node_id)
    assert (turn.status, turn.text, turn.error) == ("cancelled", "let me look", None)
    assert {node.status for node in dag.nodes if node.turn_id and node.role != "user"} == {
        "cancelled"
    }
    assert (view.busy, view.turn_id, view.head_id) == (False, None, turn.node_id)


async def test_a_late_answer_from_another_session_is_shown_with_both_halves_of_the_message(
    world: World, redis: Redis, settings: Settings
) -> None:
    target = await world.branch(await world.session(), words="elsewhere")
    session = await world.session()
    asker = await world.branch(session, words="find out", run=True)
    async with projecting(world, redis, settings), world.replies():
        queries = asking(world, redis, settings)
        await world.claim(asker)
        message = await world.send(asker, target, "quick!", wait_s=1)
        await until(lambda: has_turn(world, target))
        waiting = await queries.message(TENANT, message, await now(world))
        assert [receipt.kind for receipt in waiting.receipts] == ["accepted", "delivered"]
        assert waiting.reply is None
        world.ms += 2_000
        await until(lambda: runnable(world, asker))
        expired = await queries.message(TENANT, message, await now(world))
        assert expired.reply is not None
        assert (expired.reply.status, expired.reply.node_id) == ("expired", None)
        await world.claim(target)
        await world.answer(target, "here it is")
        await until(lambda: late(queries, message))
        seen = await queries.message(TENANT, message)
        call = await queries.node(TENANT, seen.from_)
        far = await queries.dag(TENANT, ids.session_of(target), await now(world))
    assert [receipt.kind for receipt in seen.receipts] == [
        "accepted",
        "delivered",
        "expired",
        "consumed",
        "late",
    ]
    positions = [Position.parse(receipt.position) for receipt in seen.receipts]
    assert positions == sorted(positions)
    assert seen.reply is not None
    assert (seen.reply.text, seen.reply.status) == ("here it is", "late")
    assert call.status == "error"
    [delivered] = [node for node in far.nodes if node.id == seen.node_id]
    assert delivered.metadata["from_branch"] == seen.from_
    assert "communication" not in {line.kind for line in far.lines}


async def late(queries: Queries, message: str) -> bool:
    reply = (await queries.message(TENANT, message)).reply
    return reply is not None and reply.status == "late"


async def test_live_read_models_equal_a_replay_from_scratch(
    world: World, redis: Redis, settings: Settings, prefixes: Any
) -> None:
    again = msgspec.structs.replace(settings, prefix=prefixes.next())
    async with projecting(world, redis, settings):
        queries = asking(world, redis, settings)
        for _ in range(3):
            session, asker, _ = await conversation(world)
            await queries.session(TENANT, session, await now(world))  # follows step by step
            await world.post(asker, "one", run=True)
            await world.post(asker, "two", run=False)
            await world.claim(asker)
            await world.post(asker, "three")
            await world.answer(asker, "", "look", "hear")
            await world.archive(asker)
        await queries.sessions(TENANT, 10, None, await now(world))
    await rebuild(world.store, redis, again)
    live = await everything(redis, settings.prefix)
    assert live
    assert live == await everything(redis, again.prefix)


async def test_a_query_waits_for_the_write_before_it(
    world: World, redis: Redis, settings: Settings
) -> None:
    async with projecting(world, redis, settings):
        queries = asking(world, redis, settings)
        for number in range(20):
            session = await world.session()
            done = await world.post(ids.branch_id(session, "x"), f"hello {number}")
            [received] = [e for e in done.events if isinstance(e, MessageReceived)]
            at = Position(world.store.generation, done.sequence)
            assert (await queries.node(TENANT, received.node_id, at)).text == f"hello {number}"
            assert received.turn_id is not None
            assert (await queries.turn(TENANT, received.turn_id, at)).status == "requested"


async def test_a_quiet_session_does_not_hold_up_a_query(
    world: World, redis: Redis, settings: Settings
) -> None:
    quiet = await world.session()
    async with projecting(world, redis, settings):
        await world.session()
        view = await asking(world, redis, settings).session(TENANT, quiet, await now(world))
    assert Position.parse(view.position).sequence == 1


async def test_a_position_that_does_not_come_is_said_after_the_time_out(
    world: World, redis: Redis, settings: Settings
) -> None:
    session = await world.session()
    async with projecting(world, redis, settings):
        await asking(world, redis, settings).session(TENANT, session, await now(world))
        queries = asking(world, redis, settings, read_timeout_s=0.1)
        for position in (Position(1, 1000), Position(2, 1)):
            with pytest.raises(ReadModelBehind, match=str(position)):
                await queries.session(TENANT, session, position)


async def write(view: View, generation: Generation, log: list[Recorded]) -> None:
    await view.send(await view.pack(generation, log))


async def test_what_was_written_is_skipped_when_it_comes_again(
    world: World, redis: Redis, settings: Settings
) -> None:
    await conversation(world)
    log = [
        recorded
        for sequence in range(1, await world.store.last_sequence() + 1)
        if (recorded := await world.store.read_at(sequence)) is not None
    ]
    names = Names(settings.prefix)
    generation = (await Generations(redis, names).begin(1)).generation
    view = View(redis, names)
    await write(view, generation, log)
    once = await everything(redis, settings.prefix)
    await write(view, generation, log)
    for start in range(0, len(log), 3):
        await write(view, generation, log[start : start + 7])
    assert await everything(redis, settings.prefix) == once


@pytest.mark.parametrize("length", [1, 2, 5])
async def test_overlapping_batches_take_effect_once(
    world: World, redis: Redis, settings: Settings, prefixes: Any, length: int
) -> None:
    await conversation(world)
    log: list[Recorded] = []
    for sequence in range(1, await world.store.last_sequence() + 1):
        recorded = await world.store.read_at(sequence)
        assert recorded is not None
        log.append(recorded)
    stored: list[dict[str, Any]] = []
    for prefix, step, size in (
        (settings.prefix, len(log), len(log)),
        (prefixes.next(), length, length + 4),
    ):
        names = Names(prefix)
        generation = (await Generations(redis, names).begin(1)).generation
        for start in range(0, len(log), step):
            await write(View(redis, names), generation, log[start : start + size])
        stored.append(await everything(redis, prefix))
    assert stored[0] == stored[1]


async def flush(redis: Redis, prefix: str) -> None:
    """What FLUSHALL does, to the keys of this test only, and as atomically."""
    await redis.eval(
        "for _, key in ipairs(redis.call('KEYS', ARGV[1])) do redis.call('DEL', key) end",
        0,
        f"{prefix}:*",
    )


async def test_after_a_flush_readers_get_a_clear_error_until_all_is_whole_again(
    world: World, redis: Redis, settings: Settings
) -> None:
    session, _, message = await conversation(world)
    queries = asking(world, redis, settings)
    async with projecting(world, redis, settings):
        before = await queries.dag(TENANT, session, await now(world))
    await flush(redis, settings.prefix)
    with pytest.raises(Unavailable, match="being built"):
        await queries.dag(TENANT, session)
    with pytest.raises(Unavailable, match="being built"):
        await queries.message(TENANT, message)
    async with projecting(world, redis, settings):
        await until(lambda: answers(queries, session))
        assert await queries.dag(TENANT, session) == before


async def answers(queries: Queries, session: str) -> bool:
    try:
        await queries.session(TENANT, session)
    except Unavailable:
        return False
    return True


async def test_a_flush_while_live_is_noticed_and_never_shows_half_a_graph(
    world: World, redis: Redis, settings: Settings
) -> None:
    session, _, _ = await conversation(world)
    queries = asking(world, redis, settings)
    answered = refused = 0
    async with projecting(world, redis, settings):
        whole = await queries.dag(TENANT, session, await now(world))
        for _ in range(3):
            await flush(redis, settings.prefix)
            await world.session()  # the log goes on meanwhile
            while True:
                try:
                    assert (await queries.dag(TENANT, session)).nodes == whole.nodes
                    answered += 1
                    break
                except Unavailable:
                    refused += 1
        # A quiet log is rebuilt from as well.
        await flush(redis, settings.prefix)
        await until(lambda: answers(queries, session))
    assert answered == 3
    assert refused > 0


async def test_a_rebuild_swaps_under_readers_and_a_live_worker_without_an_error(
    world: World, redis: Redis, settings: Settings
) -> None:
    session, asker, _ = await conversation(world)
    queries = asking(world, redis, settings)
    generations = Generations(redis, Names(settings.prefix))
    stop = asyncio.Event()
    read = 0

    async def reader() -> None:
        nonlocal read
        whole = await queries.dag(TENANT, session)
        while not stop.is_set():
            assert await queries.dag(TENANT, session) == whole
            await queries.message(TENANT, message_of_session)
            read += 1

    async with projecting(world, redis, settings):
        [message_of_session] = await messages(queries, session, await now(world))
        first = await generations.live()
        reading = asyncio.create_task(reader())
        swapped = first
        for _ in range(3):
            swapped = await rebuild(world.store, redis, settings)
            assert swapped != first
            assert await generations.live() == swapped
        stop.set()
        await reading
        assert read > 0
        # The worker follows the new generation.
        await world.post(asker, "more")
        view = await queries.session(TENANT, session, await now(world))
        assert view.nodes == 8
        await until(lambda: only(redis, settings.prefix, str(swapped)))


async def messages(queries: Queries, session: str, at: Position) -> list[str]:
    dag = await queries.dag(TENANT, session, at)
    turns = [await queries.turn(TENANT, node.turn_id or "") for node in dag.nodes if node.caller]
    return [wait.wait_id.replace("-w", "-m") for turn in turns for wait in turn.waits]


async def only(redis: Redis, prefix: str, generation: str) -> bool:
    names = Names(prefix)
    found = [name.decode() async for name in redis.scan_iter(match=f"{prefix}:*")]
    return {names.generation_of(name) for name in found} <= {generation, None}


async def test_a_log_that_was_made_anew_is_built_anew(
    world: World, redis: Redis, settings: Settings
) -> None:
    session = await world.session()
    queries = asking(world, redis, settings)
    async with projecting(world, redis, settings):
        await queries.session(TENANT, session, await now(world))
    other = World()
    other.store = type(other.store)(generation=2)
    other.handler = type(other.handler)(other.store, other.limits)
    await other.session()
    second = await other.session()
    async with projecting(other, redis, settings):
        view = await queries.session(TENANT, second, await now(other))
        assert view.position.startswith("2.2.")


async def test_two_workers_at_once_write_everything_once(
    world: World, redis: Redis, settings: Settings, prefixes: Any
) -> None:
    again = msgspec.structs.replace(settings, prefix=prefixes.next())
    async with projecting(world, redis, settings), projecting(world, redis, settings):
        for _ in range(3):
            await conversation(world)
        await asking(world, redis, settings).sessions(TENANT, 10, None, await now(world))
    await rebuild(world.store, redis, again)
    assert await everything(redis, settings.prefix) == await everything(redis, again.prefix)


async def test_an_event_of_a_newer_version_stops_the_worker_with_its_name(
    world: World, redis: Redis, settings: Settings
) -> None:
    queries = asking(world, redis, settings)
    async with projecting(world, redis, settings):
        await world.session()
        await queries.sessions(TENANT, 1, None, await now(world))
    session = await world.session()
    known = await now(world)
    sung = {"command_id": "c", "at": 1, "events": [{"t": "BranchSung"}], "v": 1}
    stream = StreamId(TENANT, "s" + "a" * 12, "b" + "a" * 8)
    world.store.write(stream, msgspec.msgpack.encode(sung))
    with pytest.raises(UnknownEvent, match="BranchSung"):
        await Runner(world.store, redis, settings).run()
    # What came before it can be read.
    await queries.session(TENANT, session, known)


async def test_tenants_see_their_own_only(world: World, redis: Redis, settings: Settings) -> None:
    session, _, message = await conversation(world)
    async with projecting(world, redis, settings):
        queries = asking(world, redis, settings)
        tool = (await queries.message(TENANT, message, await now(world))).from_
        turn = (await queries.node(TENANT, tool)).turn_id
        assert turn is not None
        assert (await queries.sessions("other", 10, None))[0] == []
        assert await queries.position("other", session) is None
        for question, unknown in (
            (queries.session("other", session), UnknownSession),
            (queries.branches("other", session), UnknownSession),
            (queries.dag("other", session), UnknownSession),
            (queries.node("other", tool), UnknownNode),
            (queries.turn("other", turn), UnknownTurn),
            (queries.message("other", message), UnknownMessage),
        ):
            with pytest.raises(unknown):
                await question


@pytest.mark.parametrize("text", ["", "nonsense", "s" + "a" * 12, "s" + "a" * 12 + "-_-root"])
async def test_what_is_no_id_or_nobodys_is_unknown(
    world: World, redis: Redis, settings: Settings, text: str
) -> None:
    session = await world.session()
    async with projecting(world, redis, settings):
        queries = asking(world, redis, settings)
        await queries.session(TENANT, session, await now(world))
        for question, unknown in (
            (queries.session(TENANT, text), UnknownSession),
            (queries.node(TENANT, text), UnknownNode),
            (queries.turn(TENANT, text), UnknownTurn),
            (queries.message(TENANT, text), UnknownMessage),
        ):
            with pytest.raises(unknown):
                await question


async def test_sessions_are_listed_newest_first_page_by_page(
    world: World, redis: Redis, settings: Settings
) -> None:
    made = [await world.session() for _ in range(7)]
    async with projecting(world, redis, settings):
        queries = asking(world, redis, settings)
        listed: list[str] = []
        token, sizes, at = None, [], await now(world)
        while True:
            items, token = await queries.sessions(TENANT, 3, token, at)
            listed += [item.session_id for item in items]
            sizes.append(len(items))
            if token is None:
                break
            for foreign in (token + "x", token[1:], "1", "", "1.aaaaaaaa", "9" * 40):
                with pytest.raises(Invalid, match="page_token"):
                    await queries.sessions(TENANT, 3, foreign)
            with pytest.raises(Invalid, match="page_token"):
                await queries.sessions("other", 3, token)
    assert listed == made[::-1]
    assert sizes == [3, 3, 1]


async def test_a_session_shows_its_title_head_and_names(
    world: World, redis: Redis, settings: Settings
) -> None:
    session = ids.session_id("mine")
    await world.contents.create_key(TENANT, session)
    title = await world.contents.write("Über alles", TENANT, session)
    await world.do(
        CreateSession(
            command_id="mine", at=world.ms, session_id=session, title=title, model="offline:echo"
        )
    )
    async with projecting(world, redis, settings):
        queries = asking(world, redis, settings)
        fresh = await queries.session(TENANT, session, await now(world))
        first = await world.branch(session, words="one")
        view = await queries.session(TENANT, session, await now(world))
        reserved = ids.branch_id(session, "reserved")
        await world.do(MoveHead(command_id="c-a", at=1, session_id=session, branch_id=first))
        await world.do(
            NameBranch(command_id="c-n", at=1, session_id=session, branch_id=first, name="main")
        )
        moved = await queries.session(TENANT, session, await now(world))
        await world.do(
            MoveHead(
                command_id="c-b",
                at=1,
                session_id=session,
                branch_id=reserved,
                fork=moved.head_id,
            )
        )
        forked = await queries.session(TENANT, session, await now(world))
        listed, _ = await queries.sessions(TENANT, 1, None)
    assert (fresh.title, fresh.model, fresh.attended) == ("Über alles", "offline:echo", True)
    assert fresh.head_id == ids.root_id(session)
    [only_branch] = fresh.branches
    assert (only_branch.status, only_branch.nodes) == ("live", 0)
    assert only_branch.head_id == only_branch.from_ == ids.root_id(session)
    assert [branch.branch_id for branch in view.branches] == [first, fresh.head_branch_id]
    [main] = moved.branches
    assert (main.name, main.nodes, moved.head_branch_id) == ("main", 1, first)
    assert (forked.head_branch_id, forked.head_id) == (reserved, moved.head_id)
    assert forked.branches[1].from_ == moved.head_id
    assert listed[0].title == "Über alles"


async def test_a_store_that_is_away_is_said(world: World, settings: Settings) -> None:
    session = await world.session()
    async with connect("redis://127.0.0.1:1") as nowhere:
        with pytest.raises(Unavailable, match="do not answer"):
            await asking(world, nowhere, settings).session(TENANT, session)


async def test_a_killed_store_that_comes_back_empty_is_filled_again(
    world: World, settings: Settings, tmp_path: Path
) -> None:
    session, asker, _ = await conversation(world)
    async with ValkeyServer(tmp_path) as server, connect(server.url) as redis:
        queries = asking(world, redis, settings)
        async with projecting(world, redis, settings):
            before = await queries.dag(TENANT, session, await now(world))
            await server.kill()
            with pytest.raises(Unavailable, match="do not answer"):
                await queries.dag(TENANT, session)
            await world.post(asker, "while it was away")
            await server.start()
            await until(lambda: answers(queries, session))
            after = await queries.dag(TENANT, session, await now(world))
    assert after.nodes[:-1] == before.nodes
    assert len(after.nodes) == len(before.nodes) + 1


async def test_the_process_builds_from_the_log_on_jetstream(
    redis: Redis, settings: Settings
) -> None:
    jetstream = await open_jetstream(settings)
    work = asyncio.create_task(worker.run(settings))
    try:
        contents = Contents(jetstream.keys, jetstream.blobs, settings.limits)
        handler = Handler(jetstream.store, settings.limits)
        session = ids.session_id("here")
        await contents.create_key("t", session)
        title = await contents.write("here", "t", session)
        created = CreateSession(command_id="here", at=1, session_id=session, title=title)
        done = await handler.execute("t", created)
        at = Position(jetstream.store.generation, done.sequence)
        view = await Queries(redis, contents, settings).session("t", session, at)
        assert (view.title, Position.parse(view.position).sequence) == ("here", done.sequence)
        work.cancel()
        with pytest.raises(asyncio.CancelledError):
            await work
    finally:
        work.cancel()
        await jetstream.close()
