"""What the addresses in a call mean, resolved from the log: branches, forks and senders (P2)."""

from typing import NamedTuple

from msgspec import Struct

from plait.events import addressing, ids
from plait.events.errors import (
    BranchArchived,
    Invalid,
    ReservationGone,
    UnknownBranch,
    UnknownNode,
    shown,
)
from plait.events.handler import Handler
from plait.events.session import Session, first_branch
from plait.services.gateway.shapes import NewMessage


class NotGoneOnFrom(UnknownNode):
    """A node that exists, perhaps, and from which no conversation goes on."""

    def __init__(self, node: str, why: str) -> None:
        Exception.__init__(self, f"{node}: {why}")


class Home(NamedTuple):
    """A node's place: its branch, whether it is the tip there, and its predecessor."""

    branch: str
    is_tip: bool
    predecessor: str


class PostPlan(Struct, frozen=True):
    """`fork` opens `branch` if it is not open. With `tip`, the post goes to `branch` only while
    that is its tip, and else to the branch derived from the command, which forks at `tip`."""

    branch: str
    fork: str | None = None
    tip: str | None = None


class Addresses:
    def __init__(self, handler: Handler) -> None:
        self._handler = handler

    async def of_post(
        self, tenant: str, session_id: str, body: NewMessage, command_id: str
    ) -> PostPlan:
        if sum(given is not None for given in (body.branch, body.after, body.replaces)) > 1:
            raise Invalid("give one of `branch`, `after` and `replaces`, not several")
        session = await self._handler.session(tenant, session_id)
        derived = ids.branch_id(session_id, command_id)
        if body.after is not None:
            home = await self.home(tenant, session, body.after)
            if not home.is_tip:
                return PostPlan(derived, fork=body.after)
            unopened = session.root if body.after == session.root else None
            return PostPlan(home.branch, fork=unopened, tip=body.after)
        if body.replaces is not None:
            home = await self.home(tenant, session, body.replaces)
            if not home.predecessor:
                raise Invalid("ROOT cannot be replaced: post with `after`")
            return PostPlan(derived, fork=home.predecessor)
        head, fork = session.head, session.reserved_at
        if body.branch is None:
            return PostPlan(head, fork=fork)
        if session.names.get(body.branch, body.branch) == head:
            if (await self._handler.peek(tenant, head)).archived:
                raise BranchArchived(shown(body.branch))
            return PostPlan(head, fork=fork)
        return PostPlan(await self.open_branch(tenant, session_id, body.branch))

    async def head(self, tenant: str, session_id: str, address: str) -> str:
        """The node whose context is asked for: itself, the tip of a branch, or without an address
        that of HEAD's. Raises what addressing does, and ReservationGone."""
        session = await self._handler.session(tenant, session_id)
        ref = ids.of_kind(address, "node")
        if ref is not None:
            if ref.session != session_id:
                raise UnknownNode(address)
            return address
        branch = session.names.get(address, address) or session.head
        if branch != session.head:
            by_name = ids.of_kind(branch, "branch") is None
            branch = await (
                self.open_branch(tenant, session_id, address)
                if by_name
                else self.known(tenant, session, branch)  # also an archived one
            )
        state = await self._handler.peek(tenant, branch)
        return state.tip if state.exists else session.reserved_at or session.root

    async def sender(
        self, tenant: str, session_id: str, given: str | None
    ) -> tuple[str, str | None]:
        """The sending branch and, when a node was given, that node."""
        session = await self._handler.session(tenant, session_id)
        head = session.head
        if given is None or session.names.get(given, given) == head:
            if not (await self._handler.peek(tenant, head)).exists:
                raise Invalid(f"branch {head} has no message yet: post one, or name another `from`")
            return head, None
        if ids.of_kind(given, "node") is None:
            return await self.open_branch(tenant, session_id, given), None
        return (await self.home(tenant, session, given)).branch, given

    async def open_branch(self, tenant: str, session_id: str, address: str) -> str:
        """An open branch of this session. Raises what addressing does, and ReservationGone."""
        if ids.of_kind(address, "branch") is not None:
            state = await self._handler.peek(tenant, address)
            if not state.exists and ids.session_of(address) == session_id:
                raise ReservationGone(address)
        branch = await self.resolve(tenant, session_id, address)
        if ids.session_of(branch) != session_id:
            raise UnknownBranch(address)
        return branch

    async def resolve(self, tenant: str, session_id: str, address: str) -> str:
        """As addressing does; a refusal names the branch as the caller did."""
        try:
            return await addressing.resolve(self._handler, tenant, session_id, address)
        except BranchArchived as error:
            raise (error if address in str(error) else BranchArchived(shown(address))) from None

    async def known(self, tenant: str, session: Session, address: str) -> str:
        """A branch by its exact name or its id, archived or not; also the one that HEAD reserves.
        Raises UnknownBranch and ReservationGone."""
        branch = session.names.get(address, address)
        if branch == session.head:
            return branch
        ref = ids.of_kind(branch, "branch")
        if ref is None or ref.session != session.id:
            raise UnknownBranch(address, tuple(session.names), are="the names are")
        if not (await self._handler.peek(tenant, branch)).exists:
            raise ReservationGone(branch)
        return branch

    async def home(self, tenant: str, session: Session, node: str) -> Home:
        """Where a node is that a conversation can go on from. Raises UnknownNode."""
        ref = ids.of_kind(node, "node")
        if ref is None or ref.session != session.id:
            raise UnknownNode(node)
        if node == session.root:
            first = first_branch(session.id)
            # Until something was posted, to go on from ROOT is to open the session's first branch.
            opened = (await self._handler.peek(tenant, first)).exists
            return Home(first, not opened, "")
        state = await self._handler.peek(tenant, ref.branch)
        if not state.exists:
            raise UnknownNode(node)
        if not state.has(node):
            if node in state.inbox:
                why = "it still waits in its branch's inbox: post to the branch itself"
            else:
                why = "no user or assistant node: go on from one of those, or from ROOT"
            raise NotGoneOnFrom(node, why)
        return Home(state.id, node == state.tip, state.nodes[node])
