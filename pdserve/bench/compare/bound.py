"""The rate-matched bound: the throughput of P/D if only the two engines' rates mattered.

`out_tok_s / (num_ctx * gen_rate / ctx_rate + num_gen)` is the output per core with exactly enough
prefill cores for the decode cores that neither side waits for the other. It ignores handoffs, proxy
and client, and that engines cannot be divided: a deployment can approach but not exceed it. The
name and the formula are TensorRT-LLM's.
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
