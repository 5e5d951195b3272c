"""The version of the package, for the files that `latte` itself names."""

__version__ = "0.1.0"
