"""Clock, log, metrics, and the story of each request."""
