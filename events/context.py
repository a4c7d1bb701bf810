"""What a model sees: a pure function of the log and a head.

`Transcript` folds one branch; `context` reads a chain of them, from ROOT to the head, into items;
`render` turns items and their opened texts into messages. Between fold and render nothing needs
a text, so that digests can be recomputed after an erasure.

A branch sees what it forked from as it stood when it opened: what its parent's turn did later
does not reach it, and so its prefix never changes.
"""

import hashlib
import json
import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, assert_never

import msgspec
from msgspec import Struct, field

from plait.events.errors import BrokenEdge, UnknownNode
from plait.events.store import Recorded
from plait.events.types import (
    BranchOpened,
    Content,
    MessageReceived,
    MessageRefused,
    ModelAnswered,
    NodesPlaced,
    ToolCall,
    ToolReturned,
    TurnClaimed,
    TurnEnded,
    TurnStatus,
    WaitEnded,
)


class SystemText(Struct, frozen=True, tag="system"):
    content: Content


class UserText(Struct, frozen=True, tag="user"):
    """`header` is Plait's own line in front of a text that no user of this branch wrote."""

    content: Content
    header: str | None = None


class Call(Struct, frozen=True):
    id: str  # what the provider sees: derived from the tool node's id
    name: str
    args: Content


class AssistantText(Struct, frozen=True, tag="assistant"):
    content: Content | None
    calls: tuple[Call, ...] = ()


class ToolOutput(Struct, frozen=True, tag="tool"):
    """The one result of a call; `content` None: it has none (`note` says why)."""

    call_id: str
    name: str
    content: Content | None
    is_error: bool = False
    note: str | None = None


ContextItem = SystemText | UserText | AssistantText | ToolOutput


# -- the fold of one branch ------------------------------------------------------------------


class Result(Struct, frozen=True):
    sequence: int
    content: Content | None
    is_error: bool
    note: str | None = None


class Step(Struct, frozen=True):
    """One model answer."""

    sequence: int
    text: Content | None
    calls: tuple[ToolCall, ...]


class Node(Struct, kw_only=True):
    """A user node has an `item`; an assistant node has its turn's steps and their results."""

    id: str
    sequence: int
    item: UserText | None = None
    steps: list[Step] = field(default_factory=list)
    results: dict[str, Result] = field(default_factory=dict)  # by tool node
    ended: int = 0  # the sequence of the turn's end; 0: not yet
    status: TurnStatus | None = None
    items: tuple[ContextItem, ...] | None = None  # once they can no longer change


class _Drop(NamedTuple):
    """A rollback: whatever is placed from index `since` on does not see `nodes`."""

    since: int
    nodes: tuple[str, ...]


class Transcript(Struct, kw_only=True):
    """One branch's conversation. It is folded in place: one owner per transcript."""

    version: int = 0
    fork: str = ""
    opened: int = 0
    size_bytes: int = 0  # of what it holds, roughly
    nodes: list[Node] = field(default_factory=list)
    index: dict[str, int] = field(default_factory=dict)  # node → place in nodes
    calls: dict[str, tuple[int, int, int]] = field(default_factory=dict)  # → node, step, place
    turns: dict[str, int] = field(default_factory=dict)  # claimed and not ended
    inbox: dict[str, UserText] = field(default_factory=dict)
    drops: list[_Drop] = field(default_factory=list)

    def call(self, tool_node: str) -> ToolCall | None:
        place = self.calls.get(tool_node)
        return self.nodes[place[0]].steps[place[1]].calls[place[2]] if place else None


def fold(transcript: Transcript, recorded: Recorded) -> None:
    """Takes in the branch's next append; one that it has already is passed over."""
    if recorded.sequence <= transcript.version:
        return
    sequence = recorded.sequence
    for event in recorded.append.events:
        match event:
            case BranchOpened(fork=fork):
                transcript.fork, transcript.opened = fork, sequence
            case MessageReceived():
                transcript.size_bytes += _NODE_BYTES + _held(event.content)
                item = UserText(event.content, _header(event))
                if event.after is None:
                    transcript.inbox[event.node_id] = item
                else:
                    node = Node(id=event.node_id, sequence=sequence, item=item)
                    _place(transcript, node, event.after)
            case MessageRefused(node_id=node_id):
                transcript.inbox.pop(node_id, None)
            case NodesPlaced(node_ids=node_ids, after=after):
                for node_id in node_ids:
                    item = transcript.inbox.pop(node_id)
                    _place(transcript, Node(id=node_id, sequence=sequence, item=item), after)
                    after = node_id
            case TurnClaimed(after=str(after)):
                transcript.size_bytes += _NODE_BYTES
                transcript.turns[event.turn_id] = len(transcript.nodes)
                _place(transcript, Node(id=event.node_id, sequence=sequence), after)
            case ModelAnswered(calls=calls):
                at = transcript.turns[event.turn_id]
                steps = transcript.nodes[at].steps
                for place, call in enumerate(calls):
                    transcript.calls[call.node_id] = (at, len(steps), place)
                    transcript.size_bytes += _NODE_BYTES + _held(call.args)
                transcript.size_bytes += _held(event.text)
                steps.append(Step(sequence, event.text, calls))
            case ToolReturned(node_id=call_node):
                result = Result(sequence, event.result, event.status == "error")
                _returned(transcript, call_node, result)
            case WaitEnded(call=str(call_node)):
                note = None
                if event.content is None:
                    note = f"no reply ({event.outcome})"
                    note += f": {event.reason}" if event.reason else ""
                _returned(
                    transcript,
                    call_node,
                    Result(sequence, event.content, event.outcome != "replied", note),
                )
            case TurnEnded():
                ended = transcript.turns.pop(event.turn_id, None)
                if ended is not None:
                    node = transcript.nodes[ended]
                    node.ended, node.status = sequence, event.status
                if event.dropped:
                    transcript.drops.append(_Drop(len(transcript.nodes), event.dropped))
            case _:
                pass  # What it sends, waits for by hand, and late answers: in no context.
    transcript.version = sequence


