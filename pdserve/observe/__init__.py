"""Clock, logs as events, and what metrics have in common."""
