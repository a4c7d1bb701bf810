"""Branches, given what happened, when something is asked, then this happens."""

import pytest

from plait.events import ids
from plait.events.branch import Branch, decide, evolve
from plait.events.commands import (
    AnyBranchCommand,
    ArchiveBranch,
    CancelTurn,
    ClaimTurn,
    DeliverMessage,
    DeliverNote,
    EndWait,
    FailTurn,
    MultitaskStrategy,
    PostMessage,
    RecordAnswer,
    RecordFailure,
    RecordResults,
    RequestTurn,
    SendMessage,
    ToolResult,
    ToolSend,
)
from plait.events.content import seal
from plait.events.errors import (
    BranchArchived,
    BranchBusy,
    BrokenEdge,
    BudgetExceeded,
    InboxFull,
    Invalid,
    NotATip,
    SelfSend,
    StaleClaim,
    TurnAlreadyEnded,
    UnknownBranch,
    UnknownTurn,
)
from plait.events.limits import Limits
from plait.events.store import Recorded
from plait.events.subjects import stream_of
from plait.events.types import (
    Append,
    BranchEvent,
    BranchOpened,
    Content,
    Epoch,
    MessageReceived,
    MessageRefused,
    MessageSent,
    ModelAnswered,
    ModelFailed,
    NodesPlaced,
    Pins,
    ReplyLate,
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
from plait.events.types import BranchArchived as BranchWasArchived

SESSION = ids.session_id("test")
ROOT = ids.root_id(SESSION)
HERE = ids.branch_id(SESSION, "here")
THERE = ids.branch_id(SESSION, "there")
NOW = 1_000_000


def text(words: str) -> Content:
    return seal(words, "k", b"secret")


class Story:
    """One branch through its commands, as the handler would run them."""

    def __init__(self, branch: str = HERE, **limits: float) -> None:
        self.branch = Branch(id=branch)
        self.limits = Limits(**limits)  # type: ignore[arg-type]
        self.recorded: list[Recorded] = []
        self.count = 0

    def when(self, command: AnyBranchCommand) -> list[BranchEvent]:
        events = [*decide(command, self.branch, self.limits)]
        if events:
            append = Append(command_id=command.command_id, at=command.at, events=tuple(events))
            stream = stream_of("t", self.branch.id)
            self.recorded.append(Recorded(stream, len(self.recorded) + 1, append))
            evolve(self.branch, self.recorded[-1], self.limits)
        return events

    def next_id(self) -> str:
        self.count += 1
        return f"c{self.count}"

    def post(
        self,
        words: str = "hello",
        *,
        run: bool = True,
        strategy: MultitaskStrategy = "enqueue",
        command_id: str | None = None,
        expected_tip: str | None = None,
    ) -> list[BranchEvent]:
        return self.when(
            PostMessage(
                command_id=command_id or self.next_id(),
                at=NOW,
                branch_id=self.branch.id,
                content=text(words),
                run=run,
                strategy=strategy,
                fork=ROOT,
                expected_tip=expected_tip,
            )
        )

    def claim(self, epoch: Epoch | None = None, turn: str | None = None) -> list[BranchEvent]:
        present = self.branch.turn
        assert present is not None or turn is not None
        n = present.n if present is not None else 1
        return self.when(
            ClaimTurn(
                command_id=self.next_id(),
                at=NOW,
                branch_id=self.branch.id,
                turn_id=turn or (present.id if present is not None else ""),
                epoch=epoch or (n, 1),
                worker="w",
                pins=Pins(model="offline:echo"),
            )
        )

    def answer(
        self, *calls: str, epoch: Epoch | None = None, usage: Usage | None = None
    ) -> list[BranchEvent]:
        turn = self.branch.turn
        assert turn is not None
        return self.when(
            RecordAnswer(
                command_id=self.next_id(),
                at=NOW,
                branch_id=self.branch.id,
                turn_id=turn.id,
                epoch=epoch or turn.epoch,
                context="d",
                text=text("answer"),
                calls=tuple(
                    ToolCall(self.call(name, turn.steps + 1), name, text("{}")) for name in calls
                ),
                usage=usage or Usage(),
            )
        )

    def fail(
        self, *, retry: bool = True, after_s: float | None = None, code: str = "rate_limited"
    ) -> list[BranchEvent]:
        """The model gives no answer."""
        turn = self.branch.turn
        assert turn is not None
        return self.when(
            RecordFailure(
                command_id=self.next_id(),
                at=NOW,
                branch_id=self.branch.id,
                turn_id=turn.id,
                epoch=turn.epoch,
                context="d",
                error=TurnError(code, "not now"),
                retry=retry,
                after_s=after_s,
            )
        )

    def pause(self, **failing: float) -> str:
        """The model fails, and the turn pauses. Returns the wait's id."""
        failed, _ = self.fail(**failing)  # type: ignore[arg-type]
        assert isinstance(failed, ModelFailed) and failed.wait_id is not None
        return failed.wait_id

    def call(self, name: str, step: int = 1) -> str:
        assert self.branch.turn is not None
        return ids.node_id(self.branch.id, self.branch.turn.id, str(step), name)

    def results(self, *results: ToolResult, sends: tuple[ToolSend, ...] = ()) -> list[BranchEvent]:
        turn = self.branch.turn
        assert turn is not None
        return self.when(
            RecordResults(
                command_id=self.next_id(),
                at=NOW,
                branch_id=self.branch.id,
                turn_id=turn.id,
                epoch=turn.epoch,
                results=results,
                sends=sends,
            )
        )

    def ask(self, target: str = THERE) -> str:
        """A claimed turn asks another branch and waits. Returns the wait's id."""
        self.answer("send_to_branch")
        call = self.call("send_to_branch")
        events = self.results(sends=(ToolSend(call, target, text("?"), "here", None, NOW + 1000),))
        sent = events[0]
        assert isinstance(sent, MessageSent)
        return ids.wait_id(sent.message_id)

    def deliver(self, message: str, *, wait: bool = False, hops: int = 1) -> list[BranchEvent]:
        return self.when(
            DeliverMessage(
                command_id=self.next_id(),
                at=NOW,
                root="r",
                branch_id=self.branch.id,
                message_id=ids.message_id(THERE, message),
                content=text(message),
                from_node=ids.node_id(THERE, "n"),
                sender="there",
                hops=hops,
                wait=wait,
            )
        )

    def end_wait(self, wait: str, outcome: str = "replied") -> list[BranchEvent]:
        return self.when(
            EndWait(
                command_id=self.next_id(),
                at=NOW,
                branch_id=self.branch.id,
                wait_id=wait,
                outcome=outcome,  # type: ignore[arg-type]
                content=text("reply"),
            )
        )


def kinds(events: list[BranchEvent]) -> list[type]:
    return [type(event) for event in events]


def started() -> Story:
    story = Story()
    story.post()
    return story


def running() -> Story:
    story = started()
    story.claim()
    return story


# -- opening and posting ---------------------------------------------------------------------


def test_a_first_post_opens_the_branch_places_the_message_and_asks_for_a_turn() -> None:
    opened, received, requested = Story().post()
    assert isinstance(opened, BranchOpened) and opened.fork == ROOT
    assert isinstance(received, MessageReceived) and received.after == ROOT
    assert isinstance(requested, TurnRequested) and received.turn_id == requested.turn_id


def test_a_post_to_a_branch_that_never_opened_is_refused() -> None:
    with pytest.raises(UnknownBranch):
        Story().when(PostMessage(command_id="c", at=NOW, branch_id=HERE, content=text("x")))


def test_a_branch_cannot_begin_after_a_node_of_another_session() -> None:
    foreign = ids.root_id(ids.session_id("other"))
    with pytest.raises(BrokenEdge, match=foreign):
        Story().when(
            PostMessage(command_id="c", at=NOW, branch_id=HERE, content=text("x"), fork=foreign)
        )


def test_the_same_command_again_changes_nothing() -> None:
    story = Story()
    story.post(command_id="same")
    assert story.post(command_id="same") == []


def test_a_post_is_recognised_by_its_node_when_its_command_was_forgotten() -> None:
    story = Story(command_ids=1)
    story.post(command_id="old", run=False)
    story.post(run=False)
    assert "old" not in story.branch.commands
    assert story.post(command_id="old", run=False) == []


def test_a_post_without_run_is_a_node_and_no_turn() -> None:
    assert kinds(Story().post(run=False)) == [BranchOpened, MessageReceived]


def test_posts_before_the_claim_are_read_by_the_one_turn() -> None:
    story = started()
    turn = story.branch.turn
    (received,) = story.post("more")
    assert isinstance(received, MessageReceived) and received.after is not None
    assert turn is not None and received.turn_id == turn.id


def test_a_post_that_expects_another_tip_is_refused_with_the_present_one() -> None:
    story = started()
    with pytest.raises(NotATip, match=story.branch.tip):
        story.post(expected_tip=ROOT)


# -- a busy branch ---------------------------------------------------------------------------


def test_a_post_to_a_busy_branch_waits_in_the_inbox_until_the_turn_ends() -> None:
    story = running()
    (first,) = story.post("one")
    (second,) = story.post("two")
    assert isinstance(first, MessageReceived) and first.after is None
    assert isinstance(second, MessageReceived) and second.turn_id == first.turn_id
    tip = story.branch.tip
    _, ended, placed, requested = story.answer()
    assert isinstance(ended, TurnEnded) and ended.status == "completed"
    assert placed == NodesPlaced((first.node_id, second.node_id), after=tip)
    assert isinstance(requested, TurnRequested) and requested.turn_id == first.turn_id


def test_messages_that_ask_for_no_turn_are_placed_at_the_end_and_start_none() -> None:
    story = running()
    story.deliver("news")
    assert kinds(story.answer()) == [ModelAnswered, TurnEnded, NodesPlaced]


def test_reject_refuses_while_a_turn_is_there() -> None:
    for story in (started(), running()):
        with pytest.raises(BranchBusy):
            story.post(strategy="reject")


def test_an_interrupt_stops_the_turn_keeps_what_it_did_and_goes_on() -> None:
    story = running()
    queued = story.post("queued")[0]
    received, ended, placed, requested = story.post("now", strategy="interrupt")
    assert isinstance(received, MessageReceived) and isinstance(queued, MessageReceived)
    assert isinstance(ended, TurnEnded) and ended.status == "cancelled" and not ended.dropped
    assert isinstance(placed, NodesPlaced)
    assert placed.node_ids == (queued.node_id, received.node_id)
    assert isinstance(requested, TurnRequested)
    assert requested.turn_id == received.turn_id == queued.turn_id


def test_a_rollback_drops_the_turns_input_and_output_and_keeps_messages_of_branches() -> None:
    story = started()
    story.deliver("ask", wait=True)
    user, asked = story.branch.nodes
    story.claim()
    assistant = story.branch.tip
    ended = story.post("instead", strategy="rollback")[1]
    assert isinstance(ended, TurnEnded) and ended.passed
    assert ended.dropped == (user, assistant)
    assert asked not in ended.dropped


def test_a_rollback_before_the_claim_drops_the_input_and_asks_for_another_turn() -> None:
    story = started()
    before = story.branch.turn
    received, ended, placed, requested = story.post("instead", strategy="rollback")
    assert isinstance(ended, TurnEnded) and len(ended.dropped) == 1
    assert isinstance(requested, TurnRequested) and before is not None
    assert requested.turn_id != before.id
    assert isinstance(received, MessageReceived) and isinstance(placed, NodesPlaced)


def test_an_interrupt_without_a_turn_to_follow_is_refused() -> None:
    with pytest.raises(Invalid, match="run=true"):
        running().post(strategy="interrupt", run=False)


def test_the_inbox_is_bounded_and_says_its_limit() -> None:
    story = Story(inbox_entries=2)
    story.post()
    story.claim()
    story.post()
    story.post()
    with pytest.raises(InboxFull, match="2 messages"):
        story.post()


def test_unread_messages_are_bounded_too_but_a_turn_can_always_be_asked_for() -> None:
    story = Story(inbox_entries=2)
    story.post(run=False)
    story.post(run=False)
    with pytest.raises(InboxFull):
        story.post(run=False)
    assert kinds(story.post(run=True)) == [MessageReceived, TurnRequested]


# -- claims and epochs -----------------------------------------------------------------------


def test_the_first_claim_places_the_assistant_node_and_names_what_is_read() -> None:
    story = started()
    story.deliver("news")
    tip = story.branch.tip
    (claimed,) = story.claim()
    assert isinstance(claimed, TurnClaimed)
    assert claimed.after == tip and claimed.consumed == (ids.message_id(THERE, "news"),)


def test_a_greater_epoch_takes_over_and_fences_the_older_one() -> None:
    story = running()
    (taken,) = story.claim((1, 2))
    assert isinstance(taken, TurnClaimed) and taken.after is None and not taken.consumed
    with pytest.raises(StaleClaim) as stale:
        story.answer(epoch=(1, 1))
    assert not stale.value.settled


@pytest.mark.parametrize("epoch", [(1, 1), (2, 1)])
def test_a_claim_that_is_not_newer_or_not_yet_due_is_refused_and_not_acked(epoch: Epoch) -> None:
    with pytest.raises(StaleClaim) as stale:
        running().claim(epoch)
    assert not stale.value.settled


def test_a_claim_of_an_ended_or_suspended_turn_is_refused_and_acked() -> None:
    ended = running()
    turn = ended.branch.turn
    ended.answer()
    suspended = running()
    suspended.ask()
    for story in (ended, suspended):
        with pytest.raises(StaleClaim) as stale:
            story.claim((1, 9), turn=turn.id if turn and story is ended else None)
        assert stale.value.settled


# -- steps -----------------------------------------------------------------------------------


def test_an_answer_without_calls_ends_the_turn_in_the_same_append() -> None:
    assert kinds(running().answer()) == [ModelAnswered, TurnEnded]


def test_a_call_has_one_result_the_first() -> None:
    story = running()
    story.answer("a", "b")
    a, b = story.call("a"), story.call("b")
    assert kinds(story.results(ToolResult(a, text("1")))) == [ToolReturned]
    assert kinds(story.results(ToolResult(a, text("2")), ToolResult(b, text("3")))) == [
        ToolReturned
    ]


def test_no_answer_is_taken_while_calls_are_open() -> None:
    story = running()
    story.answer("a")
    with pytest.raises(Invalid):
        story.answer()


def test_the_last_step_ends_the_turn_with_an_error_and_keeps_what_was_done() -> None:
    story = Story(turn_steps=1)
    story.post()
    story.claim()
    answered, ended = story.answer("a")
    assert isinstance(answered, ModelAnswered) and isinstance(ended, TurnEnded)
    assert ended.status == "error" and ended.error is not None
    assert "at most 1" in ended.error.message


@pytest.mark.parametrize(
    ("limits", "what"),
    [
        ({"turn_output_tokens": 30}, "tokens written by this turn: 30, and at most 30"),
        ({"turn_total_tokens": 99}, "tokens read and written by this turn: 110, and at most 99"),
    ],
)
def test_the_answer_that_passes_the_turns_tokens_ends_it_and_is_kept(
    limits: dict[str, float], what: str
) -> None:
    story = Story(HERE, **limits)
    story.post()
    story.claim()
    story.answer("a", usage=Usage(input_tokens=40, output_tokens=10))
    story.results(ToolResult(story.call("a"), text("1")))
    answered, ended = story.answer("b", usage=Usage(input_tokens=40, output_tokens=20))
    assert isinstance(answered, ModelAnswered) and isinstance(ended, TurnEnded)
    assert ended.error is not None and ended.error.code == "budget_exceeded"
    assert what in ended.error.message


def test_an_answer_without_calls_is_whole_whatever_it_cost() -> None:
    story = Story(turn_output_tokens=1)
    story.post()
    story.claim()
    assert kinds(story.answer(usage=Usage(output_tokens=9))) == [ModelAnswered, TurnEnded]
    assert list(story.branch.ended.values()) == ["completed"]


# -- models that give no answer --------------------------------------------------------------


def test_a_model_that_may_answer_later_suspends_the_turn_until_then() -> None:
    story = running()
    failed, suspended = story.fail()
    assert isinstance(failed, ModelFailed) and isinstance(suspended, TurnSuspended)
    assert (failed.step, failed.nth, failed.error.code) == (1, 1, "rate_limited")
    assert failed.deadline is not None and NOW + 500 <= failed.deadline <= NOW + 626
    assert story.branch.turn is not None and failed.wait_id is not None
    ended, resumed = story.end_wait(failed.wait_id, "expired")
    assert isinstance(ended, WaitEnded) and ended.call is None
    assert isinstance(resumed, TurnResumed) and resumed.n == 2
    story.claim()
    assert kinds(story.answer()) == [ModelAnswered, TurnEnded]


def test_each_failure_in_a_row_waits_twice_as_long_up_to_the_bound() -> None:
    story = Story(model_attempts=12, model_pause_max_s=4)
    story.post()
    pauses = []
    for _ in range(6):
        story.claim()
        wait = story.pause()
        pauses.append((story.branch.waits[wait].deadline - NOW) / 1000)
        story.end_wait(wait, "expired")
    for pause, least in zip(pauses, [0.5, 1, 2, 4, 4, 4], strict=True):
        assert least <= pause <= least * 1.26


@pytest.mark.parametrize(
    ("after_s", "least_s"), [(20.0, 20.0), (0.0, 0.5), (1e9, 24 * 3600.0), (None, 0.5)]
)
def test_when_the_provider_says_so_wins_within_bounds(
    after_s: float | None, least_s: float
) -> None:
    story = running()
    failed, _ = story.fail(after_s=after_s)
    assert isinstance(failed, ModelFailed) and failed.deadline is not None
    assert least_s <= (failed.deadline - NOW) / 1000 <= least_s * 1.26


def test_turns_that_failed_together_do_not_come_back_together() -> None:
    deadlines = set()
    for name in "abcd":
        story = Story(ids.branch_id(SESSION, name))
        story.post()
        story.claim()
        deadlines.add(story.branch.waits[story.pause(after_s=60)].deadline)
    assert len(deadlines) == 4


def test_too_many_failures_in_a_row_end_the_turn_and_an_answer_forgives_them() -> None:
    story = Story(model_attempts=2)
    story.post()
    story.claim()
    story.end_wait(story.pause(), "expired")
    story.claim()
    story.answer("a")
    story.results(ToolResult(story.call("a"), text("1")))
    story.end_wait(story.pause(), "expired")
    story.claim()
    failed, ended = story.fail()
    assert isinstance(failed, ModelFailed) and isinstance(ended, TurnEnded)
    assert (failed.step, failed.nth, failed.wait_id, failed.deadline) == (2, 3, None, None)
    assert ended.error == TurnError("rate_limited", "not now; given up after 2 calls")
    assert ended.error == failed.error


def test_a_final_failure_ends_the_turn_at_once_as_a_step_of_its_own() -> None:
    story = running()
    failed, ended = story.fail(retry=False, code="bad_key")
    assert isinstance(failed, ModelFailed) and isinstance(ended, TurnEnded)
    assert failed.wait_id is None and ended.status == "error"
    assert ended.error == failed.error == TurnError("bad_key", "not now")


def test_a_turn_cancelled_while_it_pauses_ends_the_pause_too() -> None:
    story = running()
    wait, turn = story.pause(), story.branch.turn
    assert turn is not None
    ended, _ = story.when(
        CancelTurn(command_id="x", at=NOW, branch_id=story.branch.id, turn_id=turn.id)
    )
    assert isinstance(ended, WaitEnded)
    assert (ended.wait_id, ended.outcome) == (wait, "cancelled")
    assert story.end_wait(wait, "expired") == []


def test_a_failure_of_an_older_claim_is_refused() -> None:
    story = running()
    command = RecordFailure(
        command_id="x",
        at=NOW,
        branch_id=story.branch.id,
        turn_id=story.branch.turn.id if story.branch.turn else "",
        epoch=(1, 1),
        context="d",
        error=TurnError("stalled", "nothing came"),
        retry=True,
    )
    story.claim((1, 2))
    with pytest.raises(StaleClaim):
        story.when(command)


def test_a_failed_turn_says_why_and_the_inbox_goes_on() -> None:
    story = running()
    story.post("next")
    turn = story.branch.turn
    assert turn is not None
    events = story.when(
        FailTurn(
            command_id="f",
            at=NOW,
            branch_id=HERE,
            turn_id=turn.id,
            epoch=turn.epoch,
            error=TurnError("model_error", "down"),
        )
    )
    assert kinds(events) == [TurnEnded, NodesPlaced, TurnRequested]


# -- sending and waiting ---------------------------------------------------------------------


def test_a_send_that_waits_suspends_the_turn_in_the_same_append() -> None:
    story = running()
    story.answer("send_to_branch")
    call = story.call("send_to_branch")
    sent, suspended = story.results(
        sends=(ToolSend(call, THERE, text("?"), "here", None, NOW + 1000),)
    )
    assert isinstance(sent, MessageSent) and sent.call == call and sent.hops == 1
    assert isinstance(suspended, TurnSuspended)


def test_a_send_that_does_not_wait_has_its_result_at_once() -> None:
    story = running()
    story.answer("send_to_branch")
    send = ToolSend(story.call("send_to_branch"), THERE, text("!"), "here", text("accepted"))
    assert kinds(story.results(sends=(send,))) == [MessageSent, ToolReturned]


def test_the_end_of_the_last_wait_makes_the_turn_runnable_again() -> None:
    story = running()
    wait = story.ask()
    ended, resumed = story.end_wait(wait)
    assert isinstance(ended, WaitEnded) and ended.call is not None
    assert isinstance(resumed, TurnResumed) and resumed.n == 2
    assert kinds(story.claim((2, 1))) == [TurnClaimed]
    assert kinds(story.answer()) == [ModelAnswered, TurnEnded]


def test_of_two_waits_only_the_last_end_resumes() -> None:
    story = running()
    story.answer("a", "b")
    sends = tuple(
        ToolSend(story.call(name), THERE, text("?"), "here", None, NOW + 1000) for name in "ab"
    )
    first, second, _ = story.results(sends=sends)
    assert isinstance(first, MessageSent) and isinstance(second, MessageSent)
    assert kinds(story.end_wait(ids.wait_id(second.message_id))) == [WaitEnded]
    assert kinds(story.end_wait(ids.wait_id(first.message_id))) == [WaitEnded, TurnResumed]


def test_a_wait_that_ended_before_the_suspension_lets_the_turn_go_on() -> None:
    story = running()
    story.answer("a", "b")
    sent = story.results(
        sends=(ToolSend(story.call("a"), THERE, text("?"), "here", None, NOW + 1000),)
    )[0]
    assert isinstance(sent, MessageSent)
    assert kinds(story.end_wait(ids.wait_id(sent.message_id))) == [WaitEnded]
    assert kinds(story.results(ToolResult(story.call("b"), text("1")))) == [ToolReturned]


def test_a_wait_ends_once_and_a_later_answer_is_kept_as_late_once() -> None:
    story = running()
    wait = story.ask()
    story.end_wait(wait, "expired")
    assert story.end_wait(wait, "expired") == []
    assert kinds(story.end_wait(wait, "replied")) == [ReplyLate]
    assert story.end_wait(wait, "replied") == []


def test_an_expiry_after_the_reply_changes_nothing() -> None:
    story = running()
    wait = story.ask()
    story.end_wait(wait, "replied")
    assert story.end_wait(wait, "expired") == []


def test_a_cancelled_turn_ends_its_waits_and_settles_its_debts() -> None:
    story = Story()
    story.post(run=False)
    story.deliver("ask", wait=True)
    story.claim()
    story.ask()
    turn = story.branch.turn
    assert turn is not None
    waited, ended = story.when(CancelTurn(command_id="x", at=NOW, branch_id=HERE, turn_id=turn.id))
    assert isinstance(waited, WaitEnded) and waited.outcome == "cancelled"
    assert isinstance(ended, TurnEnded) and ended.status == "cancelled"
    assert ended.answered == (ids.message_id(THERE, "ask"),)
    with pytest.raises(TurnAlreadyEnded):
        story.when(CancelTurn(command_id="y", at=NOW, branch_id=HERE, turn_id=turn.id))


def test_a_turn_that_is_not_there_cannot_be_cancelled() -> None:
    with pytest.raises(UnknownTurn):
        started().when(
            CancelTurn(command_id="x", at=NOW, branch_id=HERE, turn_id=ids.turn_id(HERE, "no such"))
        )


def test_a_chain_of_messages_has_a_length() -> None:
    story = Story(chain_hops=3)
    story.post(run=False)
    story.deliver("ask", wait=True, hops=3)
    story.claim()
    story.answer("send_to_branch")
    send = ToolSend(story.call("send_to_branch"), THERE, text("?"), "here", text("accepted"))
    with pytest.raises(BudgetExceeded, match="4, and at most 3"):
        story.results(sends=(send,))


def test_nobody_sends_to_himself() -> None:
    with pytest.raises(SelfSend):
        started().when(
            SendMessage(
                command_id="s", at=NOW, branch_id=HERE, target=HERE, content=text("x"), sender="me"
            )
        )


def test_a_send_by_hand_comes_from_the_tip() -> None:
    story = started()
    (sent,) = story.when(
        SendMessage(
            command_id="s", at=NOW, branch_id=HERE, target=THERE, content=text("x"), sender="me"
        )
    )
    assert isinstance(sent, MessageSent) and sent.from_node == story.branch.tip
    assert sent.call is None and sent.deadline is None


@pytest.mark.parametrize("deadline", [NOW, NOW + 25 * 3600 * 1000])
def test_a_wait_is_bounded_on_both_sides(deadline: int) -> None:
    with pytest.raises(Invalid, match="86400 seconds"):
        started().when(
            SendMessage(
                command_id="s",
                at=NOW,
                branch_id=HERE,
                target=THERE,
                content=text("x"),
                sender="me",
                deadline=deadline,
            )
        )


# -- receiving -------------------------------------------------------------------------------


def test_a_waiting_message_starts_a_turn_and_is_answered_by_its_end() -> None:
    story = Story()
    story.post(run=False)
    received, requested = story.deliver("ask", wait=True)
    assert isinstance(received, MessageReceived) and received.source == "from_branch"
    assert isinstance(requested, TurnRequested) and not requested.interactive
    story.claim()
    ended = story.answer()[1]
    assert isinstance(ended, TurnEnded)
    assert ended.answered == (ids.message_id(THERE, "ask"),)


def test_a_redelivered_message_changes_nothing() -> None:
    story = started()
    story.deliver("ask", wait=True)
    assert story.deliver("ask", wait=True) == []


def test_an_interrupted_turn_passes_its_debts_to_the_next() -> None:
    story = Story()
    story.post(run=False)
    story.deliver("ask", wait=True, hops=5)
    story.claim()
    ended = story.post(strategy="interrupt")[1]
    assert isinstance(ended, TurnEnded) and ended.passed and ended.answered == ()
    story.claim()
    assert story.branch.turn is not None and story.branch.turn.hops == 5
    ended = story.answer()[1]
    assert isinstance(ended, TurnEnded)
    assert ended.answered == (ids.message_id(THERE, "ask"),)


def test_a_message_to_an_archived_or_unopened_branch_is_refused_on_its_own_subject() -> None:
    archived = started()
    archived.when(ArchiveBranch(command_id="a", at=NOW, branch_id=HERE, archived=True))
    for story, code in ((archived, "branch_archived"), (Story(), "unknown_branch")):
        (refused,) = story.deliver("ask", wait=True)
        assert isinstance(refused, MessageRefused)
        assert (refused.code, refused.wait) == (code, True)
        assert story.deliver("ask", wait=True) == []


def test_a_full_inbox_refuses_a_message_and_says_so_to_the_sender() -> None:
    story = Story(inbox_entries=1)
    story.post()
    story.claim()
    story.deliver("one")
    (refused,) = story.deliver("two")
    assert isinstance(refused, MessageRefused) and refused.code == "inbox_full"


def test_a_note_starts_no_turn_and_comes_once() -> None:
    story = Story()
    story.post(run=False)
    note = DeliverNote(
        command_id="n",
        at=NOW,
        root="r",
        branch_id=HERE,
        message_id=ids.message_id(HERE, "m"),
        content=text("not delivered"),
    )
    assert kinds(story.when(note)) == [MessageReceived]
    assert story.branch.turn is None
    again = DeliverNote(
        command_id="n2",
        at=NOW,
        root="r",
        branch_id=HERE,
        message_id=note.message_id,
        content=note.content,
    )
    assert story.when(again) == []


# -- archiving and retrying ------------------------------------------------------------------


def test_archiving_refuses_the_inbox_and_lets_a_running_turn_finish() -> None:
    story = running()
    story.deliver("ask", wait=True)
    refused, archived = story.when(
        ArchiveBranch(command_id="a", at=NOW, branch_id=HERE, archived=True)
    )
    assert isinstance(refused, MessageRefused) and refused.wait
    assert isinstance(archived, BranchWasArchived)
    assert kinds(story.answer()) == [ModelAnswered, TurnEnded]
    with pytest.raises(BranchArchived):
        story.post()


def test_archiving_cancels_a_turn_that_nobody_claimed_with_its_debts() -> None:
    story = Story()
    story.post(run=False)
    story.deliver("ask", wait=True)
    ended, _ = story.when(ArchiveBranch(command_id="a", at=NOW, branch_id=HERE, archived=True))
    assert isinstance(ended, TurnEnded) and ended.status == "cancelled"
    assert ended.answered == (ids.message_id(THERE, "ask"),)


def test_a_restored_branch_takes_messages_again() -> None:
    story = Story()
    story.post(run=False)
    story.when(ArchiveBranch(command_id="a", at=NOW, branch_id=HERE, archived=True))
    story.when(ArchiveBranch(command_id="b", at=NOW, branch_id=HERE, archived=False))
    assert kinds(story.post()) == [MessageReceived, TurnRequested]


def test_an_archiving_that_is_retried_after_many_others_does_not_archive_again() -> None:
    story = Story(command_ids=2)
    story.post(run=False)
    archive = ArchiveBranch(command_id="a", at=NOW, branch_id=HERE, archived=True)
    story.when(archive)
    story.when(ArchiveBranch(command_id="b", at=NOW, branch_id=HERE, archived=False))
    for _ in range(3):
        story.post(run=False)
    assert story.when(archive) == []
    assert not story.branch.archived


def test_a_retry_opens_a_branch_that_begins_with_a_reply() -> None:
    origin = running()
    user = next(iter(origin.branch.nodes))
    story = Story(THERE)
    opened, requested = story.when(RequestTurn(command_id="r", at=NOW, branch_id=THERE, fork=user))
    assert opened == BranchOpened(fork=user)
    assert isinstance(requested, TurnRequested)
    (claimed,) = story.claim()
    assert isinstance(claimed, TurnClaimed) and claimed.after == user


# -- what the simulation found ---------------------------------------------------------------


def forgetful() -> Story:
    """Remembers one command id, so that only their own ids recognise what was done."""
    story = Story(command_ids=1)
    story.post()
    return story


def test_a_send_by_hand_is_recognised_however_old_it_is() -> None:
    story = forgetful()
    send = SendMessage(
        command_id="s", at=NOW, branch_id=HERE, target=THERE, content=text("x"), sender="me"
    )
    assert kinds(story.when(send)) == [MessageSent]
    story.post("later")
    assert story.when(send) == []


def test_a_retried_turn_is_recognised_however_old_it_is() -> None:
    story = Story(command_ids=1)
    retry = RequestTurn(command_id="r", at=NOW, branch_id=HERE, fork=ROOT)
    assert kinds(story.when(retry)) == [BranchOpened, TurnRequested]
    story.post("later")
    assert story.when(retry) == []


def test_a_turn_that_is_stopped_before_it_ran_hands_on_the_hops_that_it_was_passed() -> None:
    story = started()
    story.deliver("asked", wait=True, hops=3)
    story.claim()
    story.post("stop", strategy="interrupt")
    story.post("and again", strategy="rollback")
    story.claim()
    assert story.branch.turn is not None and story.branch.turn.hops == 3
