"""What each call writes: addresses become branches, bodies become commands (P1–P4).

Addresses are resolved from the log. With an Idempotency-Key what they resolved to is recorded
before the append, so a retry takes the same steps and makes the same ids.
"""

from collections.abc import Awaitable, Callable

import msgspec
from msgspec import Struct

from plait.events import addressing, ids
from plait.events import branch as branches
from plait.events.commands import (
    AnyBranchCommand,
    ArchiveBranch,
    CancelTurn,
    CreateSession,
    MoveHead,
    NameBranch,
    PostMessage,
    RequestTurn,
    SendMessage,
)
from plait.events.content import Contents, check_text
from plait.events.errors import (
    Invalid,
    NotATip,
    PlaitError,
    SelfSend,
    TurnStillActive,
    UnknownTurn,
    shown,
)
from plait.events.handler import Handler
from plait.events.model_names import check_model
from plait.events.providers import TenantProviders
from plait.events.session import first_branch
from plait.events.settings import Settings
from plait.events.store import Position, Requests
from plait.events.types import Content, MessageReceived
from plait.services.gateway.addresses import Addresses, PostPlan
from plait.services.gateway.idempotency import Asked, Plan, settled
from plait.services.gateway.shapes import (
    BranchPatch,
    BranchPatched,
    CheckedOut,
    MessagePosted,
    MessageSent,
    NewMessage,
    NewSend,
    NewSession,
    SessionMade,
    TurnCancelled,
    TurnRetried,
)

_NOTHING = Content(size=0, digest="", key="")  # decide never looks at a text


class NoPlan(Struct, frozen=True):
    """Nothing was resolved."""


class HeadPlan(Struct, frozen=True):
    branch: str
    fork: str | None


class SendPlan(Struct, frozen=True):
    branch: str
    from_node: str | None
    target: str
    sender: str


class RetryPlan(Struct, frozen=True):
    fork: str


