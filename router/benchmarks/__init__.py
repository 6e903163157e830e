"""Benchmarks of the router: decisions, gateway, agent traffic."""
