"""Whether an answer is right, as far as a program can tell: verifiers by name, in the sandbox."""
