"""What reaches the terminal: other people's text made harmless, in any width and any encoding."""

import codecs
import io
import re
import sys
from collections.abc import Iterable
from typing import Final

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

MIN_WIDTH: Final = 30  # below it nothing is readable, so lines may as well run over

# Terminals obey these wherever they come from: they could move the cursor, set the clipboard, or
# show a text in another order than it has.
_CONTROL = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)
_BEYOND_ASCII = re.compile("[^\x00-\x7f]")
_ASCII: Final = str.maketrans(
    "◇○△■◈●✓✗│┊─╌├┤┬╭╮╰╯▸◂→⇢⇠…·“”‘’",  # noqa: RUF001 - the last two are meant
    "*oA#@*+x|:--+++++++><>><..\"\"''",
)
_FALLBACK: Final = "plait.ascii"


def plain(text: str) -> str:
    """Each control character as one that only shows that it was there. Lines and tabs stay."""
    return _CONTROL.sub(_shown, text)


def one_line(text: str) -> str:
    """For a cell or a label: without line breaks, too."""
    return plain(" ".join(text.split()))


def escaped(json: str) -> str:
    """JSON that no terminal obeys and that standard output can encode: the same value."""
    unsafe = _CONTROL if _speaks_unicode() else _BEYOND_ASCII
    return unsafe.sub(_json_escape, json)


class Terminal(Console):
    """The one way to print: what is shown is `plain`, also where a caller forgot it."""

    def __init__(self, *, quiet: bool = False) -> None:
        super().__init__(highlight=False, quiet=quiet, emoji=False)
        if self.width < MIN_WIDTH:
            self.width = MIN_WIDTH

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            if not segment.control and _CONTROL.search(segment.text):
                yield Segment(plain(segment.text), segment.style)
            else:
                yield segment

    def on_broken_pipe(self) -> None:
        raise  # to main, through whatever has to be stopped on the way


def adapt_streams() -> None:
    """Whatever the locale: what cannot be encoded gets a shape that can, and what cannot be
    decoded a mark."""
    codecs.register_error(_FALLBACK, _in_ascii)
    for stream, errors in (
        (sys.stdin, "replace"),
        (sys.stdout, _FALLBACK),
        (sys.stderr, _FALLBACK),
    ):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=errors)


def _shown(match: re.Match[str]) -> str:
    code = ord(match[0])
    if code < 0x20:
        return chr(0x2400 + code)  # the pictures of the control characters
    return "\u2421" if code == 0x7F else "\ufffd"


def _json_escape(match: re.Match[str]) -> str:
    units = match[0].encode("utf-16-be", "surrogatepass").hex()
    return "".join(f"\\u{units[at : at + 4]}" for at in range(0, len(units), 4))


def _speaks_unicode() -> bool:
    return (sys.stdout.encoding or "").lower().replace("-", "").startswith("utf")


def _in_ascii(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    text = error.object[error.start : error.end].translate(_ASCII)
    return text.encode("ascii", "replace").decode(), error.end
