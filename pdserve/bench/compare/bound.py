"""The rate-matched bound: what P/D could reach if nothing but the two engines' rates counted.

`out_tok_s / (num_ctx * gen_rate / ctx_rate + num_gen)` is the output per core when just so
many prefill cores stand beside the decode cores that neither waits for the other. It knows no
hand-over, no proxy and no client, and engines cannot be divided: a deployment comes near it
and does not pass it. The name and the formula are TensorRT-LLM's.
"""

from __future__ import annotations

from pdserve.bench.compare.result import EngineRates


def per_core(rates: EngineRates) -> float:
    """Output tokens per second and core, prefill and decode in the best proportion."""
    num_ctx, num_gen = rates.num_cores, rates.num_cores
    return rates.out_tok_s / (num_ctx * rates.gen_rate / rates.ctx_rate + num_gen)


def of_pair(rates: EngineRates, num_prefill: int, num_decode: int) -> float:
    """Output tokens per second of whole engines: the slower side sets the pace."""
    requests = min(num_prefill * rates.ctx_rate, num_decode * rates.gen_rate)
    return requests * rates.out_tok_s / rates.gen_rate


def best_share(rates: EngineRates) -> float:
    """Prefill engines per decode engine at which neither waits."""
    return rates.gen_rate / rates.ctx_rate
