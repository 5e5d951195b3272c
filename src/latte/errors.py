"""The one exception that the command line shows as a single line, without a traceback."""


class LatteError(ValueError):
    """A user's mistake, or a state of the user's machine: the message says what was expected.

    Library functions raise it (or a plain ``ValueError``) for bad input; ``latte`` prints the
    message on one line and leaves with exit code 2.
    """
