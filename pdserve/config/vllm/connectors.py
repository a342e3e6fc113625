"""Data: vLLM's KV connectors, the keys of its `--kv-transfer-config`, and their mapping."""

from __future__ import annotations

from typing import Final

CONNECTORS: Final = {
    "NixlConnector": "nixl",
    "NixlPullConnector": "nixl",
    "NixlPushConnector": "nixl",
    "LMCacheConnectorV1": "lmcache",
    "LMCacheMPConnector": "lmcache",
}
"""Names of vLLM's connectors, and ours."""

CONNECTOR_NOTES: Final = {
    "NixlPullConnector": "`pdserve proxy --kv-mode pull` always pulls",
    "NixlPushConnector": "`pdserve proxy --kv-mode push` always pushes",
    "LMCacheConnectorV1": "LMCache runs as a server: `pdserve kv-server`",
    "LMCacheMPConnector": "lmcache.mp.host and lmcache.mp.port name the server",
}

MULTI: Final = "MultiConnector"

_STORE: Final = "keep KV in a store instead: `pdserve up --kv-tiers`, or `pdserve kv-server`"
_OTHER: Final = "use nixl or ucx to move KV between engines"

ABSENT_CONNECTORS: Final = {
    "DecodeBenchConnector": "KV that was not computed is never used",
    "ExampleConnector": "it is an example; docs/extending.md has an example for pdserve",
    "ExampleHiddenStatesConnector": "there is no such output",
    "FlexKVConnectorV1": _STORE,
    "HF3FSKVConnector": _STORE,
    "HiSparseConnector": "no model with sparse attention is served",
    "LMCacheConnectorV1Dynamic": "use LMCacheConnectorV1",
    "MoRIIOConnector": _OTHER,
    "MooncakeConnector": _OTHER,
    "MooncakeStoreConnector": _STORE,
    "OffloadingConnector": _STORE,
    "P2pNcclConnector": _OTHER,
    "SharedStorageConnector": "it is an example; docs/extending.md has an example for pdserve",
    "SimpleCPUOffloadConnector": _STORE,
}

ROLES: Final = ("kv_producer", "kv_consumer", "kv_both")

RENAMED_KEYS: Final = {
    "kv-ip": "kv-transfer-config.host",
    "kv-port": "kv-transfer-config.port",
    "engine-id": "engine-id",
}
"""Keys of vLLM's object, and our flags."""

KEYS_WITHOUT_EFFECT: Final = {
    "enable-permute-local-kv": "engines with either KV layout can exchange KV",
    "kv-buffer-device": "KV moves from pool to pool without a separate buffer",
    "kv-buffer-size": "KV moves from pool to pool without a separate buffer",
    "kv-parallel-size": "any number of engines find one another through the proxy",
    "kv-rank": "any number of engines find one another through the proxy",
}

ABSENT_KEYS: Final = {
    "kv-connector-module-path": "a package provides its connector with an entry point in the group "
    "pdserve.connectors: see docs/extending.md",
}

EXTRA: Final = {
    ("nixl", "backends"): "kv-transfer-config.nixl.backends",
    ("nixl", "kv-lease-duration"): "kv-transfer-config.lease-s",
}
"""Allowed keys of `kv_connector_extra_config`, by our connector and vLLM's key."""

ABSENT_EXTRA: Final = {
    "decoder-kv-blocks-ttl": "KV does not return to the prefill engine",
    "bidirectional-kv-xfer": "KV does not return to the prefill engine",
    "enable-cross-layers-blocks": "a block always contains all layers",
    "num-threads": "kv-transfer-config.nixl.lanes sets the number of threads that post transfers",
}

LMCACHE_HOST: Final = "lmcache.mp.host"
LMCACHE_PORT: Final = "lmcache.mp.port"
