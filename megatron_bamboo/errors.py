"""The one error that is the user's to mend."""


class UserError(ValueError):
    """Bad input: its message is one line that says how to mend it; the exit status is 2."""
