"""Answers that a program can check: compact first, verified, escalated with the failure as context."""
