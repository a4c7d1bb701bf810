"""What must hold whatever happens, as named functions.

Those in EACH_STEP look at an append before it is folded into the facts; those of `rest.py` at the
whole when nothing is left to do; `answers.py` at what clients are told when they are told it.
"""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from plait.events import ids
from plait.events.context import Segment, context, context_digest, holds
from plait.events.store import Recorded
from plait.events.types import (
    AnyEvent,
    BranchArchived,
    BranchNamed,
    BranchOpened,
    Content,
    HeadMoved,
    MessageReceived,
    MessageRefused,
    MessageSent,
    ModelAnswered,
    ModelFailed,
    NodesPlaced,
    ReplyLate,
    SessionCreated,
    ToolReturned,
    TurnClaimed,
    TurnEnded,
    TurnRequested,
    TurnResumed,
    TurnSuspended,
    WaitEnded,
)
from tests.simulation.facts import Facts

if TYPE_CHECKING:
    from tests.simulation.world import World

Found = Iterator[str]
CYCLE = "this wait would close a cycle"


def _branch_of(recorded: Recorded) -> str:
    return f"{recorded.stream.session}-{recorded.stream.branch}"


# -- at each append --------------------------------------------------------------------------


def a_command_acts_once(facts: Facts, recorded: Recorded, world: "World") -> Found:
    stream, _, append = recorded
    if (stream.session, stream.branch, append.command_id) in facts.commands:
        yield f"command {append.command_id} was appended a second time"
    kinds = {type(e) for e in append.events} & {MessageReceived, MessageSent, HeadMoved}
    for event in facts.by_command.get(append.command_id, ()):
        if type(event) in kinds:
            yield f"command {append.command_id} gave {type(event).__name__} on two branches"


def no_node_twice(facts: Facts, recorded: Recorded, world: "World") -> Found:
    fresh: set[str] = set()
    for node in _nodes(recorded.append.events):
        if node in facts.placed or node in fresh:
            yield f"node {node} is placed a second time"
        fresh.add(node)
    for event in recorded.append.events:
        if isinstance(event, MessageReceived) and event.node_id in facts.received:
            yield f"message {event.node_id} is received a second time"


def edges_are_legal(facts: Facts, recorded: Recorded, world: "World") -> Found:
    branch_id, session = _branch_of(recorded), recorded.stream.session
    branch = facts.branches.get(branch_id)
    tip = branch.tip if branch is not None else ""
    for event in recorded.append.events:
        match event:
            case BranchOpened(fork=fork):
                if facts.placed.get(fork, "").partition("-")[0] != session:
                    yield f"branch {branch_id} forks at {fork}, which is no node of its session"
                tip = fork
            case MessageReceived(after=str(after)) | TurnClaimed(after=str(after)):
                if after != tip:
                    yield f"node {event.node_id} follows {after}, but the tip is {tip}"
                tip = event.node_id
            case NodesPlaced():
                if event.after != tip:
                    yield f"nodes {event.node_ids} follow {event.after}, but the tip is {tip}"
                tip = event.node_ids[-1]
            case MessageSent():
                opened = branch is not None and event.from_node == branch.fork
                if not opened and ids.branch_of(event.from_node) != branch_id:
                    yield f"message {event.message_id} comes from {event.from_node}, elsewhere"
                if event.from_node not in facts.placed:
                    yield f"message {event.message_id} comes from {event.from_node}, no node"
            case _:
                pass


