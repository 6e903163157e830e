"""What everything cost, and what it would have cost elsewhere."""
