"""Which pool should do it: pure functions over features, scores, prices and what a session has cached."""
