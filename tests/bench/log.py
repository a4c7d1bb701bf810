"""The log: appending through the store, and replaying it into memory, beside the raw client."""

import contextlib
import gc
import time
from collections.abc import AsyncIterator, Awaitable
from pathlib import Path

from plait.events import branch as branches
from plait.events import codec, ids
from plait.events.commands import ClaimTurn, PostMessage, RecordAnswer
from plait.events.content import Contents
from plait.events.handler import Handler
from plait.events.jetstream_setup import JetStream
from plait.events.settings import Settings
from plait.events.store import StreamId
from plait.events.types import Pins, Usage
from plait.services.replies.ledger import Ledger
from tests.bench.baseline import TENANT, RawPublisher, an_append, consume, log_on_disk, many
from tests.bench.report import Bar, Figure, Rounds, rate

IN_FLIGHT = 64
APPEND_ROUNDS = 9
APPENDS_EACH = 25  # on each of the branches, in one round

REPLAY_ROUNDS = 7
REPLAY_BRANCHES = 200
REPLAY_TURNS = 40  # on each branch, of three appends: post, claim, answer
QUESTION = "What did the other branch find out about this, and does it change the plan? " * 3
ANSWER = "It found that the second way is shorter, and that nothing else depends on it. " * 10


async def append(data: Path) -> AsyncIterator[Figure]:
    async with log_on_disk(data) as (_, jetstream, nc):
        raw = RawPublisher(nc)
        rounds = Rounds()
        for number in range(-1, APPEND_ROUNDS):  # the first one warms up
            store_s = await _append_through_store(jetstream, number)
            raw_s = await _append_raw(raw, number)
            if number >= 0:
                rounds.add(1 / store_s, 1 / raw_s)
        count = IN_FLIGHT * APPENDS_EACH
        measured, baseline = rounds.medians
        yield Figure(
            group="append",
            what=f"store, {IN_FLIGHT} in flight, expected version, vs raw publish",
            measured=rate(count * measured),
            baseline=rate(count * baseline),
            value=rounds.ratio,
            bar=Bar("≥", 0.85),
        )


def _branches(number: int) -> list[str]:
    session = ids.session_id(f"append.{number}")
    return [ids.branch_id(session, str(place)) for place in range(IN_FLIGHT)]


def _stream(branch: str) -> StreamId:
    return StreamId(TENANT, ids.session_of(branch), ids.token_of(branch))


async def _append_through_store(jetstream: JetStream, number: int) -> float:
    names = _branches(number)
    appends = [[an_append(name, place) for place in range(APPENDS_EACH)] for name in names]
    store = jetstream.store

    async def write(job: int) -> None:
        stream, version = _stream(names[job]), 0
        for one in appends[job]:
            version = await store.append(stream, one, version)

    return await _timed(many(IN_FLIGHT, write, range(IN_FLIGHT)))


async def _append_raw(raw: RawPublisher, number: int) -> float:
    """The same bytes and headers, encoded before."""
    names = _branches(number)
    ready = [
        [
            (codec.encode(one), codec.headers(one))
            for one in (an_append(name, place) for place in range(APPENDS_EACH))
        ]
        for name in names
    ]

    async def write(job: int) -> None:
        subject, version = raw.subject(_stream(names[job])), 0
        for body, headers in ready[job]:
            version = await raw.publish(subject, body, headers, version)

    return await _timed(many(IN_FLIGHT, write, range(IN_FLIGHT)))


async def _timed(work: Awaitable[None]) -> float:
    gc.collect()
    began = time.perf_counter()
    await work
    return time.perf_counter() - began


async def replay(data: Path) -> AsyncIterator[Figure]:
    async with log_on_disk(data) as (settings, jetstream, nc):
        await _write_conversations(jetstream, settings)
        count = await jetstream.store.last_sequence()
        log = jetstream.subjects.log
        folded, decoded = Rounds(), Rounds()
        for number in range(-1, REPLAY_ROUNDS):
            raw_s = await consume(nc, log, count)
            fold_s = await _timed(_fold(jetstream, settings, count))
            decode_s = await _timed(_follow(jetstream, count))
            if number >= 0:
                folded.add(1 / fold_s, 1 / raw_s)
                decoded.add(1 / decode_s, 1 / raw_s)
        for what, rounds, bar in (
            ("follow, decode, fold branches and ledger, vs raw consume", folded, Bar("≥", 0.8)),
            ("of that: follow and decode alone", decoded, None),
        ):
            measured, baseline = rounds.medians
            yield Figure(
                group="replay",
                what=what,
                measured=rate(count * measured),
                baseline=rate(count * baseline),
                value=rounds.ratio,
                bar=bar,
            )


async def _write_conversations(jetstream: JetStream, settings: Settings) -> None:
    """Turns as the services write them, on branches that are appended to in turns."""
    handler = Handler(jetstream.store, settings.limits)
    contents = Contents(jetstream.keys, jetstream.blobs, settings.limits)
    session = ids.session_id("replay")
    await contents.create_key(TENANT, session)
    question = await contents.write(QUESTION, TENANT, session)
    answer = await contents.write(ANSWER, TENANT, session)

    async def converse(job: int) -> None:
        branch = ids.branch_id(session, str(job))
        for number in range(REPLAY_TURNS):
            cause = f"{job}.{number}"
            post = PostMessage(
                command_id=f"{cause}.post",
                at=number,
                branch_id=branch,
                content=question,
                fork=ids.root_id(session),
            )
            await handler.execute(TENANT, post)
            turn = (await handler.branch(TENANT, branch)).turn
            assert turn is not None, "a post asks for a turn"
            claim = ClaimTurn(
                command_id=f"{cause}.claim",
                at=number,
                cause=turn.id,
                branch_id=branch,
                turn_id=turn.id,
                epoch=(1, 1),
                worker="bench",
                pins=Pins(model="offline:echo"),
            )
            await handler.execute(TENANT, claim)
            record = RecordAnswer(
                command_id=f"{cause}.answer",
                at=number,
                cause=turn.id,
                branch_id=branch,
                turn_id=turn.id,
                epoch=(1, 1),
                context="0" * 32,
                text=answer,
                usage=Usage(input_tokens=1000, output_tokens=200),
            )
            await handler.execute(TENANT, record)

    await many(IN_FLIGHT, converse, range(REPLAY_BRANCHES))


async def _fold(jetstream: JetStream, settings: Settings, count: int) -> None:
    """What a process needs in memory: each branch's state, and the tenant's ledger."""
    states: dict[StreamId, branches.Branch] = {}
    ledger = Ledger(settings.turns_admitted)
    limits, evolve = settings.limits, branches.evolve
    async with contextlib.aclosing(jetstream.store.follow()) as batches:
        async for batch in batches:
            for recorded in batch.recorded:
                stream = recorded.stream
                state = states.get(stream)
                if state is None:
                    state = states[stream] = branches.Branch(id=f"{stream.session}-{stream.branch}")
                evolve(state, recorded, limits)
                ledger.fold(recorded)
            ledger.opened.clear()
            if batch.up_to >= count:
                break
    assert len(states) == REPLAY_BRANCHES, "every branch was replayed"


async def _follow(jetstream: JetStream, count: int) -> None:
    async with contextlib.aclosing(jetstream.store.follow()) as batches:
        async for batch in batches:
            if batch.up_to >= count:
                break
