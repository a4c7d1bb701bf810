"""The gateway as a process of its own: what it holds, how it stops, and what it says of itself."""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import schemathesis
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis.errors import Unsatisfiable
from hypothesis.strategies import booleans
from schemathesis import GenerationMode
from schemathesis.checks import CheckFunction
from schemathesis.core.result import Ok
from schemathesis.specs.openapi.checks import positive_data_acceptance

from plait.events import ids
from plait.events.jetstream_setup import open_jetstream
from plait.events.settings import Settings
from plait.projections import worker as projections
from plait.services.dev.servers import NatsServer, free_port
from plait.services.gateway.call import LOG_S, Gateway
from plait.services.gateway.worker import opened, serve
from tests.integration.gateway import Held, Plait, running
from tests.waiting import until

# An id or a token of the right form may still be nobody's; a schema cannot say that.
EXCLUDED: list[CheckFunction] = [positive_data_acceptance]
EXAMPLES = 8  # of each operation, well formed and not: seconds, not minutes


@asynccontextmanager
async def alone(settings: Settings) -> AsyncIterator[tuple[Gateway, Plait, asyncio.Task[None]]]:
    """A gateway on a log that nobody else works on."""
    settings = msgspec.structs.replace(settings, port=free_port(), read_timeout_s=0.2)
    async with opened(settings) as gateway:
        task = asyncio.create_task(serve(gateway))
        plait = Plait(settings, Held())

        async def answers() -> bool:
            try:
                return (await plait.http.get("/healthz")).status_code == 200
            except httpx.TransportError:
                return False

        try:
            await until(answers)
            yield gateway, plait, task
        finally:
            await plait.http.aclose()
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def test_a_client_that_leaves_frees_its_wait_and_its_stream(settings: Settings) -> None:
    async with alone(settings) as (gateway, plait, _):
        session = await plait.session()
        async with plait.client() as http:
            path = f"/v1/sessions/{session}"
            posting = asyncio.create_task(
                http.post(f"{path}/messages", json={"text": "x"}, params={"wait": 60})
            )
            streaming = asyncio.create_task(http.get(f"{path}/events"))

            async def held() -> bool:
                return (gateway.tail.waiters, gateway.tail.listeners) == (1, 1)

            await until(held)
            for task in (posting, streaming):
                task.cancel()
            await asyncio.gather(posting, streaming, return_exceptions=True)

        async def freed() -> bool:
            return (gateway.tail.waiters, gateway.tail.listeners) == (0, 0)

        await until(freed)


async def test_a_stopping_gateway_ends_streams_and_waits_and_says_so(settings: Settings) -> None:
    async with alone(settings) as (gateway, plait, task):
        session = await plait.session()
        path = f"/v1/sessions/{session}"
        posting = asyncio.create_task(
            plait.http.post(f"{path}/messages", json={"text": "x"}, params={"wait": 60})
        )
        streaming = asyncio.create_task(plait.http.get(f"{path}/events"))

        async def held() -> bool:
            return (gateway.tail.waiters, gateway.tail.listeners) == (1, 1)

        await until(held)
        task.cancel()
        assert (await posting).status_code == 202
        assert "event: end" in (await streaming).text
        await asyncio.wait((task,), timeout=5)
        assert task.done()


async def test_without_read_models_the_gateway_is_not_ready_but_takes_commands(
    settings: Settings,
) -> None:
    async with alone(settings) as (_, plait, _task):
        session = await plait.session()
        await plait.say(session, "kept")
        for path in ("/readyz", f"/v1/sessions/{session}"):
            answer = await plait.http.get(path)
            assert answer.status_code == 503
            assert answer.headers["retry-after"]
            assert answer.headers["content-type"] == "application/problem+json"
        context = await plait.get(f"/v1/sessions/{session}/context")
        assert context["messages"][0]["content"] == "kept"


# -- reads after writes ----------------------------------------------------------------------


