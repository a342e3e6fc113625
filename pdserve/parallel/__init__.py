"""Ranks: which there are, which groups they form, and what they say to one another."""
