"""The calls for a tenant's own providers of models. No answer holds a key."""

from typing import Annotated

from litestar import delete, get, put
from litestar.params import JSONBody, PathParameter

from plait.events.errors import Code
from plait.events.providers import ProviderSettings, ProviderView
from plait.services.gateway.call import Call
from plait.services.gateway.problems import BODY_REFUSALS, refusals
from plait.services.gateway.shapes import NewProvider, ProviderList

Name = Annotated[
    str,
    PathParameter(description="1 to 32 of a-z, 0-9, _ and -, beginning with a letter."),
]


@get(
    "/v1/providers",
    tags=["providers"],
    summary="List the tenant's own providers, by name",
    description="Of a key only whether there is one. `openai` and `anthropic` are there without "
    "being listed: the server's own, unless the tenant has its own of that name.",
    responses=refusals(),
)
async def list_providers(request: Call) -> ProviderList:
    views = await request.of_log(request.gateway.providers.views(request.tenant))
    return ProviderList(items=views)


@put(
    "/v1/providers/{name:str}",
    tags=["providers"],
    summary="Set a provider",
    description="A model `name:model` is then asked there. Replaces what was set under the name, "
    "the key as well; calls that begin within seconds may still use the old one.",
    responses={**refusals(Code.NO_SECRET, Code.BUDGET_EXCEEDED), **BODY_REFUSALS},
)
async def set_provider(request: Call, name: Name, data: JSONBody[NewProvider]) -> ProviderView:
    provider = ProviderSettings(
        name=name,
        kind=data.kind,
        base_url=data.base_url,
        key=data.key,
        headers=tuple(data.headers.items()),
        stall_s=data.stall_s,
    )
    return await request.command(request.gateway.providers.put(request.tenant, provider))


@delete(
    "/v1/providers/{name:str}",
    tags=["providers"],
    summary="Remove a provider, with its key",
    description="Turns of sessions that name it fail from then on, and say so.",
    responses=refusals(Code.UNKNOWN_PROVIDER),
)
async def remove_provider(request: Call, name: Name) -> None:
    await request.command(request.gateway.providers.remove(request.tenant, name))


ROUTES = (list_providers, set_provider, remove_provider)
