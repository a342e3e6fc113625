"""Grafana's boards, vLLM's and ours, against a real Prometheus that scrapes a real deployment.

Grafana is in none of the registries that tests may use, so panels are asked as it asks them.
"""
