"""Decides what each step computes: pure plans, one place that applies them."""
