"""What is decided for a branch's turn: claims and their epochs, steps, suspension, ends."""

from hashlib import blake2b

from plait.events import ids
from plait.events.branch.sends import check_deadline, check_send
from plait.events.branch.state import Branch, Entry, Turn
from plait.events.commands import CancelTurn, ClaimTurn, RecordAnswer, RecordFailure, RecordResults
from plait.events.errors import (
    BudgetExceeded,
    Invalid,
    PlaitError,
    StaleClaim,
    TurnAlreadyEnded,
    UnknownTurn,
)
from plait.events.limits import Limits
from plait.events.types import (
    BranchEvent,
    Epoch,
    MessageSent,
    ModelAnswered,
    ModelFailed,
    NodesPlaced,
    ToolReturned,
    TurnClaimed,
    TurnEnded,
    TurnError,
    TurnRequested,
    TurnStatus,
    TurnSuspended,
    Usage,
    WaitEnded,
)

JITTER = 0.25  # of a pause, at most


def claim(command: ClaimTurn, branch: Branch) -> list[BranchEvent]:
    turn_id, (n, _) = command.turn_id, command.epoch
    status = branch.turn_status(turn_id)
    turn = branch.turn
    if status is None:
        raise StaleClaim(turn_id, "not requested as far as this log goes", settled=False)
    if turn is None or turn.id != turn_id:
        raise StaleClaim(turn_id, f"has ended: {status}", settled=True)
    if n < turn.n or (n == turn.n and turn.status == "suspended"):
        raise StaleClaim(turn_id, f"is {turn.status} for the {turn.n}. time", settled=True)
    if n > turn.n:
        raise StaleClaim(turn_id, f"was runnable {turn.n} times, not {n}", settled=False)
    if command.epoch <= turn.epoch:
        raise StaleClaim(turn_id, f"is claimed under {turn.epoch}", settled=False)
    if turn.node_id is not None:
        return [
            TurnClaimed(
                turn_id=turn_id,
                epoch=command.epoch,
                worker=command.worker,
                node_id=turn.node_id,
            )
        ]
    return [
        TurnClaimed(
            turn_id=turn_id,
            epoch=command.epoch,
            worker=command.worker,
            node_id=ids.node_id(branch.id, turn_id),
            after=branch.tip,
            pins=command.pins,
            consumed=tuple(
                entry.message_id for entry in branch.unread if entry.message_id is not None
            ),
        )
    ]


def record_answer(command: RecordAnswer, branch: Branch, limits: Limits) -> list[BranchEvent]:
    turn = fenced(branch, command.turn_id, command.epoch)
    if turn.calls:
        raise Invalid(f"turn {turn.id} still has calls without a result")
    if len(command.calls) > limits.turn_calls:
        raise BudgetExceeded(
            "tool calls of one model answer", len(command.calls), limits.turn_calls
        )
    step = turn.steps + 1
    answered = ModelAnswered(
        turn_id=turn.id,
        epoch=command.epoch,
        step=step,
        context=command.context,
        text=command.text,
        calls=command.calls,
        usage=command.usage,
        finish=command.finish,
    )
    if not command.calls:
        return [answered, *end_turn(branch, "completed")]
    passed = _limit_passed(turn, step, command.usage, limits)
    if passed is not None:
        return [answered, *end_turn(branch, "error", error=_turn_error(passed))]
    return [answered]


def _limit_passed(turn: Turn, step: int, usage: Usage, limits: Limits) -> BudgetExceeded | None:
    """Why no further model call follows this answer."""
    output = turn.output_tokens + usage.output_tokens
    total = turn.total_tokens + usage.input_tokens + usage.output_tokens
    for what, count, limit in (
        ("model calls of this turn", step, limits.turn_steps),
        ("tokens written by this turn", output, limits.turn_output_tokens),
        ("tokens read and written by this turn", total, limits.turn_total_tokens),
    ):
        if count >= limit:
            return BudgetExceeded(what, count, limit)
    return None


def record_failure(command: RecordFailure, branch: Branch, limits: Limits) -> list[BranchEvent]:
    turn = fenced(branch, command.turn_id, command.epoch)
    if turn.calls:
        raise Invalid(f"turn {turn.id} still has calls without a result")
    nth, in_a_row = turn.failed + 1, turn.failed_in_a_row + 1
    again = command.retry and in_a_row < limits.model_attempts
    error = command.error
    if command.retry and not again:
        error = TurnError(error.code, f"{error.message}; given up after {in_a_row} calls")
    failed = ModelFailed(
        turn_id=turn.id,
        epoch=command.epoch,
        step=turn.steps + 1,
        nth=nth,
        context=command.context,
        error=error,
        wait_id=ids.pause_id(turn.id, nth) if again else None,
        deadline=command.at + _pause_ms(command, turn, limits) if again else None,
    )
    if again:
        return [failed, TurnSuspended(turn_id=turn.id, epoch=command.epoch)]
    return [failed, *end_turn(branch, "error", error=error)]


