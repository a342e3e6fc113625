"""The scheduler: pure plans of what each step computes, and one place that applies them."""
