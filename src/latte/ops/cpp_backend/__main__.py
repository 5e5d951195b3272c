"""`python -m latte.ops.cpp_backend` builds the native kernels: see :mod:`.build`."""

from latte.ops.cpp_backend.build import main

if __name__ == "__main__":
    raise SystemExit(main())
