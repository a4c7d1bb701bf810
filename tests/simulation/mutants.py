"""The rules taken out of the code, one at a time: each must be noticed.

A mutant is an edit of the source of the code under test, made in memory for the time of a run.
If the code has changed and an edit no longer applies, it says so.
"""

import importlib
import inspect
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

BRANCH = "plait.events.branch"
LEDGER = "plait.services.replies.ledger"


class Edit(NamedTuple):
    """`where` is `module:function` or `module:Class.method`."""

    where: str
    old: str
    new: str


class Mutant(NamedTuple):
    name: str  # the rule's number, and a letter
    what: str
    edits: tuple[Edit, ...]


def _mutant(name: str, what: str, where: str, old: str, new: str) -> Mutant:
    return Mutant(name, what, (Edit(where, old, new),))


MUTANTS: tuple[Mutant, ...] = (
    _mutant(
        "P1a",
        "a retry with a key draws new ids",
        "plait.services.gateway.idempotency:asked",
        'ids.derive("command", tenant, key)',
        "secrets.token_hex(13)",
    ),
    _mutant(
        "P2a",
        "a post moves HEAD",
        "plait.services.gateway.commands:Commands.post",
        "return await self._posted(tenant, command(plan, content))",
        'await self._handler.execute(tenant, MoveHead(command_id=call.command_id + ".head", '
        "at=self._now(), session_id=session_id, branch_id=plan.branch, fork=plan.fork)); "
        "return await self._posted(tenant, command(plan, content))",
    ),
    _mutant(
        "P2b",
        "`after` goes on wherever its branch ends by now",
        f"{BRANCH}.inbox:post",
        "if command.expected_tip is not None and tip != command.expected_tip:",
        "if False:",
    ),
    _mutant(
        "P2c",
        "a name that is taken is given again",
        "plait.events.session:decide",
        "if owner != branch:",
        "if False:",
    ),
    _mutant(
        "P3a",
        "no record is kept: a retry resolves anew",
        "plait.services.gateway.idempotency:settled",
        "standing = await requests.create(tenant, call.key, _encode(record))",
        "standing = _encode(record)",
    ),
    _mutant(
        "P4a",
        "a refusal rests on a cached state",
        "plait.events.handler:Handler.execute",
        "self._cached_state(stream), False",
        "self._cached_state(stream), True",
    ),
    _mutant(
        "P4b",
        "after a lost race nothing is read",
        "plait.events.handler:Handler.execute",
        "except VersionConflict:\n                    await self._catch_up(stream, state)",
        "except VersionConflict:\n                    pass",
    ),
    _mutant(
        "P5a",
        "any claim's epoch writes",
        f"{BRANCH}.turns:fenced",
        'if turn.epoch != epoch or turn.status != "running":',
        "if False:",
    ),
    _mutant(
        "P5b",
        "steps of two workers under one epoch have one command id",
        "plait.services.turns.runner:_Work.command_id",
        "self.run, ",
        "",
    ),
    _mutant(
        "P6a",
        "a worker that is refused acks",
        "plait.services.turns.runner:TurnRunner.run",
        "return stale.settled",
        "return True",
    ),
    _mutant(
        "P6b",
        "an epoch that is not greater claims",
        f"{BRANCH}.turns:claim",
        "if command.epoch <= turn.epoch:",
        "if False:",
    ),
    _mutant(
        "P6c",
        "a suspended turn is claimed",
        f"{BRANCH}.turns:claim",
        'if n < turn.n or (n == turn.n and turn.status == "suspended"):',
        "if n < turn.n:",
    ),
    _mutant(
        "P7a",
        "the inbox stays where it is when a turn ends",
        f"{BRANCH}.turns:end_turn",
        "if not entries:",
        "if True:",
    ),
    _mutant(
        "P7b",
        "the end of the last wait does not resume the turn",
        f"{BRANCH}.sends:end_wait",
        "and list(turn.waits) == [command.wait_id]",
        "and False",
    ),
    _mutant(
        "P7c",
        "a turn ends and its waits go on",
        f"{BRANCH}.turns:end_turn",
        "for wait, call in turn.waits.items()",
        "for wait, call in ()",
    ),
    _mutant(
        "P7d",
        "a turn suspends with no open wait",
        f"{BRANCH}.turns:record_results",
        "if command.suspend and waiting and not left:",
        "if command.suspend and not left:",
    ),
    _mutant(
        "P8a",
        "each message is promised a turn of its own",
        f"{BRANCH}.inbox:_turn_for",
        "return _first_asked(branch.inbox.values()) or ids.turn_id(branch.id, cause)",
        "return ids.turn_id(branch.id, cause)",
    ),
    _mutant(
        "P9a",
        "an interrupted turn's debts are dropped",
        f"{BRANCH}.state:_turn_ended",
        "if event.passed:",
        "branch.owed = {} if event.passed else branch.owed\n    if event.passed:",
    ),
    _mutant(
        "P9b",
        "an end settles nothing",
        f"{BRANCH}.turns:end_turn",
        "answered=() if passed else tuple(branch.owed)",
        "answered=()",
    ),
    _mutant(
        "P9c",
        "an interrupted turn answers instead of the next",
        f"{BRANCH}.inbox:post",
        "passed=True",
        "passed=False",
    ),
    _mutant(
        "P10a",
        "a model sees what was in the cache",
        "plait.events.transcripts:Transcripts._transcript",
        "if not known or kept.read_to < known:",
        "if not kept.read_to:",
    ),
    _mutant(
        "P10b",
        "a cached transcript goes on after a gap",
        "plait.events.transcripts:Transcripts._saw",
        "if after > version or recorded[-1].sequence <= version:",
        "if recorded[-1].sequence <= version:",
    ),
    _mutant(
        "P11a",
        "a worker never gives up",
        "plait.services.turns.runner:TurnRunner.run",
        "if delivery > self._limits.turn_attempts:",
        "if False:",
    ),
    _mutant(
        "P11b",
        "the queue gives up after two deliveries",
        "tests.simulation.servers:WorkServer._check",
        "elif self.most_deliveries is None or item.deliveries < self.most_deliveries:",
        "elif item.deliveries < 2:",
    ),
    _mutant(
        "P12a",
        "a delivery is recognised by its command id only",
        f"{BRANCH}.inbox:deliver",
        "if command.message_id in branch.settled:",
        "if False:",
    ),
    _mutant(
        "P12b",
        "a note is recognised by its command id only",
        f"{BRANCH}.inbox:deliver_note",
        "if command.message_id in branch.notes:",
        "if False:",
    ),
    _mutant(
        "P12c",
        "a send by hand is recognised by its command id only",
        f"{BRANCH}.sends:send_by_hand",
        "if message in branch.sequences:",
        "if False:",
    ),
    _mutant(
        "P12d",
        "a post is recognised by its command id only",
        f"{BRANCH}.inbox:post",
        "if node in branch.received:",
        "if False:",
    ),
    _mutant(
        "P12e",
        "a refused delivery ends in no event",
        f"{BRANCH}.inbox:deliver",
        "except PlaitError as refusal:",
        "except ZeroDivisionError as refusal:",
    ),
    _mutant(
        "P13a",
        "effects of one branch go in any order",
        "plait.services.replies.service:Replies._start",
        "source = (tenant, effect.source)",
        "source = (tenant, str(effect.key))",
    ),
    _mutant(
        "P13b",
        "an open row is not offered again",
        "plait.services.replies.service:Replies.sweep",
        "if self._again.get((tenant, effect.key), 0) <= now:",
        "if False:",
    ),
    _mutant(
        "P13c",
        "a wait ends before its deadline",
        f"{LEDGER}:Ledger.due",
        "self._deadlines[0][0] <= now_ms",
        "self._deadlines[0][0] <= now_ms + 3000",
    ),
    _mutant(
        "P14a",
        "all turns are admitted at once",
        f"{LEDGER}:Ledger._admit",
        "while len(self.admitted) < self._limit:",
        "while True:",
    ),
    _mutant(
        "P14b",
        "a suspended turn keeps its slot",
        f"{LEDGER}:Ledger._suspended",
        "self._free(event.turn_id)",
        "pass",
    ),
    _mutant(
        "P15a",
        "a refused wait adds an edge",
        f"{LEDGER}:Ledger._sent",
        "cycle = self._path(event.target, branch)",
        "cycle = self._path(event.target, branch)\n"
        "                edges = self._edges.setdefault(branch, {})\n"
        "                edges.setdefault(event.target, []).append(wait_id)",
    ),
    _mutant(
        "P15b",
        "a cycle of waits is let through",
        f"{LEDGER}:Ledger._sent",
        "if cycle is not None:",
        "if False:",
    ),
    _mutant(
        "P16a",
        "a chain has no end",
        f"{BRANCH}.sends:check_send",
        "if hops > limits.chain_hops:",
        "if False:",
    ),
    _mutant(
        "P16b",
        "hops do not travel",
        f"{BRANCH}.state:_turn_claimed",
        "turn.hops = max([branch.carried_hops, *(entry.hops for entry in branch.unread)])",
        "turn.hops = 0",
    ),
    _mutant(
        "P16c",
        "a turn that is stopped before it ran forgets the hops that it was passed",
        f"{BRANCH}.state:_turn_ended",
        "branch.carried_hops = max(branch.carried_hops, turn.hops)",
        "branch.carried_hops = turn.hops",
    ),
    _mutant(
        "P17a",
        "nobody is told of a refused message",
        f"{LEDGER}:Ledger._refused",
        'self._open(Note(("note", message), source, recorded.sequence, message))',
        "pass",
    ),
    _mutant(
        "P18a",
        "an archived branch keeps its inbox",
        f"{BRANCH}.inbox:archive",
        "for entry in branch.inbox.values()",
        "for entry in ()",
    ),
    _mutant(
        "P18b",
        "an archived branch keeps its requested turn",
        f"{BRANCH}.inbox:archive",
        "if branch.turn is not None and branch.turn.node_id is None:",
        "if False:",
    ),
    _mutant(
        "P20a",
        "a wait ends as often as it is answered",
        f"{BRANCH}.sends:end_wait",
        "if wait.outcome is None:",
        "if True:",
    ),
    _mutant(
        "P20b",
        "a late answer is dropped",
        f"{BRANCH}.sends:end_wait",
        'if not answer or wait.late or wait.outcome not in ("expired", "cancelled"):',
        "if True:",
    ),
    _mutant(
        "P23a",
        "a position stands before its append",
        "plait.services.gateway.commands:Commands._position",
        "Position(self._handler.store.generation, sequence)",
        "Position(self._handler.store.generation, sequence - 1)",
    ),
    _mutant(
        "P23b",
        "a retry's position does not cover the first try",
        "plait.events.handler:Handler.execute",
        "return Done(state.version if done is None else done, ())",
        "return Done(1, ())",
    ),
    _mutant(
        "P24a",
        "what crosses a session's border keeps its key",
        "plait.services.replies.carrier:Carrier._for",
        "if session == recorded.stream.session:",
        "if True:",
    ),
)


