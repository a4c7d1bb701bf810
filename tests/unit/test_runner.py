"""One turn, from claim to end, on the in-memory log with scripted models and tools."""

import asyncio
import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from plait.events import ids
from plait.events.commands import CancelTurn, EndWait
from plait.events.context import context_digest
from plait.events.errors import ModelFailure
from plait.events.handler import Done, Handler
from plait.events.limits import Limits
from plait.events.store import Recorded
from plait.events.subjects import stream_of
from plait.events.transcripts import Transcripts
from plait.events.types import (
    AnyEvent,
    MessageSent,
    ModelAnswered,
    ModelFailed,
    ToolReturned,
    TurnClaimed,
    TurnEnded,
    TurnError,
    TurnSuspended,
)
from plait.services.turns.models import (
    Answer,
    AskedCall,
    ModelError,
    Request,
    RetryLater,
    offline_models,
)
from plait.services.turns.runner import TurnRunner
from plait.services.turns.tools import Tool
from tests.waiting import until
from tests.world import TENANT, World

NUMBER = {"type": "object", "properties": {"x": {"type": "integer"}}}


class Scripted:
    """Answers what the script says, in order, and keeps what it was asked."""

    def __init__(self, *script: Answer | Exception | Callable[[Request], Answer]) -> None:
        self.script, self.asked = list(script), list[Request]()

    async def answer(self, request: Request) -> Answer:
        self.asked.append(request)
        said = self.script.pop(0)
        if isinstance(said, Exception):
            raise said
        return said(request) if callable(said) else said


def calling(*calls: tuple[str, dict[str, Any]], text: str = "") -> Answer:
    return Answer(text, tuple(AskedCall(name, json.dumps(args)) for name, args in calls))


def asking(target: str, *, wait: bool = True) -> Answer:
    args = {"target_branch": target, "message": "well?", "wait_reply": wait}
    return calling(("send_to_branch", args))


class Counted:
    """A tool that doubles, and counts its runs."""

    def __init__(self) -> None:
        self.runs: list[str] = []

    @property
    def tool(self) -> Tool:
        return Tool("double", "Doubles x.", NUMBER, self.call)

    async def call(self, args: dict[str, Any], key: str) -> str:
        self.runs.append(key)
        return str(2 * args["x"])


def runner(
    world: World, model: object, tools: Sequence[Tool] = (), worker: str = "w"
) -> TurnRunner:
    """A process of its own: nothing cached."""
    transcripts = Transcripts(world.store, world.contents)
    return TurnRunner(
        Handler(transcripts.watching(), world.limits),
        transcripts,
        world.contents,
        {"offline:demo": model, **({} if model else offline_models())},  # type: ignore[dict-item]
        tools,
        world.settings,
        worker,
        lambda: world.ms,
    )


async def asked(world: World, words: str = "hello") -> tuple[str, str]:
    """A branch with a turn to run: its id and the turn's."""
    branch = await world.branch(await world.session(), words=words, run=True)
    return branch, await turn_of(world, branch)


async def turn_of(world: World, branch: str) -> str:
    turn = (await world.handler.branch(TENANT, branch)).turn
    assert turn is not None, f"{branch} has no turn"
    return turn.id


async def log_of(world: World, branch: str) -> Sequence[Recorded]:
    return await world.store.read(stream_of(TENANT, branch))


async def events_of(world: World, branch: str) -> list[AnyEvent]:
    return [event for one in await log_of(world, branch) for event in one.append.events]


async def ended(world: World, branch: str) -> TurnEnded:
    return [e for e in await events_of(world, branch) if isinstance(e, TurnEnded)][-1]


async def text_of(world: World, branch: str) -> str:
    said = [e for e in await events_of(world, branch) if isinstance(e, ModelAnswered)][-1].text
    return "" if said is None else await world.contents.read(said)


async def results_of(world: World, branch: str) -> list[tuple[str, str]]:
    return [
        (e.status, await world.contents.read(e.result))
        for e in await events_of(world, branch)
        if isinstance(e, ToolReturned)
    ]


async def test_a_turn_without_tools_is_two_appends() -> None:
    world = World()
    branch, turn = await asked(world)
    assert await runner(world, offline_models()["offline:echo"]).run(TENANT, turn, 1, 1)
    _, claim, end = await log_of(world, branch)
    assert [type(e) for e in claim.append.events] == [TurnClaimed]
    assert [type(e) for e in end.append.events] == [ModelAnswered, TurnEnded]
    assert await text_of(world, branch) == "hello"


