"""`python -m spmoe_lite` is the command `spmoe-lite`."""

from spmoe_lite.cli import main

if __name__ == "__main__":
    main()
