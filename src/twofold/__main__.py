"""`python -m twofold`: the same as the command `twofold`."""

from twofold.cli import main

if __name__ == "__main__":  # processes that are spawned import this file again
    raise SystemExit(main())
