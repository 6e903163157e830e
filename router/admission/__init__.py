"""What is let in: the form of a request, who asks, for which pools, and within which limits."""
