"""Benchmarks that need the environments' prompts."""
