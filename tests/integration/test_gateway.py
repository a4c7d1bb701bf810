"""The HTTP API on a whole Plait: what users meet when things go as they should."""

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from plait.events import ids
from plait.events.settings import Settings
from tests.conftest import Address, Prefixes
from tests.integration.gateway import Plait, running
from tests.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="module")


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


@pytest_asyncio.fixture(autouse=True, loop_scope="module")
async def _held_again(plait: Plait) -> AsyncIterator[None]:
    yield
    plait.held.let_go.set()
    plait.held.let_go.clear()


# -- sessions --------------------------------------------------------------------------------


async def test_a_new_session_has_a_root_and_a_branch_that_opens_with_its_first_message(
    plait: Plait,
) -> None:
    made = await plait.post("/v1/sessions", {"title": "Lanes", "model": "offline:echo"}, 201)
    session = made["session_id"]
    assert made["head_id"] == ids.root_id(session)
    view = await plait.get(f"/v1/sessions/{session}", min_position=made["position"])
    assert view["title"] == "Lanes"
    assert view["model"] == "offline:echo"
    assert view["head_branch_id"] == made["branch_id"]
    posted = await plait.say(session, "hello")
    assert posted["branch_id"] == made["branch_id"]
    assert posted["turn_id"] is None


async def test_sessions_are_listed_newest_first_page_by_page(plait: Plait) -> None:
    made = [await plait.post("/v1/sessions", {"title": f"list {i}"}, 201) for i in range(3)]
    newest = [one["session_id"] for one in reversed(made)]
    last = made[-1]["position"]
    first = await plait.get("/v1/sessions", page_size=2, min_position=last)
    assert [item["session_id"] for item in first["items"]] == newest[:2]
    second = await plait.get("/v1/sessions", page_size=1, page_token=first["next_page_token"])
    assert [item["session_id"] for item in second["items"]] == newest[2:]


async def test_a_read_after_a_write_sees_that_write(plait: Plait) -> None:
    session = await plait.session()
    for number in range(5):
        posted = await plait.say(session, f"message {number}")
        node = await plait.http.get(
            f"/v1/sessions/{session}/nodes/{posted['node_id']}",
            headers={"Plait-Position": posted["position"]},
        )
        assert node.json()["text"] == f"message {number}"


# -- messages and turns ----------------------------------------------------------------------


async def test_a_message_that_waits_comes_back_with_its_turn(plait: Plait) -> None:
    session = await plait.session(system_prompt="Be kind.")
    turn = await plait.turn_of(session, "hello there")
    assert turn["status"] == "completed"
    assert turn["text"] == "hello there"
    assert turn["steps"][0]["finish"] == "stop"
    node = await plait.get(f"/v1/sessions/{session}/nodes/{turn['node_id']}")
    assert (node["role"], node["text"]) == ("assistant", "hello there")
    context = await plait.get(f"/v1/sessions/{session}/context")
    assert [m["content"] for m in context["messages"]] == ["Be kind."] + ["hello there"] * 2
    seen = await plait.get(f"/v1/sessions/{session}/context", head=node["predecessor"])
    assert seen["digest"] == turn["steps"][0]["context"]


async def test_a_wait_that_is_over_before_the_turn_is_a_202_and_the_turn_can_be_waited_for(
    plait: Plait,
) -> None:
    session = await plait.session()
    path = f"/v1/sessions/{session}/messages"
    posted = await plait.post(path, {"text": "hold it"}, 202, wait=0.05)
    waiting = asyncio.create_task(plait.get(f"/v1/turns/{posted['turn_id']}", wait=20))
    still = await plait.get(f"/v1/turns/{posted['turn_id']}", wait=0.05)
    assert still["status"] in ("requested", "running")
    plait.held.let_go.set()
    assert (await waiting)["text"] == "hold it"
    again = await plait.get(f"/v1/turns/{posted['turn_id']}", wait=20)
    assert again["status"] == "completed"


async def test_messages_for_a_busy_branch_wait_and_are_read_by_one_turn(plait: Plait) -> None:
    session = await plait.session()
    first = await plait.holding(session)
    second = await plait.say(session, "and this", run=True)
    third = await plait.say(session, "and that", run=True)
    assert second["turn_id"] == third["turn_id"] != first["turn_id"]
    node = await plait.get(
        f"/v1/sessions/{session}/nodes/{third['node_id']}", min_position=third["position"]
    )
    assert node["status"] == "pending"
    plait.held.let_go.set()
    turn = await plait.get(f"/v1/turns/{third['turn_id']}", wait=20)
    assert turn["text"] == "and that"


