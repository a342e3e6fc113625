"""HTTP as the proxy and the engines' servers serve it."""
