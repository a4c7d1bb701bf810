"""Writes `v1.msgpack`: a small log that holds every event of the first version.

    .venv/bin/python -m tests.histories.write_v1

Run once, before the first release. From then on the file is never written again: a version that
changes an event adds a history of its own beside this one, and keeps reading both.
"""

from pathlib import Path

import msgspec

from plait.events import codec, ids
from plait.events.types import (
    AnyEvent,
    Append,
    BranchArchived,
    BranchNamed,
    BranchOpened,
    BranchRestored,
    Content,
    HeadMoved,
    MessageReceived,
    MessageRefused,
    MessageSent,
    ModelAnswered,
    ModelFailed,
    NodesPlaced,
    Pins,
    ReplyLate,
    SessionCreated,
    ToolCall,
    ToolReturned,
    TurnClaimed,
    TurnEnded,
    TurnError,
    TurnRequested,
    TurnResumed,
    TurnSuspended,
    Usage,
    WaitEnded,
)

FILE = Path(__file__).with_name("v1.msgpack")

SESSION = ids.session_id("history")
A, B = ids.branch_id(SESSION, "a"), ids.branch_id(SESSION, "b")
ROOT = ids.root_id(SESSION)
TURN, LATER_TURN = ids.turn_id(A, "1"), ids.turn_id(A, "2")
USER, ANSWER, CALL = ids.node_id(A, "user"), ids.node_id(A, "answer"), ids.node_id(A, "call")
QUEUED = ids.node_id(A, "queued")
ASKED = ids.message_id(A, "asked")
WAIT = ids.wait_id(ASKED)


def text(written: str) -> Content:
    parts = msgspec.msgpack.encode([{"type": "text", "text": written}])
    return Content(size=len(written.encode()), digest="0" * 32, key="k1", data=parts)


LOG: list[tuple[str, list[AnyEvent]]] = [
    (
        f"{SESSION}-_",
        [SessionCreated(A, text("History"), text("Be brief."), "offline:echo", attended=False)],
    ),
    (
        A,
        [
            BranchOpened(ROOT),
            MessageReceived(USER, text("Ask b, please: “ü”"), "c1", after=ROOT, turn_id=TURN),
            TurnRequested(TURN, "c1", interactive=True),
        ],
    ),
    (
        A,
        [
            TurnClaimed(
                TURN,
                (1, 1),
                "worker-1",
                ANSWER,
                after=USER,
                pins=Pins("offline:demo", "0" * 32, ("send_to_branch",), "1" * 32),
                consumed=(ids.message_id(B, "before"),),
            )
        ],
    ),
    (
        A,
        [
            ModelAnswered(
                TURN,
                (1, 1),
                0,
                "2" * 32,
                text("I ask."),
                (ToolCall(CALL, "send_to_branch", text("{}")),),
                Usage(10, 5, 3),
                "tool_calls",
            )
        ],
    ),
    (
        A,
        [
            MessageSent(ASKED, B, text("What?"), CALL, "main", "c1", 1, CALL, 1_700_000_300_000),
            TurnSuspended(TURN, (1, 1)),
        ],
    ),
    (
        B,
        [
            BranchOpened(USER),
            MessageReceived(
                ids.node_id(B, "question"),
                text("What?"),
                "c1",
                source="from_branch",
                turn_id=ids.turn_id(B, "1"),
                hops=1,
                message_id=ASKED,
                from_node=CALL,
                sender="main",
                wait=True,
            ),
        ],
    ),
    (A, [MessageReceived(QUEUED, text("And now?"), "c2", turn_id=LATER_TURN)]),
    (
        A,
        [
            WaitEnded(WAIT, "replied", CALL, text("That."), ids.node_id(B, "reply")),
            TurnResumed(TURN, 2),
        ],
    ),
    (
        A,
        [
            ModelFailed(
                TURN,
                (2, 1),
                2,
                1,
                "3" * 32,
                TurnError("rate_limited", "openai limits the rate (HTTP 429)"),
                ids.pause_id(TURN, 1),
                1_700_000_002_000,
            ),
            TurnSuspended(TURN, (2, 1)),
        ],
    ),
    (A, [WaitEnded(ids.pause_id(TURN, 1), "expired", reason="it is time"), TurnResumed(TURN, 3)]),
    (A, [ToolReturned(TURN, (2, 1), ids.node_id(A, "other"), text("no such tool"), "error")]),
    (
        A,
        [
            TurnEnded(
                TURN,
                "error",
                TurnError("provider_refused", "the model refused the request"),
                (ASKED,),
                passed=True,
                dropped=(CALL,),
            ),
            NodesPlaced((QUEUED,), ANSWER),
            TurnRequested(LATER_TURN, "c2"),
        ],
    ),
    (A, [ReplyLate(WAIT, "failed", text("late"), ids.node_id(B, "late"), "took too long")]),
    (
        B,
        [
            BranchArchived(),
            MessageRefused(ids.node_id(B, "x"), "branch_archived", "it is archived", ASKED, True),
        ],
    ),
    (B, [BranchRestored()]),
    (f"{SESSION}-_", [BranchNamed(A, "main"), HeadMoved(B, USER)]),
]


def main() -> None:
    records = []
    for number, (branch, events) in enumerate(LOG):
        append = Append(
            command_id=ids.derive("command", str(number)),
            at=1_700_000_000_000 + number,
            events=tuple(events),
            root="c1",
            cause=TURN if branch == B else "",
        )
        stream = ("acme", SESSION, ids.token_of(branch))
        records.append((stream, codec.encode(append)))
    FILE.write_bytes(msgspec.msgpack.encode(records))


if __name__ == "__main__":
    main()
