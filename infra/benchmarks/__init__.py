"""Benchmarks: measured on the user's own machine by `tailrace bench NAME`, reported the same way everywhere.

A benchmark is a command function under the entry point group `tailrace.benchmarks`. It measures, says what it is doing
on standard error, and ends with `report.publish`.
"""
