"""The graph's fold, given what happened, then this is written; and lines between nodes."""

from collections.abc import Sequence
from typing import Any

import pytest
from msgspec import Struct

from plait.events import ids
from plait.events.content import seal
from plait.events.errors import UnknownEvent
from plait.events.store import Recorded, StreamId, seq_of
from plait.events.types import (
    Append,
    BranchArchived,
    BranchNamed,
    BranchOpened,
    BranchRestored,
    Content,
    Event,
    HeadMoved,
    MessageReceived,
    MessageRefused,
    MessageSent,
    ModelAnswered,
    NodesPlaced,
    Outcome,
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
from plait.projections.dag import (
    Placed,
    Writes,
    creates_session,
    fold,
    fold_tenant,
    lines,
)
from plait.projections.schema import (
    EndRow,
    Generation,
    HeadRow,
    Key,
    Mark,
    Names,
    NodeRow,
    OpenedRow,
    OutcomeRow,
    PlaceRow,
    RefusedRow,
    ResultRow,
    SentRow,
    SessionRow,
    StepRow,
    short,
    whole,
)

SESSION = ids.session_id("test")
ROOT = ids.root_id(SESSION)
BRANCH = ids.branch_id(SESSION, "one")
B = short(SESSION, BRANCH)
USER, LATER = ids.node_id(BRANCH, "user"), ids.node_id(BRANCH, "later")
TURN = ids.turn_id(BRANCH, "turn")
ANSWER, CALL = ids.node_id(BRANCH, TURN), ids.node_id(BRANCH, TURN, "call")
MESSAGE = ids.message_id(BRANCH, CALL)
WAIT = ids.wait_id(MESSAGE)
FAR = ids.branch_id(ids.session_id("far"), "one")
FAR_MESSAGE = ids.message_id(FAR, "hello")
AT = 1_000


def text(words: str) -> Content:
    return seal(words, "k", b"secret")


def s(any_id: str) -> str:
    return short(SESSION, any_id)


def given(*appends: Sequence[Event], branch: str = B) -> Writes:
    """Appends with the sequences 1, 2, 3…"""
    writes = Writes(SESSION)
    for sequence, events in enumerate(appends, 1):
        fold(recorded(sequence, events, branch), writes)
    return writes


def recorded(sequence: int, events: Sequence[Event], branch: str = B) -> Recorded:
    append = Append(command_id=f"c{sequence}", at=AT + sequence, events=tuple(events))  # type: ignore[arg-type]
    return Recorded(StreamId("t", SESSION, branch), sequence, append)


def stored(writes: Writes, key: Key) -> dict[str, Any]:
    """What stands in a hash that was empty before."""
    counts: dict[str, Any] = {**writes.add[key]}
    return {**writes.once[key], **writes.put[key], **counts}


def received(node: str = USER, **changes: Any) -> MessageReceived:
    values: dict[str, Any] = {"after": ROOT, "root": "r", **changes}
    return MessageReceived(node_id=node, content=text(node), **values)


def claimed(after: str | None = USER, **changes: Any) -> TurnClaimed:
    return TurnClaimed(
        turn_id=TURN,
        epoch=(1, 1),
        worker="w",
        node_id=ANSWER,
        after=after,
        pins=Pins(model="m"),
        **changes,
    )


def answered(*calls: str, step: int = 1) -> ModelAnswered:
    return ModelAnswered(
        turn_id=TURN,
        epoch=(1, 1),
        step=step,
        context="digest",
        text=text(f"step {step}"),
        calls=tuple(ToolCall(call, "send_to_branch", text("{}")) for call in calls),
        usage=Usage(10, 5, 2),
    )


def sent(**changes: Any) -> MessageSent:
    values: dict[str, Any] = {"call": CALL, "deadline": 99, "from_node": CALL, **changes}
    return MessageSent(
        message_id=MESSAGE,
        target=FAR,
        content=text("what is it?"),
        sender="one",
        root="r",
        hops=1,
        **values,
    )


def test_a_session_begins_with_root_and_a_head_that_reserves_a_branch() -> None:
    title = text("mine")
    writes = given([SessionCreated(branch_id=BRANCH, title=title, model="m")], branch="_")
    assert stored(writes, Key.NODES) == {"_-root": NodeRow("root", AT + 1, seq_of(1, 0))}
    assert stored(writes, Key.META) == {
        "session": SessionRow(title, "m", True, AT + 1),
        "head": HeadRow(B, "_-root"),
        "nodes": 1,
    }


def test_only_the_append_that_creates_a_session_lists_it_with_its_tenant() -> None:
    created = recorded(7, [SessionCreated(branch_id=BRANCH)], "_")
    assert creates_session(created)
    assert not creates_session(recorded(8, [HeadMoved(branch_id=BRANCH)], "_"))
    writes = Writes("")
    fold_tenant(created, writes)
    assert writes.rank == {Key.SESSIONS: {SESSION: 7}}
    assert (writes.first, writes.last) == (7, 7)


def test_head_names_a_branch_or_reserves_one() -> None:
    writes = given([HeadMoved(branch_id=BRANCH)], branch="_")
    assert stored(writes, Key.META)["head"] == HeadRow(B, None)
    writes = given([HeadMoved(branch_id=BRANCH, fork=USER)], branch="_")
    assert stored(writes, Key.META)["head"] == HeadRow(B, s(USER))


def test_a_name_is_taken_away_again() -> None:
    writes = given(
        [BranchNamed(branch_id=BRANCH, name="main")], [BranchNamed(branch_id=BRANCH)], branch="_"
    )
    assert stored(writes, Key.BRANCHES) == {f"{B}:name": None}


def test_a_branch_opens_at_its_fork_and_its_first_message_becomes_its_head() -> None:
    opened = [BranchOpened(fork=ROOT)]
    assert stored(given(opened), Key.BRANCHES) == {
        f"{B}:opened": OpenedRow("_-root", seq_of(1, 0)),
        f"{B}:head": "_-root",
    }
    writes = given([*opened, received()])
    assert stored(writes, Key.BRANCHES) == {
        f"{B}:opened": OpenedRow("_-root", seq_of(1, 0)),
        f"{B}:head": s(USER),
        f"{B}:nodes": 1,
    }
    assert stored(writes, Key.NODES) == {
        s(USER): NodeRow("user", AT + 1, seq_of(1, 1), predecessor="_-root", source="user")
    }
    assert stored(writes, Key.TEXTS) == {s(USER): text(USER)}


def test_an_archived_branch_can_be_restored() -> None:
    assert stored(given([BranchArchived()]), Key.BRANCHES) == {f"{B}:archived": True}
    writes = given([BranchArchived()], [BranchRestored()])
    assert stored(writes, Key.BRANCHES) == {f"{B}:archived": False}


def test_messages_of_the_inbox_get_their_places_in_order_and_no_second_text() -> None:
    waiting = given([received(after=None, turn_id=TURN), received(LATER, after=None)])
    assert stored(waiting, Key.PLACES) == {}
    assert stored(waiting, Key.NODES)[s(USER)].seq is None
    assert stored(waiting, Key.BRANCHES) == {}
    placed = given([NodesPlaced((USER, LATER), after=ROOT)])
    assert stored(placed, Key.PLACES) == {
        s(USER): PlaceRow(seq_of(1, 0), 0, "_-root"),
        s(LATER): PlaceRow(seq_of(1, 0), 1, s(USER)),
    }
    assert stored(placed, Key.BRANCHES) == {f"{B}:head": s(LATER), f"{B}:nodes": 2}
    assert stored(placed, Key.TEXTS) == {}


def test_a_refused_message_keeps_its_node_and_says_why() -> None:
    writes = given([MessageRefused(USER, "branch_archived", "why", message_id=FAR_MESSAGE)])
    assert stored(writes, Key.RESULTS) == {s(USER): ResultRow("refused", "why")}
    assert stored(writes, Key.MESSAGES) == {
        f"{FAR_MESSAGE}:refused": RefusedRow(AT + 1, seq_of(1, 0), "why")
    }


def test_a_turn_that_a_waiting_message_asks_for_is_pending_until_it_is_requested() -> None:
    asked = [received(after=None, turn_id=TURN), received(LATER, after=None, turn_id=TURN)]
    writes = given(asked)
    assert stored(writes, Key.TURNS) == {
        f"{s(TURN)}:state": "requested",
        f"{s(TURN)}:asked": s(USER),
    }
    assert writes.put[Key.TURNS] == {}, "what is known of the turn already must stand"


def test_a_later_message_for_a_turn_does_not_set_it_back() -> None:
    writes = given([TurnRequested(turn_id=TURN, root="r"), claimed()], [received(turn_id=TURN)])
    assert stored(writes, Key.TURNS)[f"{s(TURN)}:state"] == "running"


def test_the_first_claim_places_the_assistant_node_and_marks_what_it_consumed() -> None:
    writes = given(
        [received(turn_id=TURN), TurnRequested(turn_id=TURN, root="r")],
        [claimed(consumed=(FAR_MESSAGE,))],
    )
    assert stored(writes, Key.NODES)[s(ANSWER)] == NodeRow(
        "assistant", AT + 2, seq_of(2, 0), predecessor=s(USER), turn=s(TURN)
    )
    assert stored(writes, Key.TURNS)[f"{s(TURN)}:node"] == s(ANSWER)
    assert stored(writes, Key.BRANCHES) == {
        f"{B}:head": s(ANSWER),
        f"{B}:nodes": 2,
        f"{B}:turn": s(TURN),
    }
    assert stored(writes, Key.MESSAGES) == {
        f"{FAR_MESSAGE}:consumed": Mark(AT + 2, seq_of(2, 0)),
    }


def test_a_later_claim_places_nothing() -> None:
    writes = given([claimed(after=None)])
    assert stored(writes, Key.NODES) == {}
    assert stored(writes, Key.BRANCHES) == {}
    assert stored(writes, Key.TURNS) == {f"{s(TURN)}:state": "running"}


def test_calls_become_tool_nodes_in_order_without_moving_the_head() -> None:
    second = ids.node_id(BRANCH, TURN, "second")
    writes = given([answered(CALL, second)])
    assert stored(writes, Key.NODES) == {
        s(CALL): NodeRow("tool", AT + 1, seq_of(1, 0), 0, turn=s(TURN), name="send_to_branch"),
        s(second): NodeRow("tool", AT + 1, seq_of(1, 0), 1, turn=s(TURN), name="send_to_branch"),
    }
    assert stored(writes, Key.TEXTS) == {
        f"{s(CALL)}:args": text("{}"),
        f"{s(second)}:args": text("{}"),
    }
    assert stored(writes, Key.BRANCHES) == {f"{B}:nodes": 2}
    assert stored(writes, Key.TURNS) == {
        f"{s(TURN)}:1": StepRow("digest", "stop", (s(CALL), s(second)), 10, 5, 2, text("step 1")),
        f"{s(TURN)}:last": 1,
    }


def test_a_tool_s_result_is_kept_with_its_status() -> None:
    returned = ToolReturned(
        turn_id=TURN, epoch=(1, 1), node_id=CALL, result=text("no"), status="error"
    )
    writes = given([returned])
    assert stored(writes, Key.RESULTS) == {s(CALL): ResultRow("error")}
    assert stored(writes, Key.TEXTS) == {s(CALL): text("no")}


def test_a_turn_suspends_and_is_runnable_again() -> None:
    suspended = TurnSuspended(turn_id=TURN, epoch=(1, 1))
    assert stored(given([suspended]), Key.TURNS) == {f"{s(TURN)}:state": "suspended"}
    writes = given([suspended], [TurnResumed(turn_id=TURN, n=2)])
    assert stored(writes, Key.TURNS) == {f"{s(TURN)}:state": "requested"}


def test_a_turn_s_end_frees_its_branch_and_the_next_turn_takes_it() -> None:
    ended = TurnEnded(turn_id=TURN, status="error", error=TurnError("overloaded", "try later"))
    writes = given([TurnRequested(turn_id=TURN, root="r")], [ended])
    assert stored(writes, Key.ENDS) == {s(TURN): EndRow("error", "overloaded", "try later")}
    assert stored(writes, Key.BRANCHES) == {f"{B}:turn": None}
    following = ids.turn_id(BRANCH, "next")
    writes = given([ended, TurnRequested(turn_id=following, root="r")])
    assert stored(writes, Key.BRANCHES) == {f"{B}:turn": s(following)}


def test_a_message_that_waits_is_found_by_its_call() -> None:
    assert stored(given([sent()]), Key.MESSAGES) == {
        f"{s(MESSAGE)}:sent": SentRow(FAR, s(CALL), 99, AT + 1, seq_of(1, 0)),
        s(CALL): s(MESSAGE),
    }
    alone = given([sent(deadline=None)])
    assert s(CALL) not in stored(alone, Key.MESSAGES)
    assert stored(alone, Key.TEXTS) == {s(MESSAGE): text("what is it?")}


def test_a_delivered_message_is_marked_in_the_target_s_session_under_its_whole_id() -> None:
    writes = given(
        [
            received(
                source="from_branch",
                message_id=FAR_MESSAGE,
                from_node=ids.node_id(FAR, "x"),
                sender="far",
                wait=True,
            )
        ]
    )
    assert stored(writes, Key.MESSAGES) == {
        f"{FAR_MESSAGE}:delivered": Mark(AT + 1, seq_of(1, 0)),
    }
    row = stored(writes, Key.NODES)[s(USER)]
    assert (row.source, row.from_node, row.sender) == (
        "from_branch",
        ids.node_id(FAR, "x"),
        "far",
    )


def test_a_note_about_a_message_is_no_receipt_of_it() -> None:
    writes = given([received(source="note", message_id=MESSAGE)])
    assert stored(writes, Key.MESSAGES) == {}
    assert stored(writes, Key.NODES)[s(USER)].source == "note"


@pytest.mark.parametrize(
    ("outcome", "status"),
    [
        ("replied", "completed"),
        ("expired", "error"),
        ("failed", "error"),
        ("refused", "error"),
        ("cancelled", "cancelled"),
    ],
)
def test_the_end_of_a_wait_is_the_result_of_its_call(outcome: Outcome, status: str) -> None:
    ended = WaitEnded(wait_id=WAIT, outcome=outcome, call=CALL, reason="why")
    writes = given([ended])
    assert stored(writes, Key.RESULTS) == {s(CALL): ResultRow(status, "why")}
    assert stored(writes, Key.MESSAGES) == {
        f"{s(MESSAGE)}:outcome": OutcomeRow(outcome, AT + 1, seq_of(1, 0), None, "why", None)
    }


def test_a_reply_s_text_is_stored_once_as_the_call_s_result() -> None:
    ended = WaitEnded(
        wait_id=WAIT, outcome="replied", call=CALL, content=text("this"), reply_node=USER
    )
    writes = given([ended])
    assert stored(writes, Key.TEXTS) == {s(CALL): text("this")}
    row = stored(writes, Key.MESSAGES)[f"{s(MESSAGE)}:outcome"]
    assert (row.text, row.node) == (s(CALL), s(USER))


def test_a_reply_to_a_send_by_hand_and_a_late_one_have_texts_of_their_own() -> None:
    writes = given(
        [WaitEnded(wait_id=WAIT, outcome="replied", content=text("this"))],
        [ReplyLate(wait_id=WAIT, outcome="replied", content=text("that"))],
    )
    rows = stored(writes, Key.MESSAGES)
    texts = stored(writes, Key.TEXTS)
    assert texts[rows[f"{s(MESSAGE)}:outcome"].text] == text("this")
    assert texts[rows[f"{s(MESSAGE)}:late"].text] == text("that")
    assert stored(writes, Key.RESULTS) == {}


def test_writes_of_a_run_of_appends_cover_all_of_it() -> None:
    writes = given([received()], [answered()], [TurnEnded(turn_id=TURN, status="completed")])
    assert (writes.first, writes.last) == (1, 3)


def test_an_event_that_is_not_known_stops_the_fold_with_its_place() -> None:
    class Sung(Event, frozen=True):
        pass

    with pytest.raises(UnknownEvent, match=r"Sung at 1\.0 .*upgrade"):
        given([Sung()])


def test_a_wait_leads_back_to_its_message() -> None:
    assert ids.message_of(ids.wait_id(MESSAGE)) == MESSAGE


@pytest.mark.parametrize("any_id", [ROOT, BRANCH, USER, TURN, MESSAGE, FAR, FAR_MESSAGE, WAIT])
def test_short_names_become_the_ids_that_they_were(any_id: str) -> None:
    assert whole(SESSION, short(SESSION, any_id)) == any_id


def test_keys_of_a_session_share_a_slot_and_tell_version_and_generation() -> None:
    names, generation = Names("plait"), Generation(3, "ab12")
    nodes, meta = names.of(generation, "t", SESSION, (Key.NODES, Key.META))
    [listed] = names.of(generation, "t", "", (Key.SESSIONS,))
    assert nodes.partition("}")[0].partition("{")[2] == meta.partition("}")[0].partition("{")[2]
    for name in (nodes, listed, names.position(generation)):
        assert (names.version_of(name), names.generation_of(name)) == (1, "3-ab12")
    for name in (names.live, names.building):
        assert (names.version_of(name), names.generation_of(name)) == (1, None)
    assert names.version_of("plait:else") is None
    assert Generation.parse(str(generation)) == generation


class Drawn(Struct):
    """A small graph to draw, by short names."""

    nodes: list[Placed]

    def add(
        self,
        name: str,
        branch: str,
        *,
        after: str | None = None,
        caller: str | None = None,
        sender: str | None = None,
    ) -> None:
        self.nodes.append(Placed(name, branch, after, caller, sender))


def test_lines_tell_chains_forks_calls_and_communication_apart() -> None:
    graph = Drawn([])
    graph.add("root", "_")
    graph.add("a1", "a", after="root")
    graph.add("b1", "b", after="root")
    graph.add("a2", "a", after="a1")
    graph.add("tool", "a", caller="a2")
    graph.add("b2", "b", after="b1", sender="tool")
    graph.add("c1", "c", after="a1")
    graph.add("b3", "b", after="b2", sender="elsewhere")
    assert [(line.kind, line.start, line.end) for line in lines(graph.nodes)] == [
        ("chain", "root", "a1"),
        ("fork", "root", "b1"),
        ("chain", "a1", "a2"),
        ("call", "a2", "tool"),
        ("chain", "b1", "b2"),
        ("communication", "tool", "b2"),
        ("fork", "a1", "c1"),
        ("chain", "b2", "b3"),
    ]


def test_a_branch_that_goes_on_from_another_s_tip_is_a_fork() -> None:
    graph = Drawn([])
    graph.add("root", "_")
    graph.add("a1", "a", after="root")
    graph.add("b1", "b", after="a1")
    graph.add("a2", "a", after="a1")
    assert [line.kind for line in lines(graph.nodes)] == ["chain", "fork", "chain"]
