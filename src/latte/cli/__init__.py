"""The command line `latte`: thin commands over the rooms below.

Parsing imports nothing heavy, so that `--help` answers at once; each command imports what it
needs when it runs. A user's mistake (LatteError) is one line on stderr and exit code 2.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Sequence

from latte.lab.command_line import exit_code


def run(options: Namespace) -> int:
    """Do what the options say, with the code that they name."""
    if plugins := getattr(options, "plugins", None):
        from latte.lab.train.recipe import import_plugins

        import_plugins(plugins)
    code: int = options.run(options)
    return code


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code: 0, 2 for a user's mistake, 130 when interrupted."""
    from latte.cli.parser import parse
    from latte.lab.malloc import keep_memory

    options = parse(arguments)
    keep_memory()
    try:
        return exit_code(
            "latte",
            lambda: run(options),
            "a training run continues from its last checkpoint, if it has one, when run again",
        )
    except BrokenPipeError:  # such as `latte generate ... | head`
        sys.stderr.close()
        return 0
