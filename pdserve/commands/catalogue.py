"""The list of commands: names, settings, and what runs each. Imports none of them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from pdserve.config.compare import PLOT_SETTINGS
from pdserve.config.doctor import DOCTOR_SETTINGS
from pdserve.config.drain import DRAIN_SETTINGS
from pdserve.config.idle import DOCTOR_ROWS, DRAIN_ROWS
from pdserve.config.kv_events import KV_EVENTS_READER_SETTINGS
from pdserve.config.load import Table
from pdserve.config.log import LOG_FORM_SETTINGS
from pdserve.config.plan import plan_table
from pdserve.config.route import route_compare_table, route_explain_table
from pdserve.config.schema import Role
from pdserve.config.settings import (
    bench_compare_table,
    bench_serve_table,
    engine_table,
    proxy_table,
    up_table,
)
from pdserve.config.sweep import sweep_table
from pdserve.config.tiers import KV_SERVER_SETTINGS
from pdserve.config.trace import TRACE_SETTINGS
from pdserve.config.vllm.answers import VLLM_FLAGS_SETTINGS


@dataclass(frozen=True)
class Command:
    """One command of the command line.

    Attributes:
        name: As it is typed; of two words for a command of a family (`FAMILIES`).
        target: `module:function`, called with the table and the resolved settings; returns
            the exit code.
        positional: MODEL or FILE... as the usage shows it, if there is one.
    """

    name: str
    summary: str
    table: Callable[[], Table]
    target: str
    example: str
    positional: str = "MODEL "

    @property
    def takes_model(self) -> bool:
        """Whether the command needs a model."""
        return "MODEL" in self.positional

    @property
    def logs(self) -> bool:
        """Whether it serves, and so has a log."""
        return self.name in ("prefill", "decode", "serve", "proxy", "kv-server")

    @property
    def family(self) -> str:
        """The first of two words; empty if the name is one."""
        return self.name.rpartition(" ")[0]

    @property
    def last_word(self) -> str:
        """The last word of the name."""
        return self.name.rpartition(" ")[2]


COMMANDS: Final = (
    Command(
        "up",
        "start engines and a proxy on this host and send one demo request",
        up_table,
        "pdserve.commands.up:run",
        "pdserve up --once",
        positional="[MODEL] ",
    ),
    Command(
        "prefill",
        "start a prefill engine",
        functools.partial(engine_table, Role.PREFILL),
        "pdserve.commands.engine:run_prefill",
        "pdserve prefill MODEL --proxy http://127.0.0.1:8000",
    ),
    Command(
        "decode",
        "start a decode engine",
        functools.partial(engine_table, Role.DECODE),
        "pdserve.commands.engine:run_decode",
        "pdserve decode MODEL --proxy http://127.0.0.1:8000",
    ),
    Command(
        "serve",
        "start one engine for both (colocated, the baseline)",
        functools.partial(engine_table, Role.BOTH),
        "pdserve.commands.engine:run_serve",
        "pdserve serve MODEL --port 8000",
    ),
    Command(
        "proxy",
        "start the routing proxy",
        proxy_table,
        "pdserve.commands.proxy:run",
        "pdserve proxy --prefill http://127.0.0.1:8100 --decode http://127.0.0.1:8200",
        positional="",
    ),
    Command(
        "kv-server",
        "keep KV for the engines of this host beyond requests and restarts (LMCache)",
        functools.partial(Table, (*KV_SERVER_SETTINGS, *LOG_FORM_SETTINGS)),
        "pdserve.commands.kv_server:run",
        "pdserve kv-server --kv-tiers cpu:4GiB,disk:/data/kv:50GiB",
        positional="",
    ),
    Command(
        "drain",
        "drain engines within a deadline: their requests finish or move to other engines",
        functools.partial(Table, DRAIN_SETTINGS, idle=DRAIN_ROWS),
        "pdserve.commands.drain:run",
        "pdserve drain http://127.0.0.1:8200 --deadline 60",
        positional="URL... ",
    ),
    Command(
        "trace",
        "write the last seconds of a running deployment as a timeline for Perfetto",
        functools.partial(Table, TRACE_SETTINGS),
        "pdserve.commands.trace:run",
        "pdserve trace --url http://127.0.0.1:8000 --seconds 10 -o trace.json.gz",
        positional="",
    ),
    Command(
        "kv-events",
        "show which prefixes an engine reports to routers",
        functools.partial(Table, KV_EVENTS_READER_SETTINGS),
        "pdserve.commands.kv_events:run",
        "pdserve kv-events --url http://127.0.0.1:8100",
        positional="",
    ),
    Command(
        "route explain",
        "show why a request went where it did, and repeat the decision from its record",
        route_explain_table,
        "pdserve.commands.route:run_explain",
        "pdserve route explain 3f2a --url http://127.0.0.1:8000",
        positional="ID ",
    ),
    Command(
        "route compare",
        "show what another policy would have chosen for the last requests, and its cost",
        route_compare_table,
        "pdserve.commands.route:run_compare",
        "pdserve route compare --policy prefix_sticky/isl_bounding",
        positional="",
    ),
    Command(
        "plan",
        "find how many prefill and decode engines serve a workload within objectives",
        plan_table,
        "pdserve.commands.plan:run",
        "pdserve plan --num-engines 8 --url http://127.0.0.1:8000 --slo ttft:1000 tpot:30 "
        "--dataset-name trace --dataset-path mooncake.jsonl",
        positional="",
    ),
    Command(
        "doctor",
        "check this machine, and whether running engines match",
        functools.partial(Table, DOCTOR_SETTINGS, idle=DOCTOR_ROWS),
        "pdserve.commands.doctor:run",
        "pdserve doctor --peer http://127.0.0.1:8100 http://127.0.0.1:8200",
        positional="",
    ),
    Command(
        "vllm-flags",
        "show what pdserve does with vLLM's flags, variables and connectors",
        functools.partial(Table, VLLM_FLAGS_SETTINGS),
        "pdserve.commands.vllm_flags:run",
        "pdserve vllm-flags quantization",
        positional="[FILTER...] ",
    ),
    Command(
        "bench serve",
        "send requests to an endpoint and measure what users feel",
        bench_serve_table,
        "pdserve.commands.bench:run_serve",
        "pdserve bench serve --base-url http://127.0.0.1:8000 --num-prompts 100 --request-rate 4",
        positional="",
    ),
    Command(
        "bench compare",
        "start colocated and disaggregated deployments on the same cores and compare them",
        bench_compare_table,
        "pdserve.commands.bench_compare:run_compare",
        "pdserve bench compare boxed --dataset-name pd-interference --report compare.html",
    ),
    Command(
        "bench plot",
        "plot a report of saved runs",
        functools.partial(Table, PLOT_SETTINGS),
        "pdserve.commands.bench_plot:run_plot",
        "pdserve bench plot run.json --output run.html",
        positional="FILE... ",
    ),
    Command(
        "bench sweep",
        "measure an endpoint at several loads and find the highest that meets the objectives",
        sweep_table,
        "pdserve.commands.bench_sweep:run_sweep",
        "pdserve bench sweep --slo ttft:500 itl:50 --random-input-len 512 --num-prompts 60",
        positional="",
    ),
)

FAMILIES: Final = {"bench": "measure deployments", "route": "explain where requests went"}
"""First words of commands of two words, and what the commands are for."""
