"""A timed trace in Mooncake's or Azure's format, played at its own speed, faster, or in part.

Each line is `{"timestamp": 2748, "input_length": 955, "output_length": 52, "hash_ids": [46, 47]}`:
milliseconds, tokens, tokens, and an id for each 512 tokens of the prompt. The prompts themselves
are not in it. Equal ids give equal tokens, so prefix caches find here what they could find in the
traced system; tokens after the last whole id are the request's own. Lines are in order of time.
`shared` in a run's description is the share of the prompts that an unlimited cache would have.

A file whose name ends in .csv has only times and lengths, in Azure's columns
`TIMESTAMP,ContextTokens,GeneratedTokens` or in `arrived_at,num_prefill_tokens,num_decode_tokens`
(seconds), and its prompts share nothing.

(Mooncake: Trading More Storage for Less Computation, FAST '25; AzurePublicDataset,
AzureLLMInferenceTrace_{code,conv}.csv, of Splitwise, ISCA '24. The traces are in the projects'
repositories.)
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from pdserve.bench.datasets.prompts import PromptMaker, Segment
from pdserve.bench.datasets.reading import Entry, csv_rows, json_lines
from pdserve.bench.records import Planned, RequestPlan
from pdserve.config.datasets import DatasetConfig, TraceDataConfig

_FORM: Final = (
    'a line is {"timestamp": 0, "input_length": 600, "output_length": 50, "hash_ids": [1, 2]}'
)
_COLUMNS: Final = (
    ("TIMESTAMP", "ContextTokens", "GeneratedTokens"),
    ("arrived_at", "num_prefill_tokens", "num_decode_tokens"),
)


def make(config: DatasetConfig, prompts: PromptMaker) -> RequestPlan:
    """Make the plan.

    Raises:
        ConfigError: The file is not in this format.
    """
    own = config.trace
    path = Path(config.path)
    requests: list[Planned] = []
    num_too_long = 0
    first_ms: float | None = None
    before_ms = -math.inf
    notes = []
    seen: set[int] = set()
    num_tokens = num_shared = 0
    for entry in _entries(path):
        at_ms = _timestamp(entry, before_ms)
        before_ms = at_ms
        first_ms = at_ms if first_ms is None else first_ms
        at_s = (at_ms - first_ms) / 1000 - own.start_s
        segments = _segments(entry, own)
        num_output = max(1, round(entry.integer("output_length") * own.length_scale))
        if at_s < 0:
            continue
        if own.duration_s is not None and at_s >= own.duration_s:
            break
        num_prompt = sum(each.num_tokens for each in segments)
        if not prompts.fits(num_prompt, num_output):
            num_too_long += 1
            continue
        if len(requests) == config.num_prompts:
            notes.append(
                f"the trace is longer: its first {config.num_prompts} requests were sent "
                "(--num-prompts)"
            )
            break
        num_tokens += num_prompt
        num_shared += _num_shared(entry, segments, seen)
        requests.append(
            Planned(
                index=len(requests),
                prompt=prompts.make(segments, may_cut_all=True),
                max_tokens=num_output,
                num_prompt_tokens=num_prompt,
                at_s=at_s / own.speedup,
            )
        )
    if num_too_long:
        notes.append(
            f"{num_too_long} of {num_too_long + len(requests)} requests of the trace were left "
            f"out because they exceed the model's {prompts.max_model_len} tokens "
            "(--trace-length-scale makes them shorter)"
        )
    words = f"trace {path.name} speedup={own.speedup:g}"
    if num_shared:
        words += f" shared={num_shared / num_tokens:.0%}"
    if own.start_s or own.duration_s is not None:
        end = "" if own.duration_s is None else f"{own.start_s + own.duration_s:g}"
        words += f" window={own.start_s:g}..{end} s"
    if own.length_scale != 1:
        words += f" length_scale={own.length_scale:g}"
    return RequestPlan(requests=requests, description=words, notes=notes)


def _entries(path: Path) -> Iterator[Entry]:
    """A file's requests with Mooncake's fields, whatever its format."""
    if path.suffix != ".csv":
        yield from json_lines(path)
        return
    for row in csv_rows(path, _COLUMNS):
        time, num_input, num_output = row.fields.values()
        fields = {
            "timestamp": _milliseconds(row, time),
            "input_length": int(num_input) if num_input.isdecimal() else num_input,
            "output_length": int(num_output) if num_output.isdecimal() else num_output,
        }
        yield Entry(path, row.line, fields)


def _milliseconds(row: Entry, text: str) -> float:
    """Return the time of a table row: seconds, or a date with the time of day in UTC."""
    seconds = math.nan
    for read in (float, _unix_s):
        try:
            seconds = read(text)
        except ValueError:
            continue
        break
    if not math.isfinite(seconds):
        row.refuse(
            f"{text!r} is not a time",
            "write seconds, or a date and time such as 2023-11-16 18:17:03.979",
        )
    return seconds * 1000


def _unix_s(text: str) -> float:
    """Fractions of a second may have seven digits, which some releases of Python do not read."""
    return datetime.fromisoformat(text[:26]).replace(tzinfo=UTC).timestamp()


def _num_shared(entry: Entry, segments: list[Segment], seen: set[int]) -> int:
    """Leading tokens of a prompt that an earlier one had, which are then `seen`."""
    hash_ids = entry.fields.get("hash_ids", ())
    known = itertools.takewhile(lambda pair: pair[0] in seen, zip(hash_ids, segments, strict=False))
    num_shared = sum(segment.num_tokens for _, segment in known)
    seen.update(hash_ids)
    return num_shared


def _timestamp(entry: Entry, before_ms: float) -> float:
    value = entry.fields.get("timestamp")
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        found = "is missing" if value is None else "is not a number"
        entry.refuse(f"the field 'timestamp' {found}", f"{_FORM}, in milliseconds")
    if value < before_ms:
        entry.refuse(
            f"the field 'timestamp' is {value:g}, earlier than {before_ms:g} in the line above",
            "sort the lines by time",
        )
    return float(value)


def _segments(entry: Entry, own: TraceDataConfig) -> list[Segment]:
    """Return one segment per hash id, and one for the tokens after them."""
    num_input = entry.integer("input_length")
    if entry.path.suffix == ".csv":
        num_own = max(1, round(num_input * own.length_scale))
        return [Segment(f"line/{entry.line}", num_own)]
    hash_ids = entry.fields.get("hash_ids")
    if not isinstance(hash_ids, list) or not all(type(each) is int for each in hash_ids):
        found = "is missing" if hash_ids is None else "is not an array of whole numbers"
        entry.refuse(f"the field 'hash_ids' {found}", _FORM)
    num_whole, num_behind = divmod(num_input, own.block_size)
    if len(hash_ids) not in {num_whole, num_whole + (num_behind > 0)}:
        entry.refuse(
            f"the field 'hash_ids' has {len(hash_ids)} ids for {num_input} tokens",
            f"{own.block_size} tokens per id make {num_whole + (num_behind > 0)} ids: set "
            "--trace-block-size to the tokens that an id stands for",
        )
    block = max(1, round(own.block_size * own.length_scale))
    num_left = max(1, round(num_input * own.length_scale))
    segments = []
    for hash_id in hash_ids:
        num = min(block, num_left)
        segments.append(Segment(f"block/{hash_id}", num))
        num_left -= num
    return [*segments, Segment(f"line/{entry.line}", num_left)]
