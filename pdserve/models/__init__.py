"""Models: from a Hugging Face directory to a forward pass over paged KV. Knows no requests."""
