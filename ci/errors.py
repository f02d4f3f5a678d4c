"""The one exception that users see as a single clear line."""

import sys
from collections.abc import Callable


class StackError(Exception):
    """Something a user can act on; the command line prints it as one line.

    Args:
        message: What is wrong, in one line.
        hint: What to try, in one line, or empty.
    """

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint

    def __str__(self) -> str:
        text = " ".join(str(self.args[0]).split())
        return f"{text} (try: {self.hint})" if self.hint else text


def guarded(work: Callable[[], int]) -> int:
    """Carry out a command line's work; a StackError becomes one line and exit code 1."""
    try:
        return work()
    except StackError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
