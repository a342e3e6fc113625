"""Drafts: guesses at what requests put out next, verified by the model in one step."""
