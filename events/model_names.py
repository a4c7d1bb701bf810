"""Names of models, `provider:name`: checked where a session names one, known where turns run.

The write side keeps only names; `services.turns` holds what answers to them.
"""

import re
from collections.abc import Collection

from plait.events.errors import Invalid, shown

OFFLINE = ("offline:echo", "offline:demo")
PROVIDERS = ("openai", "anthropic")
_NAME = re.compile(r"[\x21-\x7e]{1,200}")  # of a model at its provider


def check_model(name: str, own: Collection[str] = ()) -> None:
    """Raises Invalid, saying which names there are; `own` are the tenant's own providers. Whether
    a provider has the model, it says itself when it is asked."""
    if name in OFFLINE:
        return
    provider, _, model = name.partition(":")
    providers = sorted({*PROVIDERS, *own})
    if provider not in providers or not _NAME.fullmatch(model):
        known = ", ".join([*OFFLINE, *(f"{provider}:<model>" for provider in providers)])
        raise Invalid(f"there is no model {shown(name)}: use one of {known}")
