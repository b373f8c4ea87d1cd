"""The errors whose message is all that a user needs."""


class InputError(ValueError):
    """What the user gave cannot be used; scripts show it as one line and exit with status 2.

    The message says what was wrong, the value that was seen, and what would do. It is a
    `ValueError`, so library users and exercises need to know no class of ours.
    """


class NoGroup(InputError):
    """The ranks did not meet. Each says so for itself: rank 0 may be the one that is missing."""


class ShortError(Exception):
    """Notebooks show it as one line, without frames."""

    def _render_traceback_(self) -> list[str]:
        return [f"{type(self).__name__}: {self}"]
