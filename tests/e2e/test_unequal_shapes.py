"""P and D of different shapes: the tokens are those of one engine, and the KV has moved.

One engine for each shape, and each of them prefills for each other one, by pull and by push. They
are driven as a proxy drives them, without one, so that every pair is played.
"""

from __future__ import annotations

import importlib.util
import itertools
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import httpx
import msgspec
import pytest

from pdserve.wire.request import EngineInfo
from pdserve.wire.transfer import TICKETS, EngineRef, PushTicket
from tests.e2e.deployment import Deployment
from tests.tiny_models import greedy_by_transformers, write_tiny_model

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]

NUM_TOKENS = 12
LONG = [3 + (17 * i + 5 * 300) % 311 for i in range(300)]
# The last one begins as the one before: D has a part of it already, whatever its block size.
PROMPTS = [[3 + (17 * i + 5 * n) % 311 for i in range(n)] for n in (1, 17, 64, 129)]
PROMPTS += [LONG, [*LONG[:200], *(5 + i % 300 for i in range(90))]]

TWELVE_HEADS = {"num_attention_heads": 12, "num_key_value_heads": 12, "hidden_size": 192}

FAMILIES: dict[str, tuple[str, dict[str, Any], dict[str, tuple[str, ...]]]] = {
    "tp 1 to 4": (
        "llama",
        {**TWELVE_HEADS, "num_hidden_layers": 2},
        {"tp1": (), "tp2": ("-tp", "2"), "tp3": ("-tp", "3"), "tp4": ("-tp", "4")},
    ),
    "pp 1 to 3": (
        "llama",
        {"num_hidden_layers": 5},
        {
            "pp1": (),
            "pp2": ("-pp", "2", "--pipeline-layers", "1,4"),
            "pp3": ("-pp", "3"),
        },
    ),
    "replicated heads": (
        "llama",
        {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2},
        {"tp1": (), "tp2": ("-tp", "2"), "tp4": ("-tp", "4")},
    ),
    "block sizes": (
        "qwen3",
        {"num_hidden_layers": 2},
        {
            "16": ("--block-size", "16"),
            "64": ("--block-size", "64"),
            "64 tp2": ("--block-size", "64", "-tp", "2"),
        },
    ),
    "latent": (
        "deepseek_v3",
        {"num_hidden_layers": 3},
        {"tp1": (), "tp2": ("-tp", "2"), "pp2 64": ("-pp", "2", "--block-size", "64")},
    ),
    "both": (
        "llama",
        {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 3},
        {
            "one": (),
            "tp2 pp2": ("-tp", "2", "-pp", "2"),
            "pp3 32": ("-pp", "3", "--block-size", "32"),
        },
    ),
    "crosswise": (
        "llama",
        {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 3},
        {
            "tp2": ("-tp", "2"),
            "pp2 32": ("-pp", "2", "--block-size", "32"),
        },
    ),
}  # fmt: skip
# Heads, layers and blocks are cut otherwise by P than by D, in each direction.
COVERING = {"crosswise"}


