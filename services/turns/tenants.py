"""Where a tenant's models are called: its own provider of that name, else as the environment says.

What was read is used for a few seconds, so that a turn of many steps asks the store once.
"""

import asyncio
import os
from collections import OrderedDict
from collections.abc import Mapping

from plait.events.errors import ModelFailure, NoSecret, WrongSecret
from plait.events.model_names import PROVIDERS
from plait.events.providers import TenantProviders
from plait.services.turns.models import ModelError
from plait.services.turns.providers import Provider, Providers, providers_from_env

KEPT_S = 5.0
KEPT = 1_024


def providers_of(
    tenants: TenantProviders, env: Mapping[str, str] = os.environ, *, kept_s: float = KEPT_S
) -> Providers:
    """For `http_models`. It raises ModelError for a provider that is not there, or whose key does
    not open, and Unavailable when the store does not answer."""
    built_in = providers_from_env(env)
    kept: OrderedDict[tuple[str, str], tuple[float, Provider | None]] = OrderedDict()

    async def provider(tenant: str, name: str) -> Provider:
        now = asyncio.get_running_loop().time()
        until, found = kept.get((tenant, name), (0.0, None))
        if until <= now:
            found = await _own(tenants, tenant, name)
            while len(kept) >= KEPT:
                kept.popitem(last=False)
            kept[tenant, name] = (now + kept_s, found)
        if found is not None:
            return found
        if name in PROVIDERS:
            return await built_in(tenant, name)
        raise ModelError(
            f"there is no provider {name!r} any more: set it again (PUT /v1/providers/{name})",
            ModelFailure.UNKNOWN_MODEL,
        )

    return provider


async def _own(tenants: TenantProviders, tenant: str, name: str) -> Provider | None:
    try:
        own = await tenants.get(tenant, name)
    except (NoSecret, WrongSecret) as error:
        raise ModelError(f"provider {name}: {error}", ModelFailure.BAD_KEY) from None
    if own is None:
        return None
    return Provider(own.base_url, own.key, own.headers, own.stall_s, own.kind)
