"""What a model says while it says it: short-lived messages beside the log, for who watches.

They go over core NATS and nothing keeps them: what counts is the answer in the log. A worker
publishes pieces on `Subjects.tokens`; each names its place, so that a reader can tell a gap from a
repeat. Of one call (turn, epoch and step) a reader holds a text and takes a piece like this:

    offset <= len(held)   held += text[len(held) - offset :]
    offset >  len(held)   it came in the middle, or missed some: it asks, and waits for the answer

To ask, it publishes an empty message with a reply subject on `Subjects.tokens_asked` of the
session; every worker that is in a call there sends what it has so far to that subject, from offset
0 on, in pieces of the same shape. Subscribe first, then ask, and no place is missed. A reader that
takes the subject of the tokens itself as reply subject needs no other subscription.

A call ends with `end`: "whole" (its answer is being recorded), or "broken": forget the text. A
worker that dies sends none; a greater epoch of the turn, or the turn's next event in the log, ends
the call as well.
"""

from typing import Literal

import msgspec
from msgspec import Struct

from plait.events.types import Epoch

PIECE_CHARS = 64 * 1024  # of one message: four bytes each, and NATS takes 1 MiB


class Tokens(Struct, frozen=True, omit_defaults=True):
    """A piece of a model call's text. `offset` counts characters (code points)."""

    turn_id: str
    epoch: Epoch
    step: int
    offset: int
    text: str
    end: Literal["", "whole", "broken"] = ""


encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(Tokens).decode
