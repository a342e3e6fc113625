"""What it takes to tokenize a conversation's next turn: whole, in pieces, and with pieces known.

Prints one JSON object; milliseconds are the best of some rounds.

    python -m benchmarks.tokenizing [--tokenizer DIR] [--turns N] [--chars N] [--rounds N]
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.engine import environment
from pdserve.config.boxed import boxed_model_dir
from pdserve.text.chat import ChatTemplate
from pdserve.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from collections.abc import Callable


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokenizer", type=Path, default=boxed_model_dir())
    parser.add_argument("--turns", type=int, default=16)
    parser.add_argument("--chars", type=int, default=3000, help="of a message")
    parser.add_argument("--rounds", type=int, default=20)
    args = parser.parse_args()
    tokenizer = Tokenizer.from_directory(args.tokenizer)
    if tokenizer.chat_template is None:
        raise SystemExit(f"--tokenizer {args.tokenizer} has no chat template")
    corpus = (boxed_model_dir() / "corpus.txt").read_text()
    template = ChatTemplate(tokenizer.chat_template, tokenizer.special_tokens)
    rendered = template.render(messages(corpus, args.turns, args.chars), now_s=0)
    told: dict[str, object] = {"benchmark": "tokenizing", "environment": environment(1)}
    told |= {"chars": len(rendered), "tokens": len(tokenizer.encode(rendered))}

    def whole() -> None:
        tokenizer._encode_whole(rendered)

    def fresh() -> Callable[[], object]:
        other = Tokenizer.from_directory(args.tokenizer)
        return lambda: other.encode(rendered, add_special_tokens=False)

    def known() -> None:
        tokenizer.encode(rendered, add_special_tokens=False)

    known()
    told["ms"] = {
        "whole": min(ms(whole) for _ in range(args.rounds)),
        "in pieces": min(ms(fresh()) for _ in range(args.rounds)),
        "known pieces": min(ms(known) for _ in range(args.rounds)),
    }
    print(json.dumps(told, indent=1))


def messages(corpus: str, num: int, chars: int) -> list[dict[str, str]]:
    """A conversation of pieces of a text, each another one."""
    roles = "user", "assistant"
    return [
        {"role": roles[i % 2], "content": corpus[i * 7919 % (len(corpus) - chars) :][:chars]}
        for i in range(num)
    ]


def ms(work: Callable[[], object]) -> float:
    """Milliseconds of some work."""
    start_s = time.perf_counter()
    work()
    return round((time.perf_counter() - start_s) * 1e3, 3)


if __name__ == "__main__":
    main()
