"""Ids carry where they belong, so that a command finds its subject without an index.

    session   s<12>                    sk3v9x0q2m7ra
    branch    <session>-b<8>           its last part is the branch token of the subject
    node      <branch>-n<11>           likewise turn -t<11>, message -m<11>, wait -w<11>,
                                       pause -p<11>
    ROOT      <session>-_-root         the session's own subject has the branch token "_"

Every id is derived from the id of the command that made it, so a retry makes the same ones.
A message and its wait carry the branch of the sender; a node and a turn the branch that they
stand on.
"""

import re
from hashlib import blake2b
from typing import NamedTuple

SESSION_TOKEN = "_"
_ALPHABET = "abcdefghijklmnopqrstuvwxyz234567"
_ID = re.compile(
    r"(?P<session>s[a-z2-7]{12})"
    r"(?:-(?P<branch>_|b[a-z2-7]{8})(?:-(?P<local>root|[ntmwp][a-z2-7]{11}))?)?"
)
_KINDS = {"n": "node", "t": "turn", "m": "message", "w": "wait", "p": "pause", "r": "node"}


class Ref(NamedTuple):
    """The parts of an id. `branch` is a whole branch id, not the token alone."""

    kind: str  # session, branch, node, turn, message, wait or pause
    session: str
    branch: str


def derive(*parts: str, length: int = 26) -> str:
    """A stable token of `length` characters (5 bits each) from the parts and their order."""
    digest = blake2b(digest_size=20)
    for part in parts:
        raw = part.encode()
        digest.update(len(raw).to_bytes(4, "big"))
        digest.update(raw)
    number = int.from_bytes(digest.digest(), "big")
    return "".join(_ALPHABET[number >> (5 * i) & 31] for i in range(length))


def session_id(command_id: str) -> str:
    return "s" + derive("session", command_id, length=12)


def branch_id(session: str, cause: str) -> str:
    return f"{session}-b{derive('branch', cause, length=8)}"


def node_id(branch: str, *cause: str) -> str:
    return f"{branch}-n{derive('node', branch, *cause, length=11)}"


def turn_id(branch: str, *cause: str) -> str:
    return f"{branch}-t{derive('turn', branch, *cause, length=11)}"


def message_id(branch: str, *cause: str) -> str:
    return f"{branch}-m{derive('message', branch, *cause, length=11)}"


def wait_id(message: str) -> str:
    """The wait for a message's reply: the message's own id, in the kind of a wait."""
    head, _, local = message.rpartition("-")
    return f"{head}-w{local[1:]}"


def message_of(wait: str) -> str:
    """The message whose reply a wait waits for."""
    head, _, local = wait.rpartition("-")
    return f"{head}-m{local[1:]}"


def pause_id(turn: str, nth: int) -> str:
    """The wait of a turn for nothing but time, after the nth of its model calls that failed."""
    branch = branch_of(turn)
    return f"{branch}-p{derive('pause', turn, str(nth), length=11)}"


def root_id(session: str) -> str:
    return f"{session}-{SESSION_TOKEN}-root"


def parse(text: str) -> Ref | None:
    """What an id names, or None when the text is none of ours."""
    match = _ID.fullmatch(text)
    if match is None:
        return None
    session, branch, local = match["session"], match["branch"], match["local"]
    if branch is None:
        return Ref("session", session, "")
    if (branch == SESSION_TOKEN) != (local == "root"):
        return None
    kind = _KINDS[local[0]] if local else "branch"
    return Ref(kind, session, f"{session}-{branch}")


def of_kind(text: str, kind: str) -> Ref | None:
    ref = parse(text)
    return ref if ref is not None and ref.kind == kind else None


def session_of(any_id: str) -> str:
    return any_id.partition("-")[0]


def branch_of(any_id: str) -> str:
    """The branch that a node, turn, message or wait belongs to; a branch's own id."""
    return "-".join(any_id.split("-", 2)[:2])


def token_of(branch: str) -> str:
    """The branch token of a subject."""
    return branch.split("-", 2)[1]


def short(any_id: str) -> str:
    """Eight characters that tell an id apart: its end, since ids of a session begin alike."""
    return any_id[-8:]