async def test_a_turn_without_tools_reads_nothing_after_its_claim() -> None:
    world = World()
    branch, turn = await asked(world)
    reads: list[str] = []
    read = world.store.read

    async def counting(stream: Any, after: int = 0) -> Any:
        reads.append(stream.branch)
        return await read(stream, after)

    world.store.read = counting  # type: ignore[method-assign]
    assert await runner(world, offline_models()["offline:echo"]).run(TENANT, turn, 1, 1)
    assert sorted(reads) == ["_", ids.token_of(branch)]


async def test_the_recorded_digest_is_that_of_the_context_which_the_model_saw() -> None:
    world = World()
    branch, turn = await asked(world)
    counted = Counted()
    model = Scripted(calling(("double", {"x": 2})), Answer("4"))
    assert await runner(world, model, [counted.tool]).run(TENANT, turn, 1, 1)
    told = [e.context for e in await events_of(world, branch) if isinstance(e, ModelAnswered)]
    for digest, upto in zip(told, (2, 4), strict=True):
        store = World().store
        for one in (await log_of(world, branch))[:upto]:
            await store.append(one.stream, one.append, (await store.last_sequence()))
        session = (await world.store.read(stream_of(TENANT, branch)._replace(branch="_")))[0]
        await store.append(session.stream, session.append, 0)
        node = ids.node_id(branch, turn)
        assert digest == context_digest(
            await Transcripts(store, world.contents).context(TENANT, node)
        )


async def test_tools_run_at_once_and_each_result_is_recorded_when_it_is_there() -> None:
    world = World()
    branch, turn = await asked(world)
    slow_may_end = asyncio.Event()

    async def slow(args: dict[str, Any], key: str) -> str:
        await slow_may_end.wait()
        return "slow"

    async def fast(args: dict[str, Any], key: str) -> str:
        return "fast"

    tools = [Tool("slow", "", {}, slow), Tool("fast", "", {}, fast)]
    model = Scripted(calling(("slow", {}), ("fast", {})), Answer("done"))
    task = asyncio.create_task(runner(world, model, tools).run(TENANT, turn, 1, 1))
    await until(lambda: results_of(world, branch))
    assert await results_of(world, branch) == [("completed", "fast")]
    slow_may_end.set()
    assert await task
    assert [m["content"] for m in model.asked[1].messages if m["role"] == "tool"] == [
        "slow",
        "fast",
    ]


async def test_asking_another_branch_suspends_and_the_reply_is_the_calls_result() -> None:
    world = World()
    branch, turn = await asked(world)
    peer = await world.branch(ids.session_of(branch))
    model = Scripted(asking(peer), Answer("so it is"))
    assert await runner(world, model).run(TENANT, turn, 1, 1)
    assert [type(e) for e in (await log_of(world, branch))[-1].append.events] == [
        MessageSent,
        TurnSuspended,
    ]
    await reply(world, branch, "yes")
    assert await runner(world, model).run(TENANT, turn, 2, 1)
    assert [m["content"] for m in model.asked[1].messages] == ["hello", None, "yes"]
    assert (await ended(world, branch)).status == "completed"


async def reply(world: World, branch: str, words: str) -> Done:
    (wait,) = (await world.handler.branch(TENANT, branch)).waits
    return await world.do(
        EndWait(
            command_id=world.id(),
            at=world.ms,
            branch_id=branch,
            wait_id=wait,
            outcome="replied",
            content=await world.contents.write(words, TENANT, ids.session_of(branch)),
        )
    )


async def test_a_reply_before_the_suspension_lets_the_turn_go_on() -> None:
    world = World()
    branch, turn = await asked(world)
    peer = await world.branch(ids.session_of(branch))

    async def slow(args: dict[str, Any], key: str) -> str:
        async def waits() -> bool:
            return bool((await world.handler.branch(TENANT, branch)).waits)

        await until(waits)
        await reply(world, branch, "yes")
        return "done"

    send = {"target_branch": peer, "message": "well?", "wait_reply": True}
    model = Scripted(calling(("slow", {}), ("send_to_branch", send)), Answer("so it is"))
    assert await runner(world, model, [Tool("slow", "", {}, slow)]).run(TENANT, turn, 1, 1)
    assert not [e for e in await events_of(world, branch) if isinstance(e, TurnSuspended)]
    assert (await ended(world, branch)).status == "completed"


