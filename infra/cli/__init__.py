"""The command line: `tailrace demo`, `run`, `status`, `bootstrap`, and what the services add."""
