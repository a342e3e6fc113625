"""Values that two processes must agree on: frozen msgspec structs, no tensors, no behaviour."""