async def test_an_interrupt_stops_the_turn_and_goes_on_with_the_new_input(plait: Plait) -> None:
    session = await plait.session()
    first = await plait.holding(session)
    turn = await plait.turn_of(session, "rather this", multitask_strategy="interrupt")
    assert turn["text"] == "rather this"
    stopped = await plait.get(f"/v1/turns/{first['turn_id']}")
    assert stopped["status"] == "cancelled"


async def test_reject_refuses_a_busy_branch(plait: Plait) -> None:
    session = await plait.session()
    await plait.holding(session)
    refused = await plait.say(session, "now", run=True, status=409, multitask_strategy="reject")
    assert refused["code"] == "branch_busy"


async def test_a_cancelled_turn_ends_at_once_and_only_once(plait: Plait) -> None:
    session = await plait.session()
    posted = await plait.holding(session)
    path = f"/v1/turns/{posted['turn_id']}/cancel"
    done = await plait.post(path)
    turn = await plait.get(f"/v1/turns/{posted['turn_id']}", min_position=done["position"])
    assert turn["status"] == "cancelled"
    assert (await plait.post(path, status=409))["code"] == "turn_ended"


async def test_a_retry_runs_the_same_input_on_a_branch_beside(plait: Plait) -> None:
    session = await plait.session()
    turn = await plait.turn_of(session, "say it")
    retried = await plait.post(f"/v1/turns/{turn['turn_id']}/retry")
    assert retried["branch_id"] != turn["branch_id"]
    again = await plait.get(f"/v1/turns/{retried['turn_id']}", wait=20)
    assert again["text"] == "say it"
    old = await plait.get(f"/v1/sessions/{session}/nodes/{turn['node_id']}")
    new = await plait.get(f"/v1/sessions/{session}/nodes/{again['node_id']}")
    assert new["predecessor"] == old["predecessor"]


async def test_a_turn_that_has_not_ended_is_not_retried(plait: Plait) -> None:
    session = await plait.session()
    posted = await plait.holding(session)
    refused = await plait.post(f"/v1/turns/{posted['turn_id']}/retry", status=409)
    assert refused["code"] == "turn_active"


async def test_a_turn_cancelled_before_its_claim_is_retried_from_its_message(plait: Plait) -> None:
    session = await plait.session()
    await plait.holding(session)
    await plait.say(session, "then this", run=True)
    plait.held.let_go.set()
    # Whether the second turn was claimed before the cancel or not, its input is run again.
    view = await plait.say(session, "and this", run=True)
    turn = await plait.get(f"/v1/turns/{view['turn_id']}", wait=20)
    retried = await plait.post(f"/v1/turns/{turn['turn_id']}/retry")
    again = await plait.get(f"/v1/turns/{retried['turn_id']}", wait=20)
    assert again["text"] == turn["text"]


# -- forks -----------------------------------------------------------------------------------


async def test_a_post_after_root_opens_the_first_branch_and_later_ones_fork_there(
    plait: Plait,
) -> None:
    made = await plait.post("/v1/sessions", {}, 201)
    session, root = made["session_id"], made["head_id"]
    first = await plait.say(session, "one", after=root)
    second = await plait.say(session, "two", after=root)
    assert first["branch_id"] == made["branch_id"] != second["branch_id"]
    view = await plait.get(f"/v1/sessions/{session}", min_position=second["position"])
    assert view["head_branch_id"] == made["branch_id"]
    assert {branch["from"] for branch in view["branches"]} == {root}


async def test_a_post_after_a_tip_goes_on_there_and_after_an_older_node_forks(
    plait: Plait,
) -> None:
    session = await plait.session()
    first = await plait.say(session, "one")
    second = await plait.say(session, "two", after=first["node_id"])
    fork = await plait.say(session, "other", after=first["node_id"])
    assert second["branch_id"] == first["branch_id"] != fork["branch_id"]
    node = await plait.get(
        f"/v1/sessions/{session}/nodes/{fork['node_id']}", min_position=fork["position"]
    )
    assert node["predecessor"] == first["node_id"]


async def test_a_post_after_the_running_turns_node_waits_in_its_inbox(plait: Plait) -> None:
    session = await plait.session()
    posted = await plait.holding(session)
    turn = await plait.get(f"/v1/turns/{posted['turn_id']}")
    later = await plait.say(session, "later", run=True, after=turn["node_id"])
    assert later["branch_id"] == posted["branch_id"]
    pending = await plait.say(session, "x", after=later["node_id"], status=404)
    assert "inbox" in pending["detail"]


