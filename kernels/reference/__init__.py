"""Pure torch definitions of every operation: what the fast kernels must compute.

They run on any device torch has, in bf16, fp16 and fp32, and compute in fp32 inside. They are the
fallback when no compiler is at hand, and the yardstick of ``tests/kernels``. They know nothing of
packing, threads or batch invariance: torch chooses the accumulation order.
"""
