"""Layers of a decoder: each owns its parameters, its weight loading and its part of the pass.

Inference only, and plain objects: a decode step runs some three hundred of these calls,
so each is one attribute lookup and one operation.
"""
