"""What happened in a run, one line each, with names that a person can follow: S1, S1.b2, n7, t3."""

import re
from collections.abc import Iterator

from plait.events.store import Recorded
from plait.events.types import Content

_ID = re.compile(r"s[a-z2-7]{12}(?:-(?:_|b[a-z2-7]{8})(?:-(?:root|[ntmwp][a-z2-7]{11}))?)?")
_HIDDEN = {"content", "text", "result", "args", "usage", "pins", "context", "root", "title"}


class Trace:
    """Keeps lines only when somebody will read them."""

    def __init__(self, on: bool) -> None:
        self.on = on
        self.lines: list[str] = []
        self._names: dict[str, str] = {}
        self._counts: dict[str, int] = {}

    def note(self, at: float, who: str, what: str) -> None:
        if self.on:
            self.lines.append(f"{at:9.3f}  {who:<16} {self.named(what)}")

    def appended(self, at: float, who: str, recorded: Recorded) -> None:
        if self.on:
            events = "; ".join(_shown(event) for event in recorded.append.events)
            branch = f"{recorded.stream.session}-{recorded.stream.branch}"
            self.note(at, who, f"append #{recorded.sequence} {branch}: {events}")

    def named(self, text: str) -> str:
        return _ID.sub(lambda found: self._name(found.group()), text)

    def _name(self, any_id: str) -> str:
        session, _, rest = any_id.partition("-")
        if not rest:
            return self._new(any_id, "S")
        branch, _, local = rest.partition("-")
        if branch == "_":
            return f"{self._name(session)}.{local or '_'}"
        if not local:
            return f"{self._name(session)}.{self._new(any_id, 'b')}"
        return self._new(any_id, local[0])

    def _new(self, any_id: str, kind: str) -> str:
        name = self._names.get(any_id)
        if name is None:
            self._counts[kind] = count = self._counts.get(kind, 0) + 1
            name = self._names[any_id] = f"{kind}{count}"
        return name


def _shown(event: object) -> str:
    return f"{type(event).__name__}({', '.join(_fields(event))})"


def _fields(event: object) -> Iterator[str]:
    for name in event.__struct_fields__:  # type: ignore[attr-defined]
        value = getattr(event, name)
        if name in _HIDDEN or isinstance(value, Content) or value in (None, False, (), ""):
            continue
        if name == "calls":
            value = " ".join(f"{call.node_id}={call.name}" for call in value)
        yield f"{name}={value}"
