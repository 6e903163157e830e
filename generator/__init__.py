"""Tasks in, rollouts out: samples groups with an engine, scores them, publishes them."""
