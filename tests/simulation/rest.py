"""What must hold at the end, when all faults are over and nothing is owed any more."""

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from plait.events import branch as branches
from plait.events import ids
from plait.events import session as sessions
from plait.events.branch import Branch
from plait.events.session import Session
from plait.events.store import Recorded, StreamId
from plait.projections.dag import Writes, creates_session, fold, fold_tenant
from plait.projections.schema import Generation
from plait.projections.view import View
from plait.services.replies.ledger import Ledger
from tests.simulation.facts import Facts
from tests.simulation.servers import NAMES, ViewServer

if TYPE_CHECKING:
    from tests.simulation.world import World

from tests.simulation.invariants import Found


def promised_turns_were_there(facts: Facts, world: "World") -> Found:
    """The turn that a message was told will read it did run, unless the message was refused, or
    the turn was stopped first and another took its place (P8)."""
    for node, received in facts.received.items():
        turn = received.event.turn_id
        if turn is None or node in facts.refused:
            continue
        if turn not in facts.turns:
            yield f"message {node} was promised {turn}, and there is no such turn"


def refusals_are_told(facts: Facts, world: "World") -> Found:
    for name, message in facts.messages.items():
        if message.refused is not None and not message.refused.wait and message.notes != 1:
            yield f"{name} was refused, and its sender has {message.notes} notes of it"


def debts_were_settled(facts: Facts, world: "World") -> Found:
    for name, message in facts.messages.items():
        if message.sent.deadline is None or message.closes_cycle or not message.received:
            continue
        settled = len(message.answered) + (message.refused is not None)
        if settled != 1:
            yield f"{name} waited for a reply, and was answered {settled} times"
        wait = facts.waits[ids.wait_id(name)]
        assert wait.ended is not None
        if wait.ended.outcome in ("expired", "cancelled") and not wait.late:
            yield f"the answer to {name} came after its wait had {wait.ended.outcome}: lost"


def ledgers_equal_a_fold(facts: Facts, world: "World") -> Found:
    fresh: dict[str, Ledger] = {}
    for recorded in world.watch.log():
        ledger = fresh.setdefault(
            recorded.stream.tenant, Ledger(world.plan.settings.turns_admitted)
        )
        ledger.fold(recorded)
    for process in world.processes.values():
        if process is None or process.replies is None:
            continue
        held = process.replies.ledgers
        for tenant in fresh.keys() | held.keys():
            ours, theirs = fresh.get(tenant), held.get(tenant)
            if ours is None or theirs is None or _rows(ours) != _rows(theirs):
                yield f"{process.name} has another ledger of {tenant} than the log"


def _rows(ledger: Ledger) -> Any:
    queues = [
        {session: [*turns] for session, turns in queue._sessions.items()}
        for queue in ledger._queues
    ]
    return ledger.effects, ledger.waits, ledger.admitted, queues, ledger._edges


def read_models_equal_replay(facts: Facts, world: "World") -> Found:
    names = NAMES
    generation = Generation.parse(world.views.keys[names.live])
    scratch = ViewServer()
    view = View(None, names)  # type: ignore[arg-type]
    groups: dict[tuple[str, str], Writes] = {}
    lists: dict[str, Writes] = {}
    for recorded in world.watch.log():
        stream = recorded.stream
        fold(recorded, groups.setdefault((stream.tenant, stream.session), Writes(stream.session)))
        if creates_session(recorded):
            fold_tenant(recorded, lists.setdefault(stream.tenant, Writes("")))
    for (tenant, _), writes in groups.items():
        scratch.answer([view._call(generation, tenant, writes)])
    for tenant, writes in lists.items():
        scratch.answer([view._call(generation, tenant, writes)])
    kept = {
        key: value
        for key, value in world.views.keys.items()
        if isinstance(value, dict) and names.generation_of(key) == str(generation)
    }
    for key in sorted(kept.keys() | scratch.keys.keys()):
        ours, theirs = scratch.keys.get(key, {}), kept.get(key, {})
        if ours != theirs:
            different = [f for f in ours.keys() | theirs.keys() if ours.get(f) != theirs.get(f)]
            yield f"{key} differs from a replay in {sorted(different)[:5]}"


def caches_equal_a_fold(facts: Facts, world: "World") -> Found:
    limits = world.plan.limits
    fresh: dict[StreamId, Session | Branch] = {}
    for recorded in world.watch.log():
        _evolve(fresh, recorded, limits)
    for process in world.processes.values():
        if process is None or process.kind == "projections":
            continue
        if process.handler is None:
            continue
        # A copy: an answer may still be on its way to the process, which folds it into its own.
        states = copy.deepcopy(dict(process.handler._states))
        for recorded in world.watch.log():
            state = states.get(recorded.stream)
            if state is not None and recorded.sequence > state.version:
                _evolve(states, recorded, limits)
        for stream, state in states.items():
            for wait_id, wait in getattr(state, "waits", {}).items():
                # A twin of a send has the deadline of another clock; nothing is decided by it.
                wait.deadline = facts.waits[wait_id].deadline
            if state.version and state != fresh.get(stream):
                yield f"{process.name} holds another state of {stream} than the log: " + _differs(
                    state, fresh.get(stream)
                )


def _differs(one: Any, other: Any) -> str:
    return ", ".join(
        f"{name}: {getattr(one, name)!r} ≠ {getattr(other, name, None)!r}"
        for name in one.__struct_fields__
        if getattr(one, name) != getattr(other, name, None)
    )[:600]


def _evolve(states: dict[StreamId, Session | Branch], recorded: Recorded, limits: Any) -> None:
    stream = recorded.stream
    if stream.branch == ids.SESSION_TOKEN:
        state = states.setdefault(stream, Session(id=stream.session))
        assert isinstance(state, Session)
        sessions.evolve(state, recorded)
    else:
        state = states.setdefault(stream, Branch(id=f"{stream.session}-{stream.branch}"))
        assert isinstance(state, Branch)
        branches.evolve(state, recorded, limits)


AT_REST: tuple[Callable[[Facts, "World"], Found], ...] = (
    promised_turns_were_there,
    refusals_are_told,
    debts_were_settled,
    ledgers_equal_a_fold,
    read_models_equal_replay,
    caches_equal_a_fold,
)
