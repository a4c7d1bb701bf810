"""Whatever happens to a branch in whatever order, these hold after each step."""

import contextlib
import itertools

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from plait.events import ids
from plait.events.branch import Branch, Turn, evolve
from plait.events.commands import CancelTurn, MultitaskStrategy, ToolResult, ToolSend
from plait.events.errors import PlaitError
from plait.events.types import (
    AnyEvent,
    MessageReceived,
    MessageRefused,
    MessageSent,
    ModelFailed,
    NodesPlaced,
    ToolReturned,
    TurnClaimed,
    TurnEnded,
    TurnRequested,
    WaitEnded,
)
from tests.unit.test_branch import NOW, ROOT, THERE, Story, text

STRATEGIES: list[MultitaskStrategy] = ["enqueue", "reject", "interrupt", "rollback"]


class BranchMachine(RuleBasedStateMachine):
    """Users, workers and `replies` act on one branch; a model of what must hold watches."""

    def __init__(self) -> None:
        super().__init__()
        self.story = Story(inbox_entries=4, turn_steps=6)
        self.events: list[AnyEvent] = []
        self.deliveries = 0
        self.story.post(run=False)

    @property
    def branch(self) -> Branch:
        return self.story.branch

    @property
    def turn(self) -> Turn | None:
        return self.branch.turn

    def keep(self, events: list[AnyEvent]) -> None:
        self.events.extend(events)

    @rule(strategy=st.sampled_from(STRATEGIES), run=st.booleans())
    def post(self, strategy: MultitaskStrategy, run: bool) -> None:
        with contextlib.suppress(PlaitError):  # A refusal changes nothing: the invariants say so.
            self.keep([*self.story.post(run=run, strategy=strategy)])

    @rule(wait=st.booleans(), again=st.booleans())
    def deliver(self, wait: bool, again: bool) -> None:
        if not again:
            self.deliveries += 1
        self.keep([*self.story.deliver(f"m{self.deliveries}", wait=wait)])

    @precondition(lambda self: self.turn is not None and self.turn.status != "suspended")
    @rule()
    def claim(self) -> None:
        assert self.turn is not None
        n, delivery = self.turn.epoch
        epoch = (self.turn.n, delivery + 1 if n == self.turn.n else 1)
        self.keep([*self.story.claim(epoch)])

    @precondition(lambda self: self.turn is not None and self.turn.status == "running")
    @rule(calls=st.lists(st.sampled_from("abc"), unique=True))
    def answer(self, calls: list[str]) -> None:
        if self.turn is not None and not self.turn.calls:
            self.keep([*self.story.answer(*calls)])

    @precondition(lambda self: self.turn is not None and self.turn.status == "running")
    @rule(ask=st.booleans())
    def finish_a_call(self, ask: bool) -> None:
        assert self.turn is not None
        for call in self.turn.to_run()[:1]:
            if ask:
                send = ToolSend(call, THERE, text("?"), "here", None, NOW + 1000)
                self.keep([*self.story.results(sends=(send,))])
            else:
                self.keep([*self.story.results(ToolResult(call, text("1")))])

    @precondition(
        lambda self: self.turn is not None and self.turn.status == "running" and not self.turn.calls
    )
    @rule(retry=st.booleans())
    def fail(self, retry: bool) -> None:
        self.keep([*self.story.fail(retry=retry)])

    @rule(outcome=st.sampled_from(["replied", "expired", "failed", "refused"]), data=st.data())
    def end_a_wait(self, outcome: str, data: st.DataObject) -> None:
        if self.branch.waits:
            wait = data.draw(st.sampled_from(sorted(self.branch.waits)))
            self.keep([*self.story.end_wait(wait, outcome)])

    @precondition(lambda self: self.turn is not None)
    @rule()
    def cancel(self) -> None:
        assert self.turn is not None
        self.keep(
            [
                *self.story.when(
                    CancelTurn(
                        command_id=self.story.next_id(),
                        at=NOW,
                        branch_id=self.branch.id,
                        turn_id=self.turn.id,
                    )
                )
            ]
        )

    @invariant()
    def nodes_form_one_chain(self) -> None:
        before = ROOT
        for node, predecessor in self.branch.nodes.items():
            assert predecessor == before
            before = node
        assert self.branch.tip == before

    @invariant()
    def the_inbox_holds_something_only_while_a_claimed_turn_is_there(self) -> None:
        if self.branch.inbox:
            assert self.turn is not None and self.turn.node_id is not None

    @invariant()
    def a_suspended_turn_has_an_open_wait_and_nothing_else_to_do(self) -> None:
        if self.turn is not None and self.turn.status == "suspended":
            assert self.turn.waits
            assert self.turn.to_run() == []

    @invariant()
    def debts_are_owed_only_while_a_turn_will_answer_them(self) -> None:
        if self.turn is None:
            assert not self.branch.owed

    @invariant()
    def every_waiting_message_is_answered_at_most_once(self) -> None:
        answered = [m for e in self.events if isinstance(e, TurnEnded) for m in e.answered]
        refused = [
            e.message_id for e in self.events if isinstance(e, MessageRefused) and e.message_id
        ]
        assert len(answered + refused) == len({*answered, *refused})

    @invariant()
    def every_message_becomes_one_node_at_most(self) -> None:
        placed = [
            e.node_id for e in self.events if isinstance(e, MessageReceived) and e.after is not None
        ]
        placed += [n for e in self.events if isinstance(e, NodesPlaced) for n in e.node_ids]
        assert len(placed) == len(set(placed))

    @invariant()
    def every_wait_ends_at_most_once_and_every_call_has_one_result(self) -> None:
        waits = [e.wait_id for e in self.events if isinstance(e, WaitEnded)]
        assert len(waits) == len(set(waits))
        results = [e.node_id for e in self.events if isinstance(e, ToolReturned)]
        results += [e.call for e in self.events if isinstance(e, WaitEnded) and e.call]
        assert len(results) == len(set(results))

    @invariant()
    def every_turn_ends_at_most_once_and_one_runs_at_a_time(self) -> None:
        open_turn: str | None = None
        for event in self.events:
            if isinstance(event, TurnRequested):
                assert open_turn is None
                open_turn = event.turn_id
            elif isinstance(event, TurnEnded):
                assert open_turn == event.turn_id
                open_turn = None
        assert open_turn == (None if self.turn is None else self.turn.id)

    @invariant()
    def epochs_grow(self) -> None:
        epochs = [(e.turn_id, e.epoch) for e in self.events if isinstance(e, TurnClaimed)]
        for (turn, epoch), (next_turn, next_epoch) in itertools.pairwise(epochs):
            assert turn != next_turn or epoch < next_epoch

    @invariant()
    def what_is_sent_and_waited_for_is_known(self) -> None:
        waits = {
            ids.wait_id(e.message_id)
            for e in self.events
            if isinstance(e, MessageSent) and e.deadline is not None
        }
        waits |= {e.wait_id for e in self.events if isinstance(e, ModelFailed) and e.wait_id}
        assert waits == set(self.branch.waits)


TestBranch = BranchMachine.TestCase
TestBranch.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def test_a_state_folded_anew_from_its_events_is_the_same() -> None:
    story = Story()
    story.post()
    story.claim()
    story.post("queued")
    story.ask()
    story.post("now", strategy="interrupt")
    fresh = Branch(id=story.branch.id)
    for recorded in story.recorded:
        evolve(fresh, recorded, story.limits)
    assert fresh == story.branch