async def test_a_send_without_waiting_is_accepted_with_its_messages_id() -> None:
    world = World()
    branch, turn = await asked(world)
    peer = await world.branch(ids.session_of(branch))
    model = Scripted(asking(peer, wait=False), Answer("told"))
    assert await runner(world, model).run(TENANT, turn, 1, 1)
    (sent,) = [e for e in await events_of(world, branch) if isinstance(e, MessageSent)]
    ((status, text),) = await results_of(world, branch)
    assert (status, json.loads(text)) == (
        "completed",
        {"status": "accepted", "message_id": sent.message_id, "branch_id": peer},
    )


class Crash(BaseException):
    """The process dies here."""


@pytest.mark.parametrize("after", range(1, 6))
async def test_a_take_over_goes_on_after_the_last_recorded_step(after: int) -> None:
    """Whatever append the first worker dies after: nothing recorded is asked for or run again."""
    world = World()
    branch, turn = await asked(world)
    model = Scripted(
        calling(("double", {"x": 1})), calling(("double", {"x": 2})), Answer("all done")
    )
    counted = Counted()
    append, appended = world.store.append, 0

    async def dying(stream: Any, what: Any, expected: int) -> int:
        nonlocal appended
        if appended == after:
            raise Crash
        sequence = await append(stream, what, expected)
        appended += 1
        return sequence

    world.store.append = dying  # type: ignore[method-assign, assignment]
    with pytest.raises(Crash):
        await runner(world, model, [counted.tool]).run(TENANT, turn, 1, 1)
    world.store.append = append  # type: ignore[method-assign]
    # An answer that was not recorded was bought in vain; the script gives it again.
    recorded = [e for e in await events_of(world, branch) if isinstance(e, ModelAnswered)]
    done = [e for e in await events_of(world, branch) if isinstance(e, ToolReturned)]
    whole = [calling(("double", {"x": 1})), calling(("double", {"x": 2})), Answer("all done")]
    again = Scripted(*whole[len(recorded) :])
    counted.runs.clear()
    assert await runner(world, again, [counted.tool], "other").run(TENANT, turn, 1, 2)
    assert len(again.asked) == 3 - len(recorded)
    assert len(counted.runs) == 2 - len(done)
    assert await results_of(world, branch) == [("completed", "2"), ("completed", "4")]
    assert await text_of(world, branch) == "all done"


async def test_a_slow_worker_cannot_write_after_another_took_over() -> None:
    world = World()
    branch, turn = await asked(world)
    entered, may_end = asyncio.Event(), asyncio.Event()

    class Slow:
        async def answer(self, request: Request) -> Answer:
            entered.set()
            await may_end.wait()
            return Answer("too late")

    slow = asyncio.create_task(runner(world, Slow()).run(TENANT, turn, 1, 1))
    await entered.wait()
    assert await runner(world, Scripted(Answer("mine"))).run(TENANT, turn, 1, 2)
    may_end.set()
    assert await slow, "the turn has ended, so its item has served its purpose"
    assert await text_of(world, branch) == "mine"


async def test_a_fenced_worker_leaves_the_item_to_the_one_that_runs() -> None:
    world = World()
    branch, turn = await asked(world)
    entered, may_end = asyncio.Event(), asyncio.Event()

    class Slow:
        async def answer(self, request: Request) -> Answer:
            entered.set()
            await may_end.wait()
            return Answer("too late")

    slow = asyncio.create_task(runner(world, Slow()).run(TENANT, turn, 1, 1))
    await entered.wait()
    await world.claim(branch, delivery=2)
    may_end.set()
    assert not await slow


async def test_two_deliveries_of_one_epoch_are_not_taken_for_one() -> None:
    """The queue was lost and made anew, so its count began again: the second must come again."""
    world = World()
    branch, turn = await asked(world)
    entered, may_end = asyncio.Event(), asyncio.Event()

    class Slow:
        async def answer(self, request: Request) -> Answer:
            entered.set()
            await may_end.wait()
            return Answer("mine")

    same = runner(world, Slow())
    first = asyncio.create_task(same.run(TENANT, turn, 1, 1))
    await entered.wait()
    assert not await same.run(TENANT, turn, 1, 1)
    assert not await runner(world, Scripted(), worker="other").run(TENANT, turn, 1, 1)
    may_end.set()
    assert await first
    assert await text_of(world, branch) == "mine"