_NODE_BYTES = 600  # what a node costs beside its texts, roughly


def _held(content: Content | None) -> int:
    return len(content.data) if content is not None and content.data is not None else 0


def _place(transcript: Transcript, node: Node, after: str) -> None:
    tip = transcript.nodes[-1].id if transcript.nodes else transcript.fork
    if after != tip:
        raise BrokenEdge(f"node {node.id} follows {after}, but its branch's tip is {tip}")
    transcript.index[node.id] = len(transcript.nodes)
    transcript.nodes.append(node)


def _returned(transcript: Transcript, tool_node: str, result: Result) -> None:
    transcript.size_bytes += _held(result.content)
    node, _, _ = transcript.calls[tool_node]
    transcript.nodes[node].results[tool_node] = result


# -- the context of a head -------------------------------------------------------------------


class Segment(NamedTuple):
    """A branch's part of a chain: up to `head`, as it stood before sequence `before` (0: now)."""

    transcript: Transcript
    head: str
    before: int = 0


def holds(segment: Segment) -> bool:
    """Whether the segment's head is a node there: of a message or a turn, or of a tool call."""
    transcript, head, before = segment
    if head in transcript.index:
        sequence = transcript.nodes[transcript.index[head]].sequence
    elif head in transcript.calls:
        node, step, _ = transcript.calls[head]
        sequence = transcript.nodes[node].steps[step].sequence
    else:
        return False
    return not before or sequence < before


def context(chain: Sequence[Segment], system: Content | None) -> tuple[ContextItem, ...]:
    """The items of a head, whose chain runs from ROOT on. Raises UnknownNode.

    Each call of a tool is followed by exactly one result, whatever became of its turn. A call as
    head shows its turn up to the answer that made it.
    """
    items: list[ContextItem] = [SystemText(system)] if system is not None else []
    for segment in chain:
        if not holds(segment):
            raise UnknownNode(segment.head)
        transcript, head, before = segment
        cut: int | None = None
        if head in transcript.index:
            last = transcript.index[head]
        else:
            last, cut, _ = transcript.calls[head]
        hidden = {node for drop in transcript.drops if drop.since <= last for node in drop.nodes}
        for place in range(last + 1):
            node = transcript.nodes[place]
            if node.id in hidden:
                continue
            if node.items is not None and not before and cut is None:
                items += node.items
            else:
                items += _items(node, before, cut if place == last else None)
    return tuple(items)


def _items(node: Node, before: int, cut: int | None) -> tuple[ContextItem, ...]:
    if node.item is not None:
        return (node.item,)
    items: list[ContextItem] = []
    steps = node.steps if cut is None else node.steps[: cut + 1]
    ended = bool(node.ended) and (not before or node.ended < before)
    for step in steps:
        if before and step.sequence >= before:
            break
        calls = tuple(Call(call_id(call.node_id), call.name, call.args) for call in step.calls)
        text = step.text if step.text is not None and step.text.size else None
        if text is None and not calls:
            continue
        items.append(AssistantText(text, calls))
        for call, source in zip(calls, step.calls, strict=True):
            result = node.results.get(source.node_id)
            if result is not None and (not before or result.sequence < before):
                items.append(
                    ToolOutput(call.id, call.name, result.content, result.is_error, result.note)
                )
            else:
                why = f"its turn ended first: {node.status}" if ended else "it is still running"
                note = f"this call has no result: {why}"
                items.append(ToolOutput(call.id, call.name, None, True, note))
    whole = tuple(items)
    if ended and not before and cut is None:
        node.items = whole  # Nothing can follow a turn's end.
    return whole


