"""Uses of the library, a file each."""