def every_wait_ends_once(facts: Facts, recorded: Recorded, world: "World") -> Found:
    for event in recorded.append.events:
        if isinstance(event, WaitEnded | ReplyLate):
            wait = facts.waits.get(event.wait_id)
            if wait is None:
                yield f"{event.wait_id} ends, and nobody waits"
                continue
            if isinstance(event, ReplyLate):
                if wait.ended is None or wait.ended.outcome not in ("expired", "cancelled"):
                    yield f"the answer of {event.wait_id} is late, but the wait did not run out"
                if wait.late:
                    yield f"the late answer of {event.wait_id} is kept twice"
                continue
            if wait.ended is not None:
                yield f"{event.wait_id} ends as {event.outcome} after {wait.ended.outcome}"
            if wait.call != event.call:
                yield f"{event.wait_id} ends the call {event.call} instead of {wait.call}"
            if event.outcome == "expired" and recorded.append.at < wait.deadline:
                yield f"{event.wait_id} expires before its deadline"


def answers_are_the_targets(facts: Facts, recorded: Recorded, world: "World") -> Found:
    """What a wait ends with is what the target's log says of the message (P12)."""
    for event in recorded.append.events:
        if not isinstance(event, WaitEnded | ReplyLate):
            continue
        wait = facts.waits.get(event.wait_id)
        if wait is None or event.outcome in ("expired", "cancelled"):
            continue
        if wait.message is None:
            yield f"the pause {event.wait_id} ends as {event.outcome}"
            continue
        message = facts.messages[wait.message]
        if event.outcome == "refused":
            by_cycle = (event.reason or "").startswith(CYCLE)
            if by_cycle != message.closes_cycle or (not by_cycle and message.refused is None):
                yield f"{event.wait_id} is refused, and nothing refused it: {event.reason}"
            continue
        if len(message.answered) != 1:
            yield f"{event.wait_id} ends as {event.outcome}; answered by {message.answered}"
            continue
        turn = facts.turns[message.answered[0]]
        completed = turn.status == "completed"
        if completed != (event.outcome == "replied"):
            yield f"{event.wait_id} ends as {event.outcome}, but {turn.id} as {turn.status}"
        if event.reply_node != ids.node_id(turn.branch, turn.id):
            yield f"{event.wait_id} names {event.reply_node} as its answer, not the turn's node"
        said = world.watch.text(turn.text) if completed and turn.text else None
        if (world.watch.text(event.content) if event.content else None) != said:
            yield f"{event.wait_id} is answered with another text than that of {turn.id}"


def debts_are_settled_once(facts: Facts, recorded: Recorded, world: "World") -> Found:
    branch = facts.branches.get(_branch_of(recorded))
    for event in recorded.append.events:
        if isinstance(event, TurnEnded) and branch is not None:
            for message in event.answered:
                if message not in branch.owed:
                    yield f"{event.turn_id} answers {message}, which it does not owe"
            stopped = any(isinstance(e, MessageReceived) for e in recorded.append.events)
            if stopped != event.passed:
                yield f"{event.turn_id} ends, stopped by a message or not: {stopped}"
            if event.passed and event.answered:
                yield f"{event.turn_id} passes its debts on and settles them as well"
            if not event.passed and set(event.answered) != set(branch.owed):
                yield f"{event.turn_id} ends and owes {[*branch.owed]} still"


def one_turn_at_a_time(facts: Facts, recorded: Recorded, world: "World") -> Found:
    branch = facts.branches.get(_branch_of(recorded))
    turn = branch.turn.id if branch is not None and branch.turn is not None else None
    for event in recorded.append.events:
        if isinstance(event, TurnRequested):
            if turn is not None or event.turn_id in facts.turns:
                yield f"{event.turn_id} is requested while {turn} is there, or again"
            turn = event.turn_id
        elif isinstance(event, TurnEnded):
            if turn != event.turn_id:
                yield f"{event.turn_id} ends, but the turn is {turn}"
            turn = None


