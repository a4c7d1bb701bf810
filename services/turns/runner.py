"""Runs one turn from its last recorded step on: claim, model, tools, results, until it ends or
waits. It knows no queue, so that the simulation can drive it.

Whatever was recorded is never asked for or run again; every append names the claim's epoch, and
a worker that is refused drops its work (P5, P6).
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import NamedTuple, TypeVar

import msgspec
import structlog

from plait.events import ids
from plait.events.branch import Turn
from plait.events.commands import (
    AnyBranchCommand,
    ClaimTurn,
    FailTurn,
    RecordAnswer,
    RecordFailure,
    RecordResults,
    ToolResult,
    ToolSend,
)
from plait.events.content import Contents
from plait.events.context import context_digest, render
from plait.events.errors import (
    Final,
    ModelFailure,
    PlaitError,
    Retryable,
    StaleClaim,
    UnknownBranch,
    UnknownSession,
)
from plait.events.handler import Done, Handler
from plait.events.settings import Settings
from plait.events.transcripts import Transcripts
from plait.events.types import (
    Content,
    Epoch,
    Pins,
    ToolCall,
    TurnClaimed,
    TurnEnded,
    TurnError,
    TurnSuspended,
)
from plait.services.turns.models import Answer, ChatModel, ModelError, Request, RetryLater
from plait.services.turns.tokens import Speak
from plait.services.turns.tools import (
    SEND_TO_BRANCH,
    Caller,
    Reading,
    Tool,
    send_to_branch,
    specs,
    specs_digest,
)

LOG_ATTEMPTS = 6  # of an append while the log does not answer; then the item comes again
LOG_PAUSE_S = 0.1  # before the second, doubled each time
ERROR_CHARS = 500  # of a tool's error that the model is shown

log = structlog.get_logger("turns")
T = TypeVar("T")


class _Failed(Exception):
    """The turn is to end as an error."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.error = TurnError(code, message)


class _Work(NamedTuple):
    """Which turn, under which claim. `run` is in the id of each of its commands, so that two
    that hold the same epoch (the queue was lost and made anew) are not taken for one."""

    tenant: str
    turn_id: str
    epoch: Epoch
    root: str
    run: str

    def command_id(self, name: str) -> str:
        return ids.derive(self.run, self.turn_id, *map(str, self.epoch), name)

    @property
    def branch_id(self) -> str:
        return ids.branch_of(self.turn_id)

    @property
    def session_id(self) -> str:
        return ids.session_of(self.turn_id)


class _Stand(NamedTuple):
    """Where a claimed turn stands, as of the sequence `known` of its branch."""

    known: int
    node_id: str
    pins: Pins
    steps: int
    to_run: tuple[str, ...]
    waiting: bool
    ran_ms: int
    since_ms: int


