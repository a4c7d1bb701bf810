"""Opens the log on JetStream: connects, creates the streams or compares them, and refuses a
server that is too old or could lose what it acknowledged.

What a client can know of durability (nats-server 2.15): neither INFO, account info nor a stream's
state says whether the server syncs each write. A stream says its replicas and its persist mode.
The monitoring endpoint `/varz` has `jetstream.config.sync_always`; the same is on
`$SYS.REQ.SERVER.PING.VARZ`, but only for users of the system account, which services are not.
So three replicas count by themselves, and a single server must prove itself by its monitoring URL.
"""

import asyncio
import contextlib
import logging
import time
from typing import Any, NamedTuple
from urllib.error import URLError
from urllib.request import urlopen

import msgspec
from nats import errors as nats_errors
from nats.aio.client import Client

from plait.events.errors import Misconfigured, Unavailable
from plait.events.jetstream import JetStreamStore
from plait.events.jetstream_api import (
    NAME_IN_USE,
    STREAM_NOT_FOUND,
    Api,
    ApiError,
    StreamInfo,
)
from plait.events.jetstream_follow import FollowingClient
from plait.events.jetstream_records import (
    JetStreamBlobs,
    JetStreamKeys,
    JetStreamLeases,
    JetStreamProviderRecords,
    JetStreamRequests,
    JetStreamWorkQueue,
    bucket_stream,
)
from plait.events.settings import Settings, without_password
from plait.events.subjects import GENERATION, Subjects

SERVER = (
    2,
    12,
)  # the oldest that our measurements and Jepsen's cover
MESSAGE_BYTES = 1024 * 1024  # what the server must take in one message
CONNECT_S = 30.0
LEASE_S = 3.0
REQUEST_S = 24 * 3600.0
FOLLOWERS = 100_000  # consumers of the log; since 2.15 a stream takes 1,000 unless it says more
PARKED = 100_000
MONITOR_S = 5.0
REPLICATED = 3

_log = logging.getLogger(__name__)


class JetStream(NamedTuple):
    """All that a process needs of NATS, on one connection."""

    nc: Client
    subjects: Subjects
    store: JetStreamStore
    blobs: JetStreamBlobs
    keys: JetStreamKeys
    requests: JetStreamRequests
    providers: JetStreamProviderRecords
    leases: JetStreamLeases
    work: JetStreamWorkQueue

    async def close(self) -> None:
        await self.store.close()
        await self.nc.close()


async def open_jetstream(settings: Settings, name: str = "plait") -> JetStream:
    """Raises Unavailable without a server, and Misconfigured as `ensure` does."""
    nc = await connect(settings, name)
    try:
        generation = await ensure(nc, settings)
    except BaseException:
        await nc.close()
        raise
    api, subjects = Api(nc), Subjects(settings.prefix)
    return JetStream(
        nc=nc,
        subjects=subjects,
        store=JetStreamStore(nc, subjects, generation),
        blobs=JetStreamBlobs(api, subjects),
        keys=JetStreamKeys(api, subjects),
        requests=JetStreamRequests(api, subjects),
        providers=JetStreamProviderRecords(api, subjects),
        leases=JetStreamLeases(api, subjects),
        work=JetStreamWorkQueue(api, subjects),
    )


async def connect(settings: Settings, name: str = "plait") -> Client:
    """A connection that comes back for ever. Raises Unavailable when the first does not come."""

    said = ""

    async def on_error(error: Exception) -> None:
        nonlocal said
        text = str(error) or type(error).__name__
        if text != said:  # It comes with each try to connect again: four a second.
            _log.warning("NATS: %s", text)
        said = text

    async def on_reconnect() -> None:
        nonlocal said
        said = ""
        _log.info("NATS: connected again")

    nc = FollowingClient()
    try:
        async with asyncio.timeout(CONNECT_S):
            await nc.connect(
                servers=settings.nats_url.split(","),
                name=name,
                error_cb=on_error,
                reconnected_cb=on_reconnect,
                connect_timeout=2,
                max_reconnect_attempts=-1,  # the default gives up after 60
                reconnect_time_wait=0.25,  # type: ignore[arg-type]
                ping_interval=10,
                max_outstanding_pings=2,
            )
    except (TimeoutError, OSError, OverflowError, ValueError, nats_errors.Error) as error:
        with contextlib.suppress(AssertionError):  # of a client that had no address to begin with
            await nc.close()
        raise Unavailable(
            f"no NATS at {without_password(settings.nats_url)} ({str(error) or 'no answer'}): "
            "start it, or set PLAIT_NATS_URL"
        ) from error
    return nc