async def test_the_context_of_a_branch_is_found_by_whatever_names_the_branch(
    plait: Plait,
) -> None:
    session = await plait.session()
    await plait.say(session, "main")
    named = await plait.say(session, "facts", after=ids.root_id(session))
    branch, tip = named["branch_id"], named["node_id"]
    path = f"/v1/sessions/{session}"
    await plait.ask("PATCH", f"{path}/branches/{branch}", {"name": "research"}, 200)
    for head in ("research", "rese", branch, tip, tip[-8:], f"{session}:research"):
        seen = await plait.get(f"{path}/context", head=head)
        assert seen["head_id"] == tip, head
        assert [message["content"] for message in seen["messages"]] == ["facts"]
    await plait.ask("PATCH", f"{path}/branches/research", {"archived": True}, 200)
    for head in ("research", branch):
        assert (await plait.get(f"{path}/context", head=head))["head_id"] == tip
    unknown = await plait.get(f"{path}/context", 404, head="nobody")
    assert unknown["code"] == "unknown_branch"


async def test_replaces_makes_a_sibling_of_the_message(plait: Plait) -> None:
    session = await plait.session()
    turn = await plait.turn_of(session, "teh question")
    old = await plait.get(f"/v1/sessions/{session}/nodes/{turn['node_id']}")
    edited = await plait.turn_of(session, "the question", replaces=old["predecessor"])
    context = await plait.get(f"/v1/sessions/{session}/context", head=edited["node_id"])
    assert [m["content"] for m in context["messages"]] == ["the question"] * 2
    head = await plait.get(f"/v1/sessions/{session}", min_position=edited["position"])
    assert head["head_branch_id"] == turn["branch_id"], "no post moves HEAD"


async def test_checkout_of_a_tip_names_its_branch_and_of_an_older_node_reserves_one(
    plait: Plait,
) -> None:
    session = await plait.session()
    first = await plait.say(session, "one")
    second = await plait.say(session, "two")
    path = f"/v1/sessions/{session}/checkout"
    reserved = await plait.post(path, {"node_id": first["node_id"]}, 200)
    assert reserved["branch_id"] != first["branch_id"]
    forked = await plait.say(session, "other")
    assert forked["branch_id"] == reserved["branch_id"]
    back = await plait.post(path, {"node_id": second["node_id"]}, 200)
    assert back == {
        "branch_id": first["branch_id"],
        "head_id": second["node_id"],
        "position": back["position"],
    }
    assert (await plait.say(session, "three"))["branch_id"] == first["branch_id"]


async def test_a_reservation_takes_posts_by_its_id_until_head_gives_it_up(plait: Plait) -> None:
    session = await plait.session()
    first = await plait.say(session, "one")
    second = await plait.say(session, "two")
    path = f"/v1/sessions/{session}/checkout"
    kept = await plait.post(path, {"node_id": first["node_id"]}, 200)
    assert (await plait.say(session, "x", branch=kept["branch_id"]))["branch_id"] == kept[
        "branch_id"
    ]
    gone = await plait.post(path, {"node_id": first["node_id"]}, 200)
    await plait.post(path, {"node_id": second["node_id"]}, 200)
    refused = await plait.say(session, "x", branch=gone["branch_id"], status=409)
    assert refused["code"] == "reservation_gone"


# -- branches --------------------------------------------------------------------------------


async def test_a_branch_is_named_archived_and_restored(plait: Plait) -> None:
    made = await plait.post("/v1/sessions", {}, 201)
    session, branch = made["session_id"], made["branch_id"]
    path = f"/v1/sessions/{session}/branches"
    await plait.ask("PATCH", f"{path}/{branch}", {"name": "main"}, 200)  # not open yet
    assert (await plait.say(session, "one", branch="main"))["branch_id"] == branch
    await plait.ask("PATCH", f"{path}/main", {"archived": True}, 200)
    assert (await plait.say(session, "two", status=409))["code"] == "branch_archived"
    done = await plait.ask("PATCH", f"{path}/main", {"archived": False, "name": None}, 200)
    assert (done["name"], done["archived"]) == (None, False)
    await plait.say(session, "three")
    listed = await plait.get(path, min_position=done["position"])
    assert [(b["branch_id"], b["name"], b["status"]) for b in listed["items"]] == [
        (branch, None, "live")
    ]


async def test_a_name_belongs_to_one_branch(plait: Plait) -> None:
    session = await plait.session()
    one = await plait.say(session, "one")
    two = await plait.say(session, "two", after=ids.root_id(session))
    path = f"/v1/sessions/{session}/branches"
    await plait.ask("PATCH", f"{path}/{one['branch_id']}", {"name": "facts"}, 200)
    taken = await plait.ask("PATCH", f"{path}/{two['branch_id']}", {"name": "facts"}, 409)
    assert taken["code"] == "name_taken"


# -- sends -----------------------------------------------------------------------------------


