"""HTTP for applications: the OpenAI-compatible front of the router."""
