"""What clients are told, compared with the log when they are told it."""

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from msgspec import UNSET

from plait.events import ids
from plait.events.errors import (
    BranchArchived,
    BranchBusy,
    Code,
    NameTaken,
    PlaitError,
    ReservationGone,
    TurnAlreadyEnded,
    TurnStillActive,
    UnknownBranch,
    UnknownNode,
    UnknownSession,
    UnknownTurn,
)
from plait.events.store import Position
from plait.services.gateway.commands import Commands
from plait.services.gateway.idempotency import Asked, asked
from plait.services.gateway.shapes import (
    BranchPatch,
    BranchPatched,
    CheckedOut,
    MessagePosted,
    MessageSent,
    NewMessage,
    NewSend,
    SessionMade,
    TurnCancelled,
    TurnRetried,
)
from tests.simulation.plan import Op

if TYPE_CHECKING:
    from tests.simulation.world import World

Act = Callable[[Commands, Asked], Awaitable[Any]]


class Request:
    """One call as a client means it, however often it is sent."""

    def __init__(self, tenant: str, path: str, body: Any, act: Act, key: str | None) -> None:
        self.tenant, self.path, self.body, self.act, self.key = tenant, path, body, act, key
        self.asked_at = 0  # the log's end when it was first sent
        self.command_ids: list[str] = []
        self.served_at = 0  # the log's end when its latest answer was made

    def asked(self) -> Asked:
        call = asked(self.tenant, self.key, "POST", self.path, self.body)
        self.command_ids.append(call.command_id)
        return call


def check_refusal(world: "World", op: Op, request: Request, error: PlaitError) -> None:
    """A refusal is true: what it says was so at some moment since the call was sent."""
    facts, since = world.watch.facts, request.asked_at
    text = f"op {op.place} is refused ({error.code}: {error})"
    for (_, _, command_id), sequence in facts.commands.items():
        if command_id in request.command_ids and sequence <= request.served_at:
            world.fail("no_acknowledged_command_lost", f"{text}, and was carried out")
    named = str(error)
    for branch in facts.branches.values():
        if branch.id not in named or facts.tenant_of(branch.id) != request.tenant:
            continue
        before = [state for at, state in branch.archived if at <= since]
        states = {
            before[-1] if before else False,
            *(state for at, state in branch.archived if at > since),
        }
        if isinstance(error, BranchArchived) and True not in states:
            world.fail("refusals_are_true", f"{text}: it was never archived")
        known = isinstance(error, UnknownBranch | ReservationGone) and f"'{branch.id}'" in named
        if known and branch.opened <= since:
            world.fail("refusals_are_true", f"{text}: it is open since #{branch.opened}")
        if isinstance(error, BranchBusy):
            was = [busy for at, busy in branch.busy if at <= since]
            if not (was and was[-1]) and not any(b for at, b in branch.busy if at > since):
                world.fail("refusals_are_true", f"{text}: it has no turn")
    for turn in facts.turns.values():
        if turn.id not in named or facts.tenant_of(turn.id) != request.tenant:
            continue
        if isinstance(error, UnknownTurn) and turn.requested <= since:
            world.fail("refusals_are_true", f"{text}: it is there")
        if isinstance(error, TurnAlreadyEnded) and turn.ended is None:
            world.fail("refusals_are_true", f"{text}: it has not ended")
        if isinstance(error, TurnStillActive) and turn.ended and turn.ended_at <= since:
            world.fail("refusals_are_true", f"{text}: it has ended")
    for session in facts.sessions.values():
        if session.tenant != request.tenant:
            continue
        unknown = isinstance(error, UnknownSession) and f"'{session.id}'" in named
        if unknown and session.sequence <= since:
            world.fail("refusals_are_true", f"{text}: it is there")
    if isinstance(error, NameTaken) and not any(
        name is not None and f"'{name}'" in named
        for session in facts.sessions.values()
        for _, _, name in session.named
    ):
        world.fail("refusals_are_true", f"{text}: nobody has it")
    if type(error) is UnknownNode:
        for node, branch_id in facts.placed.items():
            if f"'{node}'" not in named or facts.tenant_of(node) != request.tenant:
                continue
            if branch_id in facts.branches and node in facts.branches[branch_id].nodes:
                world.fail("refusals_are_true", f"{text}: it is there")
    if error.code is Code.INTERNAL:
        world.fail("refusals_are_true", text)