async def test_what_was_just_written_is_never_unknown(settings: Settings) -> None:
    async with running(settings) as plait:
        for number in range(100):
            made = await plait.post("/v1/sessions", {"title": str(number)}, 201)
            path = f"/v1/sessions/{made['session_id']}"
            await plait.get(path)
            posted = await plait.say(made["session_id"], "x", run=True)
            await plait.get(f"{path}/nodes/{posted['node_id']}")
            await plait.get(f"/v1/turns/{posted['turn_id']}")
            fork = await plait.say(made["session_id"], "y", after=made["head_id"])
            body = {"target_branch": fork["branch_id"], "message": "z"}
            sent = await plait.post(f"{path}/send", body)
            await plait.get(f"/v1/messages/{sent['message_id']}")


async def test_read_models_that_stand_still_are_behind_and_what_they_lack_is_not_unknown(
    settings: Settings,
) -> None:
    async with alone(settings) as (_, plait, _task):
        running = asyncio.create_task(projections.run(settings))

        async def ready() -> bool:
            return (await plait.http.get("/readyz")).status_code == 200

        await until(ready)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        session = await plait.session()
        posted = await plait.say(session, "x", run=True)
        fork = await plait.say(session, "y", after=ids.root_id(session))
        body = {"target_branch": fork["branch_id"], "message": "z"}
        sent = await plait.post(f"/v1/sessions/{session}/send", body)
        for path in (
            f"/v1/sessions/{session}",
            f"/v1/sessions/{session}/branches",
            f"/v1/sessions/{session}/dag",
            f"/v1/sessions/{session}/nodes/{posted['node_id']}",
            f"/v1/turns/{posted['turn_id']}",
            f"/v1/messages/{sent['message_id']}",
        ):
            told = await plait.get(path, 503)
            assert told["code"] == "read_model_behind", path
        assert (await plait.get("/v1/sessions/no-id", 404))["code"] == "unknown_session"


# -- a log that does not answer ---------------------------------------------------------------


@pytest.mark.timeout(60)
async def test_a_frozen_log_is_told_within_seconds_with_what_to_do(
    settings: Settings, tmp_path: Path
) -> None:
    async with NatsServer(tmp_path) as nats:
        own = msgspec.structs.replace(
            settings, nats_url=nats.url, nats_monitor_url=nats.monitor_url
        )
        async with alone(own) as (_, plait, _task):
            session = await plait.session()
            await plait.say(session, "x")
            path = f"/v1/sessions/{session}"

            async def timed(
                method: str, path: str, body: object = None, **headers: str
            ) -> tuple[float, httpx.Response]:
                began = time.monotonic()
                answer = await plait.http.request(method, path, json=body, headers=headers)
                return time.monotonic() - began, answer

            os.kill(nats.pid, signal.SIGSTOP)
            try:
                ready, keyed, *posts, patched, made, listed, seen = await asyncio.gather(
                    timed("GET", "/readyz"),
                    timed("POST", f"{path}/messages", {"text": "x"}, **{"Idempotency-Key": "k"}),
                    # Calls of one session go one after the other, and still wait no longer.
                    *(timed("POST", f"{path}/messages?wait=20", {"text": "x"}) for _ in range(5)),
                    timed("PATCH", f"{path}/branches/x", {"name": "y"}),
                    timed("POST", "/v1/sessions", {}),
                    timed("GET", "/v1/providers"),
                    timed("GET", f"{path}/context"),
                )
            finally:
                os.kill(nats.pid, signal.SIGCONT)
            assert ready[0] <= 2
            for seconds, answer in (ready, keyed, *posts, patched, made, listed, seen):
                assert seconds <= LOG_S + 1
                assert answer.status_code == 503, answer.text
                assert answer.json()["code"] == "unavailable"
                assert answer.headers["retry-after"]
                assert "the log does not answer" in answer.json()["detail"]
            assert "the same Idempotency-Key" in keyed[1].json()["detail"]
            for _, answer in (*posts, made):
                assert "whether the command was taken is unknown" in answer.json()["detail"]
                assert "look before" in answer.json()["detail"]
            assert patched[1].json()["detail"].endswith("unknown; send it again")
            assert seen[1].json()["detail"] == "the log does not answer: try again"

            async def answers() -> bool:
                answer = await plait.http.post(
                    f"{path}/messages", json={"text": "x"}, headers={"Idempotency-Key": "k"}
                )
                return answer.status_code == 202

            await until(answers)
            assert (await plait.get(f"{path}/context"))["messages"]


