"""What answers for a turn: the protocol of a chat model, its failures, and the offline models.

A model gets the rendered context and gives one whole answer, or fails: `RetryLater` when asking
again may help, `ModelError` when not. It is a stranger to the log: the texts of these two are
recorded and shown to people, anything else only by its type, since the text of a library's error
may hold a key.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from msgspec import Struct

from plait.events.context import without_header
from plait.events.errors import Final, ModelFailure, Retryable
from plait.events.model_names import OFFLINE
from plait.events.types import Usage

Message = Mapping[str, Any]  # as plait.events.context.render makes them


class ToolSpec(Struct, frozen=True):
    """A tool as the model is told of it. `schema` is the JSON schema of its arguments."""

    name: str
    description: str
    schema: dict[str, Any]


def _unheard(text: str) -> None:
    """Nobody listens."""


class Request(Struct, frozen=True):
    """One call. `model` is the whole name; `said` takes the answer's text, piece by piece, while
    it comes; the tenant says whose keys pay for it."""

    model: str
    messages: Sequence[Message]
    tools: Sequence[ToolSpec] = ()
    tenant: str = ""
    said: Callable[[str], None] = _unheard


class AskedCall(NamedTuple):
    name: str
    args: str  # JSON text, as the model wrote it


class Answer(Struct, frozen=True):
    text: str = ""
    calls: tuple[AskedCall, ...] = ()
    usage: Usage = Usage()
    finish: str = "stop"


class ModelError(Final):
    """The model gave no answer, and asking again would change nothing. The text has no secrets."""

    def __init__(self, message: str, failure: ModelFailure = ModelFailure.MODEL_ERROR) -> None:
        super().__init__(message)
        self.failure = failure


class RetryLater(Retryable):
    """The model gave no answer, and may give one later: in `after_s` if the provider said so."""

    def __init__(self, message: str, failure: ModelFailure, after_s: float | None = None) -> None:
        super().__init__(message)
        self.failure, self.after_s = failure, after_s


class ChatModel(Protocol):
    async def answer(self, request: Request) -> Answer: ...


class Echo:
    """`offline:echo` answers the text of the last user message."""

    async def answer(self, request: Request) -> Answer:
        said, _ = _last_user(request.messages)
        return _answer(request, said)


class Demo:
    """`offline:demo`, an actor without chance or network.

    `ask <branch>: <question>` makes it ask and quote the reply, `tell <branch>: <text>` send
    without waiting; otherwise it says what of all it was told fits the message best. Several
    branches that ask at once are answered each, since the one answer goes to all who asked.
    """

    async def answer(self, request: Request) -> Answer:
        said, last = _last_user(request.messages)
        order = _ORDER.match(said)
        if order is None:
            first = last
            while first > 0 and request.messages[first - 1]["role"] == "user":
                first -= 1
            earlier = request.messages[: max(first, 0)]
            unread = [message["content"] for message in request.messages[max(first, 0) : last + 1]]
            asked = [without_header(text) for text in unread if text != without_header(text)]
            if len(asked) < 2:
                return _answer(request, _recall(said, request.messages[: max(last, 0)]))
            lines = [f"“{_excerpt(text)}”: {_recall(text, earlier)}" for text in asked]
            return _answer(request, "\n".join(lines))
        verb, branch, text = order["verb"].lower(), order["branch"].strip(), order["text"].strip()
        results = [m for m in request.messages[last + 1 :] if m["role"] == "tool"]
        if not results:
            args = {"target_branch": branch, "message": text, "wait_reply": verb == "ask"}
            call = AskedCall("send_to_branch", json.dumps(args, ensure_ascii=False))
            return _answer(request, "", (call,))
        result = results[-1]
        if result.get("is_error"):
            return _answer(request, f"I could not {verb} {branch}: {result['content']}")
        if verb == "tell":
            return _answer(request, f"I have told {branch}: “{text}”")
        return _answer(request, f"{branch} answered: “{result['content']}”")


def offline_models() -> dict[str, ChatModel]:
    models: dict[str, ChatModel] = {"offline:echo": Echo(), "offline:demo": Demo()}
    assert tuple(models) == OFFLINE, "the write side accepts exactly what can run"
    return models


_ORDER = re.compile(r"\s*(?P<verb>ask|tell)\s+(?P<branch>.+?):\s+(?P<text>\S.*)", re.I | re.S)
_SENTENCE = re.compile(r"[^.!?\n]+[.!?]?")
_WORD = re.compile(r"\w{4,}")
_EXCERPT = 60


def _last_user(messages: Sequence[Message]) -> tuple[str, int]:
    for place in range(len(messages) - 1, -1, -1):
        if messages[place]["role"] == "user":
            return without_header(messages[place]["content"]), place
    return "", -1


def _recall(said: str, earlier: Sequence[Message]) -> str:
    """The sentence from earlier that shares most words with the message, else an excerpt of it."""
    words = set(_WORD.findall(said.lower()))
    best, shared = "", 1
    for message in earlier:
        if message["role"] not in ("user", "system"):
            continue
        for sentence in _SENTENCE.findall(without_header(message["content"])):
            count = len(words & set(_WORD.findall(sentence.lower())))
            if count > shared and not sentence.endswith("?"):
                best, shared = sentence.strip(), count
    if best:
        return best
    return f"I have read “{_excerpt(said)}”."


def _excerpt(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _EXCERPT else line[: _EXCERPT - 1].rstrip() + "…"


def _answer(request: Request, text: str, calls: tuple[AskedCall, ...] = ()) -> Answer:
    """Counts words as tokens, so that usage is not zero."""
    read = sum(len((m["content"] or "").split()) for m in request.messages)
    return Answer(
        text=text,
        calls=calls,
        usage=Usage(input_tokens=read, output_tokens=len(text.split())),
        finish="tool_calls" if calls else "stop",
    )
