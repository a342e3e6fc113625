"""How a report looks: colours for light and dark, type, tables, pictures. Knows no content."""

from __future__ import annotations

from typing import Final

_LIGHT: Final = (
    "#2f6fde", "#8a63d2", "#e07b00", "#c2410c", "#0d9668", "#0891b2", "#d6336c", "#6b7280",
)  # fmt: skip
_DARK: Final = (
    "#6ea0ff", "#b197fc", "#ffa94d", "#ff8060", "#38d39f", "#4dd4e8", "#ff7aa8", "#a1a8b3",
)  # fmt: skip

_STAGES_LIGHT: Final = {
    "proxy": "#94a3b8",
    "server": "#94a3b8",
    "admission": "#64748b",
    "retry": "#dc2626",
    "reserve": "#b45309",
    "queue": "#f59e0b",
    "prefill": "#2f6fde",
    "relay": "#22b8cf",
    "until first token": "#2f6fde",
    "kv": "#8a63d2",
    "decode queue": "#f08c00",
    "recompute": "#e11d48",
    "handover": "#d6336c",
    "step": "#94d82d",
    "first step": "#94d82d",
    "decode": "#0d9668",
    "client late": "#ef4444",
    "client and network": "#cbd5e1",
    "bound": "#94a3b8",
    "reach": "#8a63d2",
    "measured": "#0d9668",
}
_STAGES_DARK: Final = {
    "prefill": "#6ea0ff",
    "until first token": "#6ea0ff",
    "kv": "#b197fc",
    "handover": "#ff7aa8",
    "decode": "#2fb98a",
    "measured": "#38d39f",
    "reach": "#b197fc",
    "client and network": "#56606f",
}

_VARIABLES_LIGHT: Final = (
    "--ground:#ffffff;--card:#f8fafc;--edge:#e2e8f0;--text:#0f172a;--soft:#475569;"
    "--grid:#e2e8f0;--span:#2f6fde;--good:#0b7a54;--bad:#c2410c;--rule:#b91c1c"
)
_VARIABLES_DARK: Final = (
    "--ground:#0c111b;--card:#131a27;--edge:#263043;--text:#e6ebf4;--soft:#9aa7bb;"
    "--grid:#243044;--span:#6ea0ff;--good:#38d39f;--bad:#ff9466;--rule:#ff8a8a"
)

