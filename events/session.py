"""A session's own facts: HEAD, names, flags. Pure: decide(command, state) → events; evolve.

Which branches there are follows from the branches' own first appends, not from here (P2).
"""

from collections.abc import Sequence
from typing import assert_never

from msgspec import Struct, field

from plait.events import ids
from plait.events.commands import AnySessionCommand, CreateSession, MoveHead, NameBranch
from plait.events.errors import Invalid, NameTaken, UnknownSession
from plait.events.limits import Limits
from plait.events.store import Recorded
from plait.events.types import BranchNamed, Content, HeadMoved, SessionCreated, SessionEvent


class Session(Struct, kw_only=True):
    """The fold of a session's subject. It is folded in place: one owner per state."""

    id: str
    exists: bool = False
    version: int = 0
    commands: dict[str, int] = field(default_factory=dict)  # command id → sequence, all of them
    title: Content | None = None
    system_prompt: Content | None = None
    model: str | None = None
    attended: bool = True
    head: str = ""  # branch id
    reserved_at: str | None = None  # HEAD is a reservation: the node at which it will open
    names: dict[str, str] = field(default_factory=dict)  # name → branch id

    def done_at(self, command_id: str) -> int | None:
        """The append that carried this command out."""
        return self.commands.get(command_id)

    @property
    def root(self) -> str:
        return ids.root_id(self.id)

    def name_of(self, branch: str) -> str | None:
        return next((name for name, owner in self.names.items() if owner == branch), None)

    def label_of(self, branch: str, head: str) -> str:
        """How the branch is shown: its name, else the end of its head's id."""
        return self.name_of(branch) or ids.short(head)


def decide(command: AnySessionCommand, session: Session, limits: Limits) -> Sequence[SessionEvent]:
    if session.done_at(command.command_id) is not None:
        return []
    if isinstance(command, CreateSession):
        if session.exists:
            return []  # Its id derives from the command's: a retry, however late.
        return [
            SessionCreated(
                branch_id=first_branch(session.id),
                title=command.title,
                system_prompt=command.system_prompt,
                model=command.model,
                attended=command.attended,
            )
        ]
    if not session.exists:
        raise UnknownSession(session.id)
    match command:
        case MoveHead(branch_id=branch, fork=fork):
            return [HeadMoved(branch_id=branch, fork=fork)]
        case NameBranch(branch_id=branch, name=name):
            if name is not None:
                check_name(name, limits)
                owner = session.names.get(name, branch)
                if owner != branch:
                    raise NameTaken(name, owner)
            return [BranchNamed(branch_id=branch, name=name)]
        case _:
            assert_never(command)


def evolve(session: Session, recorded: Recorded) -> None:
    for event in recorded.append.events:
        match event:
            case SessionCreated():
                session.exists = True
                session.title = event.title
                session.system_prompt = event.system_prompt
                session.model = event.model
                session.attended = event.attended
                session.head, session.reserved_at = event.branch_id, session.root
            case HeadMoved():
                session.head, session.reserved_at = event.branch_id, event.fork
            case BranchNamed():
                former = session.name_of(event.branch_id)
                if former is not None:
                    del session.names[former]
                if event.name is not None:
                    session.names[event.name] = event.branch_id
            case _:
                raise AssertionError(f"{type(event).__name__} on a session's subject")
    # Nothing else would tell a retried checkout from a new one; people's commands are few.
    session.commands[recorded.append.command_id] = recorded.sequence
    session.version = recorded.sequence


def first_branch(session: str) -> str:
    return ids.branch_id(session, "first")


def check_name(name: str, limits: Limits) -> None:
    """Raises Invalid: a name must not be mistaken for an address of another form."""
    if not 1 <= len(name) <= limits.name_chars:
        raise Invalid(f"a branch name has 1 to {limits.name_chars} characters, not {len(name)}")
    if not name.isprintable() or name != name.strip():
        raise Invalid("a branch name holds printable characters and no spaces at its ends")
    if ":" in name or ids.parse(name) is not None:
        raise Invalid("a branch name holds no ':' and does not look like an id")
