"""What crosses the bus, and nothing else: messages, subjects, codec. No I/O, no torch."""