async def two_branches(plait: Plait) -> tuple[str, str, str]:
    session = await plait.session()
    asker = await plait.say(session, "I ask")
    knows = await plait.say(session, "I know", after=ids.root_id(session))
    await plait.ask(
        "PATCH", f"/v1/sessions/{session}/branches/{knows['branch_id']}", {"name": "knows"}, 200
    )
    return session, asker["branch_id"], knows["branch_id"]


async def test_one_branch_asks_another_and_the_caller_gets_the_reply(plait: Plait) -> None:
    session, asker, knows = await two_branches(plait)
    message = await plait.post(
        f"/v1/sessions/{session}/send",
        {"target_branch": "knows", "message": "what is it?", "wait_reply": True},
        200,
        wait=20,
    )
    assert message["target"] == knows
    assert ids.branch_of(message["from"]) == asker
    assert message["reply"]["text"] == "what is it?"
    assert [r["kind"] for r in message["receipts"]] == [
        "accepted",
        "delivered",
        "consumed",
        "replied",
    ]


async def test_a_message_without_a_wait_is_delivered_and_starts_no_turn(plait: Plait) -> None:
    session, asker, knows = await two_branches(plait)
    sent = await plait.post(
        f"/v1/sessions/{session}/send", {"target_branch": knows, "message": "fyi", "from": asker}
    )

    async def delivered() -> bool:
        message = await plait.get(
            f"/v1/messages/{sent['message_id']}", min_position=sent["position"]
        )
        return [r["kind"] for r in message["receipts"]] == ["accepted", "delivered"]

    await until(delivered)
    branches = await plait.get(f"/v1/sessions/{session}/branches")
    assert [b["busy"] for b in branches["items"]] == [False, False]


async def test_a_wait_that_expires_ends_the_call(plait: Plait) -> None:
    session, _, knows = await two_branches(plait)
    await plait.holding(session, branch=knows)
    body = {"target_branch": "knows", "message": "?", "wait_reply": True, "timeout_s": 0.3}
    message = await plait.post(f"/v1/sessions/{session}/send", body, 200, wait=20)
    assert message["receipts"][-1]["kind"] == "expired"


# -- events ----------------------------------------------------------------------------------


async def test_events_begin_now_and_show_each_event_with_its_text(plait: Plait) -> None:
    session = await plait.session()
    branch = (await plait.say(session, "before"))["branch_id"]
    events = plait.events(session)
    coming = asyncio.ensure_future(anext(events))

    async def came() -> bool:
        await plait.say(session, "after")  # until one of them finds the stream open
        return coming.done()

    await until(came)
    event = await coming
    assert event.type == "MessageReceived"
    assert event.data["content"] == "after"
    assert event.data["branch_id"] == branch
    await events.aclose()


async def test_a_replay_and_every_resumption_see_each_event_once_while_more_come(
    plait: Plait,
) -> None:
    session = await plait.session()
    total = 60

    async def talk() -> None:
        for number in range(total):
            await plait.say(session, f"m{number}")

    talking = asyncio.create_task(talk())
    seen: list[str] = []
    texts: list[str] = []
    while len(texts) < total:
        # Cut off again and again, at any place, and resumed from the last event.
        after = seen[-1] if seen else None
        begin = {} if after else {"from": "start"}
        count = 0
        async for event in plait.events(session, after=after, **begin):
            seen.append(event.id)
            if event.type == "MessageReceived":
                texts.append(event.data["content"])
            count += 1
            if count == 7 or len(texts) == total:
                break
    await talking
    assert texts == [f"m{number}" for number in range(total)]
    assert len(set(seen)) == len(seen)
    whole: list[str] = []
    async for event in plait.events(session, **{"from": "start"}):
        whole.append(event.id)
        if len(whole) == len(seen):
            break
    assert whole == seen


async def test_a_stream_shows_only_its_own_session(plait: Plait) -> None:
    one, other = await plait.session(), await plait.session()
    mine = await plait.say(one, "mine")
    await plait.say(other, "not mine")
    last = await plait.say(one, "mine again")
    ids_seen = []
    async for event in plait.events(one, **{"from": "start"}):
        if event.type == "MessageReceived":
            ids_seen.append(event.data["node_id"])
            if event.data["node_id"] == last["node_id"]:
                break
    assert ids_seen == [mine["node_id"], last["node_id"]]


async def test_the_past_ends_with_a_comment_and_holds_all_that_was_acknowledged(
    plait: Plait,
) -> None:
    session = await plait.session()
    for number in range(5):
        await plait.say(session, f"m{number}")
        past: list[str] = []
        path = f"/v1/sessions/{session}/events?from=start"
        async with plait.client() as http, http.stream("GET", path) as answer:
            async for line in answer.aiter_lines():
                if line == ": caught up":
                    break
                past.append(line)
        assert past.count("event: MessageReceived") == number + 1