class Acknowledged:
    """Compares an answer with the log: what it says is there, at or before its position."""

    def __init__(self, world: "World", request: Request) -> None:
        self._world, self._request = world, request
        self._facts = world.watch.facts

    def check(self, answer: Any) -> None:
        facts, request = self._facts, self._request
        position = Position.parse(answer.position)
        if position.sequence > facts.end:
            self._lost(answer, f"its position is beyond the log's end {facts.end}")
        for name in answer.__struct_fields__:
            value = getattr(answer, name)
            ours = not isinstance(value, str) or ids.parse(value) is None
            if not ours and facts.tenant_of(value) != request.tenant:
                self._world.fail("tenants_are_apart", f"{request.tenant} is told {answer}")
                return
        match answer:
            case SessionMade():
                session = facts.sessions[answer.session_id]
                self._covered(answer, session.sequence)
                if session.heads[0][1] != answer.branch_id:
                    self._lost(answer, "its branch is not the first")
            case MessagePosted():
                self._posted(answer, request.body)
            case MessageSent():
                self._sent(answer, request.body)
            case CheckedOut():
                heads = facts.sessions[ids.session_of(answer.branch_id)].heads
                at = [at for at, branch in heads if branch == answer.branch_id]
                if not at:
                    self._lost(answer, "HEAD was never there")
                else:
                    self._covered(answer, at[0])
            case BranchPatched():
                self._patched(answer, request.body)
            case TurnCancelled():
                turn = facts.turns[answer.turn_id]
                if turn.status != "cancelled":
                    self._lost(answer, f"the turn is {turn.status}")
                else:
                    self._covered(answer, turn.ended_at)
            case TurnRetried():
                turn_facts = facts.turns.get(answer.turn_id)
                if turn_facts is None or turn_facts.branch != answer.branch_id:
                    self._lost(answer, "there is no such turn")
                else:
                    self._covered(answer, turn_facts.requested)
            case _:
                raise AssertionError(answer)

    def _posted(self, answer: MessagePosted, body: NewMessage) -> None:
        facts = self._facts
        received = facts.received.get(answer.node_id)
        if received is None or received.branch != answer.branch_id:
            return self._lost(answer, "the message is not there")
        self._covered(answer, received.sequence)
        event = received.event
        if event.turn_id != answer.turn_id or (event.turn_id is None) == body.run:
            self._lost(answer, f"the turn of the message is {event.turn_id}")
        if self._world.watch.text(event.content) != body.text:
            self._lost(answer, "another text was kept")
        branch = facts.branches[answer.branch_id]
        if body.after is not None:
            opens = branch.fork == body.after and branch.opened == received.sequence
            if not opens and received.tip != body.after:
                self._lost(answer, f"it follows {received.tip}")
        elif body.replaces is not None:
            before = facts.branches[ids.branch_of(body.replaces)]
            place = before.nodes.index(body.replaces)
            if branch.fork != (before.nodes[place - 1] if place else before.fork):
                self._lost(answer, f"the branch forks at {branch.fork}")
        elif body.branch is None:
            heads = facts.sessions[ids.session_of(answer.branch_id)].heads
            before_it = [b for at, b in heads if at <= self._request.asked_at][-1:]
            if answer.branch_id not in {
                *before_it,
                *(b for at, b in heads if at > self._request.asked_at),
            }:
                self._lost(answer, "HEAD was not there")
        elif ids.of_kind(body.branch, "branch") and body.branch != answer.branch_id:
            self._lost(answer, "it went to another branch")
        return None

    def _sent(self, answer: MessageSent, body: NewSend) -> None:
        message = self._facts.messages.get(answer.message_id)
        if message is None:
            return self._lost(answer, "it was never sent")
        self._covered(answer, message.sequence)
        if (message.sent.deadline is not None) != body.wait_reply:
            self._lost(answer, "it waits, or does not")
        if self._world.watch.text(message.sent.content) != body.message:
            self._lost(answer, "another text was sent")
        return None

    def _patched(self, answer: BranchPatched, body: BranchPatch) -> None:
        session = self._facts.sessions[ids.session_of(answer.branch_id)]
        sequence = Position.parse(answer.position).sequence
        if body.name is not UNSET:
            named = [n for at, b, n in session.named if b == answer.branch_id and at <= sequence]
            if body.name not in named and body.name is not None:
                self._lost(answer, f"the names were {named}")
        branch = self._facts.branches.get(answer.branch_id)
        if body.archived is not UNSET and branch is not None:
            states = [False, *(state for at, state in branch.archived if at <= sequence)]
            if body.archived not in states:
                self._lost(answer, f"archived was {states}")

    def _covered(self, answer: Any, sequence: int) -> None:
        """A command's position covers its own append (P23)."""
        if Position.parse(answer.position).sequence < sequence:
            self._world.fail("positions_cover", f"{answer} stands before its append #{sequence}")

    def _lost(self, answer: Any, why: str) -> None:
        self._world.fail("no_acknowledged_command_lost", f"{self._request.body}: {answer}: {why}")