_RULES: Final = """
*{box-sizing:border-box}
body{margin:0;background:var(--ground);color:var(--text);
 font:15px/1.55 system-ui,-apple-system,"Segoe UI",Roboto,"Noto Sans",sans-serif}
main{max-width:1240px;margin:0 auto;padding:36px 28px 80px}
h1{font-size:27px;line-height:1.25;margin:0 0 4px;letter-spacing:-.01em}
h2{font-size:19px;margin:44px 0 12px}
h3{font-size:15px;margin:0 0 2px}
p{margin:6px 0}
.soft{color:var(--soft)}
.lead{display:grid;grid-template-columns:repeat(auto-fit,minmax(250px,1fr));gap:14px;
 margin:22px 0 8px}
.fact{background:var(--card);border:1px solid var(--edge);border-radius:12px;padding:16px 18px}
.fact b{display:block;font-size:32px;line-height:1.15;letter-spacing:-.02em;
 font-variant-numeric:tabular-nums}
.fact b i{font-size:15px;font-weight:500;font-style:normal;letter-spacing:0}
.fact.good b{color:var(--good)}.fact.bad b{color:var(--bad)}
.fact span{display:block;color:var(--soft);font-size:13px}
.scroll{overflow-x:auto;border:1px solid var(--edge);border-radius:12px}
table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums;font-size:14px}
th,td{padding:9px 12px;text-align:right;border-top:1px solid var(--edge);white-space:nowrap;
 vertical-align:top}
thead th{border-top:0;color:var(--soft);font-weight:500;background:var(--card)}
th:first-child,td:first-child{text-align:left;position:sticky;left:0;background:var(--ground)}
thead th:first-child{background:var(--card)}
tbody th{font-weight:600}
td small,th small{display:block;color:var(--soft);font-weight:400;font-size:11.5px;line-height:1.4}
p.bad{color:var(--bad)}
small.good{color:var(--good)!important}small.bad{color:var(--bad)!important}
i.swatch{display:inline-block;width:11px;height:11px;border-radius:3px;margin-right:8px}
.plain td,.plain th{white-space:normal;text-align:left}
.grid2{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,480px),1fr));gap:18px}
figure{margin:0;background:var(--card);border:1px solid var(--edge);border-radius:12px;
 padding:16px 18px;min-width:0}
figure.wide{grid-column:1/-1}
figcaption{color:var(--soft);font-size:13px;margin-bottom:10px}
.panel{font-size:13px;font-weight:600;margin:10px 0 0}
svg{display:block;width:100%;height:auto}
svg text{font:11.5px system-ui,-apple-system,"Segoe UI",Roboto,"Noto Sans",sans-serif;
 fill:var(--soft)}
svg .legend{fill:var(--text);font-size:12px}
svg .rule{fill:var(--rule)}
svg line.grid{stroke:var(--grid)}
svg line.axis{stroke:var(--soft)}
svg line.rule{stroke:var(--rule);stroke-dasharray:5 4}
svg .line{fill:none;stroke-width:2;stroke-linejoin:round;stroke-linecap:round}
svg .dashed{stroke-dasharray:6 4}
svg .dots{fill:none;stroke-width:2.6;stroke-linecap:round;stroke-opacity:.5}
svg .dot{stroke:var(--card);stroke-width:1.2}
svg .bar{stroke-width:1.6}
svg .post{stroke-width:6;stroke-opacity:.28}
svg .hollow{fill:var(--card);stroke-width:2}
svg .span{fill:var(--span);fill-opacity:.13}
svg .piece,svg .key{fill:#94a3b8}
svg .piece:hover,svg g:hover>.piece{filter:brightness(1.15)}
ul{padding-left:20px;margin:8px 0}li{margin:5px 0}
pre{background:var(--card);border:1px solid var(--edge);border-radius:10px;padding:12px 14px;
 overflow-x:auto;font:12.5px/1.5 ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;margin:8px 0;
 white-space:pre-wrap;overflow-wrap:anywhere}
nav a{color:inherit;margin-right:16px}
@media print{main{max-width:none}figure{break-inside:avoid}}
"""


def stylesheet() -> str:
    """The page's CSS."""
    return "".join(
        (
            (
                f":root{{color-scheme:light dark;{_VARIABLES_LIGHT};{_deployments(_LIGHT)};"
                f"{_variables(_STAGES_LIGHT)}}}"
            ),
            (
                "@media (prefers-color-scheme:dark)"
                f"{{:root{{{_VARIABLES_DARK};{_deployments(_DARK)};"
                f"{_variables(_STAGES_DARK)}}}}}"
            ),
            _RULES,
            *(
                f"svg .c{i}{{stroke:var(--c{i})}}svg .dot.c{i},svg .key.c{i}{{fill:var(--c{i})}}"
                f"svg .dot.c{i}{{stroke:var(--card)}}svg .key.c{i}{{stroke:none}}"
                f"i.c{i}{{background:var(--c{i})}}"
                for i in range(len(_LIGHT))
            ),
            *(f"svg .s-{_slug(name)}{{fill:var(--s-{_slug(name)})}}" for name in _STAGES_LIGHT),
        )
    )


def _deployments(colours: tuple[str, ...]) -> str:
    return ";".join(f"--c{index}:{colour}" for index, colour in enumerate(colours))


def _variables(stages: dict[str, str]) -> str:
    return ";".join(f"--s-{_slug(name)}:{colour}" for name, colour in stages.items())


def _slug(name: str) -> str:
    return name.replace(" ", "-")
