"""The verifiers' code, which runs in the sandbox alone: parsers and interpreters that meet hostile text."""