async def test_every_append_of_a_turn_names_the_command_that_began_the_chain() -> None:
    world = World()
    branch, turn = await asked(world)
    model = Scripted(calling(("double", {"x": 2})), Answer("4"))
    assert await runner(world, model, [Counted().tool]).run(TENANT, turn, 1, 1)
    post, *others = [one.append for one in await log_of(world, branch)]
    assert {(append.root, append.cause) for append in others} == {(post.command_id, turn)}


@pytest.mark.parametrize("turn", ["nonsense", ids.turn_id(ids.branch_id("s" + 12 * "a", "x"), "x")])
async def test_an_item_of_another_log_is_taken_off_the_queue(turn: str) -> None:
    assert await runner(World(), Scripted()).run(TENANT, turn, 1, 1)


@pytest.mark.parametrize(("n", "settled"), [(1, True), (2, True), (3, False)])
async def test_an_old_item_is_acked_and_one_from_the_future_is_not(n: int, settled: bool) -> None:
    world = World()
    branch, turn = await asked(world)
    peer = await world.branch(ids.session_of(branch))
    model = Scripted(asking(peer), asking(peer))
    assert await runner(world, model).run(TENANT, turn, 1, 1)
    await reply(world, branch, "yes")
    assert await runner(world, model).run(TENANT, turn, 2, 1)
    assert await runner(world, Scripted()).run(TENANT, turn, n, 5) is settled


async def test_a_cancelled_turn_is_dropped_and_its_item_acked() -> None:
    world = World()
    branch, turn = await asked(world)

    async def cancel(args: dict[str, Any], key: str) -> str:
        await world.do(
            CancelTurn(command_id=world.id(), at=world.ms, branch_id=branch, turn_id=turn)
        )
        return "in vain"

    model = Scripted(calling(("cancel", {})))
    assert await runner(world, model, [Tool("cancel", "", {}, cancel)]).run(TENANT, turn, 1, 1)
    assert (await ended(world, branch)).status == "cancelled"
    assert await results_of(world, branch) == []


@pytest.mark.parametrize(
    ("said", "code", "message"),
    [
        (ModelError("the key is not valid"), "model_error", "the key is not valid"),
        (RuntimeError("sk-secret"), "model_error", "the model failed (RuntimeError)"),
        (Answer("x" * 2_000), "text_too_long", "the text has 2000 bytes"),
        (Answer("a\0b"), "invalid_request", "the text holds a NUL"),
        (Answer("", (AskedCall("double", "{}"),) * 9), "budget_exceeded", "tool calls"),
    ],
)
async def test_an_answer_that_cannot_be_taken_ends_the_turn_as_an_error(
    said: Answer | Exception, code: str, message: str
) -> None:
    world = World(Limits(text_bytes=1_000, turn_calls=8))
    branch, turn = await asked(world)
    assert await runner(world, Scripted(said)).run(TENANT, turn, 1, 1)
    error = (await ended(world, branch)).error
    assert error is not None
    assert error.code == code
    assert error.message.startswith(message)


@pytest.mark.parametrize("after_s", [None, 30.0])
async def test_a_model_that_may_answer_later_is_asked_again_then_and_holds_nothing_meanwhile(
    after_s: float | None,
) -> None:
    world = World()
    branch, turn = await asked(world)
    model = Scripted(RetryLater("not now", ModelFailure.RATE_LIMITED, after_s), Answer("now"))
    assert await runner(world, model).run(TENANT, turn, 1, 1), "its item may go"
    (failed,) = [e for e in await events_of(world, branch) if isinstance(e, ModelFailed)]
    assert failed.error == TurnError("rate_limited", "not now")
    assert failed.deadline is not None and failed.deadline >= world.ms + 1000 * (after_s or 0.5)
    assert await runner(world, model).run(TENANT, turn, 1, 2), "and an old one does nothing"
    async with world.replies():
        world.ms = failed.deadline
        item = await world.work.take()
        while item.item.n == 1:
            world.work.ack(item.item)
            item = await world.work.take()
    assert await runner(world, model, worker="other").run(TENANT, turn, item.item.n, 1)
    assert await text_of(world, branch) == "now"
    assert len(model.asked) == 2
    assert model.asked[0].messages == model.asked[1].messages


