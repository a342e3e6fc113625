"""What a model's text is made of: content, reasoning and tool calls."""
