"""Writes docs/vllm-flags.md: what becomes of each of vLLM's names, as `pdserve vllm-flags` says it.

python -m tools.vllm_names           # writes it
python -m tools.vllm_names --check   # exit code 1 if it is not what would be written
"""

from __future__ import annotations

import sys
from itertools import groupby
from pathlib import Path
from typing import Final

from pdserve.config.settings import engine_flags
from pdserve.config.vllm import RELEASE
from pdserve.config.vllm.answers import VllmAnswer, VllmName, table
from tools.written import write_or_check

DOCUMENT: Final = Path(__file__).parents[1] / "docs" / "vllm-flags.md"
_HEAD: Final = f"""\
# vLLM's names

What pdserve does with each flag of `vllm serve` (vLLM {RELEASE}), and with its environment
variables, KV connectors and commands. `python -m tools.vllm_names` writes this page;
`pdserve vllm-flags WORD` prints the rows that contain a word. [vllm.md](vllm.md) has vLLM's own
examples, with answers.

*same*: works here, on the command line, in YAML and as `PDSERVE_*`. *no effect*: accepted, with a
line about it at the start. *not supported*: refused, with the reason. Italics mark pdserve's own
names.
"""


def document() -> str:
    """Make the page."""
    parts = [_HEAD]
    for kind, rows in groupby(table(engine_flags()), key=lambda row: row.kind):
        parts.append(
            f"\n## {kind.value[0].upper()}{kind.value[1:]}\n| vLLM's | here |\n|---|---|\n"
        )
        parts += [f"| `{row.name}` | {_said(row)} |\n" for row in rows]
    return "".join(parts)


def _said(row: VllmName) -> str:
    text = row.text.replace("|", "\\|")
    if row.answer is VllmAnswer.TRANSLATED:
        return f"*{text}*"
    return f"{row.answer.value}{': ' if text else ''}{text}"


if __name__ == "__main__":
    sys.exit(write_or_check(DOCUMENT, document()))
