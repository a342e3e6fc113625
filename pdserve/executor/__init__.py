"""Executors: bring steps to the ranks of an engine, behind one interface."""
