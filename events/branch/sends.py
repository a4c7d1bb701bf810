"""What is decided for messages that a branch sends by hand, and for the ends of its waits."""

from plait.events import ids
from plait.events.branch.state import Branch, check_open
from plait.events.commands import EndWait, SendMessage
from plait.events.errors import BrokenEdge, BudgetExceeded, Invalid, SelfSend
from plait.events.limits import Limits
from plait.events.types import BranchEvent, MessageSent, ReplyLate, TurnResumed, WaitEnded


def check_send(branch: Branch, target: str, hops: int, limits: Limits) -> None:
    """What refuses a send before it is recorded: oneself, and a chain that is too long (P16)."""
    if target == branch.id:
        raise SelfSend(branch.id)
    if hops > limits.chain_hops:
        raise BudgetExceeded("messages in this chain of branches", hops, limits.chain_hops)


def check_deadline(deadline: int | None, at: int, limits: Limits) -> None:
    if deadline is not None and not at < deadline <= at + limits.wait_max_s * 1000:
        raise Invalid(f"a wait takes more than 0 and at most {limits.wait_max_s:.0f} seconds")


def send_by_hand(command: SendMessage, branch: Branch, limits: Limits) -> list[BranchEvent]:
    message = ids.message_id(branch.id, command.command_id)
    if message in branch.sequences:
        return []
    check_open(branch)
    check_send(branch, command.target, 1, limits)
    check_deadline(command.deadline, command.at, limits)
    from_node = command.from_node or branch.tip
    if from_node != branch.fork and not branch.has(from_node):
        raise BrokenEdge(f"{from_node} is not a node of branch {branch.id}")
    return [
        MessageSent(
            message_id=message,
            target=command.target,
            content=command.content,
            from_node=from_node,
            sender=command.sender,
            root=command.root or command.command_id,
            hops=1,
            deadline=command.deadline,
        )
    ]


def end_wait(command: EndWait, branch: Branch) -> list[BranchEvent]:
    wait = branch.waits.get(command.wait_id)
    if wait is None:
        raise Invalid(f"branch {branch.id} has no wait {command.wait_id}")
    answer = command.outcome in ("replied", "failed", "refused")
    if wait.outcome is None:
        ended: list[BranchEvent] = [
            WaitEnded(
                wait_id=command.wait_id,
                outcome=command.outcome,
                call=wait.call,
                content=command.content,
                reply_node=command.reply_node,
                reason=command.reason,
            )
        ]
        turn = branch.turn
        if (
            turn is not None
            and turn.status == "suspended"
            and list(turn.waits) == [command.wait_id]
        ):
            ended.append(TurnResumed(turn_id=turn.id, n=turn.n + 1))
        return ended
    if not answer or wait.late or wait.outcome not in ("expired", "cancelled"):
        return []
    return [
        ReplyLate(
            wait_id=command.wait_id,
            outcome=command.outcome,
            content=command.content,
            reply_node=command.reply_node,
            reason=command.reason,
        )
    ]
