"""Drafts: guesses of a request's next tokens, verified by the model in one step."""
