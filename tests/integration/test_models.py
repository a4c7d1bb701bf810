"""Models behind HTTP, against llmock as a real server in both formats: every way to answer, and
every way to fail, through worker, replies and read models. llmock judges our client as well."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import msgspec
import pytest
from llmock.pytest_plugin import LLMock
from llmock.scenarios import Reply, StreamFault, ToolCall, ToolFault
from nats.aio.msg import Msg

from plait.events import ids, tokens
from plait.events.commands import NameBranch
from plait.events.context import context_digest, render
from plait.events.jetstream_setup import JetStream, open_jetstream
from plait.events.limits import Limits
from plait.events.settings import Settings
from plait.events.store import Position
from plait.events.subjects import stream_of
from plait.events.tokens import Tokens
from plait.events.transcripts import Transcripts
from plait.events.types import AnyEvent, MessageReceived, ModelFailed, ToolReturned, WaitEnded
from plait.projections import worker as projections
from plait.projections.queries import Queries, TurnView
from plait.projections.scripts import connect
from plait.services.replies import service
from plait.services.replies import worker as replies
from plait.services.turns import worker
from tests.integration.test_turns import Bench
from tests.waiting import until
from tests.world import START, TENANT

FORMATS = ("openai", "anthropic")
LIMITS = Limits(model_stall_s=1.5)  # a busy machine is no stall
KEY = "llmock-test-key"  # the fixture puts it into the environment


class Models(Bench):
    """A whole Plait but for the gateway."""

    def __init__(self, jetstream: JetStream, settings: Settings, queries: Queries) -> None:
        super().__init__(jetstream, settings)
        self.queries = queries

    async def ask(self, model: str, words: str = "hello") -> str:
        """A turn of a session of its own."""
        return await self.post(await self.session(model), words, offer=False)

    async def peer(self, session: str, name: str, words: str = "I am here.") -> str:
        """A named branch whose first turn is over."""
        turn = await self.post(session, words, offer=False)
        assert await self.ended(turn) == "completed"
        branch = ids.branch_of(turn)
        await self.handler.execute(
            TENANT,
            NameBranch(
                command_id=self.id(), at=START, session_id=session, branch_id=branch, name=name
            ),
        )
        return branch

    async def view(self, turn: str, within_s: float = 20.0) -> TurnView:
        """The ended turn, as readers see it."""
        await self.ended(turn, within_s)
        end = await self.jetstream.store.last_sequence()
        return await self.queries.turn(
            TENANT, turn, Position(self.jetstream.store.generation, end, 1023)
        )

    async def events(self, branch: str) -> list[AnyEvent]:
        recorded = await self.jetstream.store.read(stream_of(TENANT, branch))
        return [event for one in recorded for event in one.append.events]

    async def results(self, turn: str) -> list[str]:
        return [
            await self.contents.read(event.result)
            for event in await self.events(ids.branch_of(turn))
            if isinstance(event, ToolReturned)
        ]


@asynccontextmanager
async def tasks(*running: Any) -> AsyncIterator[None]:
    started = [asyncio.ensure_future(one) for one in running]
    try:
        yield
    finally:
        for task in started:
            task.cancel()
        await asyncio.gather(*started, return_exceptions=True)


@asynccontextmanager
async def plait(settings: Settings, *processes: Any) -> AsyncIterator[Models]:
    async with AsyncExitStack() as stack:
        jetstream = await open_jetstream(settings, "test-models")
        stack.push_async_callback(jetstream.close)
        redis = await stack.enter_async_context(connect(settings.redis_url))
        await stack.enter_async_context(
            tasks(replies.run(settings), projections.run(settings), *processes)
        )
        made = Models(jetstream, settings, None)  # type: ignore[arg-type]
        made.queries = Queries(redis, made.contents, settings)
        yield made


@pytest.fixture
async def models(
    settings: Settings, llmock: LLMock, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Models]:
    """With the worker in this process; `llmock` has pointed the environment at itself."""
    monkeypatch.setattr(service, "SWEEP_S", 0.02)
    llmock.tool_mode("off")
    settings = msgspec.structs.replace(settings, limits=LIMITS)
    async with plait(settings, worker.run(settings)) as made:
        yield made


def failures(view: TurnView) -> list[str]:
    return [step.error["code"] for step in view.steps if step.error is not None]


def sending(*messages: tuple[str, str], wait: bool = True) -> Reply:
    return Reply(
        tool_calls=tuple(
            ToolCall(
                "send_to_branch",
                {"target_branch": target, "message": message, "wait_reply": wait},
            )
            for target, message in messages
        )
    )


# -- answers ---------------------------------------------------------------------------------


@pytest.mark.parametrize("format", FORMATS)
async def test_a_reply_streams_and_is_recorded_whole_with_its_usage(
    models: Models, llmock: LLMock, format: str
) -> None:
    llmock.reply("It is about a mile deep.")
    view = await models.view(await models.ask(f"{format}:m", "How deep is it?"))
    assert (view.status, view.text) == ("completed", "It is about a mile deep.")
    assert view.usage["input_tokens"] > 0 and view.usage["output_tokens"] > 0
    (asked,) = llmock.requests
    assert asked.stream and asked.model == "m"
    llmock.assert_resilient(strict=True)


@pytest.mark.parametrize("format", FORMATS)
async def test_a_call_of_send_to_branch_waits_for_the_reply_and_goes_on_with_it(
    models: Models, llmock: LLMock, format: str
) -> None:
    session = await models.session(f"{format}:m")
    llmock.reply("I know miles.")
    await models.peer(session, "research")
    llmock.add(sending(("research", "How long is a nautical mile?")))
    llmock.reply("1852 metres.").reply("It says 1852 metres.")
    turn = await models.post(session, "Ask research.", offer=False)
    view = await models.view(turn)
    assert (view.status, view.text) == ("completed", "It says 1852 metres.")
    assert [wait.outcome for wait in view.waits] == ["replied"]
    assert len(llmock.requests) == 4
    sent = json.dumps(llmock.requests[-1].body, ensure_ascii=False)
    assert "1852 metres." in sent and "call_" in sent
    llmock.assert_resilient(strict=True)


@pytest.mark.parametrize("format", FORMATS)
async def test_parallel_calls_of_one_answer_wait_and_fail_each_by_itself(
    models: Models, llmock: LLMock, format: str
) -> None:
    session = await models.session(f"{format}:m")
    llmock.reply("I am here.", times=2)
    b, c = [await models.peer(session, name) for name in ("one", "two")]
    llmock.add(sending(("one", "first?"), ("nobody", "lost?"), ("two", "second?")))
    llmock.reply("an answer", times=2).reply("All done.")
    turn = await models.post(session, "Ask all.", offer=False)
    view = await models.view(turn)
    assert (view.status, view.text) == ("completed", "All done.")
    assert [wait.outcome for wait in view.waits] == ["replied", "replied"]
    assert await models.results(turn) == [
        "there is no branch 'nobody'; the live branches are one, two"
    ]
    for peer in (b, c):
        received = [e for e in await models.events(peer) if isinstance(e, MessageReceived)]
        assert len(received) == 2, "its first message, and the question, once"
    assert len(llmock.requests) == 6, "each answer was bought once"
    llmock.assert_resilient(strict=True)


@pytest.mark.parametrize("format", FORMATS)
async def test_a_model_lists_and_reads_branches(
    models: Models, llmock: LLMock, format: str
) -> None:
    session = await models.session(f"{format}:m")
    llmock.reply("It is 1852 metres.")
    peer = await models.peer(session, "research", "How long is a nautical mile?")
    calls = (ToolCall("list_branches"), ToolCall("read_branch", {"target_branch": "research"}))
    llmock.add(Reply(tool_calls=calls))
    llmock.reply("I have read it.")
    turn = await models.post(session, "Look around.", offer=False)
    view = await models.view(turn)
    assert view.text == "I have read it."
    by_shape = {("branches" in told): told for told in map(json.loads, await models.results(turn))}
    listed, read = by_shape[True], by_shape[False]
    assert [branch["name"] for branch in listed["branches"]] == ["research", None]
    assert listed["branches"][1]["is"] == "this branch" and listed["branches"][1]["busy"]
    assert (read["branch"], read["branch_id"]) == ("research", peer)
    assert [(m["role"], m["text"]) for m in read["messages"]] == [
        ("user", "How long is a nautical mile?"),
        ("assistant", "It is 1852 metres."),
    ]
    llmock.assert_resilient(strict=True)


@pytest.mark.parametrize("format", FORMATS)
async def test_the_same_context_leaves_as_the_same_bytes(
    models: Models, llmock: LLMock, format: str
) -> None:
    llmock.fail(503)
    llmock.reply("Yes.")
    turn = await models.ask(f"{format}:m", "Is it “the same”?")
    assert (await models.view(turn)).status == "completed"
    first, second = llmock.requests
    assert json.dumps(first.body) == json.dumps(second.body), "in the order of their keys, too"


# -- failures --------------------------------------------------------------------------------


@pytest.mark.parametrize("format", FORMATS)
async def test_a_rate_limit_suspends_the_turn_until_the_provider_takes_it(
    models: Models, llmock: LLMock, format: str
) -> None:
    llmock.rate_limit(retry_after=1.5).reply("Now.")
    turn = await models.ask(f"{format}:m")
    await until(lambda: suspended(models, turn))
    await until(lambda: no_work(models))  # The item is acked: no worker holds it.
    view = await models.view(turn)
    assert (view.status, view.text, failures(view)) == ("completed", "Now.", ["rate_limited"])
    first, second = llmock.requests
    assert second.started_at - first.ended_at >= 1.5
    llmock.assert_resilient(strict=True)


async def suspended(models: Models, turn: str) -> bool:
    return await models.status(turn) == "suspended"


async def no_work(models: Models) -> bool:
    return await models.queued() == 0


@pytest.mark.parametrize("format", FORMATS)
async def test_an_outage_is_waited_out_longer_each_time(
    models: Models, llmock: LLMock, format: str
) -> None:
    llmock.fail(500, times=2).reply("Back again.")
    view = await models.view(await models.ask(f"{format}:m"))
    assert (view.status, view.text) == ("completed", "Back again.")
    assert failures(view) == ["provider_unavailable"] * 2
    one, two, three = llmock.requests
    assert two.started_at - one.ended_at >= 0.5 and three.started_at - two.ended_at >= 1.0
    llmock.assert_resilient(strict=True)


def cut(kind: str, chunks: int, *behaviors: Any) -> Callable[[LLMock], object]:
    fault = StreamFault(kind, after_chunks=chunks, stall_seconds=5.0)  # type: ignore[arg-type]
    return lambda llmock: llmock.add(*behaviors, fault)


LONG = Reply(text="one two three four five six")
CALL = sending(("nobody", "a long message to nobody at all"))


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(
    ("break_it", "code"),
    [
        (cut("stall", 3, LONG), "stalled"),
        (cut("truncate", 5, LONG), "cut_off"),
        (cut("disconnect", 5, LONG), "cut_off"),
        (cut("truncate", 4, CALL), "cut_off"),
        (cut("disconnect", 4, CALL), "cut_off"),
        (cut("malformed", 4, LONG), "malformed"),
    ],
    ids=["stall", "cut", "drop", "cut-in-a-call", "drop-in-a-call", "no-json"],
)
async def test_a_stream_that_breaks_is_a_failure_and_never_a_short_answer(
    models: Models,
    llmock: LLMock,
    format: str,
    break_it: Callable[[LLMock], object],
    code: str,
) -> None:
    llmock.pace(10)  # So that the server sees whether its client still reads.
    break_it(llmock)
    llmock.reply("The whole answer.")
    turn = await models.ask(f"{format}:m")
    view = await models.view(turn)
    assert (view.status, view.text) == ("completed", "The whole answer.")
    assert failures(view) == [code]
    assert await models.results(turn) == [], "half a call is none"
    assert len(llmock.requests) == 2
    llmock.assert_resilient(strict=True)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(
    ("fault", "says"),
    [
        (ToolFault("malformed_arguments"), "send_to_branch: Input data was truncated"),
        (ToolFault("unknown_tool"), "there is no tool 'llmock_unknown_tool'; use one of"),
    ],
    ids=["arguments", "name"],
)
async def test_a_malformed_call_is_an_error_that_the_model_sees(
    models: Models, llmock: LLMock, format: str, fault: ToolFault, says: str
) -> None:
    llmock.add(CALL, fault).reply("I see.")
    turn = await models.ask(f"{format}:m")
    view = await models.view(turn)
    assert (view.status, view.text) == ("completed", "I see.")
    (result,) = await models.results(turn)
    assert result.startswith(says)
    assert result[:40] in json.dumps(llmock.requests[-1].body, ensure_ascii=False)
    llmock.assert_resilient(strict=True)


FINAL: list[tuple[Callable[[LLMock], object], str]] = [
    (lambda m: m.fail(401, message=f"Incorrect API key provided: {KEY}"), "bad_key"),
    (lambda m: m.fail(404, message="no such model"), "unknown_model"),
    (lambda m: m.fail(400, message=f"bad {KEY}"), "bad_request"),
    (lambda m: m.context_overflow(), "context_too_long"),
    (lambda m: m.add(Reply(text="I will", finish_reason="content_filter")), "content_filter"),
]


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(("refuse", "code"), FINAL, ids=[code for _, code in FINAL])
async def test_a_refusal_is_final_and_a_step_of_the_turn_without_secrets(
    models: Models, llmock: LLMock, format: str, refuse: Callable[[LLMock], object], code: str
) -> None:
    refuse(llmock)
    turn = await models.ask(f"{format}:m", "Something private.")
    view = await models.view(turn)
    assert (view.status, failures(view)) == ("error", [code])
    assert view.error is not None and view.error["code"] == code
    assert len(llmock.requests) == 1, "asking again would change nothing"
    told = json.dumps(msgspec.to_builtins(view)) + repr(await models.events(ids.branch_of(turn)))
    assert KEY not in told
    assert "private" not in json.dumps(view.error)
    llmock.assert_resilient(strict=True)


async def test_an_outage_without_end_ends_the_turn_and_says_after_how_many_calls(
    settings: Settings, llmock: LLMock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "SWEEP_S", 0.02)
    limits = Limits(model_attempts=3, model_pause_s=0.1)
    settings = msgspec.structs.replace(settings, limits=limits)
    llmock.outage()
    async with plait(settings, worker.run(settings)) as models:
        view = await models.view(await models.ask("openai:m"))
    assert view.status == "error" and failures(view) == ["provider_unavailable"] * 3
    assert view.error is not None and view.error["message"].endswith("given up after 3 calls")
    assert [step.retry_at is not None for step in view.steps] == [True, True, False]
    assert len(llmock.requests) == 3
    llmock.assert_resilient()


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        (Limits(turn_steps=2), "model calls of this turn: 2, and at most 2 are allowed"),
        (Limits(turn_output_tokens=5), "tokens written by this turn: "),
        (Limits(turn_total_tokens=5), "tokens read and written by this turn: "),
    ],
    ids=["steps", "output", "total"],
)
async def test_a_limit_of_the_turn_ends_it_and_keeps_what_was_done(
    settings: Settings, llmock: LLMock, limits: Limits, message: str
) -> None:
    settings = msgspec.structs.replace(settings, limits=limits)
    llmock.add(Reply(text="I go on and on.", tool_calls=CALL.tool_calls, times=None))
    async with plait(settings, worker.run(settings)) as models:
        view = await models.view(await models.ask("anthropic:m"))
    assert view.error is not None and view.error["code"] == "budget_exceeded"
    assert view.error["message"].startswith(message)
    assert view.text == "I go on and on." and view.usage["output_tokens"] > 0


# -- tokens ----------------------------------------------------------------------------------


@pytest.mark.parametrize("format", FORMATS)
async def test_tokens_are_heard_while_they_come_also_by_who_comes_later(
    models: Models, llmock: LLMock, format: str
) -> None:
    text = " ".join(f"word{number}" for number in range(30))
    llmock.pace(30).reply(text)
    nc, subjects = models.jetstream.nc, models.jetstream.subjects
    early, late = Reader(), Reader()
    session = await models.session(f"{format}:m")
    await nc.subscribe(subjects.tokens(TENANT, session), cb=early.take)
    await nc.flush()
    turn = await models.post(session, "Count.", offer=False)
    await until(lambda: len(early.held) > 40)
    branch = subjects.tokens(TENANT, ids.branch_of(turn))
    await nc.subscribe(branch, cb=late.take)
    await nc.publish(subjects.tokens_asked(TENANT, session), reply=branch)
    await until(lambda: late.held and late.held == early.held)
    assert early.end == "" and await models.status(turn) == "running"
    await until(lambda: early.end and late.end)
    assert (early.held, early.end) == (late.held, late.end) == (text, "whole")
    assert (await models.view(turn)).text == text


class Reader:
    """What a gateway does: holds one call's text, and takes what goes on from there."""

    def __init__(self) -> None:
        self.held, self.end = "", ""
        self.call: tuple[object, ...] = ()

    async def take(self, message: Msg) -> None:
        piece: Tokens = tokens.decode(message.data)
        call = (piece.turn_id, piece.epoch, piece.step)
        if call != self.call:
            self.call, self.held, self.end = call, "", ""
        if piece.offset <= len(self.held):
            self.held += piece.text[len(self.held) - piece.offset :]
            self.end = piece.end or self.end


