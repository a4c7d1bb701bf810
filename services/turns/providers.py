"""Models behind HTTP: OpenAI's chat completions, at any base URL, and Anthropic's messages.

One streamed call, tried once: nothing below this retries, since the turn does, without holding a
worker. A stream that ends early, stalls or breaks is a failure, never a short answer.
"""

import asyncio
import importlib
import json
import os
import re
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any

import structlog
from msgspec import Struct

from plait.events.errors import ModelFailure, TextTooLong
from plait.events.limits import Limits
from plait.events.model_names import PROVIDERS
from plait.services.turns.models import Answer, ModelError, Request, RetryLater

if TYPE_CHECKING:
    import httpx2
    from pydantic_ai.models import Model, StreamedResponse

CONNECT_S = 10.0
CONNECTIONS = 1_000  # to all addresses: as many as turns at once
MODELS_KEPT = 1_000  # one for each key, address and name; the one not used for longest goes
LOGGED_CHARS = 300  # of what a provider says about an error; the log alone gets it

log = structlog.get_logger("turns")


class Provider(Struct, frozen=True):
    """Where and as whom a provider is called. `stall_s` None: the limit for all. `kind`, a key of
    `PROVIDERS`, is needed where the name does not say it."""

    base_url: str | None = None
    key: str | None = None
    headers: tuple[tuple[str, str], ...] = ()
    stall_s: float | None = None
    kind: str = ""

    def __repr__(self) -> str:
        return f"Provider({self.base_url!r})"  # The key and the headers are nobody's business.


# Of a tenant, by the provider's name: settings for this call. Raises ModelError without any.
Providers = Callable[[str, str], Awaitable[Provider]]


def providers_from_env(env: Mapping[str, str] = os.environ) -> Providers:
    """`OPENAI_BASE_URL`, `OPENAI_API_KEY` and likewise for Anthropic, for every tenant."""

    async def provider(tenant: str, name: str) -> Provider:
        base_url, key = env.get(f"{name.upper()}_BASE_URL"), env.get(f"{name.upper()}_API_KEY")
        if not base_url and not key:
            raise ModelError(
                f"there is no key for {name}: set {name.upper()}_API_KEY", ModelFailure.BAD_KEY
            )
        return Provider(base_url or None, key or None)

    return provider


def http_models(
    limits: Limits, providers: Providers | None = None
) -> "dict[str, HttpModel | NamedModel]":
    """By the prefix of the names that they answer for; `:` answers for all others."""
    settings = providers or providers_from_env()
    kinds = {name: HttpModel(name, settings, limits) for name in PROVIDERS}
    return {
        **{f"{kind}:": model for kind, model in kinds.items()},
        ":": NamedModel(kinds, settings),
    }


class NamedModel:
    """The models of providers that tenants have named: which kind of model answers, they say."""

    def __init__(self, kinds: "Mapping[str, HttpModel]", settings: Providers) -> None:
        self._kinds, self._settings = kinds, settings

    async def answer(self, request: Request) -> Answer:
        """Raises as `HttpModel.answer` does."""
        settings = await self._settings(request.tenant, request.model.partition(":")[0])
        return await self._kinds[settings.kind].ask(settings, request)

    async def close(self) -> None:
        """The models of the kinds are closed by themselves."""


class HttpModel:
    """All models of providers of one kind: a key of `PROVIDERS`, and its own provider's name."""

    def __init__(self, provider: str, settings: Providers, limits: Limits) -> None:
        self._provider, self._settings, self._limits = provider, settings, limits
        self._http: httpx2.AsyncClient | None = None
        self._models: OrderedDict[tuple[Provider, str], Model] = OrderedDict()
        self._loading: asyncio.Task[httpx2.AsyncClient] | None = None

    async def answer(self, request: Request) -> Answer:
        """Raises RetryLater, ModelError, and TextTooLong for an answer without end."""
        return await self.ask(await self._settings(request.tenant, self._provider), request)

    async def ask(self, settings: Provider, request: Request) -> Answer:
        await self._loaded()
        from plait.services.turns import failures

        name = request.model.partition(":")[0]
        stall_s = settings.stall_s or self._limits.model_stall_s
        try:
            return await self._stream(self._model(settings, request.model), request, stall_s)
        except (ModelError, RetryLater, TextTooLong):
            raise
        except Exception as error:  # noqa: BLE001 - whatever the libraries raise becomes one of ours
            failure = failures.failure_of(error, name)
            said = redacted(str(error), settings)
            # A server may quote the key even as its machine-readable code.
            failure.args = (_without_secrets(str(failure), settings),)
            log.warning("provider failed", model=request.model, failure=failure.failure, said=said)
            raise failure from None  # The chain below may hold the key.

    async def close(self) -> None:
        self._models.clear()
        if self._http is not None:
            await self._http.aclose()

    async def _stream(self, model: "Model", request: Request, stall_s: float) -> Answer:
        from pydantic_ai.direct import model_request_stream
        from pydantic_ai.messages import (
            PartDeltaEvent,
            PartStartEvent,
            TextPart,
            TextPartDelta,
            ToolCallPart,
            ToolCallPartDelta,
        )

        from plait.services.turns import failures
        from plait.services.turns.wire import to_provider

        messages, parameters = to_provider(request)
        stall, loop = asyncio.timeout(stall_s), asyncio.get_running_loop()
        size = 0
        try:
            # From the first byte on, each event sets the clock back: there is one timer, not one
            # for each of them.
            async with (
                stall,
                model_request_stream(
                    model, messages, model_request_parameters=parameters
                ) as stream,
            ):
                async for event in stream:
                    stall.reschedule(loop.time() + stall_s)
                    text, more = "", ""
                    match event:
                        case PartStartEvent(part=TextPart(content=text)):
                            pass
                        case PartDeltaEvent(delta=TextPartDelta(content_delta=text)):
                            pass
                        case PartStartEvent(part=ToolCallPart(args=str(more))):
                            pass
                        case PartDeltaEvent(delta=ToolCallPartDelta(args_delta=str(more))):
                            pass
                        case _:
                            continue
                    size += len(text) + len(more)
                    if size > self._limits.text_bytes:
                        raise TextTooLong(size, self._limits.text_bytes)
                    if text:
                        request.said(text)
                return _whole(stream)
        except TimeoutError:
            if not stall.expired():
                raise
            name = request.model.partition(":")[0]
            raise failures.stalled(name, stall_s) from None

    async def _loaded(self) -> None:
        """In a thread: the imports take seconds, and meanwhile turns must show that they live."""
        if self._http is not None:
            return
        if self._loading is None or self._loading.done():
            self._loading = asyncio.create_task(asyncio.to_thread(_load, self._provider))
        self._http = await asyncio.shield(self._loading)

    def _model(self, settings: Provider, name: str) -> "Model":
        key = (settings, name)
        model = self._models.get(key)
        if model is None:
            while len(self._models) >= MODELS_KEPT:
                self._models.popitem(last=False)
            assert self._http is not None, "loaded before the first call"
            make = _MAKE[self._provider]
            model = self._models[key] = make(self._http, settings, name.partition(":")[2])
        else:
            self._models.move_to_end(key)
        return model


