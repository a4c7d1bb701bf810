"""Messages on their way to a provider and back, and what a provider's failure becomes."""

import json
from typing import Any

import pytest
from pydantic_ai.exceptions import ModelAPIError, ModelConnectionError, ModelHTTPError
from pydantic_ai.messages import (
    ModelMessage,
    ModelRequest,
    ModelResponse,
    SystemPromptPart,
    TextPart,
    ThinkingPart,
    ToolCallPart,
    ToolReturnPart,
    UserPromptPart,
)
from pydantic_ai.usage import RequestUsage

from plait.events.errors import Invalid
from plait.events.limits import Limits
from plait.events.model_names import check_model
from plait.events.types import Usage
from plait.services.turns.failures import check_finish, failure_of
from plait.services.turns.models import Answer, AskedCall, ModelError, Request, RetryLater
from plait.services.turns.providers import HttpModel, Provider, providers_from_env, redacted
from plait.services.turns.tools import SEND_TO_BRANCH
from plait.services.turns.wire import from_provider, to_provider

CONVERSATION: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Ask both."},
    {
        "role": "assistant",
        "content": "I ask.",
        "tool_calls": [
            {"id": "call_1", "name": "send_to_branch", "arguments": '{"message": "ü"}'},
            {"id": "call_2", "name": "no such tool!", "arguments": '{"broken'},
        ],
    },
    {"role": "tool", "tool_call_id": "call_1", "name": "send_to_branch", "content": "yes"},
    {
        "role": "tool",
        "tool_call_id": "call_2",
        "name": "no such tool!",
        "content": "there is no such tool",
        "is_error": True,
    },
    {"role": "user", "content": "And now?"},
]


def parts(message: ModelMessage) -> list[Any]:
    return [*message.parts]


def test_what_stands_between_two_answers_is_one_request_in_its_order() -> None:
    messages, parameters = to_provider(Request("openai:m", CONVERSATION, (SEND_TO_BRANCH,)))
    first, said, second = messages
    assert isinstance(first, ModelRequest) and isinstance(second, ModelRequest)
    assert isinstance(said, ModelResponse)
    assert [type(part) for part in parts(first)] == [SystemPromptPart, UserPromptPart]
    assert [type(part) for part in parts(said)] == [TextPart, ToolCallPart, ToolCallPart]
    assert [type(part) for part in parts(second)] == [
        ToolReturnPart,
        ToolReturnPart,
        UserPromptPart,
    ]
    assert [p.tool_call_id for p in parts(second)[:2]] == ["call_1", "call_2"]
    assert [p.outcome for p in parts(second)[:2]] == ["success", "failed"]
    assert parts(said)[2].tool_name == "no_such_tool_", "as every provider takes it"
    (tool,) = parameters.function_tools
    assert (tool.name, tool.parameters_json_schema) == ("send_to_branch", SEND_TO_BRANCH.schema)


def test_no_time_of_ours_is_in_it_so_the_same_request_is_the_same() -> None:
    request = Request("openai:m", CONVERSATION, (SEND_TO_BRANCH,))
    assert to_provider(request) == to_provider(request)


def test_an_answer_keeps_its_texts_and_the_arguments_as_the_model_wrote_them() -> None:
    response = ModelResponse(
        parts=[
            ThinkingPart("hm"),
            TextPart("I "),
            TextPart("ask."),
            ToolCallPart("a", '{"x":  1}'),
            ToolCallPart("b", '{"broken'),
            ToolCallPart("c", {"ü": 1}),
            ToolCallPart("d", None),
        ],
        usage=RequestUsage(input_tokens=10, output_tokens=5, cache_read_tokens=3),
        finish_reason="tool_call",
    )
    assert from_provider(response) == Answer(
        "I ask.",
        (
            AskedCall("a", '{"x":  1}'),
            AskedCall("b", '{"broken'),
            AskedCall("c", '{"ü": 1}'),
            AskedCall("d", "{}"),
        ),
        Usage(10, 5, 3),
        "tool_calls",
    )