# -- a worker that dies ----------------------------------------------------------------------


def serve(config: str) -> None:
    """The process: the worker alone."""
    asyncio.run(worker.run(msgspec.json.decode(config, type=Settings)))


@asynccontextmanager
async def process(settings: Settings) -> AsyncIterator[asyncio.subprocess.Process]:
    child = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        "import sys; from tests.integration.test_models import serve; serve(*sys.argv[1:])",
        json.dumps(msgspec.to_builtins(settings)),
    )
    try:
        yield child
    finally:
        if child.returncode is None:
            child.kill()
        await child.wait()


async def test_a_worker_killed_in_the_middle_of_a_stream_costs_one_more_call(
    settings: Settings, llmock: LLMock
) -> None:
    llmock.tool_mode("off").pace(50)
    text = " ".join(f"word{number}" for number in range(40))
    llmock.add(sending(("nobody", "hello")))
    llmock.reply(text, times=2)
    reader = Reader()
    async with plait(settings) as models:
        session = await models.session("openai:m")
        nc, subjects = models.jetstream.nc, models.jetstream.subjects
        await nc.subscribe(subjects.tokens(TENANT, session), cb=reader.take)
        turn = await models.post(session, "Count.", offer=False)
        async with process(models.settings) as first:
            await until(lambda: len(reader.held) > 30)
            first.kill()
            await first.wait()
        llmock.pace(0)
        async with process(models.settings):
            view = await models.view(turn, within_s=60)
            # Tokens have a way of their own: they may come after the answer.
            await until(lambda: (reader.held, reader.end) == (text, "whole"))
    assert (view.status, view.text) == ("completed", text)
    assert len(llmock.requests) == 3, "the recorded call, the one that was cut, and its repetition"


async def test_what_was_sent_is_what_the_log_says_it_was(models: Models, llmock: LLMock) -> None:
    """The digest that a failed call recorded is that of the context as it can still be read."""
    llmock.fail(401)
    turn = await models.ask("openai:m", "Who are you?")
    await models.ended(turn)
    (failed,) = [e for e in await models.events(ids.branch_of(turn)) if isinstance(e, ModelFailed)]
    transcripts = Transcripts(models.jetstream.store, models.contents)
    node = (await models.view(turn)).node_id
    assert node is not None
    items = await transcripts.context(TENANT, node)
    assert context_digest(items) == failed.context
    messages: Sequence[dict[str, Any]] = render(items, await transcripts.open(items))
    assert llmock.requests[0].body["messages"] == messages
    assert not [e for e in await models.events(ids.branch_of(turn)) if isinstance(e, WaitEnded)]
