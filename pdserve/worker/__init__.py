"""One rank: its device, weights, KV memory and steps. Executes; decides nothing."""
