"""A session's own facts: HEAD and names."""

import pytest

from plait.events import ids
from plait.events.commands import AnySessionCommand, CreateSession, MoveHead, NameBranch
from plait.events.errors import Invalid, NameTaken, UnknownSession
from plait.events.limits import Limits
from plait.events.session import Session, check_name, decide, evolve, first_branch
from plait.events.store import Recorded, StreamId
from plait.events.types import Append, SessionEvent

SESSION = ids.session_id("test")
A, B = ids.branch_id(SESSION, "a"), ids.branch_id(SESSION, "b")
LIMITS = Limits()


class Story:
    def __init__(self) -> None:
        self.session = Session(id=SESSION)
        self.when(CreateSession(command_id="create", at=0, session_id=SESSION))

    def when(self, command: AnySessionCommand) -> list[SessionEvent]:
        events = [*decide(command, self.session, LIMITS)]
        if events:
            append = Append(command_id=command.command_id, at=command.at, events=tuple(events))
            sequence = self.session.version + 1
            stream = StreamId("t", SESSION, ids.SESSION_TOKEN)
            evolve(self.session, Recorded(stream, sequence, append))
        return events

    def name(self, branch: str, name: str | None) -> list[SessionEvent]:
        return self.when(
            NameBranch(
                command_id=f"{branch}{name}",
                at=0,
                session_id=SESSION,
                branch_id=branch,
                name=name,
            )
        )


def test_a_new_sessions_head_reserves_its_first_branch_at_root() -> None:
    session = Story().session
    assert session.head == first_branch(SESSION)
    assert session.reserved_at == ids.root_id(SESSION)


def test_creating_it_again_changes_nothing() -> None:
    story = Story()
    assert story.when(CreateSession(command_id="create", at=9, session_id=SESSION)) == []


def test_a_session_that_was_never_created_takes_no_commands() -> None:
    with pytest.raises(UnknownSession):
        decide(
            MoveHead(command_id="m", at=0, session_id=SESSION, branch_id=A),
            Session(id=SESSION),
            LIMITS,
        )


def test_moving_head_to_an_open_branch_gives_a_reservation_up() -> None:
    story = Story()
    story.when(MoveHead(command_id="m", at=0, session_id=SESSION, branch_id=A))
    assert (story.session.head, story.session.reserved_at) == (A, None)


def test_a_checkout_that_is_retried_after_many_others_does_not_move_head_again() -> None:
    story = Story()
    first = MoveHead(command_id="first", at=0, session_id=SESSION, branch_id=A)
    story.when(first)
    for count in range(LIMITS.command_ids + 1):
        story.when(MoveHead(command_id=f"m{count}", at=0, session_id=SESSION, branch_id=B))
    assert story.when(first) == []
    assert story.session.head == B


def test_a_name_belongs_to_the_branch_that_claimed_it_first() -> None:
    story = Story()
    story.name(A, "research")
    with pytest.raises(NameTaken, match=A):
        story.name(B, "research")


def test_a_branch_has_one_name_and_its_former_one_is_free_again() -> None:
    story = Story()
    story.name(A, "first")
    story.name(A, "second")
    story.name(B, "first")
    assert story.session.names == {"second": A, "first": B}


def test_a_name_can_be_taken_away() -> None:
    story = Story()
    story.name(A, "research")
    story.name(A, None)
    assert story.session.names == {}


@pytest.mark.parametrize("name", ["", "x" * 65, " edge", "a:b", "line\nbreak", "nul\0", A, SESSION])
def test_a_name_that_could_be_mistaken_for_an_address_is_refused(name: str) -> None:
    with pytest.raises(Invalid):
        check_name(name, LIMITS)
