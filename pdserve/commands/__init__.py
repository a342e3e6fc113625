"""The commands, one module each, from settings to exit code."""
