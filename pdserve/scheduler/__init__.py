"""Decides what each step computes: pure plans, and one place that applies them."""
