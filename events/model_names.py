"""Names of models, `provider:name`: checked where a session names one, known where turns run.

The write side keeps only names; `services.turns.models` holds what answers to them.
"""

from collections.abc import Iterable

from plait.events.errors import Invalid

OFFLINE = ("offline:echo", "offline:demo")


def check_model(name: str, known: Iterable[str] = OFFLINE) -> None:
    """Raises Invalid, listing the known ones."""
    listed = tuple(known)
    if name not in listed:
        raise Invalid(f"there is no model {name!r}: use one of {', '.join(listed)}")
