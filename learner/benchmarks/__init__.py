"""The learner's own benchmarks."""