def only_the_newest_claim_writes(facts: Facts, recorded: Recorded, world: "World") -> Found:
    for event in recorded.append.events:
        if isinstance(event, TurnClaimed):
            turn = facts.turns.get(event.turn_id)
            if turn is None or turn.ended or turn.status == "suspended":
                yield f"{event.turn_id} is claimed, and is not to run"
            elif event.epoch[0] != turn.n or event.epoch <= turn.epoch:
                yield f"{event.turn_id} at {turn.n} under {turn.epoch} is claimed as {event.epoch}"
        elif isinstance(event, ModelAnswered | ModelFailed | ToolReturned | TurnSuspended):
            turn = facts.turns[event.turn_id]
            if event.epoch != turn.epoch or turn.status != "running":
                yield (
                    f"{event.turn_id} is {turn.status} under {turn.epoch}, and "
                    f"{type(event).__name__} names {event.epoch}"
                )
            elif world.watch.writer != turn.worker:
                yield f"{turn.worker} holds {turn.id}, and {world.watch.writer} writes"
        elif isinstance(event, TurnResumed):
            turn = facts.turns[event.turn_id]
            if turn.status != "suspended" or event.n != turn.n + 1:
                yield f"{event.turn_id} resumes as {event.n} and was {turn.status} at {turn.n}"


def steps_and_results_come_once(facts: Facts, recorded: Recorded, world: "World") -> Found:
    results: set[str] = set()
    for event in recorded.append.events:
        if isinstance(event, ModelFailed) and event.nth != facts.turns[event.turn_id].failed + 1:
            yield f"failure {event.nth} of {event.turn_id} is recorded again"
        if isinstance(event, ModelAnswered | ModelFailed):
            turn = facts.turns[event.turn_id]
            if event.step != turn.steps + 1:
                yield f"step {event.step} of {turn.id} comes after {turn.steps}"
            if not all(turn.calls.values()):
                yield f"{turn.id} goes on with calls that have no result: {turn.calls}"
        call = event.node_id if isinstance(event, ToolReturned) else None
        if isinstance(event, WaitEnded):
            call = event.call
        if call is not None:
            branch = facts.branches[_branch_of(recorded)]
            calls = branch.turn.calls if branch.turn is not None else {}
            if calls.get(call, -1) != 0 or call in results:
                yield f"call {call} has a result already, or is none of the turn's"
            results.add(call)


def contexts_are_of_the_log(facts: Facts, recorded: Recorded, world: "World") -> Found:
    """The recorded digest is that of the context that the log gives at that place (P10)."""
    for event in recorded.append.events:
        if not isinstance(event, ModelAnswered | ModelFailed):
            continue
        chain: list[Segment] = []
        node, before, root = (
            facts.turns[event.turn_id].node,
            0,
            ids.root_id(recorded.stream.session),
        )
        while node != root:
            transcript = facts.branches[ids.branch_of(node)].transcript
            segment = Segment(transcript, node, before)
            if not holds(segment):
                yield f"the context of {event.turn_id} has no node {node}"
                return
            chain.append(segment)
            node, before = transcript.fork, transcript.opened
        system = facts.sessions[recorded.stream.session].created.system_prompt
        if context_digest(context(chain[::-1], system)) != event.context:
            yield f"step {event.step} of {event.turn_id} saw another context than the log's"


def inbox_order_is_kept(facts: Facts, recorded: Recorded, world: "World") -> Found:
    """Messages become nodes in the order of their arrival, and those of one branch arrive in the
    order in which it sent them (P13)."""
    branch_id = _branch_of(recorded)
    branch = facts.branches.get(branch_id)
    waiting = [*branch.arrivals] if branch is not None else []
    for event in recorded.append.events:
        if isinstance(event, MessageReceived):
            if event.after is not None and waiting:
                yield f"{event.node_id} becomes a node before {waiting}, which came first"
            if event.after is None:
                waiting.append(event.node_id)
        elif isinstance(event, NodesPlaced):
            if [*event.node_ids] != waiting[: len(event.node_ids)]:
                yield f"{event.node_ids} are placed, and {waiting} came in this order"
            waiting = waiting[len(event.node_ids) :]
        elif isinstance(event, MessageRefused) and event.node_id in waiting:
            waiting.remove(event.node_id)
        settles = isinstance(event, MessageReceived) and event.source == "from_branch"
        if settles or (isinstance(event, MessageRefused) and event.node_id not in facts.received):
            message = facts.messages.get(event.message_id or "")  # type: ignore[union-attr]
            if message is None:
                continue
            for other in facts.messages.values():
                if (
                    other.branch == message.branch
                    and other.nth < message.nth
                    and not (other.received or other.refused or other.closes_cycle)
                ):
                    yield f"{event.message_id} arrives before {other.sent.message_id}"  # type: ignore[union-attr]


