"""The dashboard: a page that shows a deployment at work."""