def _pause_ms(command: RecordFailure, turn: Turn, limits: Limits) -> int:
    """What the provider asked for, else twice as long as before. Always a bit more, by a share
    that is each turn's own: those that failed together do not come back together."""
    if command.after_s is not None:
        pause_s = min(max(command.after_s, limits.model_pause_s), limits.wait_max_s)
    else:
        doubled = limits.model_pause_s * 2.0**turn.failed_in_a_row
        pause_s = min(doubled, limits.model_pause_max_s)
    seed = blake2b(f"{turn.id}.{turn.failed}".encode(), digest_size=2).digest()
    share = int.from_bytes(seed, "big") / 0xFFFF
    return int(pause_s * 1000 * (1 + JITTER * share)) + 1


def record_results(command: RecordResults, branch: Branch, limits: Limits) -> list[BranchEvent]:
    turn = fenced(branch, command.turn_id, command.epoch)
    left = dict.fromkeys(turn.to_run())
    waiting = len(turn.waits)
    events: list[BranchEvent] = []
    for result in command.results:
        if result.node_id not in left:
            continue  # It has its result, or waits: the first one stands.
        del left[result.node_id]
        events.append(
            ToolReturned(
                turn_id=turn.id,
                epoch=command.epoch,
                node_id=result.node_id,
                result=result.result,
                status=result.status,
            )
        )
    for send in command.sends:
        if send.node_id not in left:
            continue
        del left[send.node_id]
        check_send(branch, send.target, turn.hops + 1, limits)
        check_deadline(send.deadline, command.at, limits)
        message = ids.message_id(branch.id, send.node_id)
        events.append(
            MessageSent(
                message_id=message,
                target=send.target,
                content=send.content,
                from_node=send.node_id,
                sender=send.sender,
                root=turn.root,
                hops=turn.hops + 1,
                call=send.node_id,
                deadline=send.deadline,
            )
        )
        if send.deadline is not None:
            waiting += 1
        elif send.result is None:
            raise Invalid(f"the send of call {send.node_id} has neither a deadline nor a result")
        else:
            events.append(
                ToolReturned(
                    turn_id=turn.id,
                    epoch=command.epoch,
                    node_id=send.node_id,
                    result=send.result,
                )
            )
    if command.suspend and waiting and not left:
        events.append(TurnSuspended(turn_id=turn.id, epoch=command.epoch))
    return events


def cancel(command: CancelTurn, branch: Branch) -> list[BranchEvent]:
    status = branch.turn_status(command.turn_id)
    if status is None:
        raise UnknownTurn(command.turn_id)
    if command.turn_id in branch.ended:
        raise TurnAlreadyEnded(command.turn_id, status)
    return end_turn(branch, "cancelled")


def end_turn(
    branch: Branch,
    status: TurnStatus,
    *,
    error: TurnError | None = None,
    passed: bool = False,
    dropped: tuple[str, ...] = (),
    then: list[Entry] | None = None,
) -> list[BranchEvent]:
    """Ends its waits, settles or passes its debts, places the inbox, requests the next (P7)."""
    turn = branch.turn
    assert turn is not None
    events: list[BranchEvent] = [
        WaitEnded(
            wait_id=wait, outcome="cancelled", call=call, reason=f"turn {turn.id} ended: {status}"
        )
        for wait, call in turn.waits.items()
    ]
    events.append(
        TurnEnded(
            turn_id=turn.id,
            status=status,
            error=error,
            answered=() if passed else tuple(branch.owed),
            passed=passed,
            dropped=dropped,
        )
    )
    entries = [*branch.inbox.values()] if then is None else then
    if not entries:
        return events
    events.append(NodesPlaced(tuple(entry.node_id for entry in entries), after=branch.tip))
    asking = [entry for entry in entries if entry.turn_id is not None]
    if asking:
        assert asking[0].turn_id is not None
        events.append(
            TurnRequested(
                turn_id=asking[0].turn_id,
                root=asking[0].root,
                interactive=any(entry.user for entry in asking),
            )
        )
    return events


def fenced(branch: Branch, turn_id: str, epoch: Epoch) -> Turn:
    """The running turn, or StaleClaim for any epoch but its newest (P5)."""
    turn = branch.turn
    if turn is None or turn.id != turn_id:
        status = branch.ended.get(turn_id, "unknown")
        raise StaleClaim(turn_id, f"is no longer running: {status}", settled=True)
    if turn.epoch != epoch or turn.status != "running":
        why = f"is {turn.status} under {turn.epoch}, not running under {epoch}"
        raise StaleClaim(turn_id, why, settled=False)
    return turn


def _turn_error(error: PlaitError) -> TurnError:
    return TurnError(code=error.code, message=str(error))
