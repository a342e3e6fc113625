"""What each command does once its settings are known; one module per command."""
