"""Every setting, once: its name, its default for `plait dev`, and its environment variable.

`PLAIT_<FIELD>` sets a field, `PLAIT_LIMIT_<FIELD>` one of the limits.
"""

import os
from collections.abc import Mapping

import msgspec
from msgspec import Struct

from plait.events.errors import Misconfigured
from plait.events.limits import Limits


class Settings(Struct, frozen=True, kw_only=True):
    nats_url: str = "nats://127.0.0.1:4222"
    nats_monitor_url: str = ""  # http://host:8222: proves that a single server syncs each append
    redis_url: str = "redis://127.0.0.1:6379/0"
    prefix: str = "plait"  # of streams, subjects and keys: several Plaits may share the servers
    replicas: int = 1  # of streams: 3 on a cluster
    allow_lossy_log: bool = False  # start on a log that could lose acknowledged appends
    tenant: str = "dev"
    key: str = "dev"  # the one key of that tenant
    model: str = "offline:demo"  # sessions that name none
    host: str = "127.0.0.1"
    port: int = 8080
    turns_at_once: int = 1000  # per worker process
    turns_admitted: int = 1_000  # per tenant, at once: the queue of work stays short
    replies_partitions: int = 4  # of tenants; each is acted on by one process
    read_timeout_s: float = 5.0  # how long a query waits for its minimum position
    wait_max_s: float = 60.0  # how long an HTTP call may wait with `?wait=`
    log_level: str = "info"
    limits: Limits = Limits()

    @classmethod
    def from_env(cls, env: Mapping[str, str] = os.environ, /, **overrides: object) -> "Settings":
        """Raises Misconfigured, naming the variable, when a value does not fit."""
        values: dict[str, object] = {}
        limits: dict[str, object] = {}
        for target, struct, prefix in (
            (values, cls, "PLAIT_"),
            (limits, Limits, "PLAIT_LIMIT_"),
        ):
            for field in msgspec.structs.fields(struct):
                name = prefix + field.name.upper()
                if field.type is Limits or name not in env:
                    continue
                try:
                    target[field.name] = msgspec.convert(env[name], field.type, strict=False)
                except msgspec.ValidationError as error:
                    raise Misconfigured(f"{name}={env[name]!r}: {error}") from None
        given = {name: value for name, value in overrides.items() if value is not None}
        return msgspec.convert(
            {**values, **given, "limits": Limits(**limits)},  # type: ignore[arg-type]
            cls,
        )
