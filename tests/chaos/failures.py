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
        "The proxy's leg fails; it takes another P, or, with none, has a D compute the prompt "
        "within its budget for that (`local` on the ladder).",
        ("test_p_dies_before_the_transfer",),
    ),
    Row(
        "P dies in mid transfer",
        "nothing; the second token is late",
        "Pull: D's read fails as a value, is tried once more, and ends with `kv_transfer_failed`; "
        "blocks are given back once no byte can land any more (a lane whose transfer does not "
        "settle destroys its NIXL agent). Push: D's blocks stay P's to write until P is known to "
        "be dead, or D's receiving agent was destroyed. The proxy goes down the ladder.",
        (
            "test_p_dies_in_mid_transfer",
            "test_p_dies_amid_many_transfers",
            "test_p_dies_with_a_transfer_open",
        ),
    ),
    Row(
        "P dies after the transfer",
        "nothing",
        "D has all it needs and goes on.",
        ("test_p_dies_after_the_transfer",),
    ),
    Row(
        "D dies before the first token",
        "nothing; the second token is late",
        "The proxy takes another D with the same handoff: P's lease is still there, so nothing is "
        "prefilled twice. P notices the lost connection, stops writing, and the lease of what "
        "nobody fetches expires.",
        (
            "test_d_dies_before_the_first_token",
            "test_d_dies_amid_many_transfers",
            "test_d_dies_with_a_transfer_open",
        ),
    ),
    Row(
        "D dies in mid stream",
        "the stream goes on, with the same text",
        "The proxy replays the prompt and the tokens it has passed on.",
        ("test_d_dies_in_mid_stream",),
    ),
    Row(
        "the only D dies or restarts",
        "nothing; tokens come later",
        "The proxy has P serve whole requests, within P's budget for such prompts; beyond it they "
        "wait in the proxy for as long as they may queue. All is split again once D is back.",
        ("test_the_only_d",),
    ),
    Row(
        "D never pulls",
        "nothing",
        "The lease expires, the blocks are freed, and `lease_ends` counts it as expired.",
        ("test_d_never_pulls",),
    ),
    Row(
        "lease expired, D reads late",
        "nothing; TTFT grows",
        "P's confirmation says that the lease had ended; D throws away what it read, and computes "
        "it or says so.",
        ("test_the_lease_expired_and_d_reads_late",),
    ),
    Row(
        "a bit flips, a block is swapped",
        "nothing; TTFT grows",
        "The digests differ: counted as `digest`, logged as an error, the KV is thrown away.",
        ("test_a_bit_flips_in_a_leased_block",),
    ),
    Row(
        "client leaves, at any stage",
        "-",
        "The proxy cancels both legs and gives the handoff back; D ends its read, P its write, "
        "and the blocks of either are free once what is on the wire has landed or was fenced.",
        ("test_the_client_leaves_during_the",),
    ),
    Row(
        "P and D cannot reach each other",
        "nothing; the second token is late",
        "D gives the load up after its time-out, and meets P again after a back-off; the proxy's "
        "breaker of that pair opens, not the engines'; the ladder.",
        ("test_p_and_d_cannot_reach_each_other", "test_a_silent_partition_in_mid_transfer"),
    ),
    Row(
        "the address of an engine's KV is out of reach",
        "nothing",
        "When the engine registers, the proxy has it and its counterparts connect to one another's "
        "KV, and refuses it. It is not ready, says which of the two cannot reach which address and "
        "which flag sets it (`--kv-transfer-config.host`), and registers again at intervals. Of "
        "engines that were named on the proxy's command line the proxy's log says so, once, as an "
        "error; requests of such a pair go down the ladder.",
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
        "For a second: everybody waits. For longer than the time-outs: as if P had died; when it "
        "wakes its lease is over. What it still wants to write goes, over TCP, to an agent that is "
        "no more; on D's own machine nothing but P's word or its end can stop it, so D's blocks "
        "are kept until then.",
        ("test_p_is_stopped_in_mid_transfer_for_a",),
    ),
    Row(
        "D is stopped and goes on",
        "nothing; the second token is late",
        "Its heartbeats end, so P's lease expires; D learns it from the confirmation.",
        ("test_d_is_stopped_in_mid_transfer_for_longer_than_a_lease",),
    ),
    Row(
        "an API server is stopped",
        "a pause",
        "The proxy's health checks get no answer: the engine's legs are lost after three in a row, "
        "and go on elsewhere. Its core goes on, so KV that is leased there can still be read. When "
        "it wakes it finds its clients gone, and serves again.",
        _STOPPED,
    ),
    Row(
        "an engine core is stopped",
        "a pause",
        "Its server says 503 and why within two seconds, kills it after `--heartbeat-timeout`, and "
        "ends with the reason; its legs go on elsewhere.",
        _STOPPED,
    ),
    Row(
        "one TP rank is stopped",
        "a pause",
        "The core sees it, whether a step is under way or not, kills all its ranks after "
        "`--heartbeat-timeout`, and ends with the reason.",
        _STOPPED,
    ),
    Row(
        "the proxy is stopped and goes on",
        "nothing, until it goes on: a client has its own time-outs alone",
        "Engines end what they have; a lease that nobody fetches expires. When it wakes it passes "
        "on what came meanwhile, goes down the ladder where a lease is over, and still knows its "
        "engines.",
        ("test_the_proxy_is_stopped_and_goes_on",),
    ),
    Row(
        "malformed or unauthenticated frame on the side channel",
        "-",
        "The frame is refused and counted, its connection closed; all others go on.",
        ("test_garbage_on_the_side_channel_disturbs_nobody",),
    ),
    Row(
        "a forged handoff",
        "an error, or the right tokens, computed",
        "Refused by its signature; nothing of it is believed.",
        ("test_a_handoff_that_is",),
    ),
    Row(
        "a replayed handoff",
        "an error, or the right tokens, computed",
        "Its lease has ended with the first read: P says so.",
        ("test_a_handoff_that_is",),
    ),
    Row(
        "a forged push ticket",
        "an error (409 from the engine)",
        "Refused by its signature at either engine.",
        ("test_a_push_ticket_is_refused_that_is",),
    ),
    Row(
        "a replayed push ticket",
        "an error",
        "A nonce is good for one push: P tells D that it is over, D's request ends with "
        "`kv_transfer_failed`, and no byte moves.",
        ("test_a_push_ticket_that_is_replayed_moves_nothing_again",),
    ),
    Row(
        "proxy dies",
        "the connection is lost",
        "Engines cancel what has no reader, leases expire; they register again with the next "
        "proxy, which so knows its pools.",
        ("test_the_proxy_dies_and_a_restart_knows_its_pools_again",),
    ),
    Row(
        "a proxy that predicts is restarted",
        "the connection is lost; nothing of those who come then",
        "What engines have, and what they have learned that prompts and steps take, they tell it "
        "in a moment: it predicts from its first request on.",
        ("test_a_proxy_that_predicts_is_restarted",),
    ),
    Row(
        "an engine's KV events are cut off",
        "nothing",
        "After a second its events count as late, after three as those of an engine that tells "
        "nothing: what was sent there is taken for what it has. Once they come again, the proxy "
        "asks for those that it lacks.",
        ("test_the_kv_events_of_an_engine_are_cut_off",),
    ),
    Row(
        "an engine's clocks are an hour ahead",
        "nothing",
        "The wall clock and the monotonic one alike. Between hosts only durations and numbers are "
        "compared; the proxy's log says that the wall clocks differ.",
        ("test_the_clocks_of_an_engine_are_an_hour_ahead",),
    ),
    Row(
        "proxy gets SIGTERM",
        "nothing, if it comes by another proxy from then on",
        "`/readyz` says 503, but requests are taken for `--drain-delay`, each as its connection's "
        "last; then no connections are, and what runs may end within `--shutdown-timeout`.",
        ("test_every_process_is_restarted_in_turn_at_20_requests_a_second_and_none_fails",),
    ),
    Row(
        "engine gets SIGTERM",
        "nothing",
        "It is not ready any more, and ends what it has within `--shutdown-timeout`, as it tells "
        "its proxies. They send others elsewhere, and have what still runs shortly before that go "
        "on at another engine.",
        ("test_an_engine_gets_sigterm",),
    ),
    Row(
        "an engine is drained",
        "nothing; of a stream that is moved a token is late",
        "`pdserve drain`: the proxy sends it no more. What runs there may end for half of the "
        "time. Then the engine ends streams of one choice, four at a look, each with a handoff of "
        "all its tokens; another one reads the KV and goes on. If either dies meanwhile, and of "
        "what still runs shortly before the deadline, all is begun again elsewhere, and what the "
        "client has is swallowed.",
        ("test_an_engine_is_drained",),
    ),
    Row(
        "nobody listens at the store's URL",
        "nothing",
        "Engines start, warn with the flag that says where it should be, compute, and ask again "
        "every `lmcache.heartbeat-s`; once it is there it is used.",
        ("test_nobody_listens_at_the_stores_url_until_later",),
    ),
    Row(
        "a store that cannot be had",
        "-",
        "Too little `/dev/shm`, a folder that cannot be written, a full disk, a Redis server that"
        " does not answer, another LMCache: `pdserve kv-server`, and `up` with it, ends with code"
        " 3, and says what and what to do. `pdserve doctor --kv-tiers` says so before. A server "
        "without shared memory, or with chunks that are no multiple of `--block-size`, ends the "
        "engine's start.",
        ("test_a_store_that_cannot_be_had_is_refused_at_start",),
    ),
    Row(
        "the store's server dies",
        "nothing; TTFT grows",
        "A load that does not come within `lmcache.timeout-s` is computed, in the same request; "
        "saves are dropped and counted; nobody asks again until the server answers a ping. Then "
        "engines register anew, and find what is on its disk.",
        ("test_the_stores_server_is_killed",),
    ),
    Row(
        "the store's server is stopped",
        "TTFT grows by a second, once",
        "The same: what is not answered in time is a miss.",
        ("test_the_stores_server_is_stopped_and_goes_on",),
    ),
    Row(
        "all engines and the store restart",
        "nothing",
        "What was on the store's disk is found and loaded.",
        ("test_what_is_stored_survives_the_end_of_every_engine_and_of_the_server",),
    ),
    Row(
        "KV on the store's disk changes",
        "nothing; TTFT grows",
        "A flipped bit or another chunk's bytes differ from the digests that were saved with the "
        "chunk: counted, not used, and computed from there on. A file that is cut short is none "
        "to the server.",
        ("test_a_chunk_on_the_stores_disk_is_not_what_was_saved",),
    ),
    Row(
        "the store's disk fills",
        "nothing",
        "What does not fit is in the store's memory alone; what was written is found after a "
        "restart. Once there is room again it is written to.",
        ("test_the_stores_disk_fills_while_it_runs",),
    ),
    Row(
        "a store with KV of another model or layout",
        "nothing",
        "Chunks are named by weights, dtype and layout, so nothing is found, and what is computed "
        "is kept beside the others'.",
        ("test_engines_of_another_model_or_layout_share_a_store_and_find_nothing",),
    ),
    Row(
        "the store's Redis server is gone",
        "nothing",
        "The store goes on with its other tiers; Redis is used again once the store's server was "
        "started again.",
        ("test_the_stores_redis_server_ends_or_hangs",),
    ),
    Row(
        "the store's Redis server hangs",
        "TTFT grows by a second, for whoever asks first",
        "LMCache asks Redis for what it has in memory, too, so every lookup is a miss: the first "
        "one after `lmcache.timeout-s`, others after a twentieth of that until Redis goes on.",
        ("test_the_stores_redis_server_ends_or_hangs",),
    ),
    Row(
        "the store's server, P and D die",
        "tokens come later; `engines_ended` if P and then its D had the request",
        "All of the above at once: prompts are computed, another engine goes on, and who was "
        "killed starts again in the midst of it.",
        ("test_the_stores_server_p_and_a_d_are_killed_in_a_storm_of_streams",),
    ),
    Row(
        "supervisor and store are killed",
        "the connection is lost",
        "The server ends with `pdserve up`, and takes its shared memory along; if it was killed as "
        "well, whoever starts next removes what it has left.",
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
    "Every row is played on real processes by a test of `tests/chaos` (`make chaos`; the most",
    "telling ones in `make test`), which asserts zero wrong tokens, zero blocks that are not free,",
    "and a bound on the time until both is so. What fails inside one side (a rank, an engine core)",
    "is in `tests/e2e/test_rank_kill.py` and `tests/engine`.",
    "",
    "P, D: prefill and decode engine. The ladder, per request and bounded: the same P again,",
    "another D, another P, one engine computes it within its budget for that",
    "(`--recompute-tokens-per-second`), 503 with `Retry-After`. Before that last rung a request",
    "waits for an engine that is missing, for as long as it may queue (`--queue-timeout-secs`).",
    "Every rung is counted with its reason (`pdserve_kv_ladder_total`), and both are in the log",
    "line of the request: `ladder other_decode(dropped),local(decode_failed)`.",
)

