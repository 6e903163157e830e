"""What every service stands on: bus, stores, leases, telemetry, settings, life cycle, sandbox, grading, command line."""
