"""What readers may ask of the read models, and the shapes of the answers.

Every query takes `at_least`, the position that the answer must cover; it waits for the read model
up to `read_timeout_s` and then raises ReadModelBehind. A tenant sees its own only: an id of
another tenant's is unknown.
"""

from collections.abc import Awaitable, Callable, Sequence
from enum import StrEnum
from typing import TypeVar

import msgspec
from redis.asyncio import Redis

from plait.events import ids
from plait.events.content import Contents
from plait.events.errors import (
    Invalid,
    Unavailable,
    UnknownMessage,
    UnknownNode,
    UnknownSession,
    UnknownTurn,
)
from plait.events.settings import Settings
from plait.events.store import Position
from plait.events.types import Content
from plait.projections.assemble import (
    branch_views,
    fields_of,
    maybe,
    node_view,
    row_of,
    value_of,
)
from plait.projections.dag import Placed, lines
from plait.projections.reader import Answer, Reader, Swapped, Want
from plait.projections.schema import (
    HEAD,
    NODES,
    SESSION,
    EndRow,
    FailureRow,
    Generation,
    HeadRow,
    Key,
    Mark,
    MessageField,
    Names,
    NodeRow,
    OutcomeRow,
    PlaceRow,
    RefusedRow,
    ResultRow,
    SentRow,
    SessionRow,
    StepRow,
    TurnField,
    args_of,
    failure_of,
    field,
    short,
    whole,
)
from plait.projections.shapes import (
    BranchView,
    DagView,
    LineView,
    MessageView,
    NodeView,
    Receipt,
    ReplyView,
    SessionItem,
    SessionView,
    StepView,
    TurnView,
    WaitView,
)

__all__ = [
    "BranchView",
    "DagView",
    "LineView",
    "MessageView",
    "NodeView",
    "Queries",
    "Receipt",
    "ReplyView",
    "SessionItem",
    "SessionView",
    "StepView",
    "TurnView",
    "WaitView",
]

PAGE_MAX = 100
SWAPS = 5  # of generations during one query, before it gives up
WHOLE_APPEND = 1023  # the index of a position that covers all of its append


T = TypeVar("T")


