"""Rows of the read models → the answers that readers get: pure."""

from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec

from plait.events import ids
from plait.events.types import Content
from plait.projections.schema import (
    BranchField,
    EndRow,
    FailureRow,
    HeadRow,
    Mark,
    NodeRow,
    OpenedRow,
    OutcomeRow,
    PlaceRow,
    RefusedRow,
    ResultRow,
    SentRow,
    SessionRow,
    StepRow,
    field,
    whole,
)
from plait.projections.shapes import BranchView, NodeView

T = TypeVar("T")


def node_view(
    session: str,
    name: str,
    row: NodeRow,
    place: PlaceRow | None,
    result: ResultRow | None,
    ended: EndRow | None,
    assistant: str | None,
) -> NodeView:
    """A node without its texts; `ended` and `assistant` are of the turn that its row names."""
    seq, predecessor = row.seq, row.predecessor
    if place is not None:
        seq, predecessor = place.seq, place.predecessor
    node_id = whole(session, name)
    metadata: dict[str, str] = {}
    if row.from_node is not None:
        metadata["from_branch"] = whole(session, row.from_node)
    if row.sender is not None:
        metadata["sender"] = row.sender
    return NodeView(
        id=node_id,
        session_id=session,
        branch_id=ids.branch_of(node_id),
        seq=seq,
        role=row.role,
        status=_status(row, seq, result, ended),
        name=row.name,
        caller=whole(session, assistant) if row.role == "tool" and assistant else None,
        predecessor=None if predecessor is None else whole(session, predecessor),
        source=row.source,
        turn_id=None if row.turn is None else whole(session, row.turn),
        metadata=metadata,
        created_at=row.at,
    )


def _status(row: NodeRow, seq: int | None, result: ResultRow | None, ended: EndRow | None) -> str:
    if result is not None:
        return result.status
    if row.role == "assistant":
        return "running" if ended is None else ended.status
    if row.role == "tool":
        if ended is None:
            return "running"
        return "completed" if ended.status == "completed" else "cancelled"
    return "pending" if seq is None else "completed"


def branch_views(session: str, head: HeadRow, fields: dict[str, bytes]) -> list[BranchView]:
    def get(branch: str, what: BranchField) -> Any:
        value = fields.get(field(branch, what))
        return None if value is None else value_of(value)

    opened = sorted(
        (row_of(OpenedRow, value).seq, name.partition(":")[0], row_of(OpenedRow, value).fork)
        for name, value in fields.items()
        if name.endswith(f":{BranchField.OPENED}")
    )
    views: list[BranchView] = []
    for _, branch, fork in opened:
        turn = get(branch, BranchField.TURN)
        views.append(
            BranchView(
                branch_id=whole(session, branch),
                name=get(branch, BranchField.NAME),
                head_id=whole(session, get(branch, BranchField.HEAD)),
                status="archived" if get(branch, BranchField.ARCHIVED) else "live",
                busy=turn is not None,
                nodes=int(fields.get(field(branch, BranchField.NODES), 0)),
                turn_id=None if turn is None else whole(session, turn),
                from_=whole(session, fork),
            )
        )
    if all(branch != head.branch for _, branch, _ in opened) and head.fork is not None:
        views.append(
            BranchView(
                branch_id=whole(session, head.branch),
                name=get(head.branch, BranchField.NAME),
                head_id=whole(session, head.fork),
                status="live",
                busy=False,
                nodes=0,
                from_=whole(session, head.fork),
            )
        )
    return views


def fields_of(flat: Sequence[bytes]) -> dict[str, bytes]:
    return {name.decode(): value for name, value in zip(flat[::2], flat[1::2], strict=True)}


value_of = msgspec.msgpack.Decoder().decode  # of fields that hold no row
_decoders: dict[type, Any] = {
    row: msgspec.msgpack.Decoder(row)
    for row in (
        Content,
        EndRow,
        FailureRow,
        HeadRow,
        Mark,
        NodeRow,
        OpenedRow,
        OutcomeRow,
        PlaceRow,
        RefusedRow,
        ResultRow,
        SentRow,
        SessionRow,
        StepRow,
    )
}


def row_of(row: type[T], value: bytes) -> T:
    decoded: T = _decoders[row].decode(value)
    return decoded


def maybe(row: type[T], value: bytes | None) -> T | None:
    return None if value is None else row_of(row, value)