def call_id(tool_node: str) -> str:
    return f"call_{tool_node.rpartition('-')[2]}"


def context_digest(items: Iterable[ContextItem]) -> str:
    """SHA-256 over structure and keyed digests: two contexts with the same one are the same."""
    digest = hashlib.sha256()
    encode = msgspec.msgpack.Encoder().encode
    for item in items:
        match item:
            case SystemText(content=content):
                parts: tuple[object, ...] = ("system", *_named(content))
            case UserText(content=content, header=header):
                parts = ("user", *_named(content), header)
            case AssistantText(content=text, calls=calls):
                told = tuple((call.id, call.name, *_named(call.args)) for call in calls)
                parts = ("assistant", *_named(text), told)
            case ToolOutput(content=output):
                said = (item.call_id, item.name, item.is_error, item.note)
                parts = ("tool", *_named(output), *said)
            case _:
                assert_never(item)
        digest.update(encode(parts))
    return digest.hexdigest()


def _named(content: Content | None) -> tuple[str | None, str | None]:
    return (None, None) if content is None else (content.key, content.digest)


# -- messages --------------------------------------------------------------------------------


def contents(items: Iterable[ContextItem]) -> dict[str, Content]:
    """All content of the items by digest: what must be opened before they are rendered."""
    found: dict[str, Content] = {}
    for item in items:
        if item.content is not None:
            found[item.content.digest] = item.content
        if isinstance(item, AssistantText):
            for call in item.calls:
                found[call.args.digest] = call.args
    return found


def render(items: Iterable[ContextItem], texts: Mapping[str, str]) -> list[dict[str, Any]]:
    """Plain messages, with the texts by the digest of their content.

    `{"role": "system" | "user" | "assistant" | "tool", "content"}`; an assistant's may have
    `tool_calls` (`[{"id", "name", "arguments"}]`, the arguments as the model wrote them), a
    tool's has `tool_call_id` and `name`, and `is_error` when it is one.
    """
    messages: list[dict[str, Any]] = []
    for item in items:
        match item:
            case SystemText(content=content):
                messages.append({"role": "system", "content": texts[content.digest]})
            case UserText(content=content, header=header):
                text = defused(texts[content.digest])
                whole = text if header is None else f"{header}\n{text}"
                messages.append({"role": "user", "content": whole})
            case AssistantText(content=said, calls=calls):
                message: dict[str, Any] = {
                    "role": "assistant",
                    "content": None if said is None else texts[said.digest],
                }
                if calls:
                    message["tool_calls"] = [
                        {"id": call.id, "name": call.name, "arguments": texts[call.args.digest]}
                        for call in calls
                    ]
                messages.append(message)
            case ToolOutput(content=output):
                text = (item.note or "") if output is None else defused(texts[output.digest])
                message = {
                    "role": "tool",
                    "tool_call_id": item.call_id,
                    "name": item.name,
                    "content": text,
                }
                if item.is_error:
                    message["is_error"] = True
                messages.append(message)
            case _:
                assert_never(item)
    return messages


def _header(event: MessageReceived) -> str | None:
    match event.source:
        case "user":
            return None
        case "from_branch":
            return f"[Message from {json.dumps(event.sender or '?', ensure_ascii=False)}]"
        case "note":
            return "[Note from Plait]"


_OURS = re.compile(r'\[(?:Message from "(?:[^"\\]|\\.)*"|Note from Plait)\]\n')


def without_header(text: str) -> str:
    """A rendered user message without Plait's line: only Plait can have written one there."""
    found = _OURS.match(text)
    return text[found.end() :] if found else text


# What begins a line for some reader, a bracket for some eye, and the words of our headers.
_BREAKS = re.compile("(\r\n|[\n\r\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029])")
_BRACKETS = re.compile("[\\[\uff3b\ufe47\u3010\u3014\u27e6\u2045]")
_FORGED = re.compile(r"\W*\[\W*(?:message|note|attached)\W*from\b", re.IGNORECASE)
_LINE_START = 200  # characters of a line that are looked at


def defused(text: str) -> str:
    """The text with each line that could pass for one of Plait's headers marked as a quote."""
    if not _BRACKETS.search(text):
        return text
    parts = _BREAKS.split(text)
    for place in range(0, len(parts), 2):
        if _BRACKETS.search(parts[place]) and _looks_like_ours(parts[place]):
            parts[place] = f"> {parts[place]}"
    return "".join(parts)


def _looks_like_ours(line: str) -> bool:
    visible = "".join(c for c in line if unicodedata.category(c) not in ("Cf", "Mn", "Cc"))
    plain = unicodedata.normalize("NFKC", visible[:_LINE_START])
    return _FORGED.match(_BRACKETS.sub("[", plain)) is not None and not line.startswith("> ")