async def ensure(nc: Client, settings: Settings) -> int:
    """Creates what is missing, checks what is there; the log's generation.

    Raises Misconfigured when the server is too old, or lacks JetStream, when a stream differs in a
    way that cannot be changed, or when the log could lose acknowledged appends.
    """
    version = nc.connected_server_version
    if (version.major, version.minor) < SERVER:
        raise Misconfigured(
            f"nats-server {version.major}.{version.minor}.{version.patch} is too old: "
            f"install {SERVER[0]}.{SERVER[1]} or newer"
        )
    if nc.max_payload < MESSAGE_BYTES:
        raise Misconfigured(
            f"NATS takes messages of {nc.max_payload} bytes only: set its max_payload to "
            f"{MESSAGE_BYTES} or more"
        )
    api, subjects = Api(nc), Subjects(settings.prefix)
    try:
        await api.call("INFO", {}, msgspec.Raw)
    except Unavailable as error:
        raise Misconfigured(
            f"JetStream does not answer ({error}): switch it on in the server's configuration"
        ) from error
    log, *others = _streams(subjects, settings.replicas)
    info = await _ensure_stream(api, log)
    if not settings.allow_lossy_log:
        await check_durability(nc, info, settings)
    for config in others:
        await _ensure_stream(api, config)
    return int(info.metadata[GENERATION])


