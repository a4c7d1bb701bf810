"""Carries one effect of the ledger over to the branch that it concerns, idempotently.

Each ends in one event there, recognised by the id of its message or wait; doing it again, by
this process or another, changes nothing (P12).
"""

from plait.events import ids
from plait.events.commands import DeliverMessage, DeliverNote, EndWait
from plait.events.content import Contents
from plait.events.handler import Handler
from plait.events.store import EventStore, Recorded, WorkQueue
from plait.events.types import (
    Content,
    MessageRefused,
    MessageSent,
    ModelAnswered,
    Outcome,
    TurnEnded,
)
from plait.services.replies.ledger import (
    Answer,
    Deliver,
    Effect,
    Expire,
    Note,
    Offer,
    RefuseWait,
)


class Carrier:
    def __init__(
        self, store: EventStore, handler: Handler, contents: Contents, work: WorkQueue
    ) -> None:
        self._store, self._handler, self._contents, self._work = store, handler, contents, work

    async def carry(self, tenant: str, effect: Effect, at: int, source: Recorded | None) -> None:
        """`source` is the append that owes the effect, if it is at hand. Raises Unavailable."""
        if isinstance(effect, Offer):
            await self._work.offer(tenant, effect.turn_id, effect.n)
            return
        command_id = ids.derive(*effect.key)
        if isinstance(effect, RefuseWait | Expire):
            await self._handler.execute(
                tenant,
                EndWait(
                    command_id=command_id,
                    at=at,
                    cause=effect.wait_id,
                    branch_id=ids.branch_of(effect.wait_id),
                    wait_id=effect.wait_id,
                    outcome="refused" if isinstance(effect, RefuseWait) else "expired",
                    reason=effect.reason,
                ),
            )
            return
        recorded = source or await self._store.read_at(effect.sequence)
        if recorded is None:
            raise LookupError(f"the log has nothing at sequence {effect.sequence}")
        match effect:
            case Deliver():
                await self._deliver(tenant, command_id, effect, at, recorded)
            case Answer():
                await self._answer(tenant, command_id, effect, at, recorded)
            case Note():
                await self._note(tenant, command_id, effect, at, recorded)
            case _:
                raise AssertionError(f"no way to carry {type(effect).__name__}")

    async def _deliver(
        self, tenant: str, command_id: str, effect: Deliver, at: int, recorded: Recorded
    ) -> None:
        sent = next(
            event
            for event in recorded.append.events
            if isinstance(event, MessageSent) and event.message_id == effect.message_id
        )
        await self._handler.execute(
            tenant,
            DeliverMessage(
                command_id=command_id,
                at=at,
                cause=sent.message_id,
                root=sent.root,
                branch_id=sent.target,
                message_id=sent.message_id,
                content=await self._for(tenant, sent.target, recorded, sent.content),
                from_node=sent.from_node,
                sender=sent.sender,
                hops=sent.hops,
                wait=sent.deadline is not None,
            ),
        )

    async def _answer(
        self, tenant: str, command_id: str, effect: Answer, at: int, recorded: Recorded
    ) -> None:
        content: Content | None = None
        reply_node: str | None = None
        reason: str | None = None
        outcome: Outcome
        refusal = _refusal(recorded, effect.message_id)
        if refusal is not None:
            outcome, reason = "refused", refusal.reason
        else:
            ended = next(
                event
                for event in recorded.append.events
                if isinstance(event, TurnEnded) and effect.message_id in event.answered
            )
            reply_node = ids.node_id(ids.branch_of(ended.turn_id), ended.turn_id)
            outcome = "replied" if ended.status == "completed" else "failed"
            if ended.error is not None:
                reason = f"{ended.error.code}: {ended.error.message}"
            elif ended.status == "cancelled":
                reason = "the turn that was to answer was cancelled"
            for event in recorded.append.events:
                if isinstance(event, ModelAnswered) and outcome == "replied":
                    content = event.text
            if content is not None:
                content = await self._for(tenant, effect.message_id, recorded, content)
        await self._handler.execute(
            tenant,
            EndWait(
                command_id=command_id,
                at=at,
                cause=effect.message_id,
                root=recorded.append.root,
                branch_id=ids.branch_of(effect.message_id),
                wait_id=ids.wait_id(effect.message_id),
                outcome=outcome,
                content=content,
                reply_node=reply_node,
                reason=reason,
            ),
        )

    async def _note(
        self, tenant: str, command_id: str, effect: Note, at: int, recorded: Recorded
    ) -> None:
        refusal = _refusal(recorded, effect.message_id)
        assert refusal is not None, "a note comes from a refusal"
        sender = ids.branch_of(effect.message_id)
        text = f"Your message {effect.message_id} was not delivered: {refusal.reason}"
        await self._handler.execute(
            tenant,
            DeliverNote(
                command_id=command_id,
                at=at,
                cause=effect.message_id,
                root=recorded.append.root,
                branch_id=sender,
                message_id=effect.message_id,
                content=await self._contents.write(text, tenant, ids.session_of(sender)),
            ),
        )

    async def _for(
        self, tenant: str, receiver: str, recorded: Recorded, content: Content
    ) -> Content:
        """What crosses a session's border is sealed again under the receiver's key (P24)."""
        session = ids.session_of(receiver)
        if session == recorded.stream.session:
            return content
        return await self._contents.write(await self._contents.read(content), tenant, session)


def _refusal(recorded: Recorded, message_id: str) -> MessageRefused | None:
    for event in recorded.append.events:
        if isinstance(event, MessageRefused) and event.message_id == message_id:
            return event
    return None