_LIMITS = (
    "## Limits",
    "",
    "A P on the machine of D that is stopped (SIGSTOP) in mid push holds D's blocks until it goes",
    "on or dies: destroying D's NIXL agent does not stop a writer that copies between processes.",
    "Two pools can be full of what waits for the other (leases at P, reservations at D): a push",
    "that has not begun is given up after a lease's time in which P ran no step, and its request",
    "is served another way.",
    "",
    "Over TCP, a D that is killed while a P that it reads from is stopped takes that P along: UCX",
    "aborts who goes on and finds a reset amid answering a READ. A D that lives on and gives the",
    "read up ends its connections so that this does not happen.",
    "",
    "Engines of the role `both` that prefill for one another, beside decode engines and with no",
    "prefill engine, can wait for one another: each holds blocks that a request of the other is to",
    "read. Only deadlines end that. Give such a deployment a prefill engine.",
    "",
    "Whoever reaches UCX's ports can open connections there and say nothing. Those that have ended",
    "are closed within a second; where more than half of the descriptors that a process may have",
    "(`ulimit -n`) are gone to such ones, its NIXL agents are made again, at most every 30 s",
    "(`pdserve_kv_transfer_faults_total`: `descriptors_over_budget`, `agent_reset`). Its peers",
    "then have to meet it again, as after a fence.",
    "",
    "Over UCX without NIXL (the connector `ucx`; `make ucx` plays the same rows over it) a rank",
    "alone writes its blocks, from buffers, so a P that is stopped keeps none of D's. There, too,",
    "whoever reaches UCX's ports can hold connections open; what it sends has no tag that is",
    "awaited, reaches no block, and stays in memory until the engine ends.",
)

_HOW_TO_READ = (
    "One prefill and two decode engines, a tiny model (640 tokens are half a megabyte of KV);",
    "lease 3 s, handshake 2 s, transfer time-out 5 s, quarantine 2 s. Shared memory and TCP are",
    "NIXL's, UCX is the connector `ucx` over TCP. Over TCP the engines are in network namespaces,",
    "and a transfer that a fault falls into is slowed down by a token bucket",
    "(1.5 Mbit/s: 2.6 s; `netem` is not in every kernel). Each cell: seconds from the fault until",
    "every request had ended (a dash: none was under way) / until every block was free. Wrong",
    "tokens and lost blocks: 0 in every cell. A lone dash: not played there, or not measured.",
)


_SILENCE = (
    "### Silence",
    "",
    "Seconds from one token to the next, or to the end, where one process is stopped (SIGSTOP):",
    "of the client that waited longest. Engines of two ranks each; health checks and heartbeats",
    "as they are by default, with which it is to be at most 10. For a stopped proxy the pause is",
    "in it.",
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
