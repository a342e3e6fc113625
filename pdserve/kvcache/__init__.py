"""Who holds which KV block: pool, holdings and prefix matching. Counts only, no tensors."""
