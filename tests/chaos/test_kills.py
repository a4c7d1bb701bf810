"""kill -9 on real processes, each at the one moment at which it could do harm.

Where a gap must be certain, the process is stopped before the act and killed after it: what it
was to do is then in the log, and nobody has done it.
"""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from plait.events import ids
from plait.events.settings import Settings
from plait.events.types import (
    MessageReceived,
    MessageSent,
    ModelAnswered,
    ToolReturned,
    TurnClaimed,
    TurnRequested,
    TurnSuspended,
    WaitEnded,
)
from plait.services.dev.servers import free_port
from plait.services.dev.stack import SERVICES
from tests.chaos.checker import read_models_equal_a_rebuild, view_positions
from tests.chaos.director import asks, works
from tests.chaos.scripted_worker import Question, Reply
from tests.chaos.system import Chaos, Client, Watch, chaos, stopped, watching
from tests.integration.processes import descendants, until_gone
from tests.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="module")

PLAIT = [sys.executable, "-m", "plait.services.cli.main"]
SECONDS = 10.0  # "within seconds": three of them are the queue's patience


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def system(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Chaos]:
    async with chaos(tmp_path_factory.mktemp("chaos")) as system:
        yield system


@pytest_asyncio.fixture(loop_scope="module")
async def plait(system: Chaos) -> AsyncIterator[Chaos]:
    """The shared system, without workers, questions, or a process that still starts."""
    await system.ready()
    yield system
    await system.kill_workers()
    system.director.actor = None
    system.director.asked.clear()


def took_over_within_seconds(plait: Chaos, turn: str, killed: float, nth: int = 2) -> None:
    took_s = plait.take_over_s(turn, killed, nth)
    print(f"taken over after {took_s:.2f} s")
    assert took_s < SECONDS


# -- a worker of turns -----------------------------------------------------------------------


async def test_a_turn_whose_worker_died_in_a_model_call_goes_on_in_another(plait: Chaos) -> None:
    workers = {*await plait.start_workers(2)}
    turn = await plait.turn(await plait.session(), "in the model")
    first = await plait.director.model("in the model")
    killed = await plait.kill_worker(first.pid)
    second = await plait.director.model("in the model", 2)
    assert {first.pid, second.pid} == workers
    took_over_within_seconds(plait, turn, killed)
    assert second.question.messages == first.question.messages
    second.answer("done")
    await plait.watch.completed(turn)
    assert len(plait.director.asked) == 2
    assert len(plait.watch.events(ModelAnswered, turn_id=turn)) == 1


async def test_a_recorded_answer_and_a_recorded_result_outlive_their_worker(plait: Chaos) -> None:
    await plait.start_workers(2)
    turn = await plait.turn(await plait.session(), "between two tools")
    planned = await plait.director.model("between two tools")
    planned.answer("", works("the first"), works("the second"))
    unrecorded = await plait.director.tool("the second")
    (await plait.director.tool("the first")).answer("first result")
    await plait.watch.until(ToolReturned, turn_id=turn)
    killed = await plait.kill_worker(planned.pid)
    again = await plait.director.tool("the second", 2)
    took_over_within_seconds(plait, turn, killed)
    assert again.question.key == unrecorded.question.key
    again.answer("second result")
    last = await plait.director.model("between two tools", 2)
    assert last.results() == ["first result", "second result"]
    last.answer("done")
    await plait.watch.completed(turn)
    assert len(plait.director.of("model", "")) == 2  # one for each answer
    assert len(plait.director.of("tool", "the first")) == 1
    assert [event.step for event in plait.watch.events(ModelAnswered, turn_id=turn)] == [1, 2]


async def test_a_suspended_turn_needs_no_worker_and_resumes_in_another(plait: Chaos) -> None:
    session = await plait.session()
    asker, other = [await plait.branch(session, name) for name in ("asker", "other")]
    await plait.start_workers(1)
    turn = await plait.turn(session, "please ask", branch=asker)
    asked = await plait.director.model("please ask")
    await stopped(plait.stack.pids["replies"])  # else the same worker could take the question
    asked.answer("", asks("other", "how far is it?"))
    await plait.watch.until(TurnSuspended, turn_id=turn)
    await plait.kill_workers()
    os.kill(plait.stack.pids["replies"], signal.SIGCONT)
    question = await plait.watch.until(MessageReceived, sender="asker")
    assert question.turn_id is not None
    assert ids.branch_of(question.node_id) == other
    await plait.start_workers(1)
    (await plait.director.model("how far is it?")).answer("ten miles")
    resumed = await plait.director.model("please ask", 2)
    assert resumed.results() == ["ten miles"]
    resumed.answer("it is ten miles")
    await plait.watch.completed(turn)
    await plait.watch.completed(question.turn_id)
    assert len(plait.director.of("model", "please ask")) == 2
    claims = plait.watch.events(TurnClaimed, turn_id=turn)
    assert [claim.epoch[0] for claim in claims] == [1, 2]
    assert len({claim.worker for claim in claims}) == 2


