"""Requests in, decisions and answers out: takes a request apart, and has each part done where it is cheapest done well."""
