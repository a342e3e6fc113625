"""Ownership of KV blocks: pool, holdings and prefix matching. Counts only, no tensors."""