def test_what_goes_out_comes_back_as_it_was() -> None:
    """Our own answer, sent along in the next request, is the one that was recorded."""
    (_, said, _), _ = to_provider(Request("openai:m", CONVERSATION))
    assert isinstance(said, ModelResponse)
    answer = from_provider(said)
    assert answer.text == CONVERSATION[2]["content"]
    assert [call.args for call in answer.calls] == ['{"message": "ü"}', '{"broken']


@pytest.mark.parametrize(
    ("reason", "code"),
    [(None, "cut_off"), ("content_filter", "content_filter"), ("error", "provider_unavailable")],
)
def test_an_answer_is_one_only_when_the_provider_says_that_it_is_whole(
    reason: str | None, code: str
) -> None:
    with pytest.raises((RetryLater, ModelError)) as caught:
        check_finish(reason)
    assert isinstance(caught.value, RetryLater | ModelError) and caught.value.failure == code
    for whole in ("stop", "length", "tool_call"):
        check_finish(whole)


KEY = "sk-very-secret-0123456789"


def http(status: int, body: object = None, **headers: str) -> ModelHTTPError:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return ModelHTTPError(status, "m", body, headers=named)


@pytest.mark.parametrize(
    ("error", "kind", "code"),
    [
        (http(408), RetryLater, "provider_unavailable"),
        (http(413), ModelError, "context_too_long"),
        (http(400, {"message": "Prompt is too long: 9 > 8"}), ModelError, "context_too_long"),
        (http(418, {"message": KEY}), ModelError, "bad_request"),
        (http(599, {"message": KEY}), RetryLater, "provider_unavailable"),
        (ModelConnectionError("m", "refused", phase="connect"), RetryLater, "provider_unavailable"),
        (ModelConnectionError("m", KEY, phase="read"), RetryLater, "cut_off"),
        (ModelAPIError("m", KEY, in_stream=True), RetryLater, "provider_unavailable"),
        (ModelAPIError("m", KEY), RetryLater, "malformed"),
        (json.JSONDecodeError(KEY, KEY, 0), RetryLater, "malformed"),
        (AttributeError(KEY), ModelError, "model_error"),
    ],
)
def test_a_failure_is_retryable_or_final_and_never_quotes_the_provider(
    error: Exception, kind: type[Exception], code: str
) -> None:
    failure = failure_of(error, "openai")
    assert (type(failure), failure.failure) == (kind, code)
    assert KEY not in str(failure)


def test_what_a_provider_says_is_logged_without_keys() -> None:
    settings = Provider("http://p", "short", (("x-token", 'odd"one'),))
    said = redacted(
        'key short or sk-abcdefgh, Bearer abc, odd\\"one; ' + "A" * 40 + " ok", settings
    )
    assert said == "key … or …, … …; … ok"
    assert "short" not in repr(settings) and "odd" not in repr(settings)


async def test_a_provider_without_key_and_address_says_which_variable_to_set() -> None:
    env: dict[str, str] = {}
    model = HttpModel("anthropic", providers_from_env(env), Limits())
    with pytest.raises(ModelError, match="set ANTHROPIC_API_KEY") as caught:
        await model.answer(Request("anthropic:m", CONVERSATION))
    assert caught.value.failure == "bad_key"


@pytest.mark.parametrize(
    "name", ["openai:gpt-x", "anthropic:c", "openai:org/m:tag", "offline:echo"]
)
def test_a_name_of_a_model_says_its_provider(name: str) -> None:
    check_model(name)


@pytest.mark.parametrize("name", ["", "gpt", "openai:", "openai:a b", "offline:x", "other:m", ":m"])
def test_a_name_that_no_worker_could_know_is_refused(name: str) -> None:
    with pytest.raises(Invalid, match="openai:<model>"):
        check_model(name)
