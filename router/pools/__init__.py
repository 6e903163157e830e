"""Where models are called: our generators over the bus, or any OpenAI-compatible upstream."""
