"""The failure table as a document, from what its tests have measured.

    PDSERVE_FAILURES_REPORT=report.jsonl make chaos
    python -m tests.chaos.failures --where "..." report.jsonl > docs/failures.md

A line that is measured again counts in place of the one before.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

_Found = dict[tuple[str, str], dict[tuple[str, str], dict[str, Any]]]
"""What was measured, by row and phase, then by transport and mode."""

_COLUMNS = (
    ("shared memory", "pull"),
    ("shared memory", "push"),
    ("TCP", "pull"),
    ("TCP", "push"),
    ("UCX", "pull"),
    ("UCX", "push"),
)


@dataclass(frozen=True)
class Row:
    """A row of the table.

    Attributes:
        name: As the tests write it into their reports.
        client: What the client sees.
        sides: What each side does.
        tests: Names of the test functions.
    """

    name: str
    client: str
    sides: str
    tests: tuple[str, ...]


_STOPPED = (
    "test_a_part_of_p_is_stopped_before_the_hand_over",
    "test_a_part_is_stopped_in_mid_hand_over",
    "test_a_part_of_d_is_stopped_after_the_hand_over",
)

ROWS = (
    Row(
        "P dies before the transfer",
        "nothing; TTFT grows",
        "The proxy's prefill leg fails. The proxy uses another P. Without one, a D computes the "
        "prompt within its budget for that (`local` on the ladder).",
        ("test_p_dies_before_the_transfer",),
    ),
    Row(
        "P dies in mid transfer",
        "nothing; the second token is late",
        "Pull: D's read fails, is retried once, and ends with `kv_transfer_failed`. D frees the "
        "blocks once no byte can arrive any more; a lane whose transfer does not settle destroys "
        "its NIXL agent. Push: D's blocks stay reserved for P until P is known to be dead or D's "
        "receiving agent is destroyed. The proxy goes down the ladder.",
        (
            "test_p_dies_in_mid_transfer",
            "test_p_dies_amid_many_transfers",
            "test_p_dies_with_a_transfer_open",
        ),
    ),
    Row(
        "P dies after the transfer",
        "nothing",
        "D has all the KV it needs and continues.",
        ("test_p_dies_after_the_transfer",),
    ),
    Row(
        "D dies before the first token",
        "nothing; the second token is late",
        "The proxy sends the same handoff to another D. P's lease still holds, so nothing is "
        "prefilled twice. P notices the lost connection and stops writing. A lease that nobody "
        "reads expires.",
        (
            "test_d_dies_before_the_first_token",
            "test_d_dies_amid_many_transfers",
            "test_d_dies_with_a_transfer_open",
        ),
    ),
    Row(
        "D dies in mid stream",
        "the stream continues with the same text",
        "The proxy replays the prompt and the tokens that it has already sent.",
        ("test_d_dies_in_mid_stream",),
    ),
    Row(
        "the only D dies or restarts",
        "nothing; tokens arrive later",
        "P serves whole requests, within its budget for that. Other requests wait in the proxy up "
        "to the queue timeout. The proxy splits all requests again once D is back.",
        ("test_the_only_d",),
    ),
    Row(
        "D never pulls",
        "nothing",
        "The lease expires, P frees the blocks, and `lease_ends` counts it as expired.",
        ("test_d_never_pulls",),
    ),
    Row(
        "lease expired, D reads late",
        "nothing; TTFT grows",
        "P answers that the lease has ended. D discards what it read, and computes the prompt or "
        "reports the failure.",
        ("test_the_lease_expired_and_d_reads_late",),
    ),
    Row(
        "a bit flips, a block is swapped",
        "nothing; TTFT grows",
        "The digests differ. D discards the KV, counts it as `digest` and logs an error.",
        ("test_a_bit_flips_in_a_leased_block",),
    ),
    Row(
        "client leaves, at any stage",
        "-",
        "The proxy cancels both legs and returns the handoff. D stops its read, and P its write. "
        "Both free their blocks once the bytes in flight have arrived or are fenced.",
        ("test_the_client_leaves_during_the",),
    ),
    Row(
        "P and D cannot reach each other",
        "nothing; the second token is late",
        "D gives up the load after its timeout, and connects to P again after a back-off. The "
        "proxy opens the breaker of that pair, not of either engine, and goes down the ladder.",
        ("test_p_and_d_cannot_reach_each_other", "test_a_silent_partition_in_mid_transfer"),
    ),
    Row(
        "the address of an engine's KV is out of reach",
        "nothing",
        "At registration, the proxy has the engine and its counterparts connect to each other's "
        "KV. If that fails, it refuses the engine. The engine stays unready and registers again "
        "at intervals. It says which side cannot reach which address, and which flag sets that "
        "address (`--kv-transfer-config.host`). For engines named on the proxy's command line, "
        "the proxy logs one error, and their requests go down the ladder.",
        ("test_an_engine_whose_kv_is_out_of_reach_is_not_taken_in",),
    ),
    Row(
        "slow link",
        "the second token is late",
        "Nothing fails.",
        ("test_a_slow_link_only_takes_time",),
    ),
    Row(
        "P is stopped and goes on",
        "nothing; the second token is late",
        "For one second: everyone waits. For longer than the timeouts: as if P had died; its "
        "lease is over when it wakes. Over TCP, late writes go to an agent that no longer exists. "
        "On the same machine only P's word or its end can stop them, so D keeps its blocks until "
        "then.",
        ("test_p_is_stopped_in_mid_transfer_for_a",),
    ),
    Row(
        "D is stopped and goes on",
        "nothing; the second token is late",
        "D's heartbeats stop, so P's lease expires. D learns this from P's confirmation.",
        ("test_d_is_stopped_in_mid_transfer_for_longer_than_a_lease",),
    ),
    Row(
        "an API server is stopped",
        "a pause",
        "After three failed health checks in a row, the engine's legs are lost and continue "
        "elsewhere. Its core keeps running, so others can still read its leased KV. When the "
        "server wakes, its clients are gone, and it serves again.",
        _STOPPED,
    ),
    Row(
        "an engine core is stopped",
        "a pause",
        "Its server returns 503 with the reason within two seconds, kills it after "
        "`--heartbeat-timeout`, and exits with the reason. Its legs continue elsewhere.",
        _STOPPED,
    ),
    Row(
        "one TP rank is stopped",
        "a pause",
        "The core notices, with or without a running step. It kills all its ranks after "
        "`--heartbeat-timeout` and exits with the reason.",
        _STOPPED,
    ),
    Row(
        "the proxy is stopped and goes on",
        "nothing until the proxy resumes, except for the client's own timeouts",
        "Engines finish what they have. Leases that nobody reads expire. When the proxy wakes, it "
        "forwards what has arrived, goes down the ladder where a lease is over, and still knows "
        "its engines.",
        ("test_the_proxy_is_stopped_and_goes_on",),
    ),
    Row(
        "malformed or unauthenticated frame on the side channel",
        "-",
        "The receiver refuses and counts the frame and closes its connection. Other connections "
        "continue.",
        ("test_garbage_on_the_side_channel_disturbs_nobody",),
    ),
    Row(
        "a forged handoff",
        "an error, or the right tokens (computed)",
        "Its signature is invalid, so D uses none of it.",
        ("test_a_handoff_that_is",),
    ),
    Row(
        "a replayed handoff",
        "an error, or the right tokens (computed)",
        "The first read ended its lease, and P says so.",
        ("test_a_handoff_that_is",),
    ),
    Row(
        "a forged push ticket",
        "an error (409 from the engine)",
        "Either engine refuses it, because its signature is invalid.",
        ("test_a_push_ticket_is_refused_that_is",),
    ),
    Row(
        "a replayed push ticket",
        "an error",
        "A nonce is valid for one push. P tells D that it is used up, and D's request ends with "
        "`kv_transfer_failed`. No byte moves.",
        ("test_a_push_ticket_that_is_replayed_moves_nothing_again",),
    ),
    Row(
        "proxy dies",
        "the connection is lost",
        "Engines cancel requests without a reader, and leases expire. Engines register with the "
        "next proxy within 3 s, which thus knows its pools; until then its requests wait.",
        ("test_the_proxy_dies_and_a_restart_knows_its_pools_again",),
    ),
    Row(
        "a proxy that predicts is restarted",
        "the connection is lost; later requests see nothing",
        "Engines immediately report their KV and what they have learned about prompts and steps. "
        "The proxy predicts from its first request on.",
        ("test_a_proxy_that_predicts_is_restarted",),
    ),
    Row(
        "an engine's KV events are cut off",
        "nothing",
        "After one second, the proxy treats the engine's events as late. After three, it treats "
        "the engine as one without events, and assumes that it has what was sent there. When "
        "events resume, the proxy requests the missing ones.",
        ("test_the_kv_events_of_an_engine_are_cut_off",),
    ),
    Row(
        "an engine's clocks are an hour ahead",
        "nothing",
        "This covers the wall clock and the monotonic clock. Hosts exchange only durations and "
        "numbers. The proxy logs that the wall clocks differ.",
        ("test_the_clocks_of_an_engine_are_an_hour_ahead",),
    ),
    Row(
        "proxy gets SIGTERM",
        "nothing, if later requests use another proxy",
        "`/readyz` returns 503. The proxy accepts requests for `--drain-delay`, each as the last "
        "of its connection. Then it accepts no connections, and running requests have "
        "`--shutdown-timeout` to finish.",
        ("test_every_process_is_restarted_in_turn_at_20_requests_a_second_and_none_fails",),
    ),
    Row(
        "engine gets SIGTERM",
        "nothing",
        "The engine turns unready and tells its proxies that it finishes within "
        "`--shutdown-timeout`. They send new requests elsewhere. Shortly before the timeout, they "
        "continue running requests at another engine.",
        ("test_an_engine_gets_sigterm",),
    ),
    Row(
        "an engine is drained",
        "nothing; if a stream moves, one token is late",
        "`pdserve drain`: the proxy sends the engine no more requests. For half of the time, "
        "running requests can finish there. Then the engine ends single-choice streams, four at a "
        "time, each with a handoff of all its tokens. Another engine reads the KV and continues. "
        "If either engine dies meanwhile, the request starts again elsewhere. So does whatever "
        "still runs shortly before the deadline. The proxy drops the text that the client already "
        "has.",
        ("test_an_engine_is_drained",),
    ),
    Row(
        "nobody listens at the store's URL",
        "nothing",
        "Engines start, warn with the flag that sets the address, and compute. They try again "
        "every `lmcache.heartbeat-s`, and use the store once it is there.",
        ("test_nobody_listens_at_the_stores_url_until_later",),
    ),
    Row(
        "a store that cannot start",
        "-",
        "Causes: too little `/dev/shm`, a folder that is not writable, a full disk, a Redis "
        "server that does not answer, another LMCache version. `pdserve kv-server` and `up` exit "
        "with code 3, the cause and a remedy. `pdserve doctor --kv-tiers` reports the same in "
        "advance. If the server has no shared memory, or its chunks are no multiple of "
        "`--block-size`, engines refuse to start.",
        (
            "test_a_store_that_cannot_be_had_is_refused_at_start",
            "test_the_stores_disk_is_full_at_start",
            "test_another_version_of_lmcache_is_refused_at_start",
        ),
    ),
    Row(
        "the store's server dies",
        "nothing; TTFT grows",
        "If the server is a `pdserve kv-server`, lookups under way end at once. If a load misses "
        "`lmcache.timeout-s`, the engine computes that part in the same request. "
        "It drops and counts saves, and asks the store for nothing until the server answers a "
        "ping. Engines then register again and find what is on its disk.",
        ("test_the_stores_server_is_killed",),
    ),
    Row(
        "the store's server is stopped",
        "TTFT grows by a second, once",
        "The same: a late answer is a miss.",
        ("test_the_stores_server_is_stopped_and_goes_on",),
    ),
    Row(
        "all engines and the store restart",
        "nothing",
        "Engines find and load what is on the store's disk.",
        ("test_what_is_stored_survives_the_end_of_every_engine_and_of_the_server",),
    ),
    Row(
        "KV on the store's disk changes",
        "nothing; TTFT grows",
        "A flipped bit or another chunk's bytes do not match the digests saved with the chunk. "
        "The engine counts and discards the chunk, and computes from there on. The server ignores "
        "a truncated file.",
        ("test_a_chunk_on_the_stores_disk_is_not_what_was_saved",),
    ),
    Row(
        "the store's disk fills",
        "nothing",
        "Chunks that do not fit stay in the store's memory only. A restart finds those on disk. "
        "The store writes to disk again once there is room.",
        ("test_the_stores_disk_fills_while_it_runs",),
    ),
    Row(
        "a store with KV of another model or layout",
        "nothing",
        "Weights, dtype and layout are part of a chunk's name, so engines find nothing. Their own "
        "chunks are stored beside the others.",
        ("test_engines_of_another_model_or_layout_share_a_store_and_find_nothing",),
    ),
    Row(
        "the store's Redis server is gone",
        "nothing",
        "The store continues with its other tiers. It uses Redis again after a restart of the "
        "store's server.",
        ("test_the_stores_redis_server_ends_or_hangs",),
    ),
    Row(
        "the store's Redis server hangs",
        "TTFT grows by a second for the first request",
        "LMCache asks Redis even for what is in memory, so every lookup is a miss: the first "
        "after `lmcache.timeout-s`, later ones after a twentieth of that, until Redis resumes.",
        ("test_the_stores_redis_server_ends_or_hangs",),
    ),
    Row(
        "the store's server, P and D die",
        "tokens arrive later; `engines_ended` if both P and its D had the request when they died",
        "All of the above at once: engines compute prompts, another engine takes over, and the "
        "killed processes restart meanwhile.",
        ("test_the_stores_server_p_and_a_d_are_killed_in_a_storm_of_streams",),
    ),
    Row(
        "supervisor and store are killed",
        "the connection is lost",
        "The server ends with `pdserve up`. A small process that outlives both removes its shared "
        "memory. If that process is killed as well, the next server to start removes the remains.",
        ("test_no_shared_memory_is_left_when_supervisor_and_server_are_killed",),
    ),
    Row(
        "no fault",
        "-",
        "For comparison: four requests at once.",
        ("test_without_a_fault_kv_moves_in_the_mode_that_was_asked_for",),
    ),
)


def document(results: list[dict[str, Any]], where: str) -> str:
    """The whole document.

    Args:
        results: What `Stage.settle` wrote, oldest first.
        where: The machine, the day, and what else ran on it.

    Raises:
        ValueError: Something was measured that is in no row.
    """
    found: _Found = defaultdict(dict)
    for result in results:
        found[result["row"], result["phase"]][result["transport"], result["mode"]] = result
    unknown = {row for row, _ in found} - {row.name for row in ROWS}
    if unknown:
        raise ValueError(f"in no row: {sorted(unknown)}")
    lines = [*_HEAD, "", "| event | what the client sees | what each side does | tests |"]
    lines.append("|---|---|---|---|")
    for row in ROWS:
        tests = ", ".join(f"`{test}`" for test in row.tests)
        lines.append(f"| {row.name} | {row.client} | {row.sides} | {tests} |")
    lines += ["", *_LIMITS]
    lines += ["", "## Measured", "", where, "", *_HOW_TO_READ, ""]
    lines += _table(found, _cell)
    silent = {key: cells for key, cells in found.items() if _is_silence_measured(cells)}
    if silent:
        lines += ["", *_SILENCE, "", *_table(silent, _silence)]
    return "\n".join(lines) + "\n"


def _table(found: _Found, cell: Callable[[dict[str, Any] | None], str]) -> list[str]:
    names = [f"{transport}, {mode}" for transport, mode in _COLUMNS]
    lines = [f"| event | phase | {' | '.join(names)} |", "|---|---|" + "---|" * len(names)]
    for row in ROWS:
        for (name, phase), cells in found.items():
            if name == row.name:
                texts = " | ".join(cell(cells.get(column)) for column in _COLUMNS)
                lines.append(f"| {name} | {phase} | {texts} |")
    return lines


_HEAD = (
    "# When something fails",
    "",
    "This page is for operators who want to know what clients see, and what each process does,",
    "when a process, a link or a store fails. P is a prefill engine and D a decode engine.",
    "",
    "A test of `tests/chaos` plays every row on real processes (`make chaos`; the most telling",
    "ones in `make test`). It requires that no token is wrong, that every block is freed, and",
    "that both are so within a time limit. `tests/e2e/test_two_ranks.py` and `tests/engine` cover",
    "failures inside one engine: a rank, or an engine core.",
    "",
    "When a leg fails, the proxy goes down a ladder, with limits per request:",
    "",
    "1. the same P again",
    "2. another D",
    "3. another P",
    "4. one engine computes the prompt, within its budget (`--recompute-tokens-per-second`)",
    "5. 503 with `Retry-After`; before that, the request waits for a missing engine for as long as",
    "   it may queue (`--queue-timeout-secs`)",
    "",
    "Engines for both roles could wait for one another: each has leased all its blocks to the",
    "other, and has none left for the KV that was leased to it. If nothing moves for 30 s, such",
    "an engine ends one request whose KV is ready, with `kv_transfer_failed`, and another one",
    "every 5 s until it can go on.",
    "",
    "`pdserve_kv_ladder_total` counts each rung with its reason. The request's log line has both:",
    "`ladder other_decode(dropped),local(decode_failed)`.",
)

_LIMITS = (
    "## Limits",
    "",
    "**A stopped P on D's machine.** If P is stopped (SIGSTOP) in mid push, it holds D's blocks",
    "until it resumes or dies. Destroying D's NIXL agent does not stop a writer that copies",
    "between processes. The connector `ucx` has no such limit, because a rank alone writes its",
    "blocks, from buffers. `make ucx` plays the same rows over it.",
    "",
    "**Two full pools.** P's pool can be full of leases, and D's of reservations, that wait for",
    "each other. Once P has been able to run nothing for a second, pushes that have not begun are",
    "given up, and their requests are pulled instead.",
    "",
    "**D killed while it reads, over TCP.** If D is killed just after it began a pull, and P was",
    "stopped or busy and has not seen that yet, P dies, too: UCX aborts a process that has to",
    "answer a READ over a lost connection. Requests continue elsewhere, as after the death of any",
    "P. A D that lives and gives up the read closes its connections so that this does not happen,",
    "even behind a partition of up to five minutes. A push has no such limit, but the small READ",
    "of a handshake does.",
    "",
    "**Engines of the role `both`.** Engines that prefill for one another, beside decode engines",
    "and without a prefill engine, can deadlock: each holds blocks that a request of the other",
    "must read. Only deadlines end that. Give such a deployment a prefill engine.",
    "",
    "**Access to UCX's ports.** Anyone who can reach them can open idle connections. The process",
    "closes ended connections within a second. If idle ones take over half of a process's",
    "descriptors (`ulimit -n`), it recreates its NIXL agents, at most every 30 s",
    "(`pdserve_kv_transfer_faults_total`: `descriptors_over_budget`, `agent_reset`). Its peers",
    "must then reconnect, as after a fence. The connector `ucx` can be held open in the same way.",
    "Data from such connections matches no expected tag and reaches no block, but stays in memory",
    "until the engine ends.",
)

_HOW_TO_READ = (
    "The deployment has one prefill and two decode engines and a tiny model (640 tokens are half",
    "a megabyte of KV). Timeouts: lease 3 s, handshake 2 s, transfer 5 s, quarantine 2 s. Shared",
    "memory and TCP are NIXL's; UCX is the connector `ucx` over TCP. Over TCP, the engines run in",
    "network namespaces. A token bucket slows down transfers that a fault must hit (1.5 Mbit/s:",
    "2.6 s; not every kernel has `netem`).",
    "",
    "Each cell gives the seconds from the fault until every request had ended, then until every",
    "block was free. A dash before the slash means that no request was running; a lone dash means",
    "not played or not measured. No cell has wrong tokens or lost blocks.",
)


_SILENCE = (
    "### Silence",
    "",
    "This is the longest time in seconds that any client waited for its next token, or for the",
    "end, while one process was stopped (SIGSTOP). Engines have two ranks each. Health checks and",
    "heartbeats have their defaults, which limit the wait to 10 s. For a stopped proxy, the time",
    "includes the stop.",
)


def _is_silence_measured(cells: dict[tuple[str, str], dict[str, Any]]) -> bool:
    return any(cell.get("silent_s") is not None for cell in cells.values())


def _silence(result: dict[str, Any] | None) -> str:
    return "-" if result is None else f"{result['silent_s']:.1f}"


def _cell(result: dict[str, Any] | None) -> str:
    if result is None:
        return "-"
    ended = f"{result['requests_ended_s']:.1f}" if result["ends"] else "-"
    return f"{ended} / {result['blocks_free_s']:.1f}"


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("reports", type=Path, nargs="+", help="files of JSON lines, oldest first")
    parser.add_argument("--where", required=True, help="the machine, the day, the load")
    arguments = parser.parse_args()
    results = [
        json.loads(line)
        for report in arguments.reports
        for line in report.read_text().splitlines()
        if line.startswith("{")
    ]
    sys.stdout.write(document(results, arguments.where))


if __name__ == "__main__":
    main()
