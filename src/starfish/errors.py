"""The one error a user is meant to read."""


class UserError(Exception):
    """Something the user must change: `message` names the thing and its value, `hint` the way out."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


def listed(names: list[str], most: int = 5) -> str:
    """The first few of many names, for an error text."""
    shown = ", ".join(f"`{name}`" for name in names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"
