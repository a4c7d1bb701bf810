"""Bad input at the HTTP API: each gets its clear error, and changes nothing."""

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio

from plait.events import ids
from plait.events.settings import Settings
from tests.conftest import Address, Prefixes
from tests.integration.gateway import Plait, running

pytestmark = pytest.mark.asyncio(loop_scope="module")

ELSEWHERE = "saaaaaaaaaaaa"  # an id's form, and nobody's


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def plait(
    nats_server: Address, valkey_server: Address, prefixes: Prefixes
) -> AsyncIterator[Plait]:
    settings = Settings(
        nats_url=nats_server.url,
        nats_monitor_url=nats_server.monitor_url,
        redis_url=valkey_server.url,
        prefix=prefixes.next(),
    )
    async with running(settings) as plait:
        yield plait


def problem(answer: httpx.Response) -> tuple[int, str]:
    assert answer.headers["content-type"] == "application/problem+json", answer.text
    told = answer.json()
    assert told["status"] == answer.status_code
    assert told["detail"]
    return answer.status_code, told["code"]


# -- keys ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "header", [None, "", "Bearer", "Bearer wrong", "Basic ZGV2OmRldg==", "Bearer dév"]
)
async def test_a_missing_or_wrong_key_is_a_401_that_says_how(
    plait: Plait, header: str | None
) -> None:
    headers = [] if header is None else [(b"authorization", header.encode())]
    async with httpx.AsyncClient(base_url=plait.url, trust_env=False) as http:
        answer = await http.post("/v1/sessions", headers=headers, json={"junk": 1})
    assert problem(answer) == (401, "unauthorized")
    assert answer.headers["www-authenticate"] == "Bearer"


# -- bodies ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "hint"),
    [
        (b"", "needs a JSON body"),
        (b"{", "truncated"),
        (b"null", "object"),
        (b"[]", "object"),
        (b'{"text": 1}', "text"),
        (b'{"text": "a", "run": "true"}', "run"),
        (b'{"text": "a", "no_such_field": 1}', "no_such_field"),
        (b'{"run": true}', "text"),
        (b'{"text": ""}', "length"),
        (b'{"text": "a", "multitask_strategy": "hurry"}', "hurry"),
        (
            b'{"text": "a", "multitask_strategy": "merge"}',
            "one of enqueue, reject, interrupt, rollback",
        ),
        (b'{"text": " \\n\\u2003"}', "`text` is empty or only white space"),
        (b'{"text": "\\u0000"}', "NUL"),
        (b'{"text": "\\ud800"}', "surrogate"),
        (b'{"text": "\xff"}', "UTF-8"),
        (b'{"text": "a", "after": "x", "branch": "y"}', "one of"),
        (b"[" * 100_000, "object"),
    ],
)
async def test_a_body_that_does_not_fit_is_refused_with_its_place(
    plait: Plait, body: bytes, hint: str
) -> None:
    made = await plait.post("/v1/sessions", {}, 201)
    session = made["session_id"]
    answer = await plait.http.post(f"/v1/sessions/{session}/messages", content=body)
    assert problem(answer) == (400, "invalid_request")
    assert hint.lower() in answer.json()["detail"].lower()
    view = await plait.get(f"/v1/sessions/{session}", min_position=made["position"])
    assert view["nodes"] == 1


async def test_a_long_refusal_is_cut(plait: Plait) -> None:
    session, long = await plait.session(), "x" * 5_000
    for method, path, body in (
        ("POST", f"/v1/sessions/{session}/messages", {"text": "a", long: 1}),
        ("POST", f"/v1/sessions/{session}/messages", {"text": "a", "branch": long}),
        ("POST", f"/v1/sessions/{session}/messages", {"text": "a", "after": long}),
        ("POST", f"/v1/sessions/{session}/messages", {"text": "a", "multitask_strategy": long}),
        ("POST", "/v1/sessions", {"model": long}),
        ("PATCH", f"/v1/sessions/{session}/branches/{long}", {}),
        ("GET", f"/v1/sessions/{long}", None),
        ("GET", f"/v1/sessions/{session}?min_position={long}", None),
        ("GET", f"/v1/sessions/{session}/context?head={long}", None),
        ("GET", f"/v1/sessions/{session}?{long}=1", None),
        ("GET", f"/v1/turns/{long}", None),
        ("GET", f"/v1/messages/{long}", None),
        ("GET", f"/v1/{long}", None),
        ("DELETE", f"/v1/sessions/{long}", None),
    ):
        answer = await plait.http.request(method, path, json=body)
        assert 400 <= problem(answer)[0] < 500
        assert len(answer.json()["detail"]) < 500, (method, path[:30], answer.text)