async def test_a_worker_that_slept_through_its_take_over_writes_nothing_and_acks_nothing(
    plait: Chaos,
) -> None:
    workers = {*await plait.start_workers(2)}
    turn = await plait.turn(await plait.session(), "sleep well")
    first = await plait.director.model("sleep well")
    await stopped(first.pid)
    second = await plait.director.model("sleep well", 2)
    assert {first.pid, second.pid} == workers
    first.answer("too late")
    os.kill(first.pid, signal.SIGCONT)
    await until(lambda: "claim refused" in plait.log_of(first.pid))
    assert plait.watch.events(ModelAnswered, turn_id=turn) == []
    # Had the sleeper acked, nobody would take over from the other.
    killed = await plait.kill_worker(second.pid)
    third = await plait.director.model("sleep well", 3)
    took_over_within_seconds(plait, turn, killed, nth=3)
    assert third.pid == first.pid
    third.answer("in time")
    await plait.watch.completed(turn)
    (answer,) = plait.watch.events(ModelAnswered, turn_id=turn)
    assert answer.text is not None
    assert await plait.watch.contents.read(answer.text) == "in time"


async def test_of_two_that_ask_each_other_at_once_the_later_is_told_of_the_cycle(
    plait: Chaos,
) -> None:
    session = await plait.session()
    branches = {name: await plait.branch(session, name) for name in ("left", "right")}
    await plait.start_workers(2)
    turns = {
        name: await plait.turn(session, f"you {name}, ask", branch=branch)
        for name, branch in branches.items()
    }
    both = [await plait.director.model(f"you {name}, ask") for name in branches]
    for asked, target in zip(both, reversed(branches), strict=True):
        asked.answer("", asks(target, "what do you say?"))
    for turn in turns.values():
        await plait.watch.until(TurnSuspended, turn_id=turn)
    waits = [
        event
        for event in plait.watch.events(MessageSent)
        if ids.session_of(event.message_id) == session
    ]
    earlier, later = [event.sender for event in waits]
    told = await plait.director.model(f"you {later}, ask", 2)
    cycle = f"{later} → {earlier} → {later}"
    (result,) = told.results()
    assert result.endswith(f"this wait would close a cycle: {cycle}. Send without waiting.")
    told.answer("then I will not ask")
    asked = await plait.director.model("what do you say?")
    asked.answer("nothing")
    heard = await plait.director.model(f"you {earlier}, ask", 2)
    assert heard.results() == ["nothing"]
    heard.answer("it says nothing")
    for turn in turns.values():
        await plait.watch.completed(turn)
    outcomes = [plait.watch.events(WaitEnded, wait_id=ids.wait_id(w.message_id)) for w in waits]
    assert [[end.outcome for end in ends] for ends in outcomes] == [["replied"], ["refused"]]


# -- replies ---------------------------------------------------------------------------------


async def test_what_was_sent_while_replies_died_is_delivered_once_and_answered_once(
    plait: Chaos,
) -> None:
    session = await plait.session()
    for name in ("sender", "receiver"):
        await plait.branch(session, name)
    await plait.start_workers(1)
    turn = await plait.turn(session, "pass it on", branch="sender")
    asked = await plait.director.model("pass it on")
    await stopped(plait.stack.pids["replies"])
    asked.answer("", asks("receiver", "the parcel"))
    sent = await plait.watch.until(MessageSent, sender="sender")
    await plait.watch.until(TurnSuspended, turn_id=turn)
    assert not plait.watch.events(MessageReceived, message_id=sent.message_id)
    await plait.killed("replies")
    receiving = await plait.director.model("the parcel")
    # The answer meets the same fate.
    await stopped(plait.stack.pids["replies"])
    receiving.answer("thank you")
    (delivered,) = plait.watch.events(MessageReceived, message_id=sent.message_id)
    assert delivered.turn_id is not None
    await plait.watch.completed(delivered.turn_id)
    assert not plait.watch.events(WaitEnded, wait_id=ids.wait_id(sent.message_id))
    await plait.killed("replies")
    thanked = await plait.director.model("pass it on", 2)
    assert thanked.results() == ["thank you"]
    thanked.answer("they thank you")
    await plait.watch.completed(turn)
    ends = plait.watch.events(WaitEnded, wait_id=ids.wait_id(sent.message_id))
    assert [end.outcome for end in ends] == ["replied"]
    assert len(plait.watch.events(MessageReceived, message_id=sent.message_id)) == 1
    assert len(plait.director.of("model", "the parcel")) == 1


