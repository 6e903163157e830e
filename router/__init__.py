"""Requests in, decisions and answers out: takes a request apart, and has each part done where that is cheapest."""
