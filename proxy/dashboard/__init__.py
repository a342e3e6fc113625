"""The page that shows a deployment at work."""