def _streams(subjects: Subjects, replicas: int) -> list[dict[str, Any]]:
    disk = {"storage": "file", "num_replicas": replicas, "discard": "new"}
    one_each = {"max_msgs_per_subject": 1}
    return [
        disk
        | {
            "name": subjects.log,
            "subjects": [subjects.events()],
            "compression": "s2",
            "deny_delete": True,
            "deny_purge": True,
            "allow_direct": True,
            "max_consumers": FOLLOWERS,
            "metadata": {GENERATION: str(time.time_ns() // 1_000_000)},
        },
        disk
        | one_each
        | {
            "name": subjects.work,
            "subjects": [subjects.work_items],
            "retention": "workqueue",
            "discard_new_per_subject": True,
        },
        disk
        | one_each
        | {
            "name": subjects.requests,
            "subjects": [subjects.all_requests],
            "max_age": _ns(REQUEST_S),
        },
        disk
        | one_each
        | {
            "name": subjects.parked,
            "subjects": [subjects.all_parked],
            "discard": "old",
            "max_msgs": PARKED,
        },
        disk
        | one_each
        | {
            "name": subjects.blobs,
            "subjects": [subjects.all_blobs],
            "discard_new_per_subject": True,
            "compression": "s2",
        },
        disk
        | one_each
        | {
            "name": bucket_stream(subjects.keys),
            "subjects": [f"$KV.{subjects.keys}.>"],
            "allow_rollup_hdrs": True,
            "deny_delete": True,
        },
        disk
        | one_each
        | {
            "name": bucket_stream(subjects.providers),
            "subjects": [f"$KV.{subjects.providers}.>"],
        },
        disk
        | one_each
        | {
            # In a file: a memory stream would not outlive the restart of a single server.
            "name": bucket_stream(subjects.leases),
            "subjects": [f"$KV.{subjects.leases}.>"],
            "max_age": _ns(LEASE_S),
            "allow_rollup_hdrs": True,
            "deny_delete": True,
        },
    ]


async def _ensure_stream(api: Api, wanted: dict[str, Any]) -> StreamInfo:
    name = wanted["name"]
    try:
        info = await api.info(name)
    except ApiError as error:
        if error.err_code != STREAM_NOT_FOUND:
            raise
        try:
            return await api.call(f"STREAM.CREATE.{name}", wanted, StreamInfo)
        except ApiError as error:
            if error.err_code != NAME_IN_USE:
                raise Misconfigured(f"stream {name} cannot be created: {error}") from error
        info = await api.info(name)  # another process of ours created it at the same moment
    differing = {
        field: value
        for field, value in wanted.items()
        if field != "metadata" and info.config.get(field) != value
    }
    if differing.get("num_replicas", 0) < info.config["num_replicas"]:
        # Somebody raised it; a process with an old setting must not lower it again.
        differing.pop("num_replicas", None)
    if "metadata" in wanted and GENERATION not in info.metadata:
        differing["metadata"] = {**info.metadata, **wanted["metadata"]}
    if not differing:
        return info
    _log.info("changing stream %s: %s", name, differing)
    try:
        return await api.call(f"STREAM.UPDATE.{name}", {**info.config, **differing}, StreamInfo)
    except ApiError as error:
        present = {field: info.config.get(field) for field in differing}
        raise Misconfigured(
            f"stream {name} has {present}, needs {differing}, and cannot be changed "
            f"({error.description}): change it by hand, or use another PLAIT_PREFIX"
        ) from error


async def check_durability(nc: Client, log: StreamInfo, settings: Settings) -> None:
    """Raises Misconfigured when `log` could lose what it acknowledges, or when nothing shows that
    it cannot."""
    accept = "or accept that with PLAIT_ALLOW_LOSSY_LOG=1"
    if log.config.get("persist_mode", "default") not in ("", "default"):
        raise Misconfigured(
            f"stream {log.config['name']} acknowledges before it writes (persist_mode "
            f"{log.config['persist_mode']}): it could lose acknowledged events. "
            f"Restore it into a stream without that, {accept}"
        )
    if log.config.get("num_replicas", 1) >= REPLICATED:
        return
    if not settings.nats_monitor_url:
        raise Misconfigured(
            "the log has one replica, and nothing shows that its server writes each event to the "
            "disk before it acknowledges it. Set `sync_interval: always` in the jetstream block of "
            "its configuration and PLAIT_NATS_MONITOR_URL to its monitoring address (its setting "
            "`http`, such as http://127.0.0.1:8222), use three replicas (PLAIT_REPLICAS=3) on a "
            f"cluster, {accept}"
        )
    server = await _monitored(settings.nats_monitor_url)
    connected: dict[str, Any] = nc._server_info  # the client shows only parts of it
    leader = log.cluster.leader or connected["server_name"]
    another = leader == connected["server_name"] and server.server_id != connected["server_id"]
    if server.server_name != leader or another:
        raise Misconfigured(
            f"PLAIT_NATS_MONITOR_URL={without_password(settings.nats_monitor_url)} is server "
            f"{server.server_name} ({server.server_id}), but the log is on {leader}: "
            "give that one's address"
        )
    if not server.jetstream.config.sync_always:
        raise Misconfigured(
            "NATS acknowledges events before they are on the disk, and a power cut could lose "
            "them: set `sync_interval: always` in the jetstream block of its configuration, "
            f"restart it, {accept}"
        )


class _Config(msgspec.Struct):
    sync_always: bool = False


class _JetStream(msgspec.Struct):
    config: _Config = msgspec.field(default_factory=_Config)


class _Server(msgspec.Struct):
    server_id: str
    server_name: str
    jetstream: _JetStream = msgspec.field(default_factory=_JetStream)


async def _monitored(url: str) -> _Server:
    def read() -> bytes:
        with urlopen(f"{url.rstrip('/')}/varz", timeout=MONITOR_S) as answer:
            data: bytes = answer.read()
            return data

    shown = without_password(url)
    try:
        return msgspec.json.decode(await asyncio.to_thread(read), type=_Server)
    except (URLError, ConnectionError, TimeoutError) as error:
        if isinstance(error, URLError) and not isinstance(error.reason, OSError):
            raise Misconfigured(f"PLAIT_NATS_MONITOR_URL={shown}: {error.reason}") from error
        raise Unavailable(  # It may be starting, as NATS itself may be.
            f"nothing answers at PLAIT_NATS_MONITOR_URL={shown} ({error}): start it, or give what "
            "the server's setting `http` says"
        ) from error
    except (OSError, ValueError) as error:
        raise Misconfigured(
            f"PLAIT_NATS_MONITOR_URL={shown} is no monitoring address of a NATS server ({error}): "
            "give what its setting `http` says"
        ) from error


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)
