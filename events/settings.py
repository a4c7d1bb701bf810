"""Every setting, once: its name, its default for `plait dev`, and its environment variable.

`PLAIT_<FIELD>` sets a field, `PLAIT_LIMIT_<FIELD>` one of the limits. What does not fit, and a name
that is none of ours, is refused at start.
"""

import os
import re
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from plait.events.errors import Misconfigured
from plait.events.limits import Limits

Count = Annotated[int, Meta(ge=1, le=1_000_000)]
Seconds = Annotated[float, Meta(gt=0, le=86_400)]
Token = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_-]{1,64}$")]  # stands in subjects and keys

OTHERS = {"PLAIT_URL"}  # what the command line reads by itself
SECRETS = {"PLAIT_KEY", "PLAIT_SECRET"}  # never shown


class Settings(Struct, frozen=True, kw_only=True):
    nats_url: str = "nats://127.0.0.1:4222"
    nats_monitor_url: str = ""  # http://host:8222: proves that a single server syncs each append
    redis_url: Annotated[str, Meta(pattern="^(redis|rediss|unix)://")] = "redis://127.0.0.1:6379/0"
    prefix: Token = "plait"  # of streams, subjects and keys: several Plaits may share the servers
    replicas: Annotated[int, Meta(ge=1, le=5)] = 1  # of streams: 3 on a cluster
    allow_lossy_log: bool = False  # start on a log that could lose acknowledged appends
    tenant: Token = "dev"
    key: Annotated[str, Meta(min_length=1)] = "dev"  # the one key of that tenant
    secret: str = ""  # 32 bytes in base64: what the keys of providers are encrypted with
    model: Annotated[str, Meta(pattern="^[^:]+:.+$")] = "offline:demo"  # sessions that name none
    host: str = "127.0.0.1"
    port: Annotated[int, Meta(ge=1, le=65_535)] = 8080
    turns_at_once: Count = 1000  # per worker process
    turns_admitted: Count = 1_000  # per tenant, at once: the queue of work stays short
    replies_partitions: Annotated[int, Meta(ge=1, le=64)] = (
        4  # of tenants; each is acted on by one process
    )
    read_timeout_s: Seconds = 5.0  # how long a query waits for its minimum position
    wait_max_s: Seconds = 60.0  # how long an HTTP call may wait with `?wait=`
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    limits: Limits = Limits()

    def __repr__(self) -> str:
        return f"Settings(prefix={self.prefix!r})"  # The key and the secret stay out of log lines.

    @classmethod
    def from_env(cls, env: Mapping[str, str] = os.environ, /, **overrides: object) -> "Settings":
        """Raises Misconfigured, naming the variable, when a value does not fit."""
        own = {"PLAIT_" + field.name.upper(): field for field in msgspec.structs.fields(cls)}
        limits = {"PLAIT_LIMIT_" + f.name.upper(): f for f in msgspec.structs.fields(Limits)}
        del own["PLAIT_LIMITS"]
        _refuse_unknown(env, {*own, *limits, *OTHERS})
        values = {f.name: _value(env, name, f.type) for name, f in own.items() if name in env}
        bounds = {
            f.name: _value(env, name, Annotated[f.type, Meta(gt=0, le=2**40)])
            for name, f in limits.items()
            if name in env
        }
        for name, value in overrides.items():
            if value is not None:
                kind = own["PLAIT_" + name.upper()].type
                values[name] = _value({name: str(value)}, name, kind)
        return cls(**values, limits=Limits(**bounds))


def _value(env: Mapping[str, str], name: str, kind: Any) -> Any:
    try:
        return msgspec.convert(env[name], kind, strict=False)
    except msgspec.ValidationError as error:
        shown = name if name in SECRETS else f"{name}={without_password(env[name])!r}"
        raise Misconfigured(f"{shown}: {error}") from None


def _refuse_unknown(env: Mapping[str, str], known: set[str]) -> None:
    for name in sorted(env):
        if name.startswith("PLAIT_") and name not in known:
            close = get_close_matches(name, known, n=1)
            hint = f": do you mean {close[0]}?" if close else ": unset it"
            raise Misconfigured(f"{name} is no setting of Plait{hint}")


def without_password(url: str) -> str:
    """The address, or several with commas between, as it may be shown: without user, password and
    token."""
    shown = re.sub(r"(?<=://)\S*@|^(?!\w+://)\S*@", "***@", url)
    return re.sub(r"(?i)([?&](?:password|username|token)=)[^&\s]*", r"\1***", shown)