async def test_a_log_that_is_gone_is_told_with_what_to_do(settings: Settings) -> None:
    async with alone(settings) as (_, plait, _task):
        session = await plait.session()
        jetstream = await open_jetstream(settings)
        try:
            await jetstream.nc.jetstream().delete_stream(jetstream.subjects.log)
        finally:
            await jetstream.close()
        for path in ("/readyz", f"/v1/sessions/{session}/context"):
            told = await plait.get(path, 503)
            assert f"the log (stream {settings.prefix}-log) is gone: restore it" in told["detail"]
        told = await plait.say(session, "x", status=503)
        assert "is gone: restore it from a backup, or restart" in told["detail"]


async def test_the_schema_documents_every_answer_and_refuses_unknown_fields(
    settings: Settings,
) -> None:
    async with alone(settings) as (_, plait, _task), httpx.AsyncClient(trust_env=False) as http:
        schema = (await http.get(f"{plait.url}/schema")).json()
    operations = [
        (path, method, operation)
        for path, methods in schema["paths"].items()
        for method, operation in methods.items()
    ]
    assert len(operations) >= 18
    for path, method, operation in operations:
        assert operation["summary"], path
        refused = [status for status in operation["responses"] if status >= "400"]
        assert {"400", "500", "503"} <= set(refused), (method, path)
        assert ("401" in refused) != (path in ("/healthz", "/readyz")), (method, path)
        for parameter in operation.get("parameters", ()):
            assert parameter.get("description"), (method, path, parameter["name"])
        for status in refused:
            content = operation["responses"][status]["content"]
            assert set(content) == {"application/problem+json"}, (method, path, status)
        body = operation.get("requestBody")
        if body is not None:
            assert "413" in operation["responses"]
            name = body["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
            assert schema["components"]["schemas"][name]["additionalProperties"] is False


@pytest.mark.timeout(120)
async def test_no_call_that_the_schema_allows_or_forbids_ends_in_a_5xx_or_an_unknown_answer(
    settings: Settings,
) -> None:
    quick = msgspec.structs.replace(settings, wait_max_s=0.05)
    async with running(quick) as plait:
        session = await plait.session(title="fuzzed")
        await plait.say(session, "something to find", run=True)
        await asyncio.to_thread(_fuzz, plait, session)


def _fuzz(plait: Plait, session: str) -> None:
    headers = {"Authorization": f"Bearer {plait.settings.key}"}
    schema = schemathesis.openapi.from_url(f"{plait.url}/schema/openapi.json")
    fuzzed = 0
    for result in schema.exclude(path_regex="/events$").get_all_operations():
        assert isinstance(result, Ok), result
        operation = result.ok()
        for mode in GenerationMode:
            cases = operation.as_strategy(generation_mode=mode)

            @given(case=cases, known=booleans())
            @hypothesis_settings(
                max_examples=EXAMPLES,
                deadline=None,
                derandomize=True,
                database=None,
                suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
            )
            def each(case: schemathesis.Case[Any], known: bool) -> None:
                if known and "session_id" in case.path_parameters:
                    case.path_parameters["session_id"] = session
                    case.query.pop("min_position", None)
                case.call_and_validate(headers=headers, excluded_checks=EXCLUDED)

            with contextlib.suppress(Unsatisfiable):  # A call without parameters is never wrong.
                each()
                fuzzed += 1
    assert fuzzed >= 30
