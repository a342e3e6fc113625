"""Ranks, the groups they form, and their collectives."""
