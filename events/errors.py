"""Errors carry data and say what to do next; retryable or final is their type.

`Code` lists every stable code that a client can meet; `services.gateway.problems` turns each
into its HTTP answer.
"""

from enum import StrEnum
from typing import ClassVar

NAMES_LISTED = 20  # in one error
SHOWN_CHARS = 100  # of what a caller gave, repeated in an error


def shown(given: str) -> str:
    """Quoted, and cut where it is long."""
    return repr(given if len(given) <= SHOWN_CHARS else given[:SHOWN_CHARS] + "…")


class Code(StrEnum):
    INVALID = "invalid_request"
    UNKNOWN_SESSION = "unknown_session"
    UNKNOWN_BRANCH = "unknown_branch"
    UNKNOWN_NODE = "unknown_node"
    UNKNOWN_TURN = "unknown_turn"
    UNKNOWN_MESSAGE = "unknown_message"
    UNKNOWN_PROVIDER = "unknown_provider"
    AMBIGUOUS_BRANCH = "ambiguous_branch"
    BRANCH_ARCHIVED = "branch_archived"
    BRANCH_MERGED = "branch_merged"
    RESERVATION_GONE = "reservation_gone"
    NAME_TAKEN = "name_taken"
    NOT_A_TIP = "not_a_tip"
    BROKEN_EDGE = "broken_edge"
    SELF_SEND = "self_send"
    WAIT_CYCLE = "wait_cycle"
    BUDGET_EXCEEDED = "budget_exceeded"
    INBOX_FULL = "inbox_full"
    BRANCH_BUSY = "branch_busy"
    TURN_ENDED = "turn_ended"
    TURN_ACTIVE = "turn_active"
    STALE_CLAIM = "stale_claim"
    TEXT_TOO_LONG = "text_too_long"
    NO_SECRET = "no_secret"
    IDEMPOTENCY_MISMATCH = "idempotency_key_mismatch"
    BAD_POSITION = "bad_position"
    UNAUTHORIZED = "unauthorized"
    NOT_FOUND = "not_found"
    METHOD_NOT_ALLOWED = "method_not_allowed"
    READ_MODEL_BEHIND = "read_model_behind"
    UNAVAILABLE = "unavailable"
    CONFLICT = "conflict"
    INTERNAL = "internal"


class ModelFailure(StrEnum):
    """Why a model gave no answer: stable codes of a turn's failed steps, and of its error."""

    # asked again later, up to a bound
    RATE_LIMITED = "rate_limited"
    PROVIDER_UNAVAILABLE = "provider_unavailable"
    STALLED = "stalled"
    CUT_OFF = "cut_off"
    MALFORMED = "malformed"
    # final
    BAD_KEY = "bad_key"
    BAD_REQUEST = "bad_request"
    CONTENT_FILTER = "content_filter"
    CONTEXT_TOO_LONG = "context_too_long"
    QUOTA_EXCEEDED = "quota_exceeded"
    UNKNOWN_MODEL = "unknown_model"
    MODEL_ERROR = "model_error"


class PlaitError(Exception):
    """The root. `code` is stable; the text says what is wrong and what to do."""

    code: ClassVar[Code] = Code.INTERNAL


class Final(PlaitError):
    """Asking again changes nothing."""


class Retryable(PlaitError):
    """The same call may succeed later."""


class VersionConflict(Retryable):
    """Another writer appended first: load again and decide again (P4)."""

    code = Code.CONFLICT

    def __init__(self, last: int | None) -> None:
        super().__init__(f"another append came first (last sequence: {last or 'unknown'})")
        self.last = last


class Unavailable(Retryable):
    """The log or the read models do not answer."""

    code = Code.UNAVAILABLE


class LogGone(Unavailable):
    def __init__(self, stream: str) -> None:
        super().__init__(
            f"the log (stream {stream}) is gone: restore it from a backup, or restart the services "
            "to begin a new one"
        )


class ReadModelBehind(Retryable):
    code = Code.READ_MODEL_BEHIND


class Invalid(Final):
    code = Code.INVALID


class TextTooLong(Final):
    code = Code.TEXT_TOO_LONG

    def __init__(self, size: int, limit: int) -> None:
        super().__init__(f"the text has {size} bytes; at most {limit} are allowed: shorten it")


class AppendTooLarge(Final):
    code = Code.INVALID

    def __init__(self, size: int, limit: int) -> None:
        super().__init__(
            f"the append has {size} bytes, and the log takes {limit}: ask for less in one command"
        )


class UnknownSession(Final):
    code = Code.UNKNOWN_SESSION

    def __init__(self, session: str) -> None:
        super().__init__(f"there is no session {shown(session)}")


class UnknownBranch(Final):
    code = Code.UNKNOWN_BRANCH

    def __init__(
        self, branch: str, known: tuple[str, ...] = (), *, are: str = "the live branches are"
    ) -> None:
        listed = ", ".join(known[:NAMES_LISTED])
        more = f" and {len(known) - NAMES_LISTED} more" if len(known) > NAMES_LISTED else ""
        hint = f"; {are} {listed}{more}" if known else ""
        super().__init__(f"there is no branch {shown(branch)}{hint}")


