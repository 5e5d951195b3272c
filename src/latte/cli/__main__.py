"""`python -m latte.cli`: the same as `latte`."""

from latte.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
