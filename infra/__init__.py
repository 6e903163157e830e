"""What every service stands on: bus, stores, leases, telemetry, life cycle, sandbox, grading, command line."""