async def test_nothing_to_say_is_refused_in_a_send_as_well(plait: Plait) -> None:
    session = await plait.session()
    body = {"target_branch": "x", "message": "\t "}
    told = await plait.post(f"/v1/sessions/{session}/send", body, 400)
    assert "`message` is empty or only white space" in told["detail"]


@pytest.mark.parametrize("action", ["cancel", "retry"])
async def test_a_call_without_fields_takes_none(plait: Plait, action: str) -> None:
    path = f"/v1/turns/{ELSEWHERE}-baaaaaaaa-taaaaaaaaaaa/{action}"
    for body in (b'{"force": true}', b"[]", b"null", b"{", b"\xff"):
        answer = await plait.http.post(path, content=body)
        assert problem(answer) == (400, "invalid_request"), body
        assert "empty object" in answer.json()["detail"]
    for body in (b"", b" {} "):
        assert problem(await plait.http.post(path, content=body)) == (404, "unknown_turn")


async def test_a_body_of_another_kind_is_a_415(plait: Plait) -> None:
    answer = await plait.http.post(
        "/v1/sessions", content=b"title=x", headers={"content-type": "text/plain"}
    )
    assert problem(answer) == (415, "invalid_request")


async def test_an_over_long_text_is_refused_and_the_limit_is_said(plait: Plait) -> None:
    session = await plait.session()
    limit = plait.settings.limits.text_bytes
    exact = await plait.say(session, "x" * limit)
    node = await plait.get(
        f"/v1/sessions/{session}/nodes/{exact['node_id']}", min_position=exact["position"]
    )
    assert len(node["text"]) == limit
    told = await plait.say(session, "x" * (limit + 1), status=413)
    assert told["code"] == "text_too_long"
    assert str(limit) in told["detail"]


