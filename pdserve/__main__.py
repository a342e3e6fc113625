"""`python -m pdserve` is `pdserve`."""

from __future__ import annotations

import sys

from pdserve.cli import main

if __name__ == "__main__":
    sys.exit(main())
