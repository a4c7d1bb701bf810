"""`?wait=`: what a call waits for, told by the log and answered from the read models.

The watch begins before the state is read, so an end in between is not missed.
"""

from plait.events import ids
from plait.events.errors import ReadModelBehind, Unavailable, UnknownBranch, UnknownTurn
from plait.events.store import Position
from plait.projections.queries import MessageView, TurnView
from plait.services.gateway.call import Call


async def turn_end(call: Call, turn_id: str, seconds: float, node_id: str = "") -> Position | None:
    """Where the turn ended; None when it has not in time. A refusal of the message `node_id`,
    which asked for it, is the end of it as well."""
    gateway = call.gateway
    names = (turn_id, node_id) if node_id else (turn_id,)
    with gateway.tail.watch(*names) as ended:
        try:
            branch = await call.of_log(gateway.handler.peek(call.tenant, ids.branch_of(turn_id)))
        except UnknownBranch:
            return None
        if turn_id in branch.ended:
            return Position(gateway.store.generation, branch.version)
        if branch.turn_status(turn_id) is None and turn_id not in branch.received.values():
            return None  # Nobody asked for it: there is nothing to wait for.
        sequence = await call.ends(ended, seconds)
    return None if sequence is None else Position(gateway.store.generation, sequence)


async def ended_turn(call: Call, turn_id: str, seconds: float, node_id: str) -> TurnView | None:
    try:
        position = await turn_end(call, turn_id, seconds, node_id)
        if position is None:
            return None
        return await call.gateway.queries.turn(call.tenant, turn_id, position)
    except (ReadModelBehind, Unavailable, UnknownTurn):
        return None  # The command stands: its answer need not fail for that.


async def answered_message(call: Call, message_id: str, seconds: float) -> MessageView | None:
    """The message when its wait has ended, one way or another."""
    gateway, wait = call.gateway, ids.wait_id(message_id)
    try:
        with gateway.tail.watch(wait) as ended:
            branch = await call.of_log(gateway.handler.peek(call.tenant, ids.branch_of(message_id)))
            sequence: int | None = branch.version
            if branch.waits[wait].outcome is None:
                sequence = await call.ends(ended, seconds)
        if sequence is None:
            return None
        return await gateway.queries.message(
            call.tenant, message_id, Position(gateway.store.generation, sequence)
        )
    except (ReadModelBehind, Unavailable):
        return None  # Likewise.