# -- the gateway and projections -------------------------------------------------------------

CLIENTS = 8
POSTS = 10  # of each client at least, and on until the last kill


async def posting(
    client: Client, session: str, name: str, going: asyncio.Event, told: dict[str, Any]
) -> None:
    """Until it is to stop; what it was told of each post, by text."""
    mine = 0
    while mine < POSTS or going.is_set():
        # Every third opens a branch of its own.
        where = {"replaces": told[f"{name}.1"]["node_id"]} if mine % 3 == 2 else {}
        text = f"{name}.{mine}"
        told[text] = await client.say(session, text, run=False, **where)
        mine += 1


@asynccontextmanager
async def clients_posting(client: Client, session: str) -> AsyncIterator[dict[str, Any]]:
    """What they were told so far; all of it, once the block has ended."""
    told: dict[str, Any] = {}
    going = asyncio.Event()
    going.set()
    async with asyncio.TaskGroup() as tasks:
        for number in range(CLIENTS):
            tasks.create_task(posting(client, session, f"client{number}", going, told))
        yield told
        await further(told)
        going.clear()


async def further(told: dict[str, Any]) -> None:
    """As many posts more as there are clients."""
    goal = len(told) + CLIENTS
    await until(lambda: len(told) >= goal, within_s=60)


async def every_post_is_there_once(watch: Watch, session: str, told: dict[str, Any]) -> None:
    await watch.caught_up()
    found: dict[str, list[str]] = {}
    for event in watch.events(MessageReceived):
        if ids.session_of(event.node_id) == session:
            text = await watch.contents.read(event.content)
            found.setdefault(text, []).append(event.node_id)
    assert found == {text: [answer["node_id"]] for text, answer in told.items()}


async def stopped_before_it_answered(plait: Chaos, session: str, told: dict[str, Any]) -> None:
    """Stops the gateway at a moment at which the log has a post that no client was told of."""
    pid = plait.stack.pids["gateway"]

    async def in_the_gap() -> bool:
        await stopped(pid)
        for _ in range(3):  # what it had sent before is read meanwhile
            await plait.watch.caught_up()
        events = plait.watch.events(MessageReceived)
        if sum(ids.session_of(event.node_id) == session for event in events) > len(told):
            return True
        os.kill(pid, signal.SIGCONT)
        return False

    await until(in_the_gap)


async def test_every_post_that_a_killed_gateway_acknowledged_is_there_once(plait: Chaos) -> None:
    session = await plait.session()
    async with clients_posting(plait, session) as told:
        for _ in range(2):
            await further(told)
            await stopped_before_it_answered(plait, session, told)
            await plait.killed("gateway")
    await every_post_is_there_once(plait.watch, session, told)


async def stopped_between_write_and_position(plait: Chaos, session: str) -> None:
    """Stops projections at a moment at which a write is in, and the position is not."""
    pid = plait.stack.pids["projections"]

    async def in_the_gap() -> bool:
        await stopped(pid)
        written, position = await view_positions(plait, session)
        if written != position:
            return True
        os.kill(pid, signal.SIGCONT)
        return False

    await until(in_the_gap, within_s=30)


async def test_read_models_that_died_while_events_came_equal_a_rebuild(plait: Chaos) -> None:
    session = await plait.session()
    async with clients_posting(plait, session) as told:
        for _ in range(2):
            await further(told)
            await stopped_between_write_and_position(plait, session)
            await plait.killed("projections")
    await every_post_is_there_once(plait.watch, session, told)
    await read_models_equal_a_rebuild(plait)


# -- the servers, and everything at once -----------------------------------------------------


