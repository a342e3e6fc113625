"""Clock, structured logs, metrics and traces."""