def _load(provider: str) -> "httpx2.AsyncClient":
    """What takes long: the imports, the certificates, and what the first model imports more."""
    for name in (
        f"pydantic_ai.models.{provider}",
        "pydantic_ai.direct",
        "plait.services.turns.wire",
        "plait.services.turns.failures",
    ):
        importlib.import_module(name)
    http = _http()
    _MAKE[provider](http, Provider(), "none")
    return http


def _http() -> "httpx2.AsyncClient":
    """One for all tenants: keys are headers of each request."""
    import httpx2

    return httpx2.AsyncClient(
        # A stall is ours to notice: it counts tokens, not bytes.
        timeout=httpx2.Timeout(None, connect=CONNECT_S),
        limits=httpx2.Limits(max_connections=CONNECTIONS, max_keepalive_connections=100),
        follow_redirects=False,  # A key goes to no other address than the one it is set for.
    )


def _openai(http: "httpx2.AsyncClient", settings: Provider, name: str) -> "Model":
    from openai import AsyncOpenAI
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.profiles.openai import OpenAIModelProfile
    from pydantic_ai.providers.openai import OpenAIProvider
    from pydantic_ai.providers.openai_compatible import OpenAICompatibleProvider

    client = AsyncOpenAI(
        api_key=settings.key or "none",
        base_url=settings.base_url or "https://api.openai.com/v1",
        default_headers=dict(settings.headers),
        max_retries=0,
        http_client=http,
    )
    client.organization = client.project = client.admin_api_key = None
    _only_these_headers(client, settings)
    # Another server than OpenAI's may read the control tokens of its model's template in a text:
    # the compatible provider breaks them up.
    own = client.base_url.host == "api.openai.com"
    provider = (
        OpenAIProvider(openai_client=client)
        if own
        else OpenAICompatibleProvider("compatible", openai_client=client)
    )
    # Without this a stream that was cut counts as an answer, even with half a tool call.
    profile = OpenAIModelProfile(openai_chat_streaming_requires_finish_reason=True)
    return OpenAIChatModel(name, provider=provider, profile=profile)


def _anthropic(http: "httpx2.AsyncClient", settings: Provider, name: str) -> "Model":
    from anthropic import AsyncAnthropic
    from pydantic_ai.models.anthropic import AnthropicModel, AnthropicModelSettings
    from pydantic_ai.providers.anthropic import AnthropicProvider

    client = AsyncAnthropic(
        api_key=settings.key or "none",
        base_url=settings.base_url or "https://api.anthropic.com",
        default_headers=dict(settings.headers),
        max_retries=0,
        http_client=http,
    )
    _only_these_headers(client, settings)
    # The prefix of a branch does not change as it grows: paid once, then read from the cache.
    caching = AnthropicModelSettings(anthropic_cache=True)
    provider = AnthropicProvider(anthropic_client=client)
    return AnthropicModel(name, provider=provider, settings=caching)


_MAKE = {"openai": _openai, "anthropic": _anthropic}


def _only_these_headers(client: Any, settings: Provider) -> None:
    """The libraries add headers from variables of their own, and a tenant's server must not get
    what an operator has set for another."""
    client._custom_headers = dict(settings.headers)


def _whole(stream: "StreamedResponse") -> Answer:
    from plait.services.turns import failures
    from plait.services.turns.wire import from_provider

    response = stream.get()
    failures.check_finish(response.finish_reason)
    return from_provider(response)


_SECRETS = re.compile(r"(?i)\b(?:sk|pk|key|tok)[-_][\w-]{6,}|bearer\s+\S+|[\w-]{32,}")


def redacted(text: str, settings: Provider) -> str:
    """What a provider said, without anything that is a key or looks like one."""
    return _SECRETS.sub("…", _without_secrets(text, settings))[:LOGGED_CHARS]


def _without_secrets(text: str, settings: Provider) -> str:
    values = [value for _, value in settings.headers]
    for secret in (settings.key, *values, *(value.rpartition(" ")[2] for value in values)):
        if secret:
            text = text.replace(secret, "…").replace(json.dumps(secret)[1:-1], "…")
    return text
