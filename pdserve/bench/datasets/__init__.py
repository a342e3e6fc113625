"""Data sets of benchmarks: each module makes the requests of one, pure and seeded."""
