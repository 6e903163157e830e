"""What can be wrong with bytes from the bus. Every message says what, where, and what was expected."""

MAX_SENTENCE = 500  # characters: what is quoted from a hostile message must not fill logs and dead letters


class ContractError(ValueError):
    """A message that cannot be used. `code` is stable and machine-readable: it is the dead letter's reason."""

    code = "contract_error"

    def __init__(self, sentence: str) -> None:
        super().__init__(sentence if len(sentence) <= MAX_SENTENCE else sentence[: MAX_SENTENCE - 1] + "…")


class MalformedMessage(ContractError):
    """Not msgpack, not a map, or above a size limit."""

    code = "malformed"


class UnknownVersion(ContractError):
    """A major version this reader does not know."""

    code = "unknown_version"


class InvalidMessage(ContractError):
    """Not this contract: a missing or mistyped field, shapes that disagree, numbers that are not finite."""

    code = "invalid"
