"""How a branch is addressed, wherever a target is taken: a name, a node, or a branch's own id.

research              an exact name in the caller's session, else the one that begins so
<session>:research    the same in another session of the tenant
<node>                the branch that it lies on, as it is now: not a place to fork
<branch>              itself
abcdefgh              the short form of a branch without a name: the end of its head's id
"""

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple
from weakref import WeakKeyDictionary

from plait.events import ids
from plait.events.branch import Branch, check_open
from plait.events.errors import (
    AmbiguousBranch,
    Invalid,
    PlaitError,
    UnknownBranch,
    UnknownNode,
)
from plait.events.handler import Handler
from plait.events.subjects import stream_of
from plait.events.types import ModelAnswered

LISTED = 20  # names or candidates in an error
LOADED = 1_000  # branches of a session that one address may make us look at
FORKS_CACHED = 100_000

_SHORT = re.compile(r"[a-z2-7]{8}")


class UnopenedBranch(UnknownBranch):
    """HEAD reserves it, and it opens with its first message."""

    def __init__(self, branch: str) -> None:
        PlaitError.__init__(
            self, f"branch {branch} has no message yet: post one to it first, or name another"
        )


async def resolve(handler: Handler, tenant: str, session_id: str, text: str) -> str:
    """The id of the one branch that `text` names, seen from `session_id`; it takes messages.

    Raises UnknownSession, UnknownBranch, UnknownNode, AmbiguousBranch, BranchArchived,
    BranchMerged, and Invalid for a session's id alone; what is another tenant's is unknown.
    """
    session_part, colon, rest = text.partition(":")
    if colon and ids.of_kind(session_part, "session") is not None:
        session_id, text = session_part, rest
    ref = ids.parse(text)
    if ref is not None and ref.kind == "session":
        raise Invalid(f"{text} is a session: name one of its branches, as in {text}:<name>")
    if ref is not None and ref.kind in ("branch", "node"):
        if colon and ref.session != session_id:
            raise UnknownBranch(text)
        await handler.session(tenant, ref.session)
        if ref.kind == "branch":
            return await _open(handler, tenant, text)
        return await _of_node(handler, tenant, ref.session, text)
    session = await handler.session(tenant, session_id)
    exact = session.names.get(text)
    if exact is not None:
        return await _open(handler, tenant, exact)
    if text:
        found = await _by_prefix(handler, tenant, session_id, text)
        if found is None and _SHORT.fullmatch(text):
            found = await _by_short(handler, tenant, session_id, text)
        if found is not None:
            return found
    names = list((await handler.session(tenant, session_id)).names.items())[:LISTED]
    live = [name for name, branch in names if await _is_live(handler, tenant, branch)]
    raise UnknownBranch(text, tuple(live))


async def label(
    handler: Handler, tenant: str, branch_id: str, *, seen_from: str | None = None
) -> str:
    """How the branch is shown: its name, or the end of its head's id; from another session,
    behind its own session's id, so that it can be addressed so."""
    session_id = ids.session_of(branch_id)
    tip = (await handler.branch(tenant, branch_id)).tip
    shown = (await handler.session(tenant, session_id)).label_of(branch_id, tip)
    return shown if seen_from in (None, session_id) else f"{session_id}:{shown}"


async def _open(handler: Handler, tenant: str, branch_id: str) -> str:
    """The branch's id. Raises when it takes no messages."""
    branch = await handler.peek(tenant, branch_id)
    if not branch.exists:
        session = await handler.session(tenant, ids.session_of(branch_id))
        if session.head == branch_id and session.reserved_at is not None:
            raise UnopenedBranch(branch_id)
    check_open(branch)
    return branch_id


async def _by_prefix(handler: Handler, tenant: str, session_id: str, text: str) -> str | None:
    session = await handler.session(tenant, session_id)
    begins = [owner for name, owner in session.names.items() if name.startswith(text)]
    live = [branch for branch in begins[:LOADED] if await _is_live(handler, tenant, branch)]
    if len(live) > 1:
        raise await _ambiguous(handler, tenant, text, live)
    if not live and len(begins) == 1:
        return await _open(handler, tenant, begins[0])
    return live[0] if live else None