def receipts_are_monotone(facts: Facts, recorded: Recorded, world: "World") -> Found:
    for event in recorded.append.events:
        if isinstance(event, MessageReceived) and event.source == "from_branch":
            message = facts.messages.get(event.message_id or "")
            if message is None:
                yield f"{event.message_id} is delivered and was never sent"
            elif message.received or message.refused:
                yield f"{event.message_id} is delivered a second time, or after its refusal"
            elif message.sent.target != _branch_of(recorded):
                yield f"{event.message_id} is delivered to {_branch_of(recorded)}"
            elif message.closes_cycle:
                yield f"{event.message_id} is delivered, and its wait closes a cycle"
            elif (message.sent.hops, message.sent.root) != (event.hops, event.root):
                yield f"{event.message_id} changed its hops or its root on the way"
        elif isinstance(event, MessageRefused) and event.message_id is not None:
            if facts.messages[event.message_id].refused is not None:
                yield f"{event.message_id} is refused a second time"
            if facts.messages[event.message_id].consumed:
                yield f"{event.message_id} is refused after it was read"
        elif isinstance(event, TurnClaimed):
            for name in event.consumed:
                if not facts.messages[name].received:
                    yield f"{name} is read before it arrived"
        elif isinstance(event, TurnEnded):
            for name in event.answered:
                # A turn that is stopped before its first claim answers what it never read.
                if event.status == "completed" and not facts.messages[name].consumed:
                    yield f"{name} is answered before it was read"


def tenants_are_apart(facts: Facts, recorded: Recorded, world: "World") -> Found:
    stream, _, append = recorded
    created = isinstance(append.events[0], SessionCreated)
    if not created and facts.tenant_of(stream.session) != stream.tenant:
        yield f"tenant {stream.tenant} writes to {stream.session}, which is another's"
    own = world.keys._keys.get((stream.tenant, stream.session), ("", b""))[0]
    for event in append.events:
        if isinstance(event, MessageSent) and facts.tenant_of(event.target) != stream.tenant:
            yield f"{event.message_id} is sent to {event.target}, another tenant's"
        for name in event.__struct_fields__:
            content = getattr(event, name)
            if isinstance(content, Content) and content.key != own:
                yield f"{type(event).__name__}.{name} is sealed with another session's key"


def budgets_are_held(facts: Facts, recorded: Recorded, world: "World") -> Found:
    limits, branch = world.plan.limits, facts.branches.get(_branch_of(recorded))
    for event in recorded.append.events:
        match event:
            case MessageSent():
                if event.hops > limits.chain_hops:
                    yield f"{event.message_id} has {event.hops} hops"
                turn = branch.turn if branch is not None and event.call is not None else None
                if turn is not None and event.hops != turn.hops + 1:
                    yield f"{event.message_id} has {event.hops} hops after {turn.hops}"
                latest = recorded.append.at + limits.wait_max_s * 1000
                if event.deadline is not None and event.deadline > latest:
                    yield f"{event.message_id} waits until {event.deadline}"
            case MessageReceived(after=None, source="user" | "from_branch") if branch is not None:
                placed = any(isinstance(e, NodesPlaced) for e in recorded.append.events)
                if not placed and len(branch.arrivals) >= limits.inbox_entries:
                    yield f"the inbox of {branch.id} holds {len(branch.arrivals)} already"
            case ModelAnswered():
                if event.step > limits.turn_steps or len(event.calls) > limits.turn_calls:
                    yield f"{event.turn_id} takes step {event.step}, {len(event.calls)} calls"
            case TurnClaimed():
                running = sum(
                    turn.status == "running" and facts.tenant_of(turn.id) == recorded.stream.tenant
                    for turn in facts.turns.values()
                    if turn.id != event.turn_id
                )
                if running >= world.plan.settings.turns_admitted:
                    yield f"{event.turn_id} is claimed while {running} others run"
                if event.epoch[1] > limits.turn_attempts + 30:
                    yield f"{event.turn_id} is tried for the {event.epoch[1]}. time"
            case _:
                pass