class Commands:
    def __init__(
        self,
        handler: Handler,
        contents: Contents,
        requests: Requests,
        providers: TenantProviders,
        settings: Settings,
        now: Callable[[], int],
    ) -> None:
        """`now` is a clock in ms."""
        self._handler, self._contents, self._requests = handler, contents, requests
        self._providers = providers
        self._limits, self._now = settings.limits, now
        self._addresses = Addresses(handler)

    # -- sessions ----------------------------------------------------------------------------

    async def create_session(self, tenant: str, body: NewSession, call: Asked) -> SessionMade:
        if body.title is not None and len(body.title) > self._limits.title_chars:
            raise Invalid(f"a title has at most {self._limits.title_chars} characters")
        for text in (body.title, body.system_prompt):
            if text is not None:
                check_text(text, self._limits)
        if body.model is not None:
            check_model(body.model, await self._providers.names(tenant))
        await self._plan(tenant, call, NoPlan, _nothing)
        session = ids.session_id(call.command_id)
        await self._contents.create_key(tenant, session)  # what is sealed needs it
        done = await self._handler.execute(
            tenant,
            CreateSession(
                command_id=call.command_id,
                at=self._now(),
                session_id=session,
                title=await self._sealed(body.title, tenant, session),
                system_prompt=await self._sealed(body.system_prompt, tenant, session),
                model=body.model,
                attended=body.attended,
            ),
        )
        return SessionMade(
            session_id=session,
            branch_id=first_branch(session),
            head_id=ids.root_id(session),
            position=self._position(done.sequence),
        )

    async def checkout(self, tenant: str, session_id: str, node: str, call: Asked) -> CheckedOut:
        async def resolve() -> HeadPlan:
            session = await self._handler.session(tenant, session_id)
            home = await self._addresses.home(tenant, session, node)
            if home.is_tip:
                return HeadPlan(home.branch, node if node == session.root else None)
            return HeadPlan(ids.branch_id(session_id, call.command_id), node)

        plan = await self._plan(tenant, call, HeadPlan, resolve)
        done = await self._handler.execute(
            tenant,
            MoveHead(
                command_id=call.command_id,
                at=self._now(),
                session_id=session_id,
                branch_id=plan.branch,
                fork=plan.fork,
            ),
        )
        return CheckedOut(
            branch_id=plan.branch, head_id=node, position=self._position(done.sequence)
        )

    async def patch_branch(
        self, tenant: str, session_id: str, address: str, body: BranchPatch, call: Asked
    ) -> BranchPatched:
        """The name is claimed first: who comes second is refused, and nothing has changed."""
        session = await self._handler.session(tenant, session_id)
        branch = await self._addresses.known(tenant, session, address)
        archiving = ArchiveBranch(
            command_id=call.command_id,
            at=self._now(),
            branch_id=branch,
            archived=body.archived is True,
        )
        state = await self._handler.peek(tenant, branch)
        archived, sequence = state.archived, max(session.version, state.version)
        changes = body.archived is not msgspec.UNSET and body.archived != archived
        if changes:
            branches.decide(archiving, state, self._limits)  # refused before anything is named
        name = session.name_of(branch)
        if body.name is not msgspec.UNSET and body.name != name:
            named = NameBranch(
                command_id=call.command_id,
                at=self._now(),
                session_id=session_id,
                branch_id=branch,
                name=body.name,
            )
            sequence = max(sequence, (await self._handler.execute(tenant, named)).sequence)
            name = body.name
        if changes:
            done = await self._handler.execute(tenant, archiving)
            archived, sequence = archiving.archived, max(sequence, done.sequence)
        return BranchPatched(
            branch_id=branch, name=name, archived=archived, position=self._position(sequence)
        )

    # -- messages ----------------------------------------------------------------------------

    async def post(
        self, tenant: str, session_id: str, body: NewMessage, call: Asked
    ) -> MessagePosted:
        _check_said("text", body.text)
        check_text(body.text, self._limits)

        def command(plan: PostPlan, content: Content) -> PostMessage:
            return PostMessage(
                command_id=call.command_id,
                at=self._now(),
                branch_id=plan.branch,
                content=content,
                run=body.run,
                strategy=body.multitask_strategy,
                fork=plan.fork,
                expected_tip=plan.tip,
            )

        async def resolve() -> PostPlan:
            return await self._addresses.of_post(tenant, session_id, body, call.command_id)

        def trial(plan: PostPlan) -> PostMessage:
            # That the tip has moved since it was looked at refuses nothing: the post forks then.
            return command(msgspec.structs.replace(plan, tip=None), _NOTHING)

        plan = await self._plan(tenant, call, PostPlan, resolve, trial)
        content = await self._contents.write(body.text, tenant, session_id)
        forked = PostPlan(ids.branch_id(session_id, call.command_id), fork=plan.tip)
        try:
            return await self._posted(tenant, command(plan, content))
        except NotATip:
            pass  # Somebody went on there first: this one forks.
        except PlaitError:
            # It may have forked at an earlier try, before the node's branch came to refuse it.
            if plan.tip is None or not (await self._handler.peek(tenant, forked.branch)).exists:
                raise
        return await self._posted(tenant, command(forked, content))

    async def _posted(self, tenant: str, command: PostMessage) -> MessagePosted:
        done = await self._handler.execute(tenant, command)
        node = ids.node_id(command.branch_id, command.command_id)
        turn, sequence = None, done.sequence
        for event in done.events:
            if isinstance(event, MessageReceived) and event.node_id == node:
                turn = event.turn_id
        if not done.events:  # it was done before
            state = await self._handler.peek(tenant, command.branch_id)
            turn, sequence = state.received[node], state.sequences[node]
        return MessagePosted(
            node_id=node,
            branch_id=command.branch_id,
            turn_id=turn,
            position=self._position(sequence),
        )

    async def send(self, tenant: str, session_id: str, body: NewSend, call: Asked) -> MessageSent:
        _check_said("message", body.message)
        check_text(body.message, self._limits)
        if body.timeout_s is not None and not body.wait_reply:
            raise Invalid("`timeout_s` is how long to wait for a reply: it needs `wait_reply`")
        timeout_s = self._limits.wait_default_s if body.timeout_s is None else body.timeout_s
        if not 0 < timeout_s <= self._limits.wait_max_s:
            raise Invalid(f"`timeout_s` is above 0 and at most {self._limits.wait_max_s:.0f}")

        def command(plan: SendPlan, content: Content) -> SendMessage:
            at = self._now()
            return SendMessage(
                command_id=call.command_id,
                at=at,
                branch_id=plan.branch,
                target=plan.target,
                content=content,
                sender=plan.sender,
                deadline=at + max(1, int(timeout_s * 1000)) if body.wait_reply else None,
                from_node=plan.from_node,
            )

        async def resolve() -> SendPlan:
            branch, node = await self._addresses.sender(tenant, session_id, body.from_)
            target = await self._addresses.resolve(tenant, session_id, body.target_branch)
            if target == branch:
                raise SelfSend(shown(body.target_branch))
            sender = await addressing.label(self._handler, tenant, branch)
            return SendPlan(branch, node, target, sender)

        plan = await self._plan(
            tenant, call, SendPlan, resolve, lambda plan: command(plan, _NOTHING)
        )
        content = await self._contents.write(body.message, tenant, session_id)
        done = await self._handler.execute(tenant, command(plan, content))
        message, sequence = ids.message_id(plan.branch, call.command_id), done.sequence
        if not done.events:
            state = await self._handler.peek(tenant, plan.branch)
            sequence = state.sequences[message]
        return MessageSent(message_id=message, position=self._position(sequence))

    # -- turns -------------------------------------------------------------------------------

    async def cancel(self, tenant: str, turn: str, call: Asked) -> TurnCancelled:
        branch = _branch_of_turn(turn)

        command = CancelTurn(
            command_id=call.command_id, at=self._now(), branch_id=branch, turn_id=turn
        )
        await self._plan(tenant, call, NoPlan, _nothing, lambda _: command)
        done = await self._handler.execute(tenant, command)
        return TurnCancelled(turn_id=turn, branch_id=branch, position=self._position(done.sequence))

    async def retry(self, tenant: str, turn: str, call: Asked) -> TurnRetried:
        """The same input once more, on a new branch that forks where the turn's answer began."""
        home = _branch_of_turn(turn)
        branch = ids.branch_id(ids.session_of(turn), call.command_id)

        async def resolve() -> RetryPlan:
            state = await self._handler.peek(tenant, home)
            if state.turn_status(turn) is None:
                raise UnknownTurn(turn)
            if turn not in state.ended:
                raise TurnStillActive(turn)
            answer = ids.node_id(home, turn)
            if state.has(answer):
                return RetryPlan(state.nodes[answer])
            # Cancelled before its first claim: go on from the last message that asked for it.
            asking = [
                node for node, asked in state.received.items() if asked == turn and state.has(node)
            ]
            return RetryPlan(asking[-1] if asking else state.fork)

        plan = await self._plan(tenant, call, RetryPlan, resolve)
        fresh = ids.turn_id(branch, call.command_id)
        if call.key is not None:
            state = await self._handler.peek(tenant, branch)
            if fresh in state.sequences:
                return TurnRetried(
                    turn_id=fresh,
                    branch_id=branch,
                    position=self._position(state.sequences[fresh]),
                )
        done = await self._handler.execute(
            tenant,
            RequestTurn(
                command_id=call.command_id, at=self._now(), branch_id=branch, fork=plan.fork
            ),
        )
        return TurnRetried(turn_id=fresh, branch_id=branch, position=self._position(done.sequence))

    # -- shared ------------------------------------------------------------------------------

    async def _plan(
        self,
        tenant: str,
        call: Asked,
        kind: type[Plan],
        resolve: Callable[[], Awaitable[Plan]],
        command: Callable[[Plan], AnyBranchCommand] | None = None,
    ) -> Plan:
        """What `resolve` says, or what it said to the first call with this key. Before it is
        recorded, the command is decided without being written: a refusal leaves no record."""

        async def check(plan: Plan) -> None:
            if command is not None:
                trial = command(plan)
                state = await self._handler.peek(tenant, trial.branch_id)
                branches.decide(trial, state, self._limits)

        return await settled(self._requests, tenant, call, kind, resolve, check)

    async def _sealed(self, text: str | None, tenant: str, session: str) -> Content | None:
        return None if text is None else await self._contents.write(text, tenant, session)

    def _position(self, sequence: int) -> str:
        return str(Position(self._handler.store.generation, sequence))


async def _nothing() -> NoPlan:
    return NoPlan()


def _check_said(field: str, text: str) -> None:
    if not text.strip():
        raise Invalid(f"`{field}` is empty or only white space: say something")


def _branch_of_turn(turn: str) -> str:
    ref = ids.of_kind(turn, "turn")
    if ref is None:
        raise UnknownTurn(turn)
    return ref.branch
