"""Clients of two tenants: what they ask over HTTP, how they retry, and what they were told.

A call with an Idempotency-Key is sent until an answer comes, now and then twice at once, and
sometimes again much later; a call without one is sent once, and what became of it may stay
unknown. Every answer is compared with the log when it comes.
"""

import asyncio
import random
from typing import TYPE_CHECKING, Any, get_args

from plait.events import ids
from plait.events.commands import MultitaskStrategy
from plait.events.errors import (
    BranchBusy,
    InboxFull,
    PlaitError,
    Retryable,
)
from plait.services.gateway.shapes import (
    BranchPatch,
    Checkout,
    NewMessage,
    NewSend,
    NewSession,
)
from tests.simulation.answers import Acknowledged, Request, check_refusal
from tests.simulation.models import POISON
from tests.simulation.plan import Op
from tests.simulation.processes import Process

if TYPE_CHECKING:
    from tests.simulation.world import World

TENANTS = ("acme", "zeta")
HTTP_S = 4.0  # after which a client gives up
TRIES = 40
NAMES = ("alpha", "beta", "gamma")


class Clients:
    def __init__(self, world: "World") -> None:
        self._world = world
        self.checkouts: set[str] = set()  # command ids that may move HEAD

    async def run(self) -> None:
        plan, options = self._world.plan, self._world.options
        ops = [op for op in plan.ops if options.ops is None or op.place in options.ops]
        await asyncio.gather(
            *(self._client([op for op in ops if op.client == n]) for n in range(plan.clients))
        )

    async def _client(self, ops: list[Op]) -> None:
        for op in ops:
            chance = random.Random(f"{self._world.plan.seed}/op/{op.place}")
            await asyncio.sleep(chance.choice((0.0, 0.0, 0.02, 0.5, 3.0)))
            request = self._request(op, chance)
            if request is not None:
                await self._done(op, request, chance)

    # -- sending -----------------------------------------------------------------------------

    async def _done(self, op: Op, request: Request, chance: random.Random) -> None:
        sent = [self._until_answered(op, request, chance)]
        if request.key is not None and chance.random() < 0.2:
            sent.append(self._until_answered(op, request, chance))
        done = [a for a in await asyncio.gather(*sent) if a and not isinstance(a, PlaitError)]
        again = 0.7 if self._world.plan.focus == "forks" else 0.3
        if done and request.key is not None and chance.random() < again:
            await asyncio.sleep(chance.random() * 10)
            done.append(await self._until_answered(op, request, chance))
        for answer in done:
            if not _same(done[0], answer):
                self._world.fail(
                    "a_key_gives_one_answer", f"{op.kind} {op.place}: {done[0]} and then {answer}"
                )

    async def _until_answered(self, op: Op, request: Request, chance: random.Random) -> Any:
        for _ in range(TRIES if request.key is not None else 1):
            request.asked_at = request.asked_at or self._world.watch.facts.end
            answer = await self._over_http(op, request)
            if isinstance(answer, PlaitError):
                trace = f"op {op.place} refused: {answer.code}: {answer}"
                self._world.trace.note(self._world.loop.time(), f"client {op.client}", trace)
                again = isinstance(answer, Retryable) and not isinstance(
                    answer, BranchBusy | InboxFull
                )
                if not again:
                    check_refusal(self._world, op, request, answer)
                    return answer
            elif answer is not None:
                trace = f"op {op.place} answered: {answer}"
                self._world.trace.note(self._world.loop.time(), f"client {op.client}", trace)
                Acknowledged(self._world, request).check(answer)
                return answer
            await asyncio.sleep(chance.random() * 2)
        if request.key is not None:
            self._world.fail("clients_get_answers", f"op {op.place} got none in {TRIES} tries")
        return None

    async def _over_http(self, op: Op, request: Request) -> Any:
        world = self._world
        gateways = [p for p in world.processes.values() if p is not None and p.kind == "gateway"]
        if not gateways:
            await asyncio.sleep(1.0)
            return None
        gateway = world.chance.choice(gateways)
        fate = None
        if world.faulty and "http" in world.plan.events and world.chance.random() < 0.12:
            drawn = world.chance.choice(("lost request", "lost answer", "late request"))
            if world.strikes("http", f"http@{world.count('http')}", f"op {op.place} {drawn}"):
                fate = drawn
        if fate == "lost request":
            return None
        answer: asyncio.Future[Any] = world.loop.create_future()

        def start() -> None:
            if not gateway.dead:
                world.loop.start(gateway.lane, self._served(gateway, op, request, answer))

        world.home_later(world.chance.random() * 9 if fate == "late request" else 0.0, start)
        try:
            await asyncio.wait([answer], timeout=HTTP_S)
            if not answer.done() or fate == "lost answer":
                return None
            return answer.result()
        finally:
            answer.cancel()

    async def _served(
        self, gateway: Process, op: Op, request: Request, answer: "asyncio.Future[Any]"
    ) -> None:
        said: Any
        try:
            await gateway.ready.wait()
            assert gateway.commands is not None
            call = request.asked()
            if op.kind == "checkout":
                self.checkouts.add(call.command_id)
            said = await request.act(gateway.commands, call)
        except PlaitError as error:
            said = error
        except Exception as error:  # noqa: BLE001 - a 500
            self._world.fail("nothing_breaks_off", f"op {op.place} is a 500: {error!r}", error)
            return
        gateway.check()
        request.served_at = self._world.watch.facts.end
        if not answer.done():
            answer.set_result(said)

    # -- what is asked -----------------------------------------------------------------------

    def _request(self, op: Op, chance: random.Random) -> Request | None:
        facts = self._world.watch.facts
        tenants = TENANTS[: self._world.plan.tenants]
        tenant = tenants[op.client % len(tenants)]
        if chance.random() < 0.3:
            tenant = chance.choice(tenants)
        key = f"key {op.place}" if chance.random() < 0.7 else None
        sessions = [s for s in facts.sessions.values() if s.tenant == tenant]
        foreign = [s for s in facts.sessions.values() if s.tenant != tenant]
        if op.kind == "create":
            tenant = tenants[op.place % len(tenants)]
        if op.kind == "create" or not sessions:
            made = NewSession(
                title=chance.choice((None, "a title")),
                system_prompt=chance.choice((None, f"prompt {op.place}")),
            )
            return Request(
                tenant, "/sessions", made, lambda c, a: c.create_session(tenant, made, a), key
            )
        session = chance.choice(sessions)
        if foreign and chance.random() < 0.04:
            session = chance.choice(foreign)
        s = session.id
        path = f"/sessions/{s}/{op.kind}"
        opened = session.branches
        branch = chance.choice(opened) if opened else session.heads[-1][1]
        nodes = facts.branches[branch].nodes if opened else []
        node = chance.choice([*nodes, ids.root_id(s)])
        forks = self._world.plan.focus == "forks"
        if nodes and chance.random() < (0.8 if forks else 0.3):
            node = nodes[-1]
        turns = [t for t in facts.turns.values() if ids.session_of(t.id) == s]
        match op.kind:
            case "open":
                first = NewMessage(text=f"opened {op.place} in {s}", after=ids.root_id(s))
                return Request(tenant, path, first, lambda c, a: c.post(tenant, s, first, a), key)
            case "stop":
                busy = [facts.branches[b] for b in opened if facts.branches[b].turn is not None]
                busy.sort(key=lambda b: (b.carried_hops, len(b.owed)))
                if not busy:
                    return None
                stop = NewMessage(
                    text=f"stopped {op.place} in {s}",
                    branch=busy[-1].id,
                    multitask_strategy=chance.choice(("interrupt", "rollback")),
                )
                return Request(tenant, path, stop, lambda c, a: c.post(tenant, s, stop, a), key)
            case "post":
                message = self._message(op, chance, s, branch, node)
                return Request(
                    tenant, path, message, lambda c, a: c.post(tenant, s, message, a), key
                )
            case "send":
                wait = chance.random() < 0.6
                send = NewSend(
                    target_branch=facts.some_address(chance, s),
                    message=f"by hand {op.place} in {s}",
                    from_=chance.choice((None, branch, node)),
                    wait_reply=wait,
                    timeout_s=chance.choice((None, 1.0, 4.0, 10.0)) if wait else None,
                )
                return Request(tenant, path, send, lambda c, a: c.send(tenant, s, send, a), key)
            case "checkout":
                out = Checkout(node_id=node)
                return Request(
                    tenant, path, out, lambda c, a: c.checkout(tenant, s, out.node_id, a), key
                )
            case "name" | "archive" | "restore":
                if op.kind == "name":
                    patch = BranchPatch(name=chance.choice((*NAMES, NAMES[0], None)))
                else:
                    patch = BranchPatch(archived=op.kind == "archive")
                if op.kind == "restore":
                    archived = [b for b in opened if facts.branches[b].closed]
                    branch = chance.choice(archived) if archived else branch
                return Request(
                    tenant,
                    path,
                    patch,
                    lambda c, a: c.patch_branch(tenant, s, branch, patch, a),
                    None,
                )
            case "cancel" | "retry":
                if not turns:
                    return None
                turn = chance.choice(turns[-4:] if op.kind == "cancel" else turns).id
                if op.kind == "cancel":
                    return Request(tenant, turn, None, lambda c, a: c.cancel(tenant, turn, a), key)
                return Request(
                    tenant, f"{turn}/retry", None, lambda c, a: c.retry(tenant, turn, a), key
                )
            case _:
                raise AssertionError(op)

    def _message(
        self, op: Op, chance: random.Random, session_id: str, branch: str, node: str
    ) -> NewMessage:
        text = f"posted {op.place} in {session_id}"
        if chance.random() < 0.03:
            text += f" {POISON}"
        if chance.random() < 0.1:
            text += " and much more" * 8
        strategy = chance.choices(get_args(MultitaskStrategy), weights=(60, 8, 16, 16))[0]
        run = strategy in ("interrupt", "rollback") or chance.random() < 0.85
        address: dict[str, str] = {}
        kind = chance.choices(("head", "branch", "after", "replaces", "name"), (22, 40, 22, 9, 7))[
            0
        ]
        if kind == "branch":
            address["branch"] = branch
        elif kind == "name":
            address["branch"] = chance.choice((*NAMES, "al"))
        elif kind != "head":
            address[kind] = node
        return NewMessage(text=text, run=run, multitask_strategy=strategy, **address)


def _same(first: Any, other: Any) -> bool:
    """The same ids; a position may be a later one."""
    if type(first) is not type(other):
        return False
    return all(
        getattr(first, name) == getattr(other, name)
        for name in first.__struct_fields__
        if name != "position"
    )
