"""The command `pdserve`, also `python -m pdserve`. All else is imported where Ctrl-C is heeded."""

from __future__ import annotations

import sys


def main() -> int:
    """Run one command and return its exit code; Ctrl-C while it starts ends it in one line."""
    try:
        from pdserve.cli import main as run

        return run()
    except KeyboardInterrupt:
        print("pdserve: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