class Queries:
    """Asks the live generation; opens texts with the session's key. `redis` gives bytes."""

    def __init__(self, redis: Redis, contents: Contents, settings: Settings) -> None:
        self._reader = Reader(redis, Names(settings.prefix), settings.read_timeout_s)
        self._contents = contents

    async def sessions(
        self,
        tenant: str,
        page_size: int,
        after: str | None,
        at_least: Position | None = None,
    ) -> tuple[list[SessionItem], str | None]:
        """A page of the tenant's sessions, newest first, and the token of the next page. Raises
        Invalid for a token that this list did not give."""
        if not 1 <= page_size <= PAGE_MAX:
            raise Invalid(f"page_size is 1 to {PAGE_MAX}, not {page_size}")
        start = "+inf" if after is None else f"({_page_start(tenant, after)}"
        page = Want(
            "ZREVRANGEBYSCORE",
            Key.SESSIONS,
            (start, "-inf", "WITHSCORES", "LIMIT", 0, page_size + 1),
        )

        async def ask() -> tuple[list[SessionItem], str | None]:
            [listed] = await self._reader.read(tenant, [("", [page])], at_least)
            flat = listed.values[0] if listed.values else []
            found = list(zip(flat[::2], flat[1::2], strict=True))
            names = [name.decode() for name, _ in found[:page_size]]
            row = [Want("HGET", Key.META, (SESSION,))]
            answers = await self._reader.read(
                tenant, [(name, row) for name in names], within=listed.generation
            )
            items: list[SessionItem] = []
            for name, answer in zip(names, answers, strict=True):
                session = row_of(SessionRow, answer.values[0])
                items.append(
                    SessionItem(
                        session_id=name,
                        title=await self._text(session.title),
                        created_at=session.at,
                    )
                )
            more = len(found) > page_size
            return items, _page_token(tenant, int(found[page_size - 1][1])) if more else None

        return await _of_one_generation(ask)

    async def session(
        self, tenant: str, session_id: str, at_least: Position | None = None
    ) -> SessionView:
        """Raises UnknownSession."""
        answer = await self._session(
            tenant,
            session_id,
            [
                Want("HMGET", Key.META, (SESSION, HEAD, NODES)),
                Want("HGETALL", Key.BRANCHES),
            ],
            at_least,
        )
        (session, head, nodes), branches = answer.values
        row, head_row = row_of(SessionRow, session), row_of(HeadRow, head)
        views = branch_views(session_id, head_row, fields_of(branches))
        head_branch = whole(session_id, head_row.branch)
        return SessionView(
            session_id=session_id,
            title=await self._text(row.title),
            model=row.model,
            attended=row.attended,
            created_at=row.at,
            head_branch_id=head_branch,
            head_id=next(view.head_id for view in views if view.branch_id == head_branch),
            nodes=int(nodes),
            branches=views,
            position=str(_position(answer)),
        )

    async def branches(
        self, tenant: str, session_id: str, at_least: Position | None = None
    ) -> list[BranchView]:
        """In the order in which they opened; last the one that HEAD reserves. Raises
        UnknownSession."""
        wants = [Want("HGET", Key.META, (HEAD,)), Want("HGETALL", Key.BRANCHES)]
        answer = await self._session(tenant, session_id, wants, at_least)
        head, branches = answer.values
        return branch_views(session_id, row_of(HeadRow, head), fields_of(branches))

    async def node(self, tenant: str, node_id: str, at_least: Position | None = None) -> NodeView:
        """A node with its texts. Raises UnknownNode."""
        ref = ids.of_kind(node_id, "node")
        if ref is None:
            raise UnknownNode(node_id)
        session, name = ref.session, short(ref.session, node_id)
        wants = [
            Want("HGET", Key.NODES, (name,)),
            Want("HGET", Key.PLACES, (name,)),
            Want("HGET", Key.RESULTS, (name,)),
            Want("HMGET", Key.TEXTS, (name, args_of(name))),
        ]

        async def ask() -> NodeView:
            [answer] = await self._reader.read(tenant, [(session, wants)], at_least)
            if answer.sequence is None or answer.values[0] is None:
                raise UnknownNode(node_id)
            found, placed, result, (text, args) = answer.values
            row = row_of(NodeRow, found)
            ended = assistant = last = None
            if row.turn is not None:
                fields = (field(row.turn, TurnField.NODE), field(row.turn, TurnField.LAST))
                turn = [
                    Want("HGET", Key.ENDS, (row.turn,)),
                    Want("HMGET", Key.TURNS, fields),
                ]
                [more] = await self._reader.read(
                    tenant, [(session, turn)], within=answer.generation
                )
                ended, (assistant, last) = more.values
            content = maybe(Content, text)
            if row.role == "assistant" and last is not None:
                assert row.turn is not None
                [final] = await self._steps(
                    tenant, session, row.turn, [value_of(last)], answer.generation
                )
                content = final.text
            outcome = maybe(ResultRow, result)
            view = node_view(
                session,
                name,
                row,
                maybe(PlaceRow, placed),
                outcome,
                maybe(EndRow, ended),
                None if assistant is None else value_of(assistant),
            )
            note = outcome.note if outcome is not None and row.role == "tool" else None
            return msgspec.structs.replace(
                view,
                text=note if content is None else await self._text(content),
                args=await self._text(maybe(Content, args)),
            )

        return await _of_one_generation(ask)

    async def turn(self, tenant: str, turn_id: str, at_least: Position | None = None) -> TurnView:
        """Raises UnknownTurn."""
        ref = ids.of_kind(turn_id, "turn")
        if ref is None:
            raise UnknownTurn(turn_id)
        session, name = ref.session, short(ref.session, turn_id)
        fields = [
            TurnField.STATE,
            TurnField.ASKED,
            TurnField.NODE,
            TurnField.LAST,
            TurnField.FAILED,
        ]
        wants = [
            Want("HMGET", Key.TURNS, tuple(field(name, what) for what in fields)),
            Want("HGET", Key.ENDS, (name,)),
        ]

        async def ask() -> TurnView:
            [answer] = await self._reader.read(tenant, [(session, wants)], at_least)
            if answer.sequence is None or answer.values[0][0] is None:
                raise UnknownTurn(turn_id)
            (state, asked, node, last, failed), end = answer.values
            ended = maybe(EndRow, end)
            status = value_of(state) if ended is None else ended.status
            if status == "requested" and asked is not None:
                refusal = [Want("HGET", Key.RESULTS, (value_of(asked),))]
                [refused] = await self._reader.read(
                    tenant, [(session, refusal)], within=answer.generation
                )
                if refused.values[0] is not None:
                    status = "cancelled"  # Its input was turned away: it will never run.
            numbers = range(1, value_of(last) + 1) if last is not None else ()
            steps = await self._steps(tenant, session, name, numbers, answer.generation)
            calls = [call for step in steps for call in step.calls]
            texts = [await self._text(step.text) for step in steps]
            failures = await self._failures(tenant, session, name, failed, answer.generation)
            return TurnView(
                turn_id=turn_id,
                session_id=session,
                branch_id=ref.branch,
                node_id=None if node is None else whole(session, value_of(node)),
                status=status,
                text=texts[-1] if texts else None,
                steps=sorted(
                    [
                        *failures,
                        *(
                            StepView(
                                step=number,
                                text=text,
                                context=step.context,
                                finish=step.finish,
                                calls=[whole(session, call) for call in step.calls],
                            )
                            for number, step, text in zip(numbers, steps, texts, strict=True)
                        ),
                    ],
                    key=lambda view: view.step,
                ),
                waits=await self._waits(tenant, session, calls, answer.generation),
                usage={
                    "input_tokens": sum(step.input_tokens for step in steps),
                    "output_tokens": sum(step.output_tokens for step in steps),
                    "cached_tokens": sum(step.cached_tokens for step in steps),
                },
                error=None
                if ended is None or ended.code is None
                else {"code": ended.code, "message": ended.message or ""},
            )

        return await _of_one_generation(ask)

    async def message(
        self, tenant: str, message_id: str, at_least: Position | None = None
    ) -> MessageView:
        """A message between branches, whose halves stand in the sender's and in the target's
        session. Raises UnknownMessage."""
        ref = ids.of_kind(message_id, "message")
        if ref is None:
            raise UnknownMessage(message_id)
        session, name = ref.session, short(ref.session, message_id)
        wants = [
            _message_fields(name, MessageField.SENT, MessageField.OUTCOME, MessageField.LATE),
            Want("HGET", Key.TEXTS, (name,)),
        ]

        async def ask() -> MessageView:
            [answer] = await self._reader.read(tenant, [(session, wants)], at_least)
            if answer.sequence is None or answer.values[0][0] is None:
                raise UnknownMessage(message_id)
            (found, ended, was_late), content = answer.values
            sent = row_of(SentRow, found)
            outcome, late = maybe(OutcomeRow, ended), maybe(OutcomeRow, was_late)
            target = whole(session, sent.target)
            there = ids.session_of(target)
            half = _message_fields(
                short(there, message_id),
                MessageField.DELIVERED,
                MessageField.CONSUMED,
                MessageField.REFUSED,
            )
            [other] = await self._reader.read(
                tenant, [(there, [half])], at_least, within=answer.generation
            )
            delivered, consumed, refused = other.values[0] if other.values else (None,) * 3
            marks: list[tuple[str, Mark | OutcomeRow | RefusedRow | SentRow | None]] = [
                ("accepted", sent),
                ("delivered", maybe(Mark, delivered)),
                ("consumed", maybe(Mark, consumed)),
                ("late", late),
            ]
            if outcome is not None:
                marks.append((outcome.outcome, outcome))
            if outcome is None or outcome.outcome != "refused":
                marks.append(("refused", maybe(RefusedRow, refused)))
            return MessageView(
                message_id=message_id,
                from_=whole(session, sent.from_node),
                target=target,
                node_id=ids.node_id(target, message_id),
                text=await self._text(row_of(Content, content)) or "",
                wait_reply=sent.deadline is not None,
                deadline=sent.deadline,
                receipts=[
                    Receipt(kind=kind, at=mark.at, position=answer.position(mark.seq))
                    for kind, mark in sorted(
                        ((kind, mark) for kind, mark in marks if mark is not None),
                        key=lambda pair: pair[1].seq,
                    )
                ],
                reply=await self._reply(tenant, session, outcome, late, answer.generation),
            )

        return await _of_one_generation(ask)

    async def dag(self, tenant: str, session_id: str, at_least: Position | None = None) -> DagView:
        """All nodes that have their place, in order, without texts. Raises UnknownSession."""
        keys = (Key.NODES, Key.PLACES, Key.RESULTS, Key.ENDS)
        wants = [Want("HGETALL", key) for key in keys]
        answer = await self._session(tenant, session_id, wants, at_least)
        nodes, places, results, ends = map(fields_of, answer.values)
        rows = {name: row_of(NodeRow, value) for name, value in nodes.items()}
        assistants = {
            row.turn: name
            for name, row in rows.items()
            if row.role == "assistant" and row.turn is not None
        }
        found: list[tuple[int, int, NodeView]] = []
        for name, row in rows.items():
            place = maybe(PlaceRow, places.get(name))
            turn = row.turn or ""
            view = node_view(
                session_id,
                name,
                row,
                place,
                maybe(ResultRow, results.get(name)),
                maybe(EndRow, ends.get(turn)),
                assistants.get(turn),
            )
            if view.seq is not None:
                found.append((view.seq, row.nth if place is None else place.nth, view))
        ordered = [view for _, _, view in sorted(found, key=lambda item: item[:2])]
        drawn = lines(
            Placed(
                node.id,
                node.branch_id,
                node.predecessor,
                node.caller,
                node.metadata.get("from_branch"),
            )
            for node in ordered
        )
        return DagView(
            nodes=ordered,
            lines=[LineView(kind=kind, node_ids=(start, end)) for kind, start, end in drawn],
            cursor=str(_position(answer)),
        )

    async def position(self, tenant: str, session_id: str) -> Position | None:
        """Up to where the session can be read; None: it is unknown."""
        if ids.of_kind(session_id, "session") is None:
            return None
        [answer] = await self._reader.read(tenant, [(session_id, [])])
        return None if answer.sequence is None else _position(answer)

    async def _session(
        self, tenant: str, session_id: str, wants: Sequence[Want], at_least: Position | None
    ) -> Answer:
        if ids.of_kind(session_id, "session") is None:
            raise UnknownSession(session_id)
        [answer] = await self._reader.read(tenant, [(session_id, wants)], at_least)
        if answer.sequence is None:
            raise UnknownSession(session_id)
        return answer

    async def _steps(
        self,
        tenant: str,
        session: str,
        turn: str,
        numbers: Sequence[int],
        within: Generation,
    ) -> list[StepRow]:
        if not numbers:
            return []
        steps = Want("HMGET", Key.TURNS, tuple(field(turn, number) for number in numbers))
        [answer] = await self._reader.read(tenant, [(session, [steps])], within=within)
        return [row_of(StepRow, value) for value in answer.values[0]]

    async def _failures(
        self, tenant: str, session: str, turn: str, count: bytes | None, within: Generation
    ) -> list[StepView]:
        if count is None:
            return []
        names = tuple(failure_of(turn, nth + 1) for nth in range(value_of(count)))
        want = Want("HMGET", Key.TURNS, names)
        [answer] = await self._reader.read(tenant, [(session, [want])], within=within)
        rows = [row_of(FailureRow, value) for value in answer.values[0]]
        return [
            StepView(
                step=row.step,
                text=None,
                context=row.context,
                finish="error",
                calls=[],
                error={"code": row.code, "message": row.message},
                retry_at=row.deadline,
            )
            for row in rows
        ]

    async def _waits(
        self, tenant: str, session: str, calls: Sequence[str], within: Generation
    ) -> list[WaitView]:
        """The waits that these calls began, in order."""
        if not calls:
            return []
        sent = Want("HMGET", Key.MESSAGES, tuple(calls))
        [answer] = await self._reader.read(tenant, [(session, [sent])], within=within)
        found = [
            (call, value_of(value))
            for call, value in zip(calls, answer.values[0], strict=True)
            if value is not None
        ]
        if not found:
            return []
        [answer] = await self._reader.read(
            tenant,
            [
                (
                    session,
                    [
                        _message_fields(name, MessageField.SENT, MessageField.OUTCOME)
                        for _, name in found
                    ],
                )
            ],
            within=within,
        )
        waits: list[WaitView] = []
        for (call, name), (sent_row, ended) in zip(found, answer.values, strict=True):
            row, outcome = row_of(SentRow, sent_row), maybe(OutcomeRow, ended)
            assert row.deadline is not None, "only a send that waits is found by its call"
            waits.append(
                WaitView(
                    wait_id=ids.wait_id(whole(session, name)),
                    call=whole(session, call),
                    target=whole(session, row.target),
                    deadline=row.deadline,
                    outcome=None if outcome is None else outcome.outcome,
                )
            )
        return waits

    async def _reply(
        self,
        tenant: str,
        session: str,
        outcome: OutcomeRow | None,
        late: OutcomeRow | None,
        within: Generation,
    ) -> ReplyView | None:
        row = late or outcome
        if row is None:
            return None
        text = row.reason
        if row.text is not None:
            want = Want("HGET", Key.TEXTS, (row.text,))
            [answer] = await self._reader.read(tenant, [(session, [want])], within=within)
            text = await self._text(row_of(Content, answer.values[0]))
        return ReplyView(
            node_id=None if row.node is None else whole(session, row.node),
            text=text or "",
            status="late" if late is not None else row.outcome,
        )

    async def _text(self, content: Content | None) -> str | None:
        return None if content is None else await self._contents.read(content)


async def _of_one_generation(ask: Callable[[], Awaitable[T]]) -> T:
    """Several reads of one query see one generation, or the query begins anew."""
    for _ in range(SWAPS):
        try:
            return await ask()
        except Swapped:
            continue
    raise Unavailable("the read models are being built again and again: try again later")


def _message_fields(message: str, *fields: StrEnum) -> Want:
    return Want("HMGET", Key.MESSAGES, tuple(field(message, what) for what in fields))


def _position(answer: Answer) -> Position:
    return Position(answer.generation.log, answer.sequence or 0, WHOLE_APPEND)


def _page_token(tenant: str, sequence: int) -> str:
    return f"{sequence}.{ids.derive('page of sessions', tenant, str(sequence), length=8)}"


def _page_start(tenant: str, token: str) -> int:
    sequence = token.partition(".")[0]
    if not (sequence.isascii() and sequence.isdigit() and len(sequence) < 17) or (
        token != _page_token(tenant, int(sequence))
    ):
        raise Invalid("page_token is not one that this list gave: begin without one")
    return int(sequence)
