"""What this package raises when its caller is at fault.

Every message says what was met, what was expected and what to do; the
command-line programs print it as one line and exit with status 2.  All are
`ValueError`, so that a caller need not know the finer names.
"""


class InputError(ValueError):
    """The caller gave something that cannot be used; the base of all errors here."""


class ShapeError(InputError):
    """Operands whose shapes do not fit each other."""


class ConfigError(InputError):
    """An architecture that contradicts itself, or one this package does not run."""


class CheckpointError(InputError):
    """A model file that is damaged, incomplete or not what its config declares."""


class CacheError(InputError):
    """A KV cache that belongs to another model, or has no room, or lacks the rows asked for."""


class UnknownName(InputError, KeyError):
    """A name that is not in the list it should be in."""

    def __init__(self, kind, name, known):
        known = list(known)
        super().__init__(f"no {kind} {name!r}; known: {', '.join(known)}")
        self.known = known

    def __reduce__(self):
        return _unpickled, (self.args[0], self.known)

    __str__ = ValueError.__str__  # KeyError would print the message as a quoted repr


def _unpickled(message, known):
    error = UnknownName("", "", known)
    error.args = (message,)
    return error