class ReservationGone(Final):
    code = Code.RESERVATION_GONE

    def __init__(self, branch: str) -> None:
        super().__init__(
            f"branch {branch} was never opened and HEAD has moved elsewhere: "
            "check out its node again, or post with `after`"
        )


class UnknownNode(Final):
    code = Code.UNKNOWN_NODE

    def __init__(self, node: str) -> None:
        super().__init__(f"there is no node {shown(node)} here")


class UnknownTurn(Final):
    code = Code.UNKNOWN_TURN

    def __init__(self, turn: str) -> None:
        super().__init__(f"there is no turn {shown(turn)}")


class UnknownMessage(Final):
    code = Code.UNKNOWN_MESSAGE

    def __init__(self, message: str) -> None:
        super().__init__(f"there is no message {shown(message)}")


class UnknownProvider(Final):
    code = Code.UNKNOWN_PROVIDER

    def __init__(self, name: str, known: tuple[str, ...] = ()) -> None:
        hint = f"; there are {', '.join(known)}" if known else ""
        super().__init__(f"there is no provider {shown(name)}{hint}")


class NoSecret(Final):
    code = Code.NO_SECRET

    def __init__(self) -> None:
        super().__init__(
            "keys are stored encrypted, and there is nothing to encrypt them with: set "
            "PLAIT_SECRET to 32 random bytes in base64 (`openssl rand -base64 32`), the same for "
            "all processes, and start them again"
        )


class WrongSecret(Final):
    """What is sealed does not open."""

    code = Code.NO_SECRET

    def __init__(self, why: str) -> None:
        super().__init__(
            f"the stored key cannot be read ({why}): give this process the PLAIT_SECRET that it "
            "was stored under, or store the key again"
        )


class AmbiguousBranch(Final):
    code = Code.AMBIGUOUS_BRANCH

    def __init__(self, text: str, candidates: tuple[tuple[str, str], ...]) -> None:
        listed = ", ".join(f"{name} (head {head})" for name, head in candidates)
        super().__init__(f"{shown(text)} could be {listed}: use a name or a head")
        self.candidates = candidates


class BranchArchived(Final):
    code = Code.BRANCH_ARCHIVED

    def __init__(self, branch: str) -> None:
        super().__init__(f"branch {branch} is archived: restore it first, or use another")


class BranchMerged(Final):
    code = Code.BRANCH_MERGED

    def __init__(self, branch: str, into: str) -> None:
        super().__init__(f"branch {branch} was merged into {into}: use that branch")
        self.into = into


class NameTaken(Final):
    code = Code.NAME_TAKEN

    def __init__(self, name: str, branch: str) -> None:
        super().__init__(f"the name {name!r} belongs to branch {branch}: choose another")


class NotATip(Final):
    code = Code.NOT_A_TIP

    def __init__(self, node: str, tip: str) -> None:
        super().__init__(f"{node} is not the tip of its branch; the tip is {tip}")


class BrokenEdge(Final):
    """An edge that the model does not allow; the text names the node."""

    code = Code.BROKEN_EDGE


class SelfSend(Final):
    code = Code.SELF_SEND

    def __init__(self, branch: str) -> None:
        super().__init__(f"branch {branch} cannot send to itself: name another branch")


class BudgetExceeded(Final):
    code = Code.BUDGET_EXCEEDED

    def __init__(self, what: str, count: int, limit: int) -> None:
        super().__init__(f"{what}: {count}, and at most {limit} are allowed")


class InboxFull(Retryable):
    code = Code.INBOX_FULL

    def __init__(self, branch: str, limit: int) -> None:
        super().__init__(
            f"the inbox of branch {branch} is full: {limit} messages there wait to be read. "
            "Try again when its turn has ended, or have one read them (post with run=true)"
        )


class BranchBusy(Retryable):
    code = Code.BRANCH_BUSY

    def __init__(self, branch: str, turn: str) -> None:
        super().__init__(
            f"branch {branch} is busy with turn {turn}: try again when it ends, or post with "
            "another multitask_strategy"
        )


class TurnAlreadyEnded(Final):
    code = Code.TURN_ENDED

    def __init__(self, turn: str, status: str) -> None:
        super().__init__(f"turn {turn} has already ended: {status}")
        self.status = status


class TurnStillActive(Final):
    code = Code.TURN_ACTIVE

    def __init__(self, turn: str) -> None:
        super().__init__(f"turn {turn} has not ended: cancel it, or wait")


class StaleClaim(Final):
    """Another claim of this turn is newer, or the turn is not to run: drop the work (P6)."""

    code = Code.STALE_CLAIM

    def __init__(self, turn: str, why: str, *, settled: bool) -> None:
        super().__init__(f"turn {turn}: {why}")
        self.settled = settled  # True: the work item has served its purpose and may be acked


class IdempotencyMismatch(Final):
    code = Code.IDEMPOTENCY_MISMATCH

    def __init__(self) -> None:
        super().__init__("this Idempotency-Key was used for another call: use a new key")


class BadPosition(Final):
    code = Code.BAD_POSITION

    def __init__(self, text: str, why: str) -> None:
        super().__init__(f"position {shown(text)}: {why}")


class UnknownEvent(Final):
    """The log holds an event of a newer version than this process: upgrade it."""


class Misconfigured(Final):
    """The servers are too old, lack a feature, or could lose what was acknowledged."""
