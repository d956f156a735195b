"""`python -m spmoe_lite` is the command `spmoe-lite`."""

try:
    from spmoe_lite.cli import main
except KeyboardInterrupt:  # while modules are read; later `main` sees to it
    raise SystemExit(130) from None

if __name__ == "__main__":
    main()