class TurnRunner:
    """`now` is a clock in ms; no two processes have the same `worker_id`. Give the handler
    `transcripts.watching()` as its store, and a turn without tools reads nothing beyond what its
    claim did. `models` are found by their whole name, or by their provider's prefix. `speak` lets
    others hear what models say while they say it; `reading` gives models the tools that read."""

    def __init__(
        self,
        handler: Handler,
        transcripts: Transcripts,
        contents: Contents,
        models: Mapping[str, ChatModel],
        tools: Sequence[Tool],
        settings: Settings,
        worker_id: str,
        now: Callable[[], int],
        speak: Speak | None = None,
        reading: Reading | None = None,
    ) -> None:
        self._handler, self._transcripts, self._contents = handler, transcripts, contents
        self._models = models
        self._tools = {tool.name: tool for tool in tools}
        self._reading = reading
        told = specs(tools, reading=reading is not None)
        self._specs = {spec.name: spec for spec in told}
        self._specs_digest = specs_digest(tuple(self._specs.values()))
        self._settings, self._limits = settings, settings.limits
        self._worker_id, self._now, self._speak = worker_id, now, speak
        self._runs = 0

    async def run(self, tenant: str, turn_id: str, n: int, delivery: int) -> bool:
        """True: the item has served its purpose and is to be acked. False: leave it alone."""
        if ids.of_kind(turn_id, "turn") is None:
            log.error("a work item names no turn", turn=turn_id)
            return True
        self._runs += 1
        epoch = (n, delivery)
        try:
            # Read here, the claim is decided without reading again.
            turn = (await self._handler.branch(tenant, ids.branch_of(turn_id))).turn
            root = turn.root if turn is not None and turn.id == turn_id else ""
            work = _Work(tenant, turn_id, epoch, root, f"{self._worker_id}.{self._runs}")
            stand = await self._claim(work)
            try:
                if delivery > self._limits.turn_attempts:
                    raise _Failed("gave_up", f"given up after {delivery - 1} attempts")
                await self._go_on(work, stand)
            except StaleClaim:
                raise
            except _Failed as failed:
                await self._fail(work, failed.error)
            except Final as error:
                await self._fail(work, TurnError(error.code, str(error)))
        except StaleClaim as stale:
            log.info("claim refused", turn=turn_id, epoch=epoch, why=str(stale))
            return stale.settled
        except Retryable as error:
            log.warning("turn left to its next delivery", turn=turn_id, error=str(error))
            return False
        except (UnknownSession, UnknownBranch):
            # The leader said so, and they come before their turns: the item is not of this log.
            log.error("a work item of another log", turn=turn_id)  # noqa: TRY400
        except Exception:
            # A fault of ours: the next delivery tries again, and the last one ends the turn.
            log.exception("turn broke off", turn=turn_id, epoch=epoch)
            return False
        return True

    # -- the turn ----------------------------------------------------------------------------

    async def _claim(self, work: _Work) -> _Stand:
        session = await self._transcripts.session(work.tenant, work.session_id)
        pins = Pins(
            model=session.model or self._settings.model,
            system_prompt=session.system_prompt.digest if session.system_prompt else None,
            tools=tuple(self._specs),
            tools_digest=self._specs_digest,
        )
        at = self._now()
        done = await self._execute(
            work.tenant,
            ClaimTurn(
                command_id=work.command_id("claim"),
                at=at,
                cause=work.turn_id,
                root=work.root,
                branch_id=work.branch_id,
                turn_id=work.turn_id,
                epoch=work.epoch,
                worker=self._worker_id,
                pins=pins,
            ),
        )
        for event in done.events:
            if isinstance(event, TurnClaimed) and event.after is not None:
                return _Stand(done.sequence, event.node_id, pins, 0, (), False, 0, at)
        return await self._stand(work)

    async def _stand(self, work: _Work) -> _Stand:
        branch = await self._handler.branch(work.tenant, work.branch_id)
        turn: Turn | None = branch.turn
        if turn is None or turn.id != work.turn_id:
            raise StaleClaim(work.turn_id, "has ended meanwhile", settled=True)
        if turn.epoch != work.epoch or turn.status != "running":
            why = f"is {turn.status} under {turn.epoch}, not running under {work.epoch}"
            # Suspended at its own n, the item has served its purpose; a newer claim is another's.
            own = turn.epoch == work.epoch
            raise StaleClaim(work.turn_id, why, settled=own)
        assert turn.node_id is not None and turn.pins is not None, "a running turn was claimed"
        return _Stand(
            branch.version,
            turn.node_id,
            turn.pins,
            turn.steps,
            tuple(turn.to_run()),
            bool(turn.waits),
            turn.ran_ms,
            turn.since_ms,
        )

    async def _go_on(self, work: _Work, stand: _Stand) -> None:
        """Until the turn has ended or is suspended."""
        while True:
            if stand.to_run or stand.waiting:
                if await self._run_calls(work, stand):
                    return
            elif await self._ask(work, stand):
                return
            stand = await self._stand(work)

    def _left_s(self, stand: _Stand) -> float:
        """Raises _Failed when the turn has run for too long."""
        ran_s = (stand.ran_ms + max(0, self._now() - stand.since_ms)) / 1000
        limit_s = self._limits.turn_time_s
        if ran_s >= limit_s:
            raise _Failed("turn_time", f"the turn ran for {ran_s:.0f} s; {limit_s:.0f} are allowed")
        return limit_s - ran_s

    # -- the model ---------------------------------------------------------------------------

    async def _ask(self, work: _Work, stand: _Stand) -> bool:
        """One model call, recorded whole. True when the turn ended with it, or pauses."""
        model = self._model(stand.pins.model)
        items = await self._transcripts.context(work.tenant, stand.node_id, known=stand.known)
        messages = render(items, await self._transcripts.open(items))
        told = tuple(self._specs[name] for name in stand.pins.tools if name in self._specs)
        request = Request(stand.pins.model, messages, told, work.tenant)
        try:
            answer = await self._answer(work, model, stand, request)
        except (RetryLater, ModelError) as failure:
            await self._record_failure(work, stand, context_digest(items), failure)
            return True
        step = stand.steps + 1
        calls = [
            ToolCall(
                ids.node_id(work.branch_id, work.turn_id, str(step), str(place)),
                call.name,
                await self._contents.write(call.args, work.tenant, work.session_id),
            )
            for place, call in enumerate(answer.calls)
        ]
        text = answer.text
        done = await self._execute(
            work.tenant,
            RecordAnswer(
                command_id=work.command_id(f"answer.{step}"),
                at=self._now(),
                cause=work.turn_id,
                root=work.root,
                branch_id=work.branch_id,
                turn_id=work.turn_id,
                epoch=work.epoch,
                context=context_digest(items),
                text=(
                    await self._contents.write(text, work.tenant, work.session_id) if text else None
                ),
                calls=tuple(calls),
                usage=answer.usage,
                finish=answer.finish,
            ),
        )
        return not calls or any(isinstance(event, TurnEnded) for event in done.events)

    def _model(self, name: str) -> ChatModel:
        model = self._models.get(name) or self._models.get(name.partition(":")[0] + ":")
        model = model or self._models.get(":")  # providers that tenants have named
        if model is None:
            known = ", ".join(sorted(self._models))
            message = f"this worker has no model {name!r}, only {known}"
            raise _Failed(ModelFailure.UNKNOWN_MODEL, message)
        return model

    async def _answer(
        self, work: _Work, model: ChatModel, stand: _Stand, request: Request
    ) -> Answer:
        """Raises RetryLater and ModelError, and nothing else of the model's."""
        left_s = self._left_s(stand)
        if self._speak is None:
            return await self._within(left_s, _only_ours(model, request))
        speech = self._speak(work.tenant, work.turn_id, work.epoch, stand.steps + 1)
        heard = msgspec.structs.replace(request, said=speech.say)
        try:
            answer = await self._within(left_s, _only_ours(model, heard))
            speech.end("whole")
            return answer
        finally:
            speech.end("broken")  # Unless it has ended.

    async def _record_failure(
        self, work: _Work, stand: _Stand, context: str, failure: RetryLater | ModelError
    ) -> None:
        retry = isinstance(failure, RetryLater)
        log.warning(
            "model call failed",
            turn=work.turn_id,
            model=stand.pins.model,
            failure=failure.failure,
            retry=retry,
        )
        await self._execute(
            work.tenant,
            RecordFailure(
                command_id=work.command_id(f"failure.{stand.steps + 1}"),
                at=self._now(),
                cause=work.turn_id,
                root=work.root,
                branch_id=work.branch_id,
                turn_id=work.turn_id,
                epoch=work.epoch,
                context=context,
                error=TurnError(failure.failure, str(failure)),
                retry=retry,
                after_s=failure.after_s if isinstance(failure, RetryLater) else None,
            ),
        )

    async def _within(self, left_s: float, what: Awaitable[T]) -> T:
        limit = asyncio.timeout(left_s)
        try:
            async with limit:
                return await what
        except TimeoutError:
            if not limit.expired():
                raise
            limit_s = self._limits.turn_time_s
            message = f"the turn ran for {limit_s:.0f} s, and no more are allowed"
            raise _Failed("turn_time", message) from None

    # -- the tools ---------------------------------------------------------------------------

    async def _run_calls(self, work: _Work, stand: _Stand) -> bool:
        """Runs what has neither result nor wait; each is recorded as soon as it is there. True
        when the turn is suspended then, or has ended."""
        if not stand.to_run:
            return await self._record(work, [], f"suspend.{stand.steps}")
        calls = [
            await self._transcripts.call(work.tenant, node, known=stand.known)
            for node in stand.to_run
        ]
        running = {asyncio.ensure_future(self._call(work, stand, call)) for call in calls}
        try:
            while running:
                finished, running = await asyncio.wait(
                    running, timeout=self._left_s(stand), return_when=asyncio.FIRST_COMPLETED
                )
                if finished:
                    results = sorted((task.result() for task in finished), key=_node_of)
                    name = f"results.{ids.derive(*map(_node_of, results))}"
                    if await self._record(work, results, name):
                        return True
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
        return False

    async def _record(
        self, work: _Work, results: Sequence[ToolResult | ToolSend], name: str
    ) -> bool:
        at = self._now()
        done = await self._execute(
            work.tenant,
            RecordResults(
                command_id=work.command_id(name),
                at=at,
                cause=work.turn_id,
                root=work.root,
                branch_id=work.branch_id,
                turn_id=work.turn_id,
                epoch=work.epoch,
                results=tuple(r for r in results if isinstance(r, ToolResult)),
                sends=tuple(_not_overdue(r, at) for r in results if isinstance(r, ToolSend)),
            ),
        )
        return any(isinstance(event, TurnSuspended) for event in done.events)

    async def _call(self, work: _Work, stand: _Stand, call: ToolCall) -> ToolResult | ToolSend:
        try:
            args = await self._contents.read(call.args)
            caller = Caller(work.tenant, work.branch_id, work.turn_id, call.node_id)
            if call.name == SEND_TO_BRANCH.name:
                return await send_to_branch(
                    args,
                    caller,
                    handler=self._handler,
                    contents=self._contents,
                    now=self._now(),
                )
            if self._reading is not None and self._reading.has(call.name):
                text = await self._reading.run(call.name, args, caller, stand.known)
            else:
                text = await self._run_tool(call, args)
            return ToolResult(call.node_id, await self._sealed(work, text))
        except Retryable:
            raise  # The log's trouble, not the model's.
        except PlaitError as error:
            text = str(error)
        except Exception as error:  # noqa: BLE001 - whatever a tool raises is its result
            log.info("tool failed", tool=call.name, turn=work.turn_id, error=repr(error))
            text = f"{type(error).__name__}: {error}"
        text = _printable(text)
        return ToolResult(call.node_id, await self._sealed(work, text), "error")

    async def _run_tool(self, call: ToolCall, args: str) -> str:
        tool = self._tools.get(call.name)
        if tool is None:
            known = ", ".join(self._specs)
            raise _Refused(f"there is no tool {call.name!r}; use one of {known}")
        try:
            decoded = msgspec.json.decode(args or "{}", type=dict[str, object])
        except (msgspec.DecodeError, UnicodeEncodeError) as error:
            raise _Refused(f"the arguments of {call.name} are no JSON object: {error}") from None
        return await tool.call(decoded, call.node_id)

    async def _sealed(self, work: _Work, text: str) -> Content:
        return await self._contents.write(text, work.tenant, work.session_id)

    # -- the log -----------------------------------------------------------------------------

    async def _fail(self, work: _Work, error: TurnError) -> None:
        await self._execute(
            work.tenant,
            FailTurn(
                command_id=work.command_id("fail"),
                at=self._now(),
                cause=work.turn_id,
                root=work.root,
                branch_id=work.branch_id,
                turn_id=work.turn_id,
                epoch=work.epoch,
                error=error,
            ),
        )

    async def _execute(self, tenant: str, command: AnyBranchCommand) -> Done:
        """Bears a log that does not answer for a while: the model's answer is not bought twice."""
        pause_s = LOG_PAUSE_S
        for _ in range(LOG_ATTEMPTS - 1):
            try:
                return await self._handler.execute(tenant, command)
            except Retryable:
                await asyncio.sleep(pause_s)
                pause_s *= 2
        return await self._handler.execute(tenant, command)


async def _only_ours(model: ChatModel, request: Request) -> Answer:
    """What a model raises that is not ours is final, and its text stays here: it may hold a key."""
    try:
        return await model.answer(request)
    except PlaitError:
        raise
    except Exception as error:  # noqa: BLE001 - nothing of a model's own goes further
        log.warning("a model raised what it should not", error=type(error).__name__)
        raise ModelError(f"the model failed ({type(error).__name__})") from None


class _Refused(Final):
    """A call that cannot be run; the model reads why."""


def _node_of(result: ToolResult | ToolSend) -> str:
    return result.node_id


def _not_overdue(send: ToolSend, at: int) -> ToolSend:
    """A very short wait may be over before it is recorded: it is recorded all the same."""
    if send.deadline is None or send.deadline > at:
        return send
    return msgspec.structs.replace(send, deadline=at + 1)


def _printable(text: str) -> str:
    """An error's text as content takes it."""
    return text[:ERROR_CHARS].encode(errors="replace").decode().replace("\0", "�")