async def test_a_call_that_failed_is_a_step_with_what_was_sent_and_why() -> None:
    world = World()
    branch, turn = await asked(world)
    model = Scripted(
        calling(("double", {"x": 1})), ModelError("the key is not valid", ModelFailure.BAD_KEY)
    )
    assert await runner(world, model, [Counted().tool]).run(TENANT, turn, 1, 1)
    (failed,) = [e for e in await events_of(world, branch) if isinstance(e, ModelFailed)]
    answered = [e for e in await events_of(world, branch) if isinstance(e, ModelAnswered)]
    assert (failed.step, failed.error.code) == (2, "bad_key")
    assert failed.context != answered[0].context
    assert (await ended(world, branch)).error == failed.error


class Heard:
    """One listener for all calls."""

    def __init__(self) -> None:
        self.calls: list[list[str]] = []

    def speak(self, tenant: str, turn_id: str, epoch: tuple[int, int], step: int) -> "Heard":
        self.calls.append([f"{tenant} {epoch} {step}"])
        return self

    def say(self, text: str) -> None:
        self.calls[-1].append(text)

    def end(self, how: str) -> None:
        if self.calls[-1][-1] != "(whole)":
            self.calls[-1].append(f"({how})")


async def test_what_a_model_says_is_heard_with_a_clear_end() -> None:
    world = World()
    _, turn = await asked(world)
    heard = Heard()

    def say(request: Request) -> Answer:
        request.said("one ")
        request.said("two")
        return Answer("one two") if len(heard.calls) == 2 else calling(("double", {"x": 1}))

    def break_off(request: Request) -> Answer:
        request.said("half")
        raise RetryLater("broke off", ModelFailure.CUT_OFF)

    for model in (Scripted(say, say), Scripted(break_off)):
        speaking = runner(world, model, [Counted().tool])
        speaking._speak = heard.speak
        assert await speaking.run(TENANT, turn, 1, 1)
        _, turn = await asked(world)
    assert heard.calls == [
        ["t (1, 1) 1", "one ", "two", "(whole)"],
        ["t (1, 1) 2", "one ", "two", "(whole)"],
        ["t (1, 1) 1", "half", "(broken)"],
    ]


async def test_a_model_that_this_worker_does_not_have_ends_the_turn_clearly() -> None:
    world = World()
    branch, turn = await asked(world)
    other = runner(world, None)
    other._models = {"offline:echo": offline_models()["offline:echo"]}
    assert await other.run(TENANT, turn, 1, 1)
    error = (await ended(world, branch)).error
    assert error is not None
    assert error.message == "this worker has no model 'offline:demo', only offline:echo"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (AskedCall("triple", "{}"), "there is no tool 'triple'; use one of send_to_branch, double"),
        (AskedCall("double", "{"), "the arguments of double are no JSON object"),
        (AskedCall("double", "[1]"), "the arguments of double are no JSON object"),
        (AskedCall("double", '{"y": 1}'), "KeyError: 'x'"),
        (AskedCall("send_to_branch", "{}"), "send_to_branch: Object missing required field"),
        (
            AskedCall("send_to_branch", '{"target_branch": "nobody", "message": "x"}'),
            "there is no branch 'nobody'",
        ),
        (
            AskedCall(
                "send_to_branch",
                '{"target_branch": "me", "message": "x", "wait_reply": true, "timeout_s": 1e9}',
            ),
            "timeout_s is at most 86400 seconds",
        ),
    ],
)
async def test_a_call_that_cannot_run_gets_an_error_result_and_the_turn_goes_on(
    call: AskedCall, message: str
) -> None:
    world = World()
    branch, turn = await asked(world)
    model = Scripted(Answer("", (call,)), Answer("I see"))
    assert await runner(world, model, [Counted().tool]).run(TENANT, turn, 1, 1)
    ((status, text),) = await results_of(world, branch)
    assert status == "error"
    assert text.startswith(message)
    assert model.asked[1].messages[-1]["is_error"]
    assert (await ended(world, branch)).status == "completed"


async def test_sending_to_oneself_is_refused_in_the_result() -> None:
    world = World()
    branch, turn = await asked(world)
    assert await runner(world, Scripted(asking(branch), Answer("ok"))).run(TENANT, turn, 1, 1)
    ((status, text),) = await results_of(world, branch)
    assert (status, text) == (
        "error",
        f"branch {branch} cannot send to itself: name another branch",
    )


