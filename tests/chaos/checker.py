"""Compares what clients were told and what readers read with the log, when all is quiet.

The simulation's invariants are asked of the real log, too: what must hold is the same.
"""

from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, cast

from redis.asyncio import Redis

from plait.events import ids
from plait.events.content import unseal
from plait.events.settings import Settings
from plait.events.store import Position, Recorded
from plait.events.transcripts import Transcripts
from plait.events.types import (
    Content,
    MessageReceived,
    MessageSent,
    ModelAnswered,
    ToolReturned,
    TurnClaimed,
    TurnEnded,
    TurnSuspended,
)
from plait.projections.runner import Runner
from plait.projections.schema import POSITION, Generation, Key, Names
from plait.projections.scripts import connect
from plait.services.replies.ledger import Ledger
from tests.chaos.load import Load
from tests.chaos.system import Chaos, settings_of
from tests.simulation import invariants, rest
from tests.simulation.facts import Facts
from tests.unit.test_context import assert_valid

if TYPE_CHECKING:
    from tests.simulation.world import World


SCRATCH = 1  # the number of another database in the same server


async def read_models_equal_a_rebuild(plait: Chaos) -> None:
    """What stands in the live generation against one that is built from the log in an empty
    database."""
    store = plait.watch.jetstream.store
    end = await store.last_sequence()
    position = str(Position(store.generation, end))
    await plait.get("/v1/sessions", min_position=position)  # until the live ones are there
    settings = settings_of(plait.stack)
    names = Names(settings.prefix)
    async with connect(settings.redis_url) as live, _scratch(settings.redis_url) as scratch:
        await Runner(store, scratch, settings).build()
        kept, fresh = await _rows(live, names), await _rows(scratch, names)
    assert kept.keys() == fresh.keys()
    different = [name for name in fresh if kept[name] != fresh[name]]
    assert not different, [(name, kept[name], fresh[name]) for name in different[:3]]
    assert fresh


async def view_positions(plait: Chaos, session: str) -> tuple[int, int]:
    """How far the live generation of a session has been written, and how far it says that all of
    it has."""
    settings = settings_of(plait.stack)
    names = Names(settings.prefix)
    async with connect(settings.redis_url) as redis:
        generation = Generation.parse(await _bytes(redis.get(names.live)))
        [meta] = names.of(generation, settings.tenant, session, [Key.META])
        written = await _bytes(redis.hget(meta, POSITION))
        return int(written), int(await _bytes(redis.get(names.position(generation))))


@asynccontextmanager
async def _scratch(url: str) -> AsyncIterator[Redis]:
    async with connect(url.rpartition("/")[0] + f"/{SCRATCH}") as redis:
        await redis.flushdb()
        yield redis
        await redis.flushdb()


async def _rows(redis: Redis, names: Names) -> dict[str, Any]:
    """All that the live generation holds, by key without the generation's name."""
    generation = (await _bytes(redis.get(names.live))).decode()
    rows: dict[str, Any] = {}
    async for raw in redis.scan_iter(count=1000):
        key = raw.decode()
        if names.generation_of(key) != generation or key.endswith(":all"):
            continue
        kind = (await _bytes(redis.type(key))).decode()
        short = key.replace(generation, "*")
        if kind == "hash":
            rows[short] = await redis.hgetall(key)
        elif kind == "zset":
            rows[short] = await redis.zrange(key, 0, -1, withscores=True)
        else:
            raise AssertionError(f"{key} is a {kind}")
    return rows


async def _bytes(answer: Awaitable[object]) -> bytes:
    found = await answer
    assert isinstance(found, bytes)
    return found


# -- at rest ---------------------------------------------------------------------------------


def only_the_newest_claim_writes(facts: Facts, recorded: Recorded, _: "World") -> Iterator[str]:
    """The simulation's knows, too, who wrote; a real log does not tell."""
    for event in recorded.append.events:
        if isinstance(event, ModelAnswered | ToolReturned | TurnSuspended):
            turn = facts.turns[event.turn_id]
            if event.epoch != turn.epoch or turn.status != "running":
                yield f"{turn.id} is {turn.status} under {turn.epoch}, and not {event.epoch}"


AT_EACH_APPEND: tuple[Callable[[Facts, Recorded, "World"], Iterator[str]], ...] = (
    invariants.a_command_acts_once,
    invariants.no_node_twice,
    invariants.edges_are_legal,
    invariants.every_wait_ends_once,
    invariants.answers_are_the_targets,
    invariants.debts_are_settled_once,
    invariants.one_turn_at_a_time,
    only_the_newest_claim_writes,
    invariants.steps_and_results_come_once,
    invariants.contexts_are_of_the_log,
    invariants.inbox_order_is_kept,
    invariants.receipts_are_monotone,
    invariants.a_closed_branch_takes_nothing,
    invariants.notes_start_nothing,
)


class _Texts:
    """The part of the simulated world that these invariants look at."""

    def text(self, content: Content | None) -> str | None:
        return None if content is None or content.data is None else unseal(content.data)

    @property
    def watch(self) -> "_Texts":
        return self