async def _by_short(handler: Handler, tenant: str, session_id: str, text: str) -> str | None:
    """A head's short form first; then that of any message or turn that was a head once."""
    opened = (await handler.store.branches(tenant, session_id))[:LOADED]
    branches = [branch_id for branch_id in opened if await _is_live(handler, tenant, branch_id)]
    for matches in (_head_ends, _any_node_ends):
        found = [b for b in branches if matches(await handler.peek(tenant, b), text)]
        if len(found) == 1:
            return found[0]
        if found:
            raise await _ambiguous(handler, tenant, text, found)
    return None


def _head_ends(branch: Branch, text: str) -> bool:
    return branch.tip.endswith(text)


def _any_node_ends(branch: Branch, text: str) -> bool:
    return any(node.endswith(text) for node in branch.nodes)


async def _is_live(handler: Handler, tenant: str, branch_id: str) -> bool:
    branch = await handler.peek(tenant, branch_id)
    return branch.exists and not branch.archived and branch.merged_into is None


async def _of_node(handler: Handler, tenant: str, session_id: str, node: str) -> str:
    root = ids.root_id(session_id)
    own: str | None = None
    if node != root:
        own = ids.branch_of(node)
        node = await _standing(handler, tenant, own, node)
    opened = (await handler.store.branches(tenant, session_id))[:LOADED]
    lying = [branch_id for branch_id in opened if await _lies_on(handler, tenant, node, branch_id)]
    live = [branch_id for branch_id in lying if await _is_live(handler, tenant, branch_id)]
    tips = [branch for branch in live if (await handler.peek(tenant, branch)).tip == node]
    if own in tips or len(tips) == 1:
        # A branch that was opened at this tip and has no node yet does not take it away.
        return own if own is not None and own in tips else tips[0]
    if len(live) > 1:
        raise await _ambiguous(handler, tenant, node, tips or live)
    if live:
        return live[0]
    return await _open(handler, tenant, own if own is not None else root)


async def _standing(handler: Handler, tenant: str, branch_id: str, node: str) -> str:
    """The node as one of the conversation: a tool call stands for its turn. Raises UnknownNode."""
    branch = await handler.peek(tenant, branch_id)
    if branch.has(node) or node in branch.inbox:
        return node
    for recorded in await handler.store.read(stream_of(tenant, branch_id)):
        for event in recorded.append.events:
            if isinstance(event, ModelAnswered) and any(c.node_id == node for c in event.calls):
                return ids.node_id(branch_id, event.turn_id)
    raise UnknownNode(node)


# -- forks -----------------------------------------------------------------------------------


class _Fork(NamedTuple):
    """Where a branch begins: never changes. `place` counts the fork's place on its branch."""

    node: str
    place: int


# By handler, since another log may hold other branches of the same ids.
_forks: "WeakKeyDictionary[Handler, dict[tuple[str, str], _Fork]]" = WeakKeyDictionary()


async def _lies_on(handler: Handler, tenant: str, node: str, branch_id: str) -> bool:
    """Whether the walk from the branch's tip to ROOT passes through the node."""
    if node == ids.root_id(ids.session_of(branch_id)):
        return True
    own = ids.branch_of(node)
    place: int | None = None
    while branch_id != own:
        fork = await _fork(handler, tenant, branch_id)
        branch_id, place = ids.branch_of(fork.node), fork.place
        if branch_id.endswith(f"-{ids.SESSION_TOKEN}"):
            return False
    if place is None:
        return True
    return _place(await handler.peek(tenant, own), node) <= place


async def _fork(handler: Handler, tenant: str, branch_id: str) -> _Fork:
    known = _forks.setdefault(handler, {})
    fork = known.get((tenant, branch_id))
    if fork is None:
        node = (await handler.branch(tenant, branch_id)).fork
        place = -1
        if not node.endswith("-root"):
            parent = ids.branch_of(node)
            node = await _standing(handler, tenant, parent, node)
            place = _place(await handler.peek(tenant, parent), node)
        while len(known) >= FORKS_CACHED:
            del known[next(iter(known))]
        fork = known[tenant, branch_id] = _Fork(node, place)
    return fork


def _place(branch: Branch, node: str) -> int:
    """A message in the inbox comes after all nodes."""
    known = enumerate(branch.nodes)
    return next((place for place, other in known if other == node), len(branch.nodes))


async def _ambiguous(
    handler: Handler, tenant: str, text: str, branches: Iterable[str]
) -> AmbiguousBranch:
    candidates: Sequence[tuple[str, str]] = [
        (await label(handler, tenant, b), (await handler.peek(tenant, b)).tip) for b in branches
    ]
    return AmbiguousBranch(text, tuple(candidates[:LISTED]))
