"""Makes an endpoint drop its prefix cache, so that a run does not benefit from an earlier one."""

from __future__ import annotations

from typing import Final

import aiohttp

from pdserve.bench.target import Target

_TIMEOUT_S: Final = 30.0
_PATH: Final = "/reset_prefix_cache"


async def reset_prefix_caches(target: Target) -> str | None:
    """Reset the cache; return None on success, else the reason in words.

    pdserve's engines and its proxy support it, and vLLM with VLLM_SERVER_DEV_MODE=1.
    """
    url = target.base_url.rstrip("/") + _PATH
    timeout = aiohttp.ClientTimeout(total=_TIMEOUT_S)
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout) as session,
            session.post(url, headers=target.headers) as response,
        ):
            if response.status == 200:
                return None
            if response.status in {404, 405}:
                return f"{url} does not exist: {response.status}"
            return f"{url} answered {response.status}: {(await response.text())[:300].strip()}"
    except (aiohttp.ClientError, TimeoutError) as error:
        return f"{url} did not answer: {error or type(error).__name__}"
