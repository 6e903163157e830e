"""What can be wrong with bytes from the bus. Every message says what, where, and what was expected."""


class ContractError(ValueError):
    """A message that cannot be used. `code` is stable and machine-readable: it is the dead letter's reason."""

    code = "contract_error"


class MalformedMessage(ContractError):
    """Not msgpack, not a map, or above the size limit."""

    code = "malformed"


class UnknownVersion(ContractError):
    """A major version this reader does not know."""

    code = "unknown_version"


class InvalidMessage(ContractError):
    """msgpack, but not this contract: a missing or mistyped field, shapes that disagree, numbers that are not finite."""

    code = "invalid"
