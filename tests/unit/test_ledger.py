"""The ledger: what it owes follows from the log alone."""

from plait.events import ids
from plait.events.content import seal
from plait.events.store import Recorded
from plait.events.subjects import stream_of
from plait.events.types import (
    AnyEvent,
    Append,
    MessageReceived,
    MessageRefused,
    MessageSent,
    ModelFailed,
    ReplyLate,
    TurnEnded,
    TurnError,
    TurnRequested,
    TurnResumed,
    TurnSuspended,
    WaitEnded,
)
from plait.services.replies.ledger import Ledger

SESSION = ids.session_id("ledger")
A, B, C = (ids.branch_id(SESSION, name) for name in "abc")
TEXT = seal("words", "k", b"secret")


class Log:
    """Feeds a ledger, and keeps what it was fed so that another can fold the same."""

    def __init__(self, admitted: int = 100) -> None:
        self.ledger = Ledger(admitted)
        self.recorded: list[Recorded] = []

    def __call__(self, branch: str, *events: AnyEvent) -> list[str]:
        """Returns the kinds of effects that the append opened."""
        sequence = len(self.recorded) + 1
        append = Append(command_id=f"c{sequence}", at=0, events=events)
        recorded = Recorded(stream_of("t", branch), sequence, append)
        self.recorded.append(recorded)
        self.ledger.fold(recorded)
        opened = [effect.key[0] for effect in self.ledger.opened]
        self.ledger.opened.clear()
        return opened

    def send(
        self, sender: str, target: str, *, deadline: int | None = None, by_hand: bool = False
    ) -> str:
        message = ids.message_id(sender, target, str(len(self.recorded)))
        self(
            sender,
            MessageSent(
                message_id=message,
                target=target,
                content=TEXT,
                from_node=ids.node_id(sender, "n"),
                sender="abc"[(A, B, C).index(sender)],
                root="r",
                hops=1,
                call=None if by_hand else ids.node_id(sender, "call"),
                deadline=deadline,
            ),
        )
        return message

    def open_keys(self) -> set[str]:
        return {kind for kind, _ in self.ledger.effects}


def received(message: str, target: str) -> MessageReceived:
    return MessageReceived(
        node_id=ids.node_id(target, message),
        content=TEXT,
        root="r",
        source="from_branch",
        message_id=message,
    )


def test_a_message_is_owed_until_its_target_received_it() -> None:
    log = Log()
    message = log.send(A, B)
    assert log.open_keys() == {"deliver"}
    log(B, received(message, B))
    assert log.open_keys() == set()


def test_an_answer_is_owed_from_the_turns_end_until_the_wait_ended() -> None:
    log = Log()
    message = log.send(A, B, deadline=5)
    log(B, received(message, B))
    opened = log(B, TurnEnded(ids.turn_id(B, "t"), "completed", answered=(message,)))
    assert opened == ["answer"]
    log(A, WaitEnded(ids.wait_id(message), "replied"))
    assert log.open_keys() == set() and not log.ledger.waits


def test_an_answer_after_the_wait_expired_is_owed_until_it_is_kept_as_late() -> None:
    log = Log()
    message = log.send(A, B, deadline=5)
    log(B, received(message, B))
    log(A, WaitEnded(ids.wait_id(message), "expired"))
    log(B, TurnEnded(ids.turn_id(B, "t"), "completed", answered=(message,)))
    assert log.open_keys() == {"answer"}
    log(A, ReplyLate(ids.wait_id(message), "replied"))
    assert log.open_keys() == set()


def test_a_refused_message_is_told_to_its_sender_as_an_answer_or_a_note() -> None:
    for deadline, told in ((5, "answer"), (None, "note")):
        log = Log()
        message = log.send(A, B, deadline=deadline)
        refused = MessageRefused(
            ids.node_id(B, message), "branch_archived", "gone", message, wait=deadline is not None
        )
        assert log(B, refused) == [told]


def test_a_note_is_settled_when_it_is_received() -> None:
    log = Log()
    message = log.send(A, B)
    log(B, MessageRefused(ids.node_id(B, message), "branch_archived", "gone", message))
    node = ids.node_id(A, "note")
    log(A, MessageReceived(node, TEXT, "r", source="note", message_id=message))
    assert log.open_keys() == set()


def test_a_wait_falls_due_once_and_only_while_it_is_open() -> None:
    log = Log()
    ended = log.send(A, B, deadline=5)
    log.send(A, C, deadline=6)
    log(A, WaitEnded(ids.wait_id(ended), "replied"))
    assert [*log.ledger.due(5)] == []
    assert len([*log.ledger.due(6)]) == 1
    assert [*log.ledger.due(7)] == []
    assert "expire" in log.open_keys()


def test_of_two_branches_that_ask_each_other_the_later_in_the_log_is_refused() -> None:
    log = Log()
    log.send(A, B, deadline=5)
    refused = log.send(B, A, deadline=5)
    effect = log.ledger.effects["cycle", ids.wait_id(refused)]
    assert "b → a → b" in getattr(effect, "reason", "")
    assert ("deliver", refused) not in log.ledger.effects


def test_a_cycle_is_found_through_others_and_spelled_out() -> None:
    log = Log()
    log.send(A, B, deadline=5)
    log.send(B, C, deadline=5)
    refused = log.send(C, A, deadline=5)
    effect = log.ledger.effects["cycle", ids.wait_id(refused)]
    assert "c → a → b → c" in getattr(effect, "reason", "")