def a_closed_branch_takes_nothing(facts: Facts, recorded: Recorded, world: "World") -> Found:
    branch = facts.branches.get(_branch_of(recorded))
    if branch is None:
        return
    closed = branch.closed
    turn, left = branch.turn, set(branch.arrivals)
    for event in recorded.append.events:
        if closed:
            match event:
                case MessageReceived(source="user" | "from_branch"):
                    yield f"{branch.id} is archived and takes {event.node_id}"
                case TurnRequested():
                    yield f"{branch.id} is archived and requests {event.turn_id}"
                case TurnClaimed(after=str()):
                    yield f"{branch.id} is archived and starts {event.turn_id}"
                case _:
                    pass
        if isinstance(event, TurnEnded):
            turn = None
        if isinstance(event, MessageRefused):
            left.discard(event.node_id)
        if isinstance(event, BranchArchived):
            # Notes may stay: they are Plait's own, and take no part in the refusal.
            asked = [n for n in left if branch.arrivals[n].source != "note"]
            if asked or (turn is not None and not turn.node):
                yield f"{branch.id} is archived with {asked} in its inbox, turn {turn}"


def only_checkouts_move_head(facts: Facts, recorded: Recorded, world: "World") -> Found:
    for event in recorded.append.events:
        if isinstance(event, HeadMoved):
            if recorded.append.command_id not in world.clients.checkouts:
                yield f"HEAD moves to {event.branch_id}, and nobody checked it out"
        elif isinstance(event, BranchNamed) and event.name is not None:
            names = facts.sessions[recorded.stream.session].names
            if event.name in {n for b, n in names.items() if b != event.branch_id}:
                yield f"the name {event.name} is given twice"


def notes_start_nothing(facts: Facts, recorded: Recorded, world: "World") -> Found:
    for event in recorded.append.events:
        if isinstance(event, MessageReceived) and event.source == "note":
            message = facts.messages[event.message_id or ""]
            if message.refused is None or message.notes:
                yield f"a note says that {event.message_id} was refused: twice, or untrue"
            if event.turn_id is not None or event.wait:
                yield f"the note on {event.message_id} asks for a turn"
            if any(isinstance(other, TurnRequested) for other in recorded.append.events):
                yield f"the note on {event.message_id} starts a turn"


EACH_STEP: tuple[Callable[[Facts, Recorded, "World"], Found], ...] = (
    a_command_acts_once,
    no_node_twice,
    edges_are_legal,
    every_wait_ends_once,
    answers_are_the_targets,
    debts_are_settled_once,
    one_turn_at_a_time,
    only_the_newest_claim_writes,
    steps_and_results_come_once,
    contexts_are_of_the_log,
    inbox_order_is_kept,
    receipts_are_monotone,
    tenants_are_apart,
    budgets_are_held,
    a_closed_branch_takes_nothing,
    only_checkouts_move_head,
    notes_start_nothing,
)


def _nodes(events: tuple[AnyEvent, ...]) -> Iterator[str]:
    for event in events:
        match event:
            case MessageReceived(after=str()) | TurnClaimed(after=str()):
                yield event.node_id
            case NodesPlaced():
                yield from event.node_ids
            case ModelAnswered():
                yield from (call.node_id for call in event.calls)
            case _:
                pass
