"""Runs the transfer protocol of one rank in a thread of its own, over the side channel."""