async def test_a_body_beyond_any_text_is_cut_off(plait: Plait) -> None:
    session = await plait.session()

    async def endless() -> AsyncIterator[bytes]:
        yield b'{"text": "'
        for _ in range(plait.settings.limits.text_bytes * 7 // 65536):
            yield b"x" * 65536

    answer = await plait.http.post(f"/v1/sessions/{session}/messages", content=endless())
    assert problem(answer) == (413, "text_too_long")


async def test_a_session_is_made_only_of_what_fits(plait: Plait) -> None:
    for body, code, status in (
        ({"title": "x" * 201}, "invalid_request", 400),
        ({"title": "a\0"}, "invalid_request", 400),
        ({"model": "nobody"}, "invalid_request", 400),
        ({"system_prompt": "x" * (1024 * 1024 + 1)}, "text_too_long", 413),
    ):
        assert (await plait.post("/v1/sessions", body, status))["code"] == code


# -- queries ---------------------------------------------------------------------------------


async def test_unknown_and_ill_formed_query_parameters_are_refused(plait: Plait) -> None:
    session = await plait.session()
    for path, query in (
        ("/v1/sessions", {"page_sise": 5}),
        ("/v1/sessions", {"page_size": 101}),
        ("/v1/sessions", {"page_size": 0}),
        ("/v1/sessions", {"page_size": "many"}),
        ("/v1/sessions", {"page_token": "from-elsewhere"}),
        (f"/v1/turns/{session}-baaaaaaaa-taaaaaaaaaaa", {"wait": -1}),
        (f"/v1/turns/{session}-baaaaaaaa-taaaaaaaaaaa", {"wait": "nan"}),
        (f"/v1/turns/{session}-baaaaaaaa-taaaaaaaaaaa", {"wait": "inf"}),
        ("/healthz", {"verbose": 1}),
        (f"/v1/turns/{session}-baaaaaaaa-taaaaaaaaaaa", {"wait": [1, 2]}),
        ("/v1/sessions", {"page_size": [1, 1]}),
    ):
        told = await plait.get(path, 400, **query)
        assert told["code"] == "invalid_request", (path, query)


async def test_a_query_parameter_that_does_not_fit_is_refused_with_what_it_takes(
    plait: Plait,
) -> None:
    turn = f"/v1/turns/{ELSEWHERE}-baaaaaaaa-taaaaaaaaaaa"
    longest = plait.settings.wait_max_s
    for path, query, told in (
        (turn, {"wait": "soon"}, "`wait` takes a number, at least 0"),
        (turn, {"wait": "-1"}, "`wait` takes a number, at least 0"),
        (turn, {"wait": longest + 1}, f"`wait` is a number of seconds, from 0 to {longest:g}"),
        (turn, {"wait": "nan"}, "`wait` takes a number, at least 0"),
        (turn, {"wait": "inf"}, f"`wait` is a number of seconds, from 0 to {longest:g}"),
        (turn, {"wait": [1, 2]}, "`wait` is given more than once"),
        ("/v1/sessions", {"page_size": "many"}, "takes a whole number, at least 1, at most 100"),
    ):
        assert told in (await plait.get(path, 400, **query))["detail"], query


async def test_positions_of_another_log_or_beyond_the_end_are_refused(plait: Plait) -> None:
    made = await plait.post("/v1/sessions", {}, 201)
    path = f"/v1/sessions/{made['session_id']}"
    generation, sequence, _ = made["position"].split(".")
    for text in (
        "x",
        "1.2",
        "1.2.3.4",
        "-1.0.0",
        f"{int(generation) + 1}.1.0",
        f"{generation}.{int(sequence) + 1000}.0",
        f"{generation}.{2**50}.0",
        "one.two.three",
    ):
        assert (await plait.get(path, 400, min_position=text))["code"] == "bad_position", text
        resumed = await plait.http.get(f"{path}/events", headers={"Last-Event-ID": text})
        assert problem(resumed) == (400, "bad_position"), text


# -- what is not there, or not yours ---------------------------------------------------------


async def test_what_is_unknown_or_of_another_tenant_is_a_404(plait: Plait) -> None:
    branch = f"{ELSEWHERE}-baaaaaaaa"
    node, turn, message = (f"{branch}-{kind}aaaaaaaaaaa" for kind in "ntm")
    said = {"text": "x"}
    asked: list[tuple[str, str, Any, str]] = [
        ("GET", f"/v1/sessions/{ELSEWHERE}", None, "unknown_session"),
        ("GET", "/v1/sessions/not-an-id", None, "unknown_session"),
        ("GET", f"/v1/sessions/{ELSEWHERE}/branches", None, "unknown_session"),
        ("GET", f"/v1/sessions/{ELSEWHERE}/dag", None, "unknown_session"),
        ("GET", f"/v1/sessions/{ELSEWHERE}/context", None, "unknown_session"),
        ("GET", f"/v1/sessions/{ELSEWHERE}/events", None, "unknown_session"),
        ("GET", f"/v1/sessions/{ELSEWHERE}/nodes/{node}", None, "unknown_node"),
        ("GET", f"/v1/sessions/x/nodes/{node}", None, "unknown_node"),
        ("POST", f"/v1/sessions/{ELSEWHERE}/messages", said, "unknown_session"),
        ("POST", f"/v1/sessions/{ELSEWHERE}/checkout", {"node_id": node}, "unknown_session"),
        ("PATCH", f"/v1/sessions/{ELSEWHERE}/branches/{branch}", {}, "unknown_session"),
        (
            "POST",
            f"/v1/sessions/{ELSEWHERE}/send",
            {"target_branch": "x", "message": "x"},
            "unknown_session",
        ),
        ("GET", f"/v1/turns/{turn}", None, "unknown_turn"),
        ("GET", f"/v1/turns/{turn}?wait=5", None, "unknown_turn"),
        ("GET", "/v1/turns/x", None, "unknown_turn"),
        ("POST", f"/v1/turns/{turn}/cancel", None, "unknown_turn"),
        ("POST", "/v1/turns/x/cancel", None, "unknown_turn"),
        ("POST", f"/v1/turns/{turn}/retry", None, "unknown_turn"),
        ("GET", f"/v1/messages/{message}", None, "unknown_message"),
        ("GET", "/v1/nothing", None, "not_found"),
        ("GET", "/v1/turns/%00%ff", None, "unknown_turn"),
    ]
    for method, path, body, code in asked:
        answer = await plait.http.request(method, path, json=body)
        assert problem(answer) == (404, code), (method, path, answer.text)


async def test_another_sessions_nodes_and_branches_are_not_reached_from_here(plait: Plait) -> None:
    here, there = await plait.session(), await plait.session()
    await plait.say(here, "mine")
    other = await plait.say(there, "other")
    node = other["node_id"]
    path = f"/v1/sessions/{here}"
    bodies: list[dict[str, Any]] = [{"after": node}, {"replaces": node}]
    for body in bodies:
        assert (await plait.say(here, "x", status=404, **body))["code"] == "unknown_node"
    refused = await plait.say(here, "x", status=404, branch=other["branch_id"])
    assert refused["code"] == "unknown_branch"
    checked = await plait.post(f"{path}/checkout", {"node_id": node}, 404)
    assert checked["code"] == "unknown_node"
    assert (await plait.get(f"{path}/context", 404, head=node))["code"] == "unknown_node"
    assert (await plait.get(f"{path}/nodes/{node}", 404))["code"] == "unknown_node"
    patched = await plait.ask("PATCH", f"{path}/branches/{other['branch_id']}", {}, 404)
    assert patched["code"] == "unknown_branch"


async def test_a_method_that_a_path_does_not_have_is_a_405(plait: Plait) -> None:
    answer = await plait.http.delete("/v1/sessions")
    assert problem(answer) == (405, "method_not_allowed")
    assert set(answer.headers["allow"].split(", ")) == {"GET", "OPTIONS", "POST"}
    assert answer.headers["allow"] in answer.json()["detail"]


async def test_options_name_every_method_of_a_path(plait: Plait) -> None:
    for path, methods in (
        ("/v1/sessions", "GET, OPTIONS, POST"),
        ("/v1/sessions/x/branches/y", "OPTIONS, PATCH"),
        ("/v1/providers/x", "DELETE, OPTIONS, PUT"),
        ("/healthz", "GET, OPTIONS"),
    ):
        answer = await plait.http.options(path)
        assert (answer.status_code, answer.headers["allow"]) == (204, methods)


async def test_what_is_unknown_says_where_to_look(plait: Plait) -> None:
    session, local = await plait.session(), f"{ELSEWHERE}-baaaaaaaa"
    path = f"/v1/sessions/{session}/context"
    assert "/branches lists" in (await plait.get(path, 404, head="x"))["detail"]
    for path, place in (
        (f"/v1/sessions/{ELSEWHERE}", "GET /v1/sessions lists"),
        (f"/v1/sessions/{session}/nodes/{session}-baaaaaaaa-naaaaaaaaaaa", "/dag lists"),
        (f"/v1/turns/{local}-taaaaaaaaaaa", "`turn_id`"),
        (f"/v1/messages/{local}-maaaaaaaaaaa", "`message_id`"),
        ("/v1/nothing", "see /schema"),
    ):
        assert place in (await plait.get(path, 404))["detail"], path


# -- branches --------------------------------------------------------------------------------


async def test_branches_that_cannot_be_used_are_told_apart(plait: Plait) -> None:
    session = await plait.session()
    one = await plait.say(session, "one")
    path = f"/v1/sessions/{session}"
    for name in ("red", "redder"):
        made = await plait.say(session, name, after=ids.root_id(session))
        await plait.ask("PATCH", f"{path}/branches/{made['branch_id']}", {"name": name}, 200)
    unknown = await plait.say(session, "x", branch="blue", status=404)
    assert unknown["code"] == "unknown_branch"
    assert "redder" in unknown["detail"]
    ambiguous = await plait.say(session, "x", branch="re", status=409)
    assert ambiguous["code"] == "ambiguous_branch"
    assert [name for name, _ in ambiguous["data"]["candidates"]] == ["red", "redder"]
    await plait.ask("PATCH", f"{path}/branches/redder", {"archived": True}, 200)
    archived = await plait.say(session, "x", branch="redder", status=409)
    assert archived["code"] == "branch_archived"
    assert "'redder'" in archived["detail"]
    await plait.ask("PATCH", f"{path}/branches/{one['branch_id']}", {"name": "main"}, 200)
    await plait.ask("PATCH", f"{path}/branches/main", {"archived": True}, 200)
    heads = await plait.say(session, "x", branch="main", status=409)
    assert "'main'" in heads["detail"]
    await plait.ask("PATCH", f"{path}/branches/main", {"archived": False}, 200)
    sent = await plait.post(f"{path}/send", {"target_branch": "redder", "message": "x"}, 409)
    assert "'redder'" in sent["detail"]
    mine = await plait.post(
        f"{path}/send", {"target_branch": one["branch_id"], "message": "x"}, 400
    )
    assert mine["code"] == "self_send"
    body = {"from": "red", "target_branch": "red", "message": "x"}
    own = await plait.post(f"{path}/send", body, 400)
    assert own["code"] == "self_send"
    assert "'red'" in own["detail"]
    for name in ("", " x", "a:b", one["branch_id"], "x" * 65):
        told = await plait.ask("PATCH", f"{path}/branches/red", {"name": name}, 400)
        assert told["code"] == "invalid_request"


async def test_a_conversation_goes_on_only_from_messages_and_turns(plait: Plait) -> None:
    session = await plait.session()
    await plait.turn_of(session, "tell me")
    unknown = f"{(await plait.say(session, 'x'))['branch_id']}-naaaaaaaaaaa"
    bodies: list[dict[str, Any]] = [{"after": unknown}, {"replaces": unknown}, {"after": "x"}]
    for body in bodies:
        assert (await plait.say(session, "x", status=404, **body))["code"] == "unknown_node"
    turn = unknown.replace("-n", "-t")
    assert (await plait.get(f"/v1/turns/{turn}", 404, wait=30))["code"] == "unknown_turn"
    root = await plait.say(session, "x", status=400, replaces=ids.root_id(session))
    assert "ROOT" in root["detail"]


async def test_a_send_needs_a_branch_that_has_opened_and_a_sensible_wait(plait: Plait) -> None:
    session = await plait.session()
    path = f"/v1/sessions/{session}/send"
    body = {"target_branch": "x", "message": "x"}
    assert "no message yet" in (await plait.post(path, body, 400))["detail"]
    await plait.say(session, "one")
    other = (await plait.say(session, "two", after=ids.root_id(session)))["branch_id"]
    for extra in (
        {"timeout_s": 5},
        {"wait_reply": True, "timeout_s": 0},
        {"wait_reply": True, "timeout_s": -5},
        {"wait_reply": True, "timeout_s": 90_000},
        {"wait_reply": True, "timeout_s": 1e300},
    ):
        told = await plait.post(path, {"target_branch": other, "message": "x", **extra}, 400)
        assert told["code"] == "invalid_request", extra


# -- idempotency -----------------------------------------------------------------------------


async def replayed(
    plait: Plait, path: str, body: dict[str, object] | None, key: str, status: int
) -> Any:
    headers = {"Idempotency-Key": key}
    first = await plait.ask("POST", path, body, status, headers=headers)
    again = await plait.ask("POST", path, body, status, headers=headers)
    assert again == first
    other = (
        await plait.ask("POST", path + "?wait=0.01", body, status, headers=headers)
        if (path.endswith(("/messages", "/send")))
        else first
    )
    assert other == first
    return first


async def test_each_post_sent_again_with_its_key_is_the_first_answer_again(plait: Plait) -> None:
    made = await replayed(plait, "/v1/sessions", {"title": "one"}, "make", 201)
    session = made["session_id"]
    path = f"/v1/sessions/{session}"
    root = await replayed(
        plait,
        f"{path}/messages",
        {"text": "a", "run": False, "after": made["head_id"]},
        "root",
        202,
    )
    assert root["branch_id"] == made["branch_id"]
    said = await replayed(plait, f"{path}/messages", {"text": "b", "run": False}, "say", 202)
    fork = await replayed(
        plait,
        f"{path}/messages",
        {"text": "c", "run": False, "after": root["node_id"]},
        "fork",
        202,
    )
    assert fork["branch_id"] != said["branch_id"]
    edit = {"text": "d", "run": False, "replaces": root["node_id"]}
    await replayed(plait, f"{path}/messages", edit, "edit", 202)
    await replayed(plait, f"{path}/checkout", {"node_id": root["node_id"]}, "checkout", 200)
    body = {"from": fork["node_id"], "target_branch": said["node_id"], "message": "hi"}
    await replayed(plait, f"{path}/send", body, "send", 202)
    turn = await plait.post(f"{path}/messages", {"text": "hold", "branch": fork["branch_id"]}, 202)
    await replayed(plait, f"/v1/turns/{turn['turn_id']}/cancel", None, "cancel", 202)
    await replayed(plait, f"/v1/turns/{turn['turn_id']}/retry", None, "retry", 202)
    plait.held.let_go.set()
    last = await plait.say(session, "end")
    view = await plait.get(path, min_position=last["position"])
    # Each key opened at most one branch: first, fork, edit, retry, and HEAD's after the checkout.
    assert len(view["branches"]) == 5


async def test_a_post_after_a_tip_sent_again_stays_there_though_the_branch_went_on(
    plait: Plait,
) -> None:
    session = await plait.session()
    path = f"/v1/sessions/{session}/messages"
    first = await plait.say(session, "one")
    body = {"text": "two", "run": False, "after": first["node_id"]}
    headers = {"Idempotency-Key": "after a tip"}
    second = await plait.ask("POST", path, body, 202, headers=headers)
    await plait.say(session, "three")
    assert await plait.ask("POST", path, body, 202, headers=headers) == second
    assert second["branch_id"] == first["branch_id"]


async def test_a_key_with_another_body_or_path_is_a_409(plait: Plait) -> None:
    one, other = await plait.session(), await plait.session()
    headers = {"Idempotency-Key": "reused"}
    body = {"text": "x", "run": False}
    await plait.ask("POST", f"/v1/sessions/{one}/messages", body, 202, headers=headers)
    for path, sent in (
        (f"/v1/sessions/{one}/messages", {"text": "y", "run": False}),
        (f"/v1/sessions/{other}/messages", body),
        ("/v1/sessions", {}),
    ):
        told = await plait.ask("POST", path, sent, 409, headers=headers)
        assert told["code"] == "idempotency_key_mismatch"
        assert "was used for another call" in told["detail"]


async def test_a_refusal_is_not_recorded_so_a_retry_is_decided_anew(plait: Plait) -> None:
    session = await plait.session()
    path = f"/v1/sessions/{session}"
    branch = (await plait.say(session, "one"))["branch_id"]
    await plait.ask("PATCH", f"{path}/branches/{branch}", {"archived": True}, 200)
    headers = {"Idempotency-Key": "refused at first"}
    body = {"text": "two", "run": False}
    await plait.ask("POST", f"{path}/messages", body, 409, headers=headers)
    await plait.ask("PATCH", f"{path}/branches/{branch}", {"archived": False}, 200)
    other = {"text": "three", "run": False}  # nothing is bound to the key yet
    await plait.ask("POST", f"{path}/messages", other, 202, headers=headers)


@pytest.mark.parametrize("key", ["", "x" * 256, "tab\there", "é"])
async def test_a_key_has_bounds(plait: Plait, key: str) -> None:
    answer = await plait.http.post(
        "/v1/sessions", json={}, headers=[(b"Idempotency-Key", key.encode())]
    )
    assert problem(answer) == (400, "invalid_request")