@contextmanager
def applied(mutant: Mutant) -> Iterator[None]:
    restore: list[tuple[Any, str, Any, bool]] = []
    try:
        for edit in mutant.edits:
            _apply(edit, restore)
        yield
    finally:
        for holder, name, value, is_dict in reversed(restore):
            if is_dict:
                holder[name] = value
            else:
                setattr(holder, name, value)


def _apply(edit: Edit, restore: list[tuple[Any, str, Any, bool]]) -> None:
    module_name, _, path = edit.where.partition(":")
    module = importlib.import_module(module_name)
    *outer, name = path.split(".")
    owner: Any = module
    for part in outer:
        owner = getattr(owner, part)
    original = getattr(owner, name)
    source = textwrap.dedent(inspect.getsource(original))
    depth = 4 if outer else 0
    if _shallower(edit.old, depth) not in source:
        raise LookupError(f"{edit.where} has no longer {edit.old!r}: change the mutant")
    source = source.replace(_shallower(edit.old, depth), _shallower(edit.new, depth))
    made: dict[str, Any] = {}
    exec(compile(source, f"<{edit.where}>", "exec"), module.__dict__, made)
    fresh = made[name]
    restore.append((owner, name, original, False))
    setattr(owner, name, fresh)
    if owner is not module:
        # Tables of methods hold the function itself.
        _in_tables(module, original, fresh, restore)
        return
    for other in list(sys.modules.values()):
        if not getattr(other, "__name__", "").startswith(("plait.", "tests.simulation")):
            continue
        if other is not module and getattr(other, name, None) is original:
            restore.append((other, name, original, False))
            setattr(other, name, fresh)
    _in_tables(module, original, fresh, restore)


def _in_tables(
    module: Any, original: Any, fresh: Any, restore: list[tuple[Any, str, Any, bool]]
) -> None:
    for table in list(vars(module).values()):
        if isinstance(table, dict) and table is not module.__dict__:
            for key, value in table.items():
                if value is original:
                    restore.append((table, key, original, True))
                    table[key] = fresh


def _shallower(text: str, by: int) -> str:
    """A method's source is dedented; so are the later lines of what is looked for in it."""
    return text.replace("\n" + " " * by, "\n")