async def test_a_turn_has_its_time_and_no_more() -> None:
    world = World(Limits(turn_time_s=60))
    branch, turn = await asked(world)

    async def slow(args: dict[str, Any], key: str) -> str:
        world.ms += 61_000
        return "done"

    model = Scripted(calling(("slow", {})))
    assert await runner(world, model, [Tool("slow", "", {}, slow)]).run(TENANT, turn, 1, 1)
    error = (await ended(world, branch)).error
    assert error is not None
    assert (error.code, error.message) == ("turn_time", "the turn ran for 61 s; 60 are allowed")


async def test_a_model_that_never_answers_is_cut_off_at_the_turns_time() -> None:
    world = World(Limits(turn_time_s=0.05))
    branch, turn = await asked(world)

    class Silent:
        async def answer(self, request: Request) -> Answer:
            await asyncio.Event().wait()
            raise AssertionError

    assert await runner(world, Silent()).run(TENANT, turn, 1, 1)
    error = (await ended(world, branch)).error
    assert error is not None
    assert error.code == "turn_time"


async def test_a_turn_that_always_breaks_is_given_up_after_its_attempts() -> None:
    world = World(Limits(turn_attempts=3))
    branch, turn = await asked(world)
    assert await runner(world, Scripted()).run(TENANT, turn, 1, 4)
    error = (await ended(world, branch)).error
    assert error is not None
    assert (error.code, error.message) == ("gave_up", "given up after 3 attempts")


async def test_an_endless_loop_of_calls_ends_at_the_step_limit() -> None:
    world = World(Limits(turn_steps=3))
    branch, turn = await asked(world)
    model = Scripted(*[calling(("double", {"x": 1}))] * 3)
    assert await runner(world, model, [Counted().tool]).run(TENANT, turn, 1, 1)
    error = (await ended(world, branch)).error
    assert error is not None
    assert error.code == "budget_exceeded"


async def test_the_model_is_told_of_the_tools_and_the_pins_name_them() -> None:
    world = World()
    branch, turn = await asked(world)
    model = Scripted(Answer("ok"))
    assert await runner(world, model, [Counted().tool]).run(TENANT, turn, 1, 1)
    (request,) = model.asked
    assert [tool.name for tool in request.tools] == ["send_to_branch", "double"]
    schema = request.tools[0].schema
    assert schema["required"] == ["target_branch", "message"]
    assert schema["additionalProperties"] is False
    (claimed,) = [e for e in await events_of(world, branch) if isinstance(e, TurnClaimed)]
    assert claimed.pins is not None
    assert claimed.pins.tools == ("send_to_branch", "double")


async def test_demo_answers_each_of_the_branches_that_ask_at_once() -> None:
    messages = [
        {"role": "user", "content": "The sea is three kilometres deep."},
        {"role": "assistant", "content": "Noted."},
        {"role": "user", "content": '[Message from "a"]\nHow many kilometres deep is it?'},
        {"role": "user", "content": '[Message from "b"]\nWho are you?'},
    ]
    answer = await offline_models()["offline:demo"].answer(Request("offline:demo", messages))
    assert answer.text.splitlines() == [
        "“How many kilometres deep is it?”: The sea is three kilometres deep.",
        "“Who are you?”: I have read “Who are you?”.",
    ]


async def test_demo_asks_waits_and_quotes_the_reply() -> None:
    world = World()
    session = await world.session()
    peer = await world.branch(session, words="A nautical mile is 1852 metres. The sea is blue.")
    branch = await world.branch(session, words=f"ask {peer}: How long is a nautical mile?")
    await world.post(branch, f"ask {peer}: How long is a nautical mile?")
    turn = await turn_of(world, branch)
    demo = runner(world, offline_models()["offline:demo"])
    async with world.replies():
        assert await demo.run(TENANT, turn, 1, 1)
        item = await world.work.take()
        while item.item.turn_id == turn and item.item.n == 1:
            world.work.ack(item.item)
            item = await world.work.take()
        assert await demo.run(TENANT, item.item.turn_id, 1, 1)
        world.work.ack(item.item)
        assert await text_of(world, peer) == "A nautical mile is 1852 metres."
        item = await world.work.take()
        assert (item.item.turn_id, item.item.n) == (turn, 2)
        assert await demo.run(TENANT, turn, 2, 1)
    assert await text_of(world, branch) == f"{peer} answered: “A nautical mile is 1852 metres.”"