class Pair:
    """Two engines of a deployment, and their last request through both."""

    def __init__(self, deployment: Deployment, prefill: str, decode: str) -> None:
        self._deployment = deployment
        self._prefill, self._decode = prefill, decode

    def _body(self, prompt: list[int], salt: str, params: dict[str, Any]) -> dict[str, Any]:
        return {
            "prompt": prompt,
            "max_tokens": NUM_TOKENS,
            "temperature": 0.0,
            "ignore_eos": True,
            "return_token_ids": True,
            "cache_salt": salt,
            "kv_transfer_params": params,
        }

    def _post(self, name: str, body: dict[str, Any]) -> dict[str, Any]:
        url = f"{self._deployment.url(name)}/v1/completions"
        answer = httpx.post(url, json=body, timeout=60, verify=False)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    def pull(self, prompt: list[int], salt: str) -> list[int]:
        """Prefill there, decode here: D reads."""
        ours = {"final_length": True}
        params = {"do_remote_decode": True, "pdserve": ours}
        prefilled = self._post(self._prefill, self._body(prompt, salt, params))
        handoff = prefilled["kv_transfer_params"]
        handoff["pdserve"]["on_load_failure"] = "report"
        decoded = self._post(self._decode, self._body(prompt, salt, handoff))
        tokens: list[int] = decoded["choices"][0]["token_ids"]
        return tokens

    def push(self, prompt: list[int], salt: str) -> list[int]:
        """Both at once, with a ticket: P writes."""
        ticket = PushTicket(
            nonce=f"{salt} {len(prompt)}",
            prefill=self._ref(self._prefill),
            decode=self._ref(self._decode),
        )
        text = TICKETS.seal(ticket, self._deployment.secret)
        to_p = {"do_remote_decode": True, "pdserve": {"final_length": True, "ticket": text}}
        to_d = {"do_remote_prefill": True, "pdserve": {"ticket": text}}
        with ThreadPoolExecutor(2) as pool:
            decoding = pool.submit(self._post, self._decode, self._body(prompt, salt, to_d))
            pool.submit(self._post, self._prefill, self._body(prompt, salt, to_p)).result()
            tokens: list[int] = decoding.result()["choices"][0]["token_ids"]
        return tokens

    def _ref(self, name: str) -> EngineRef:
        info = msgspec.convert(self._deployment.info(name)["engine"], EngineInfo)
        assert info.kv_shape is not None
        assert info.can_push
        return EngineRef(
            engine_id=info.engine_id,
            incarnation=info.incarnation,
            endpoints=tuple(info.endpoints),
            shape=info.kv_shape,
        )


def loads(deployment: Deployment, name: str) -> dict[str, float]:
    """What has been loaded, by mode, and how many prompt tokens were computed."""
    metrics = deployment.metrics(name)
    found = {mode: metrics[f'pdserve_kv_loads_total{{mode="{mode}"}}'] for mode in ("pull", "push")}
    found["bytes"] = metrics["pdserve_kv_transfer_bytes_total"]
    return found


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(family, marks=[] if family in COVERING else pytest.mark.matrix)
        for family in FAMILIES
    ],
)
@pytest.mark.parametrize(
    "kv_connector",
    [
        "nixl",
        pytest.param(
            "ucx",
            marks=[
                pytest.mark.matrix,
                pytest.mark.skipif(
                    importlib.util.find_spec("ucxx") is None, reason="pdserve[ucx] is not here"
                ),
            ],
        ),
    ],
)
def test_engines_of_unequal_shapes_hand_over_to_one_another(
    kv_connector: str, family: str, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    kind, fields, shapes = FAMILIES[family]
    model = write_tiny_model(tmp_path_factory.mktemp("unequal") / "model", kind, **fields)
    expected = greedy_by_transformers(model, PROMPTS, NUM_TOKENS)
    deployment = Deployment(tmp_path)
    try:
        for name, flags in shapes.items():
            deployment.start(
                name,
                *("serve", str(model), "--port", "0", "--num-threads", "1", "--dtype", "float32"),
                *("--kv-cache-memory-bytes", "16MiB"),
                *("--kv-transfer-config.kv-connector", kv_connector),
                # Ranks of nine engines wire up to one another here, on two cores.
                *("--kv-transfer-config.handshake-timeout-s", "30"),
                *("--max-num-batched-tokens", "128", *flags),
            )
        deployment.wait()
        for prefill, decode in itertools.permutations(shapes, 2):
            pair = Pair(deployment, prefill, decode)
            moves: dict[str, Callable[[list[int], str], list[int]]] = {
                "pull": pair.pull,
                "push": pair.push,
            }
            for mode, move in moves.items():
                before = loads(deployment, decode)
                salt = f"{prefill} {decode} {mode}"
                with ThreadPoolExecutor(len(PROMPTS)) as pool:
                    got = [*pool.map(move, PROMPTS[:-1], itertools.repeat(salt))]
                got.append(move(PROMPTS[-1], salt))
                assert got == expected, f"{mode} from {prefill} to {decode}"
                after = loads(deployment, decode)
                assert after[mode] == before[mode] + len(PROMPTS), f"{mode} {prefill} {decode}"
                assert after["bytes"] > before["bytes"]
        deployment.wait_nothing_held(*shapes, timeout_s=20.0)
    finally:
        deployment.end()
