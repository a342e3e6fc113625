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
"""Names that have another one here."""

CONNECTOR_NOTES: Final = {
    "NixlPullConnector": "`pdserve proxy --kv-mode pull` moves all KV so",
    "NixlPushConnector": "`pdserve proxy --kv-mode push` moves all KV so",
    "LMCacheConnectorV1": "LMCache runs as a server: `pdserve kv-server`",
    "LMCacheMPConnector": "lmcache.mp.host and lmcache.mp.port say where the server is",
}

MULTI: Final = "MultiConnector"

_STORE: Final = "keep KV in a store instead: `pdserve up --kv-tiers`, or `pdserve kv-server`"
_OTHER: Final = "KV goes from engine to engine by nixl or ucx"

ABSENT_CONNECTORS: Final = {
    "DecodeBenchConnector": "KV that nobody has computed is never used",
    "ExampleConnector": "it is an example; docs/extending.md has one for pdserve",
    "ExampleHiddenStatesConnector": "there is no such output",
    "FlexKVConnectorV1": _STORE,
    "HF3FSKVConnector": _STORE,
    "LMCacheConnectorV1Dynamic": "use LMCacheConnectorV1",
    "MoRIIOConnector": _OTHER,
    "MooncakeConnector": _OTHER,
    "MooncakeStoreConnector": _STORE,
    "OffloadingConnector": _STORE,
    "P2pNcclConnector": _OTHER,
    "SharedStorageConnector": "it is an example; docs/extending.md has one for pdserve",
    "SimpleCPUOffloadConnector": _STORE,
}

ROLES: Final = ("kv_producer", "kv_consumer", "kv_both")

RENAMED_KEYS: Final = {
    "kv-ip": "kv-transfer-config.host",
    "kv-port": "kv-transfer-config.port",
    "engine-id": "engine-id",
}
"""Keys of vLLM's object that have another flag here."""

KEYS_WITHOUT_EFFECT: Final = {
    "enable-permute-local-kv": "engines of both layouts of KV understand one another",
    "kv-buffer-device": "KV goes from pool to pool, without a buffer of its own",
    "kv-buffer-size": "KV goes from pool to pool, without a buffer of its own",
    "kv-parallel-size": "engines find one another by the proxy, any number of them",
    "kv-rank": "engines find one another by the proxy, any number of them",
}

ABSENT_KEYS: Final = {
    "kv-connector-module-path": "a package brings its connector by an entry point of the group "
    "pdserve.connectors: see docs/extending.md",
}

EXTRA: Final = {
    ("nixl", "backends"): "kv-transfer-config.nixl.backends",
    ("nixl", "kv-lease-duration"): "kv-transfer-config.lease-s",
}
"""What `kv_connector_extra_config` may have, by our connector and vLLM's key."""

ABSENT_EXTRA: Final = {
    "decoder-kv-blocks-ttl": "KV does not go back to the prefill engine",
    "enable-cross-layers-blocks": "a block always has all layers side by side",
    "num-threads": "kv-transfer-config.nixl.lanes says how many threads post transfers",
}

LMCACHE_HOST: Final = "lmcache.mp.host"
LMCACHE_PORT: Final = "lmcache.mp.port"