async def echo(question: Question) -> Reply:
    """Asks when told to, works when told to, and quotes what came of it."""
    last = question.messages[-1] if question.messages else {"role": "tool", "content": ""}
    if question.kind == "tool":
        return Reply(f"worked on {question.said}")
    if last["role"] == "tool":
        return Reply(last["content"])
    verb, _, rest = question.said.partition(" ")
    if verb == "ask":
        target, _, text = rest.partition(": ")
        return Reply("", (asks(target, text), works(text)))
    return Reply(f"heard {question.said}")


NAMES = [f"branch{number}" for number in range(4)]


async def asked_all_around(client: Client, session: str) -> list[str]:
    """Each branch is told to ask the one before it; the turns of that."""
    for name in NAMES:
        await client.branch(session, name)
    return [
        await client.turn(session, f"ask {NAMES[place - 1]}: what of {name}?", branch=name)
        for place, name in enumerate(NAMES)
    ]


async def every_turn_completes_once(watch: Watch, turns: list[str]) -> None:
    """And so do those that they led to; each wait ends once, and nothing is delivered twice."""
    session = ids.session_of(turns[0])
    for turn in turns:
        await watch.completed(turn, within_s=60)
    asked = [e for e in watch.events(MessageSent) if ids.session_of(e.message_id) == session]
    assert asked
    for event in asked:
        (end,) = watch.events(WaitEnded, wait_id=ids.wait_id(event.message_id))
        received = watch.events(MessageReceived, message_id=event.message_id)
        if end.outcome == "refused":
            assert "this wait would close a cycle" in (end.reason or "")
        assert (end.outcome, len(received)) in (("replied", 1), ("refused", 0))
    requested = [e.turn_id for e in watch.events(TurnRequested)]
    assert len({*requested}) == len(requested)
    for turn in requested:
        if ids.session_of(turn) == session:
            await watch.completed(turn, within_s=60)


async def a_read_sees_the_write_before_it(client: Client, session: str) -> None:
    posted = await client.say(session, "read me", run=False)
    path = f"/v1/sessions/{session}/nodes/{posted['node_id']}"
    assert (await client.get(path, min_position=posted["position"]))["text"] == "read me"


EVERYTHING = ("nats", "valkey", *SERVICES)


@pytest.mark.parametrize("names", [("nats",), ("valkey",), EVERYTHING], ids=" ".join)
async def test_turns_and_posts_outlive_their_servers(plait: Chaos, names: tuple[str, ...]) -> None:
    await plait.start_workers(2)
    plait.director.actor = echo
    session, posts = await plait.session(), await plait.session()
    async with clients_posting(plait, posts) as told:
        turns = await asked_all_around(plait, session)
        await plait.killed(*names)
    await every_turn_completes_once(plait.watch, turns)
    await every_post_is_there_once(plait.watch, posts, told)
    await a_read_sees_the_write_before_it(plait, session)
    await read_models_equal_a_rebuild(plait)


@contextlib.contextmanager
def dev(data: Path, port: int) -> Iterator[tuple[int, Settings]]:
    """`plait dev`, ready: its process, and where its servers are."""
    command = [*PLAIT, "dev", "--json", "--port", str(port), "--data", str(data)]
    with (data / "dev.log").open("a") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log)
    with process:
        assert process.stdout is not None
        told = msgspec.json.decode(process.stdout.readline())
        settings = Settings(
            nats_url=told["nats"], redis_url=told["valkey"], key=told["key"], allow_lossy_log=True
        )
        try:
            yield process.pid, settings
        finally:
            process.kill()


async def test_kill_9_of_the_whole_process_tree_loses_nothing(tmp_path: Path) -> None:
    port = free_port()
    client = Client(f"http://127.0.0.1:{port}", Settings().key)
    with contextlib.ExitStack() as trees:
        pid, _ = await asyncio.to_thread(trees.enter_context, dev(tmp_path, port))
        session, posts = await client.session(), await client.session()
        async with clients_posting(client, posts) as told:
            turns = await asked_all_around(client, session)
            await further(told)
            tree = [pid, *descendants(pid)]
            for one in tree:
                with contextlib.suppress(ProcessLookupError):  # it died with its guard
                    os.kill(one, signal.SIGKILL)
            await until_gone(tree)
            _, settings = await asyncio.to_thread(trees.enter_context, dev(tmp_path, port))
        async with watching(settings) as watch:
            await every_turn_completes_once(watch, turns)
            await every_post_is_there_once(watch, posts, told)
        await a_read_sees_the_write_before_it(client, session)
    await client.http.aclose()
