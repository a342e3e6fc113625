"""The command `pdserve`, also `python -m pdserve`. All else is imported where Ctrl-C is heeded."""

from __future__ import annotations

import io
import os
import sys


def main() -> int:
    """Run one command and return its exit code; Ctrl-C while it starts ends it in one line."""
    _open_closed_streams()
    _write_what_cannot_be_encoded_as_escapes()
    try:
        from pdserve.cli import main as run

        return run()
    except KeyboardInterrupt:
        print("pdserve: interrupted", file=sys.stderr)
        return 130


def _open_closed_streams() -> None:
    """Open `/dev/null` for standard streams that are closed, as after `2>&-`.

    Otherwise a socket gets that descriptor, and libraries that write to stderr write to a peer.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            descriptor = os.open(os.devnull, os.O_RDWR)  # the lowest one that is free: its own
            os.set_inheritable(descriptor, True)
            setattr(sys, name, os.fdopen(descriptor, mode))


def _write_what_cannot_be_encoded_as_escapes() -> None:
    """Let an answer that the locale has no characters for be written: it would end the command."""
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")


if __name__ == "__main__":
    sys.exit(main())