def open_matters(plait: Chaos) -> str:
    """What the log still owes; empty when nothing."""
    ledgers: dict[str, Ledger] = {}
    facts = Facts()
    for _, recorded in plait.watch.seen:
        ledger = ledgers.setdefault(recorded.stream.tenant, Ledger(Settings().turns_admitted))
        ledger.fold(recorded)
        facts.fold(recorded)
    left = [f"{turn.id} is {turn.status}" for turn in facts.turns.values() if not turn.ended]
    left += [f"{wait} is open" for wait in facts.open_waits]
    left += [
        f"{[*branch.arrivals]} in the inbox of {branch.id}"
        for branch in facts.branches.values()
        if branch.arrivals
    ]
    for ledger in ledgers.values():
        left += map(str, (*ledger.effects, *ledger.admitted, *ledger.waits))
    return "; ".join(left[:8])


async def is_quiet(plait: Chaos) -> bool:
    await plait.watch.caught_up()
    return not open_matters(plait)


async def check(plait: Chaos, load: Load) -> str:
    """Fails with what does not add up; else what was looked at."""
    await plait.watch.caught_up()
    facts, world = Facts(), cast("World", _Texts())
    for _, recorded in plait.watch.seen:
        for invariant in AT_EACH_APPEND:
            broken = [*invariant(facts, recorded, world)]
            assert not broken, (recorded.sequence, invariant.__name__, broken)
        facts.fold(recorded)
    broken = [*rest.promised_turns_were_there(facts, world)]
    broken += rest.debts_were_settled(facts, world)
    broken += rest.refusals_are_told(facts, world)
    assert not broken
    await _what_clients_were_told_is_so(plait, load)
    _recorded_results_were_not_run_again(plait, load)
    await _contexts_are_valid(plait, facts)
    await read_models_equal_a_rebuild(plait)
    ends = Counter(event.status for event in plait.watch.events(TurnEnded))
    waits = Counter(w.ended.outcome for w in facts.waits.values() if w.ended is not None)
    again = sum(claim.epoch[1] > 1 for claim in plait.watch.events(TurnClaimed))
    errors = Counter(e.error.code for e in plait.watch.events(TurnEnded) if e.error is not None)
    return (
        f"{len(plait.watch.seen)} appends; turns {dict(ends)} {dict(errors)}, {again} taken over; "
        f"waits {dict(waits)}; late answers {sum(w.late for w in facts.waits.values())}"
    )


async def _what_clients_were_told_is_so(plait: Chaos, load: Load) -> None:
    received: dict[str, list[str]] = {}
    placed: dict[str, str] = {}
    for _, (_, sequence, append) in plait.watch.seen:
        for event in append.events:
            if isinstance(event, MessageReceived):
                if event.source == "user":
                    text = await plait.watch.contents.read(event.content)
                    received.setdefault(text, []).append(event.node_id)
                placed[event.node_id] = f"{sequence}"
    for text, told in load.told.posts.items():
        assert received.get(text) == [told["node_id"]], f"post {text}: {received.get(text)}"
        assert told["position"].split(".")[1] == placed[told["node_id"]], text
        if told["turn_id"] is not None:
            assert len(plait.watch.events(TurnEnded, turn_id=told["turn_id"])) == 1, text
    opening = {f"you are {name}" for name in load.names}
    assert received.keys() == load.told.posts.keys() | opening
    by_hand: dict[str, list[str]] = {}
    for event in plait.watch.events(MessageSent):
        if event.call is None and event.hops == 1:
            text = await plait.watch.contents.read(event.content)
            by_hand.setdefault(text, []).append(event.message_id)
    for text, message in load.told.sends.items():
        assert by_hand.get(text) == [message], f"send {text}: {by_hand.get(text)}"


def _recorded_results_were_not_run_again(plait: Chaos, load: Load) -> None:
    """A worker whose claims of the turn all came after a call's result did not run the call."""
    results: dict[str, int] = {}
    claims: dict[tuple[str, int], int] = {}
    turns: dict[str, str] = {}
    for _, (_, sequence, append) in plait.watch.seen:
        for event in append.events:
            if isinstance(event, ToolReturned):
                results[event.node_id] = sequence
                turns[event.node_id] = event.turn_id
            elif isinstance(event, TurnClaimed):
                pid = int(event.worker.rsplit(".", 2)[1])
                claims.setdefault((event.turn_id, pid), sequence)
    for run in load.runs:
        assert ids.of_kind(run.key, "node")
        if run.key in results:
            assert claims[turns[run.key], run.pid] < results[run.key], run


async def _contexts_are_valid(plait: Chaos, facts: Facts) -> None:
    watch = plait.watch
    transcripts = Transcripts(watch.jetstream.store, watch.contents)
    for branch in facts.branches.values():
        tenant = facts.tenant_of(branch.id)
        assert tenant is not None
        assert_valid(await transcripts.context(tenant, branch.tip))
