"""Readers of `config.json`, a function for each family: from `Fields` to a `ModelArch`.

Absent fields have the default of the family's class in transformers.
"""
