"""Errors that a person can act on."""


class UserError(Exception):
    """Wrong settings, a missing file, an unreachable server: one sentence that says what, where, and what to do.

    The command line and the services print it without a traceback and exit with code 2.
    """