def test_a_refused_wait_adds_no_edge_and_an_ended_one_takes_its_edge_away() -> None:
    log = Log()
    first = log.send(A, B, deadline=5)
    refused = log.send(B, A, deadline=5)
    log(B, WaitEnded(ids.wait_id(refused), "refused"))
    log(A, WaitEnded(ids.wait_id(first), "replied"))
    log.send(B, A, deadline=5)
    assert "cycle" not in log.open_keys()


def test_a_wait_by_hand_holds_nobody_up_and_closes_no_cycle() -> None:
    log = Log()
    log.send(A, B, deadline=5, by_hand=True)
    log.send(B, A, deadline=5)
    assert "cycle" not in log.open_keys()


# -- admission -------------------------------------------------------------------------------


def turn(session: str, name: str) -> str:
    return ids.turn_id(ids.branch_id(ids.session_id(session), name), "t")


def request(turn_id: str, *, interactive: bool = False) -> TurnRequested:
    return TurnRequested(turn_id, "r", interactive=interactive)


def test_no_more_turns_are_admitted_than_the_limit_and_an_end_admits_the_next() -> None:
    log = Log(admitted=1)
    first, second = turn("x", "1"), turn("x", "2")
    assert log(first, request(first)) == ["offer"]
    assert log(second, request(second)) == []
    assert log(first, TurnEnded(first, "completed")) == ["offer"]
    assert [*log.ledger.admitted] == [second]


def test_a_suspended_turn_gives_its_slot_away_and_comes_back_before_new_ones() -> None:
    log = Log(admitted=1)
    first, second, third = (turn("x", name) for name in "123")
    log(first, request(first))
    log(second, request(second))
    log(third, request(third))
    log(first, TurnSuspended(first, (1, 1)))
    assert [*log.ledger.admitted] == [second]
    log(first, TurnResumed(first, 2))
    log(second, TurnEnded(second, "completed"))
    assert log.ledger.admitted[first].n == 2


def test_sessions_take_turns_whatever_one_of_them_has_queued() -> None:
    log = Log(admitted=1)
    running = turn("busy", "running")
    log(running, request(running))
    for name in "abcdef":
        log(turn("busy", name), request(turn("busy", name)))
    log(turn("calm", "only"), request(turn("calm", "only")))
    order = []
    for _ in range(3):
        (present,) = log.ledger.admitted
        order.append(present)
        log(present, TurnEnded(present, "completed"))
    assert turn("calm", "only") in order


def test_what_a_user_asked_for_goes_first() -> None:
    log = Log(admitted=1)
    running, branch, user = turn("x", "0"), turn("x", "branch"), turn("x", "user")
    log(running, request(running))
    log(branch, request(branch))
    log(user, request(user, interactive=True))
    log(running, TurnEnded(running, "completed"))
    assert [*log.ledger.admitted] == [user]


def test_a_turn_that_ends_before_it_was_admitted_is_admitted_never() -> None:
    log = Log(admitted=1)
    first, second = turn("x", "1"), turn("x", "2")
    log(first, request(first))
    log(second, request(second))
    log(second, TurnEnded(second, "cancelled"))
    assert log(first, TurnEnded(first, "completed")) == []
    assert log.ledger.runnable == 0


def test_two_ledgers_that_fold_the_same_log_owe_and_admit_the_same() -> None:
    log = Log(admitted=2)
    log.send(A, B, deadline=5)
    log.send(B, A, deadline=5)
    for name in "abc":
        log(turn("x", name), request(turn("x", name)))
    other = Ledger(2)
    for recorded in log.recorded:
        other.fold(recorded)
    assert other.effects == log.ledger.effects
    assert other.admitted == log.ledger.admitted


def test_a_turn_that_pauses_gives_its_slot_away_and_is_due_at_its_deadline() -> None:
    log = Log(admitted=1)
    a, b = ids.turn_id(A, "t"), ids.turn_id(B, "t")
    pause = ids.pause_id(a, 1)
    assert log(A, TurnRequested(a, "r")) == ["offer"]
    assert log(B, TurnRequested(b, "r")) == []
    error = TurnError("rate_limited", "not now")
    failed = ModelFailed(a, (1, 1), 1, 1, "d", error, pause, 5_000)
    assert log(A, failed, TurnSuspended(a, (1, 1))) == ["offer"], "b has the slot"
    assert list(log.ledger.due(4_999)) == []
    (expire,) = log.ledger.due(5_000)
    assert (expire.wait_id, expire.source) == (pause, A)
    log(A, WaitEnded(pause, "expired"), TurnResumed(a, 2))
    assert not log.ledger.waits and log.open_keys() == {"offer"}
    assert log(B, TurnEnded(b, "completed")) == ["offer"]


def test_a_model_call_that_failed_for_good_owes_nothing() -> None:
    log = Log()
    turn = ids.turn_id(A, "t")
    log(A, TurnRequested(turn, "r"))
    failed = ModelFailed(turn, (1, 1), 1, 1, "d", TurnError("bad_key", "no"))
    log(A, failed, TurnEnded(turn, "error"))
    assert not log.ledger.waits and log.open_keys() == set()
    assert log.ledger.next_deadline() is None
