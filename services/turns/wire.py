"""Our messages in the shape of pydantic-ai's, and its answers in ours.

Its message objects carry wall-clock times and provider state: they are made for one call and never
stored. What leaves for the provider depends on the request alone, so that the same request is the
same bytes. Importing pydantic-ai costs seconds, so only a process that calls a provider pays.
"""

import json
import re
from datetime import UTC, datetime

from pydantic_ai.messages import (
    ModelMessage,
    ModelRequest,
    ModelRequestPart,
    ModelResponse,
    ModelResponsePart,
    SystemPromptPart,
    TextPart,
    ToolCallPart,
    ToolReturnPart,
    UserPromptPart,
)
from pydantic_ai.models import ModelRequestParameters
from pydantic_ai.tools import ToolDefinition

from plait.events.types import Usage
from plait.services.turns.models import Answer, AskedCall, Message, Request

NAME_CHARS = 64  # of a tool: what providers take
_THEN = datetime.fromtimestamp(0, UTC)  # no time of ours is the provider's business
_NOT_A_NAME = re.compile(r"[^a-zA-Z0-9_-]")


def to_provider(request: Request) -> tuple[list[ModelMessage], ModelRequestParameters]:
    """Everything between two answers goes into one request: a provider wants the results of one
    answer's calls together."""
    messages: list[ModelMessage] = []
    between: list[ModelRequestPart] = []
    for message in request.messages:
        if message["role"] == "assistant":
            if between:
                messages.append(ModelRequest(parts=between, timestamp=_THEN))
            messages.append(ModelResponse(parts=_said(message), timestamp=_THEN))
            between = []
        else:
            between.append(_heard(message))
    if between:
        messages.append(ModelRequest(parts=between, timestamp=_THEN))
    tools = [
        ToolDefinition(
            name=tool.name,
            description=tool.description,
            parameters_json_schema=tool.schema,
            strict=False,  # The schema goes out as it is recorded, not rewritten.
        )
        for tool in request.tools
    ]
    return messages, ModelRequestParameters(function_tools=tools, allow_text_output=True)


def _heard(message: Message) -> ModelRequestPart:
    text = message["content"]
    match message["role"]:
        case "system":
            return SystemPromptPart(content=text, timestamp=_THEN)
        case "user":
            return UserPromptPart(content=text, timestamp=_THEN)
        case "tool":
            return ToolReturnPart(
                tool_name=_name(message["name"]),
                content=text,
                tool_call_id=message["tool_call_id"],
                timestamp=_THEN,
                outcome="failed" if message.get("is_error") else "success",
            )
        case role:
            raise AssertionError(f"no message has the role {role!r}")


def _said(message: Message) -> list[ModelResponsePart]:
    parts: list[ModelResponsePart] = []
    if message["content"]:
        parts.append(TextPart(content=message["content"]))
    parts += [
        ToolCallPart(tool_name=_name(call["name"]), args=call["arguments"], tool_call_id=call["id"])
        for call in message.get("tool_calls", ())
    ]
    return parts


def _name(name: str) -> str:
    """A model may call a tool by a name that no provider would take back."""
    return _NOT_A_NAME.sub("_", name)[:NAME_CHARS] or "_"


def from_provider(response: ModelResponse) -> Answer:
    """The whole answer. Reasoning is not kept. Arguments stay as the model wrote them, also when
    they are no JSON: the call's result tells it so."""
    calls = [part for part in response.parts if isinstance(part, ToolCallPart)]
    usage = response.usage
    return Answer(
        text="".join(part.content for part in response.parts if isinstance(part, TextPart)),
        calls=tuple(
            AskedCall(call.tool_name[:NAME_CHARS], _arguments(call.args)) for call in calls
        ),
        usage=Usage(
            input_tokens=usage.input_tokens,
            output_tokens=usage.output_tokens,
            cached_tokens=usage.cache_read_tokens,
        ),
        finish="tool_calls" if calls else response.finish_reason or "stop",
    )


def _arguments(args: object) -> str:
    """JSON text; some servers give an object."""
    return args if isinstance(args, str) else json.dumps(args or {}, ensure_ascii=False)
