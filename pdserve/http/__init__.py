"""HTTP code that the proxy and the engines' servers share."""
