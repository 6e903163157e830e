"""Commands of the router: `tailrace route …`, `tailrace costs`, `tailrace tco`."""
