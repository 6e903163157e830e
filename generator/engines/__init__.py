"""What samples completions. Every engine speaks the protocol in `base`."""
