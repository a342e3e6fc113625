"""Proof with readers that nobody here wrote: `make readers` (see `__main__`)."""
