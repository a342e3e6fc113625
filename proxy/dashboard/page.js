"use strict";
// Draws what /dashboard/data says, once a second. Every figure is a sum of series of /metrics, the
// proxy's or an engine's; rates are their differences. All that is remembered is bounded.

const INTERVAL_MS = 1000, TIMEOUT_MS = 4000, KEPT_S = 61, GAP_S = 5, TIMELINE_S = 30, RATE_S = 5, GHOST_S = 120;
const STATES = ["held", "leased", "receiving", "quarantined", "cached", "free"];
const TTFT = ["admission", "proxy", "retry", "queue", "reserve", "prefill", "relay"];
const SECOND = ["decode_queue", "kv", "recompute", "handover", "first_step"];
const STAGES = [
  ["all", "Clients", "text", "have requests open"],
  ["queued", "Queue", "slate", "for a place"],
  ["prefill", "Prefill", "blue", "the prompt is computed"],
  ["transfer", "Transfer", "amber", "its KV goes over"],
  ["decode", "Decode", "teal", "tokens come"],
  ["local", "One engine", "violet", "does everything"],
];

const BASE = new URL(".", location).href.slice(0, -1); // with the prefix of a reverse proxy

const $ = (id) => document.getElementById(id);
const el = (tag, cls = "", text = "") => {
  const made = document.createElement(tag);
  if (cls) made.className = cls;
  if (text) made.textContent = text;
  return made;
};
const svg = (tag, attributes = {}) => {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
};
const say = (node, text) => { if (node.textContent !== text) node.textContent = text; };

// --- figures

const parsed = new Map();
function parse(key) {
  let found = parsed.get(key);
  if (!found) {
    const brace = key.indexOf("{");
    const labels = {};
    if (brace >= 0)
      for (const [, name, value] of key.slice(brace).matchAll(/(\w+)="((?:[^"\\]|\\.)*)"/g))
        labels[name] = value.replace(/\\(.)/g, (_, c) => (c === "n" ? "\n" : c));
    found = { name: brace < 0 ? key : key.slice(0, brace), labels };
    if (parsed.size > 20000) parsed.clear();
    parsed.set(key, found);
  }
  return found;
}
// A place to look a series up: {name: [[labels, value], ...]}.
function index(series) {
  const byName = new Map();
  for (const key in series) {
    const { name, labels } = parse(key);
    if (!byName.has(name)) byName.set(name, []);
    byName.get(name).push([labels, series[key]]);
  }
  return byName;
}
function total(at, name, want = {}) {
  let sum = 0;
  for (const [labels, value] of at?.get(name) ?? [])
    if (Object.keys(want).every((label) => labels[label] === want[label])) sum += value;
  return sum;
}
// Counters since the start or over the last minute; one that was set back has begun again.
const grown = (now, then, name, want) => {
  const value = total(now, name, want);
  const before = then ? total(then, name, want) : 0;
  return value >= before ? value - before : value;
};
// Shows a sum of series and says which it is, for tests and for people who look closer.
function figure(node, of, name, want, text, value, isAll = true) {
  say(node, text(value));
  if (!isAll) { delete node.dataset.metric; node.title = ""; return; } // of the last minute
  node.dataset.of = of;
  node.dataset.metric = name + (Object.keys(want).length ? `{${Object.entries(want).map(([k, v]) => `${k}="${v}"`).join(",")}}` : "");
  node.dataset.value = String(value);
  node.title = `${node.dataset.metric} = ${value}`;
}
function histogram(now, then, name, want = {}) {
  const counts = new Map();
  for (const [at, sign] of [[now, 1], [then, -1]])
    for (const [labels, value] of at?.get(`${name}_bucket`) ?? [])
      if (Object.keys(want).every((label) => labels[label] === want[label])) {
        const le = labels.le === "+Inf" ? Infinity : Number(labels.le);
        counts.set(le, (counts.get(le) ?? 0) + sign * value);
      }
  const bounds = [...counts.keys()].sort((a, b) => a - b);
  return { bounds, cumulative: bounds.map((bound) => counts.get(bound)) };
}
function quantile(q, { bounds, cumulative }) {
  const count = cumulative.at(-1) ?? 0;
  if (!(count > 0)) return NaN;
  const rank = q * count;
  let b = cumulative.findIndex((c) => c >= rank);
  if (b === bounds.length - 1) return bounds.at(-2);
  const low = b ? bounds[b - 1] : 0, below = b ? cumulative[b - 1] : 0;
  return low + ((bounds[b] - low) * (rank - below)) / (cumulative[b] - below || 1);
}

const plain = (value) => value.toLocaleString("en", { maximumFractionDigits: 0 });
const short = (value) => (value >= 1e9 ? `${(value / 1e9).toFixed(2)} G` : value >= 1e6 ? `${(value / 1e6).toFixed(2)} M` : value >= 1e5 ? `${(value / 1e3).toFixed(0)} k` : plain(value));
const rate = (value) => (value >= 100 ? plain(value) : value.toFixed(1));
function bytes(value) {
  for (const [size, unit] of [[1e12, "TB"], [1e9, "GB"], [1e6, "MB"], [1e3, "kB"]])
    if (value >= size) return [(value / size).toFixed(value / size >= 100 ? 0 : 1), unit];
  return [value.toFixed(0), "B"];
}
const ms = (seconds) => (Number.isNaN(seconds) ? "–" : seconds >= 10 ? `${seconds.toFixed(1)} s` : seconds >= 1 ? `${seconds.toFixed(2)} s` : seconds >= 0.1 ? `${(seconds * 1e3).toFixed(0)} ms` : seconds >= 0.001 ? `${(seconds * 1e3).toFixed(1)} ms` : `${(seconds * 1e3).toFixed(2)} ms`);
const clock = (wall_s) => new Date(wall_s * 1e3).toLocaleTimeString("en-GB");
function big(node, number, unit) {
  if (!node.unit) { node.textContent = ""; node.number = node.appendChild(document.createTextNode("")); node.unit = node.appendChild(el("span", "unit")); }
  if (node.number.data !== number) node.number.data = number;
  say(node.unit, unit);
}

// --- what is remembered

let moments = []; // [{at_s, wall_s, proxy, engines: Map(url -> {data, at})}] of the last KEPT_S
let spansMinute = false;
let lastAnswer = 0;
const ghosts = new Map(); // url -> {data, at_s}
const last = () => moments.at(-1);
// The newest moment that is at least `ago_s` old, else the oldest one.
function before(ago_s) {
  const now = last().at_s;
  for (let i = moments.length - 2; i >= 0; i--) if (now - moments[i].at_s >= ago_s - 0.2) return moments[i];
  return moments[0];
}
function perSecond(now, then, of) {
  const spent = now.at_s - then.at_s;
  return spent > 0 ? Math.max(0, of(now, then)) / spent : 0;
}
const proxyGrowth = (name, want) => (now, then) => grown(now.proxy, then.proxy, name, want);
const enginesGrowth = (name) => (now, then) => {
  let sum = 0;
  for (const [url, engine] of now.engines) {
    const was = then.engines.get(url);
    if (was && was.data.incarnation === engine.data.incarnation) sum += grown(engine.at, was.at, name);
  }
  return sum;
};
const enginesTotal = (name) => [...last().engines.values()].reduce((sum, engine) => sum + total(engine.at, name), 0);

// --- what the proxy says of itself and its engines

const where = (url) => url.replace(/^https?:\/\//, "");
const whyDead = (engine) => (engine.is_unreachable || engine.reason.startsWith("cannot connect") ? "nobody listens there any more" : engine.reason);
const isDead = (engine) => engine.is_unreachable || engine.health === "unreachable";
function drawBanner({ banner }) {
  $("banner").className = `banner ${banner.tone || "plain"}`;
  say($("banner-headline"), banner.headline);
  const list = $("banner-details");
  banner.details.forEach((text, i) => say(list.children[i] ?? list.appendChild(el("li")), text));
  while (list.children.length > banner.details.length) list.lastChild.remove();
}
function drawEvents(now) {
  const list = $("events"), newest = Number(list.firstElementChild?.dataset.seq ?? 0);
  for (const event of now.events.filter(({ seq }) => seq > newest).reverse()) {
    const item = el("li", event.tone);
    item.dataset.seq = event.seq;
    item.append(el("time", "", clock(event.wall_s)), el("i"), el("span", "", event.text));
    list.prepend(item);
  }
  while (list.children.length > now.events.length) list.lastChild.remove();
  $("events-empty").hidden = now.events.length > 0;
  say($("events-since"), `since ${clock(now.events_since_s)}`);
}

// --- drawing

function spark(node, values) {
  if (!node.firstChild) node.append(svg("path", { class: "area" }), svg("path", { class: "stroke" }));
  const top = Math.max(1e-9, ...values.map(([, value]) => value));
  const now = values.length ? values.at(-1)[0] : 0;
  const points = values.map(([at, value]) => `${(120 - (now - at) * 2).toFixed(1)},${(26 - (24 * value) / top).toFixed(1)}`);
  const line = points.length > 1 ? `M${points.join("L")}` : "";
  node.lastChild.setAttribute("d", line);
  node.firstChild.setAttribute("d", line ? `${line}L120,28L${points[0].split(",")[0]},28Z` : "");
}
const each = (of) => moments.slice(1).map((now, i) => [now.at_s, perSecond(now, moments[i], of)]);

function drawTiles(now, then) {
  const near = before(RATE_S);
  big($("k-running"), plain(total(now.proxy, "pdserve_requests_running")), "requests");
  const running = $("k-running");
  running.dataset.of = "proxy"; running.dataset.metric = "pdserve_requests_running"; running.dataset.value = String(total(now.proxy, "pdserve_requests_running"));
  figure($("k-waiting"), "proxy", "pdserve_requests_waiting", {}, (v) => `${plain(v)} wait of ${plain(now.shown.queue_size)} · ${plain(now.shown.max_concurrent_requests)} may run`, total(now.proxy, "pdserve_requests_waiting"));
  big($("k-rate"), rate(perSecond(now, near, proxyGrowth("pdserve_requests_total"))), "ended/s");
  figure($("k-total"), "proxy", "pdserve_requests_total", { outcome: "ok" }, (v) => `${short(v)} answered since start`, total(now.proxy, "pdserve_requests_total", { outcome: "ok" }));
  big($("k-tokens"), rate(perSecond(now, near, enginesGrowth("vllm:generation_tokens_total"))), "tok/s");
  figure($("k-tokens-total"), "proxy", "vllm:generation_tokens_total", {}, (v) => `${short(v)} tokens since start`, total(now.proxy, "vllm:generation_tokens_total"));
  big($("k-moved"), ...bytes(perSecond(now, near, enginesGrowth("pdserve_kv_transfer_bytes_total"))));
  say($("k-moved").unit, `${$("k-moved").unit.textContent}/s`);
  figure($("k-moved-total"), "engines", "pdserve_kv_transfer_bytes_total", {}, (v) => `${bytes(v).join(" ")} by these engines`, enginesTotal("pdserve_kv_transfer_bytes_total"));
  const ended = ["error", "shed", "disconnected", "client_error"].map((outcome) => [outcome, grown(now.proxy, then, "pdserve_requests_total", { outcome })]);
  const failed = ended[0][1] + ended[1][1];
  big($("k-failed"), short(failed), "requests");
  $("k-failed").closest(".tile").classList.toggle("bad", failed > 0);
  say($("k-failed-parts"), `${short(ended[0][1])} failed · ${short(ended[1][1])} shed · ${short(ended[2][1])} left · ${short(ended[3][1])} bad`);
  spark($("spark-requests"), each(proxyGrowth("pdserve_requests_total")));
  spark($("spark-tokens"), each(enginesGrowth("vllm:generation_tokens_total")));
  spark($("spark-moved"), each(enginesGrowth("pdserve_kv_transfer_bytes_total")));
}

function buildFlow() {
  for (const [stage, title, tone, what] of STAGES) {
    const node = el("li", stage === "local" ? "node aside" : "node");
    node.id = `flow-${stage}`;
    node.style.setProperty("--tone", `var(--${tone})`);
    node.append(el("h3", "", title), el("p", "count", "–"), el("p", "rate", what));
    $("flow").append(node);
  }
  for (const [id, name] of [["push", "KV pushed"], ["pull", "KV pulled"], ["local", "served by one engine"], ["ladder", "ladder rungs"], ["retries", "retries"], ["edges", "pairs with an open breaker"]]) {
    const pair = el("div");
    pair.id = `way-${id}`;
    pair.append(el("dt", "", name), el("dd", "", "–"));
    $("ways").append(pair);
  }
}
function drawFlow(now, then) {
  const near = before(RATE_S);
  const flows = {
    all: `${rate(perSecond(now, near, proxyGrowth("pdserve_requests_total")))}/s come to an end`,
    queued: `${rate(perSecond(now, near, proxyGrowth("pdserve_disagg_decisions_total")))}/s leave it`,
    prefill: `${rate(perSecond(now, near, enginesGrowth("vllm:prompt_tokens_total")))} prompt tok/s`,
    transfer: `${bytes(perSecond(now, near, enginesGrowth("pdserve_kv_transfer_bytes_total"))).join(" ")}/s of KV`,
    decode: `${rate(perSecond(now, near, enginesGrowth("vllm:generation_tokens_total")))} tok/s`,
    local: `${rate(perSecond(now, near, proxyGrowth("pdserve_disagg_decisions_total", { decision: "local" })))}/s go this way`,
  };
  for (const [stage] of STAGES) {
    const node = $(`flow-${stage}`), want = stage === "all" ? {} : { stage }, value = total(now.proxy, "pdserve_requests_in_flight", want);
    figure(node.children[1], "proxy", "pdserve_requests_in_flight", want, plain, value);
    say(node.children[2], flows[stage]);
    node.classList.toggle("busy", value > 0);
    node.style.setProperty("--heat", String(Math.min(24, value ? 5 + 4 * Math.log2(1 + value) : 0)));
  }
  const way = (id, name, want) => {
    const value = grown(now.proxy, then, name, want);
    figure($(`way-${id}`).children[1], "proxy", name, want, short, value, !then);
    return value;
  };
  way("push", "pdserve_kv_mode_total", { mode: "push" });
  way("pull", "pdserve_kv_mode_total", { mode: "pull" });
  way("local", "pdserve_disagg_decisions_total", { decision: "local" });
  $("way-ladder").classList.toggle("warn", way("ladder", "pdserve_kv_ladder_total", {}) > 0);
  $("way-retries").classList.toggle("warn", way("retries", "pdserve_retries_total", {}) > 0);
  const open = total(now.proxy, "pdserve_open_edges");
  figure($("way-edges").children[1], "proxy", "pdserve_open_edges", {}, plain, open);
  $("way-edges").classList.toggle("warn", open > 0);
  say($("flow-note"), `kv mode ${now.shown.kv_mode} · prefill by ${now.shown.prefill_policy} · decode by ${now.shown.decode_policy} · split ${now.shown.split_policy}`);
}

// What engines keep KV in beyond their own blocks; hidden where none of them has that.
const STORE = [
  ["loaded", "read", "pdserve_kv_tier_loaded_bytes_total", (v) => bytes(v).join(" "), false],
  ["saved", "written", "pdserve_kv_tier_saved_bytes_total", (v) => bytes(v).join(" "), false],
  ["dropped", "chunks not kept", "pdserve_kv_tier_dropped_saves_total", (v) => short(v), true],
  ["mismatches", "digests that differ", "pdserve_kv_tier_digest_mismatches_total", (v) => short(v), true],
  ["timeouts", "questions without an answer", "pdserve_kv_tier_lookup_timeouts_total", (v) => short(v), true],
  ["up", "engines that reach it", "pdserve_kv_tier_server_up", plain, false],
];
function buildStore() {
  for (const [id, name] of [["hits", "prompt tokens found"], ["rate", "read at"], ...STORE]) {
    const pair = el("div");
    pair.id = `store-${id}`;
    pair.append(el("dt", "", name), el("dd", "", "–"));
    $("store-figures").append(pair);
  }
}
function drawStore(now, then) {
  const first = then ? moments[0] : null;
  const value = (name) => (first ? enginesGrowth(name)(now, first) : enginesTotal(name));
  const [asked, found] = ["queries", "hits"].map((what) => value(`vllm:external_prefix_cache_${what}_total`));
  $("store").hidden = !STORE.some(([, , name]) => enginesTotal(name)) && !enginesTotal("vllm:external_prefix_cache_queries_total");
  const hits = $("store-hits").children[1];
  say(hits, asked ? `${short(found)} of ${short(asked)}, ${Math.round((100 * found) / asked)} %` : "–");
  hits.dataset.value = String(asked ? found / asked : 0);
  const spent = value("pdserve_kv_tier_load_seconds_total");
  say($("store-rate").children[1], spent ? `${bytes(value("pdserve_kv_tier_loaded_bytes_total") / spent).join(" ")}/s` : "–");
  for (const [id, , name, text, warns] of STORE) {
    const node = $(`store-${id}`), isNow = id === "up", amount = isNow ? enginesTotal(name) : value(name);
    figure(node.children[1], "engines", name, {}, text, amount, !first || isNow);
    node.classList.toggle("warn", warns ? amount > 0 : isNow && !amount);
  }
}

// Why requests went where they did; hidden where no pairs are chosen.
const routeRows = new Map(); // seq -> element
function drawRoutes(now, then) {
  const { routes } = now;
  $("routes").hidden = !routes;
  if (!routes) return;
  const judged = ["both", "ttft", "itl", "none"].map((kept) => grown(now.proxy, then, "pdserve_slo_requests_total", { kept }));
  const streams = judged.reduce((a, b) => a + b, 0);
  const shed = grown(now.proxy, then, "pdserve_rejected_total", {});
  say($("routes-note"), [!routes.is_known && "too little is learned yet", streams && `${((100 * judged[0]) / streams).toFixed(0)} % of streams met both objectives`, `${short(shed)} turned away`].filter(Boolean).join(" · "));
  drawShare(now, then);
  drawScatter(routes.decisions);
  drawWork(routes.engines);
  const wanted = new Set(routes.decisions.slice(0, 5).map(({ seq }) => seq));
  for (const [seq, row] of routeRows) if (!wanted.has(seq)) { row.remove(); routeRows.delete(seq); }
  routes.decisions.slice(0, 5).forEach((made, i) => {
    let row = routeRows.get(made.seq);
    if (!row) routeRows.set(made.seq, (row = routeRow(made)));
    say(row.querySelector("pre"), made.words);
    if ($("routes-last").children[i] !== row) $("routes-last").insertBefore(row, $("routes-last").children[i] ?? null);
  });
}
function routeRow(made) {
  const row = el("li"), details = el("details"), summary = el("summary", "route"), more = el("div", "more");
  const tag = el("i", made.is_split ? "r-split" : "r-local");
  summary.append(tag, el("span", "who mono", made.request_id), el("span", "what", `${made.is_split ? "split" : "one engine"}: ${made.reason.replaceAll("_", " ")}`));
  more.append(el("pre"));
  details.append(summary, more);
  row.append(details);
  return row;
}
const WAYS = [["disaggregated", "r-split", "split"], ["local", "r-local", "one engine"]];
function drawShare(now, then) {
  const node = $("routes-share");
  if (!node.firstChild) for (const [, tone] of WAYS) node.append(svg("path", { class: tone }));
  const counts = moments.slice(1).map((moment, i) => WAYS.map(([decision]) => grown(moment.proxy, moments[i].proxy, "pdserve_disagg_decisions_total", { decision })));
  const top = Math.max(1, ...counts.map(([split, local]) => split + local));
  const x = (i) => 400 - (now.at_s - moments[i + 1].at_s) * (400 / 60);
  const edge = (of) => counts.map((pair, i) => `${x(i).toFixed(1)},${(118 - (112 * of(pair)) / top).toFixed(1)}`);
  const area = (upper, lower) => (counts.length > 1 ? `M${[...upper, ...lower.reverse()].join("L")}Z` : "");
  node.children[0].setAttribute("d", area(edge(([split]) => split), edge(() => 0)));
  node.children[1].setAttribute("d", area(edge(([split, local]) => split + local), edge(([split]) => split)));
  const reasons = [];
  for (const [decision, tone, name] of WAYS)
    for (const [labels] of now.proxy.get("pdserve_disagg_decisions_total") ?? []) {
      const want = { decision, reason: labels.reason };
      const value = labels.decision === decision ? grown(now.proxy, then, "pdserve_disagg_decisions_total", want) : 0;
      if (value) reasons.push([value, tone, `${name}: ${labels.reason.replaceAll("_", " ")}`]);
    }
  reasons.sort(([a], [b]) => b - a);
  node.setAttribute("aria-label", reasons.map(([value, , text]) => `${text} ${plain(value)}`).join(", ") || "no requests yet");
  const key = $("routes-reasons"), shown = reasons.slice(0, 6);
  shown.forEach(([value, tone, text], i) => {
    if (!key.children[i]) { const item = el("span"); item.append(el("i"), el("span"), el("b")); key.append(item); }
    const [swatch, name, count] = key.children[i].children;
    swatch.className = tone;
    say(name, text);
    say(count, short(value));
  });
  while (key.children.length > shown.length) key.lastChild.remove();
}
function drawScatter(decisions) {
  const chart = $("routes-scatter"), known = decisions.filter((made) => made.measured_ms !== null && made.measured_ms > 0);
  chart.replaceChildren();
  if (!known.length) {
    const text = svg("text", { x: 200, y: 96, "text-anchor": "middle" });
    text.textContent = "nothing measured yet";
    chart.append(text);
    chart.setAttribute("aria-label", "nothing measured yet");
    say($("routes-error"), "");
    return;
  }
  const all = known.flatMap((made) => [made.predicted_ms, made.measured_ms]).map((value) => Math.log10(Math.max(0.1, value)));
  const low = Math.floor(Math.min(...all)), high = Math.max(low + 1, Math.ceil(Math.max(...all)));
  const at = (value, from, to) => from + ((Math.log10(Math.max(0.1, value)) - low) / (high - low)) * (to - from);
  chart.append(svg("line", { class: "base", x1: 30, x2: 375, y1: 165, y2: 10 }));
  for (let power = low; power <= high; power++) {
    const text = svg("text", { x: at(10 ** power, 30, 375), y: 182, "text-anchor": "middle" });
    text.textContent = ms(10 ** power / 1e3).replace(/\.0+(?= )/, "");
    chart.append(text);
  }
  for (const made of known) {
    const dot = svg("circle", { class: made.is_split ? "r-split" : "r-local", cx: at(made.predicted_ms, 30, 375), cy: at(made.measured_ms, 165, 10), r: 3.5 });
    const tip = svg("title");
    tip.textContent = `${made.request_id}: predicted ${made.predicted_ms.toFixed(1)} ms, was ${made.measured_ms.toFixed(1)}; ${made.reason.replaceAll("_", " ")}`;
    dot.append(tip);
    chart.append(dot);
  }
  const off = known.reduce((sum, made) => sum + Math.abs(made.predicted_ms - made.measured_ms) / made.measured_ms, 0) / known.length;
  say($("routes-error"), `off by ${(100 * off).toFixed(0)} % on average, of the last ${known.length}`);
  chart.setAttribute("aria-label", `predicted against measured, off by ${(100 * off).toFixed(0)} % on average`);
}
function drawWork(engines) {
  const list = $("routes-work"), tops = ["backlog_ms", "itl_ms"].map((of) => Math.max(1, ...engines.map((engine) => engine[of])));
  engines.forEach((engine, i) => {
    if (!list.children[i]) {
      const item = el("li"), bars = el("span", "bars");
      bars.append(el("i", "w-backlog"), el("i", "w-itl"));
      item.append(el("span", "mono"), bars, el("span", "soft"));
      list.append(item);
    }
    const [name, bars, text] = list.children[i].children;
    say(name, where(engine.url));
    [engine.backlog_ms, engine.itl_ms].forEach((value, row) => { bars.children[row].style.width = `${(100 * value) / tops[row]}%`; });
    say(text, `${{ prefill: "prompts first · ", decode: "tokens first · " }[engine.home] ?? ""}${ms(engine.backlog_ms / 1e3)} of prompts · ${engine.num_streams} streams, ${ms(engine.itl_ms / 1e3)} each`);
  });
  while (list.children.length > engines.length) list.lastChild.remove();
  const lag = (of) => Math.max(0, ...of.map((engine) => engine.lag_ms ?? 0));
  say($("routes-lag"), engines.some((engine) => engine.lag_ms !== null) ? `KV events heard ${ms(lag(engines) / 1e3)} ago` : "no engine tells of its KV");
  spark($("trend-lag"), moments.filter((moment) => moment.routes).map((moment) => [moment.at_s, lag(moment.routes.engines)]));
}

const cards = new Map(); // url -> {root, parts}
function card(url) {
  let made = cards.get(url);
  if (made) return made;
  const root = el("article", "engine");
  root.dataset.url = url;
  const head = el("div", "engine-head"), why = el("p", "why"), facts = el("dl", "facts"), kv = el("div", "kv");
  const pills = ["health", "breaker", "edges"].map(() => el("span", "pill"));
  head.append(el("h3", "", where(url)), ...pills);
  const values = {};
  for (const [key, name] of [["running", "running"], ["waiting", "waiting"], ["receiving", "receiving"], ["tokens", "tok/s"], ["moved", "KV in/s"], ["hits", "prefix hits"]]) {
    const pair = el("div");
    pair.append(el("dt", "", name), (values[key] = el("dd", "", "–")));
    facts.append(pair);
  }
  const bar = el("div", "bar");
  bar.setAttribute("role", "img");
  const key = el("div", "key"), parts = {}, counts = {};
  for (const state of STATES) {
    bar.append((parts[state] = el("i", `s-${state}`)));
    const item = el("span");
    item.append(el("i", `s-${state}`), document.createTextNode(state), (counts[state] = el("b", "", "–")));
    key.append(item);
  }
  const timeline = svg("svg", { class: "timeline", viewBox: `0 0 ${TIMELINE_S * 10} 64`, preserveAspectRatio: "none", role: "img" });
  for (const state of STATES) timeline.append(svg("path", { class: `s-${state}` }));
  timeline.append(svg("path", { class: "moved" }));
  const axis = el("div", "axis");
  const peak = el("span", "", "");
  axis.append(el("span", "", "30 s ago"), peak, el("span", "", "now"));
  kv.append(bar, key, timeline, axis);
  const id = el("p", "id mono");
  root.append(head, why, facts, kv, id);
  made = { root, pills, why, values, bar, parts, counts, timeline, peak, id };
  cards.set(url, made);
  return made;
}
function pill(node, text, tone) { say(node, text); node.className = `pill ${tone}`; node.hidden = !text; }

function drawEngine(url, data, at, now, gone) {
  const made = card(url), dead = !gone && isDead(data);
  made.root.classList.toggle("dead", dead || gone);
  made.root.classList.toggle("gone", gone);
  made.root.dataset.state = gone ? "gone" : dead ? "dead" : data.health;
  if (gone) pill(made.pills[0], "gone", "bad");
  else if (dead) pill(made.pills[0], "dead", "bad");
  else if (data.failure && data.health === "ready") pill(made.pills[0], "slow to answer", "warn");
  else pill(made.pills[0], data.health.replace("_", " "), { ready: "good", not_ready: "warn" }[data.health] ?? "");
  pill(made.pills[1], data.breaker === "closed" ? "" : `breaker ${data.breaker.replace("_", " ")}`, data.breaker === "open" ? "bad" : "warn");
  const bad = now.edges.filter((edge) => edge.prefill === url || edge.decode === url);
  pill(made.pills[2], bad.length > 2 ? `breakers of ${bad.length} pairs` : bad.map((edge) => `${edge.mode} ${edge.prefill === url ? "to" : "from"} ${where(edge.prefill === url ? edge.decode : edge.prefill)} ${edge.state.replace("_", " ")}`).join(", "), "warn");
  const seen = data.age_s === null ? "its figures were never read" : `figures are ${(data.age_s + (gone ? now.at_s - ghosts.get(url).at_s : 0)).toFixed(0)} s old`;
  say(made.why, gone ? `It left, or its lease ran out; ${seen}.` : dead ? `${whyDead(data).replace(/^n/, "N")}; ${seen}.` : data.failure ? `${data.failure}; ${seen}.` : data.health !== "ready" ? data.reason : "");
  made.why.hidden = !made.why.textContent;
  const of = gone ? "gone" : url;
  figure(made.values.running, of, "vllm:num_requests_running", {}, plain, total(at, "vllm:num_requests_running"));
  for (const [value, reason] of [[made.values.waiting, "capacity"], [made.values.receiving, "deferred"]])
    figure(value, of, "vllm:num_requests_waiting_by_reason", { reason }, plain, total(at, "vllm:num_requests_waiting_by_reason", { reason }));
  const near = before(RATE_S), was = near.engines.get(url);
  const own = (name) => (was && !gone && !dead && was.data.incarnation === data.incarnation && now.at_s > near.at_s ? grown(at, was.at, name) / (now.at_s - near.at_s) : 0);
  say(made.values.tokens, rate(own("vllm:generation_tokens_total")));
  say(made.values.moved, bytes(own("pdserve_kv_transfer_bytes_total")).join(" "));
  const asked = total(at, "vllm:prefix_cache_queries_total");
  say(made.values.hits, asked ? `${((100 * total(at, "vllm:prefix_cache_hits_total")) / asked).toFixed(0)} %` : "–");
  const all = STATES.reduce((sum, state) => sum + total(at, "pdserve_kv_blocks", { state }), 0);
  for (const state of STATES) {
    const value = total(at, "pdserve_kv_blocks", { state });
    made.parts[state].style.width = all ? `${(100 * value) / all}%` : "0";
    figure(made.counts[state], of, "pdserve_kv_blocks", { state }, plain, value);
  }
  made.bar.setAttribute("aria-label", `KV blocks: ${STATES.map((state) => `${total(at, "pdserve_kv_blocks", { state })} ${state}`).join(", ")}`);
  drawTimeline(made, url, now);
  say(made.id, [data.model && data.model.split("/").pop(), data.dtype, data.block_size && `blocks of ${data.block_size}`, data.engine_id, data.incarnation && `life ${data.incarnation.slice(0, 8)}`, data.is_static ? "from the command line" : "registered", data.num_foreign && `${data.num_foreign} requests of others`].filter(Boolean).join(" · "));
}
function drawTimeline(made, url, now) {
  const kept = moments.filter((moment) => now.at_s - moment.at_s <= TIMELINE_S + 1 && moment.engines.has(url) && !isDead(moment.engines.get(url).data));
  const x = (moment) => (TIMELINE_S - (now.at_s - moment.at_s)) * 10;
  // From the bottom: what is in use; the rest is empty space above it.
  const shown = STATES.slice(0, 5), below = kept.map(() => 0);
  shown.forEach((_, row) => {
    const lower = kept.map((moment, i) => [x(moment), below[i]]);
    kept.forEach((moment, i) => { below[i] += 64 * moment.engines.get(url).shares[row]; });
    const upper = kept.map((moment, i) => [x(moment), below[i]]);
    const path = [...upper, ...lower.reverse()].map(([px, py]) => `${px.toFixed(1)},${(64 - py).toFixed(1)}`).join("L");
    made.timeline.children[row].setAttribute("d", kept.length > 1 ? `M${path}Z` : "");
  });
  const moved = kept.slice(1).map((moment, i) => [x(moment), perSecond(moment, kept[i], (a, b) => (a.engines.get(url).data.incarnation === b.engines.get(url).data.incarnation ? grown(a.engines.get(url).at, b.engines.get(url).at, "pdserve_kv_transfer_bytes_total") : 0))]);
  const top = Math.max(0, ...moved.map(([, value]) => value));
  made.timeline.lastChild.setAttribute("d", top ? `M${moved.map(([px, value]) => `${px.toFixed(1)},${(62 - (56 * value) / top).toFixed(1)}`).join("L")}` : "");
  say(made.peak, top ? `line: KV received, peak ${bytes(top).join(" ")}/s` : "share of blocks in use");
  made.timeline.setAttribute("aria-label", `KV blocks by state over the last 30 s${top ? `; ${made.peak.textContent}` : ""}`);
}
const pools = new Map();
function drawPools(now) {
  for (const [url, ghost] of ghosts) if (now.engines.has(url) || now.at_s - ghost.at_s > GHOST_S) ghosts.delete(url);
  const rows = [...[...now.engines].map(([url, engine]) => [url, engine.data, engine.at, false]), ...[...ghosts].map(([url, ghost]) => [url, ghost.data, ghost.at, true])];
  for (const [url, made] of cards) if (!rows.some(([other]) => other === url)) { made.root.remove(); cards.delete(url); }
  const [prefills, decodes] = ["prefill", "decode"].map((role) => rows.filter(([, data]) => data.role === role).length);
  $("pools").className = `pools${prefills && decodes > prefills ? " more-decode" : decodes && prefills > decodes ? " more-prefill" : ""}`;
  for (const role of ["prefill", "decode", "both"]) {
    const mine = rows.filter(([, data]) => data.role === role).sort(([a], [b]) => (a < b ? -1 : 1));
    let pool = pools.get(role);
    if (!mine.length) { pool?.root.remove(); pools.delete(role); continue; }
    if (!pool) {
      const root = el("div", `pool ${role}`), head = el("div", "pool-head"), list = el("div", "pool-engines"), note = el("p", "note");
      head.append(el("h2", "", { prefill: "Prefill engines", decode: "Decode engines", both: "Engines for both" }[role]), note);
      root.append(head, list);
      pools.set(role, (pool = { root, list, note }));
      const after = ["prefill", "decode", "both"].slice(["prefill", "decode", "both"].indexOf(role) + 1).map((r) => pools.get(r)?.root).find(Boolean);
      $("pools").insertBefore(root, after ?? null);
    }
    const ready = total(now.proxy, "pdserve_backends", { role, state: "ready" });
    figure(pool.note, "proxy", "pdserve_backends", { role, state: "ready" }, (v) => `${plain(v)} of ${mine.filter((row) => !row[3]).length} ready`, ready);
    mine.forEach(([url, data, at, gone], i) => {
      drawEngine(url, data, at, now, gone);
      const { root } = card(url);
      if (pool.list.children[i] !== root) pool.list.insertBefore(root, pool.list.children[i] ?? null);
    });
  }
}

function drawHistogram(kind, name, now, then) {
  const found = histogram(now.proxy, then, name), count = found.cumulative.at(-1) ?? 0;
  const chart = $(`${kind}-chart`), quantiles = $(`${kind}-quantiles`);
  const span = then ? `in ${Math.round(now.at_s - moments[0].at_s)} s` : "since start";
  figure($(`${kind}-count`), "proxy", `${name}_count`, {}, (v) => `${short(v)} ${span}`, count, !then);
  if (!quantiles.firstChild) for (const q of ["p50", "p90", "p99"]) { const part = el("span", "", q); part.append(el("b")); quantiles.append(part); }
  // One that fewer than one wait lies beyond is moved by the next as far as that likes.
  const marks = [0.5, 0.9, 0.99].map((q) => (count * (1 - q) < 1 - 1e-9 ? NaN : quantile(q, found)));
  marks.forEach((value, i) => { const b = quantiles.children[i].lastChild; say(b, ms(value)); b.dataset.value = String(value); b.title = Number.isNaN(value) ? "too few to tell" : ""; });
  chart.replaceChildren();
  chart.append(svg("line", { class: "base", x1: 0, x2: 400, y1: 170.5, y2: 170.5 }));
  const each = found.cumulative.map((c, i) => c - (i ? found.cumulative[i - 1] : 0));
  let low = each.findIndex((c) => c > 0), high = each.findLastIndex((c) => c > 0);
  if (low < 0) {
    const text = svg("text", { x: 200, y: 96, "text-anchor": "middle" });
    text.textContent = "nothing measured yet";
    chart.append(text);
    chart.setAttribute("aria-label", "nothing measured yet");
    return;
  }
  while (high - low < 7) { if (low > 0) low--; if (high < each.length - 1 && high - low < 7) high++; }
  const width = 400 / (high - low + 1), top = Math.max(...each);
  for (let i = low; i <= high; i++) {
    const height = (158 * each[i]) / top;
    const bar = svg("rect", { x: (i - low) * width + 2, y: 170 - height, width: width - 4, height, rx: 2 });
    const tip = svg("title");
    tip.textContent = `${i ? ms(found.bounds[i - 1]) : 0} to ${found.bounds[i] === Infinity ? "∞" : ms(found.bounds[i])}: ${plain(each[i])}`;
    bar.append(tip);
    const step = Math.ceil((high - low + 1) / 8);
    if (i < high && (i - low) % step === step - 1 && found.bounds[i] !== Infinity) {
      const text = svg("text", { x: (i - low + 1) * width, y: 186, "text-anchor": "middle" });
      text.textContent = ms(found.bounds[i]).replace(/\.0+(?= )/, "").replace(/(\.\d*?)0+(?= )/, "$1");
      chart.append(text);
    }
    chart.append(bar);
  }
  chart.setAttribute("aria-label", `p50 ${ms(marks[0])}, p90 ${ms(marks[1])}, p99 ${ms(marks[2])} of ${plain(count)}`);
}

function buildStages() {
  for (const [id, title, names] of [["ttft", "to the first token", TTFT], ["second", "from the first to the second", SECOND]]) {
    const stack = el("div", "stack"), head = el("h3", "", title), bar = el("div", "bar"), key = el("div", "key");
    stack.id = `stack-${id}`;
    head.append(el("b", "", "–"));
    bar.setAttribute("role", "img");
    for (const name of names) {
      bar.append(el("i", `t-${name}`));
      const item = el("span");
      item.append(el("i", `t-${name}`), document.createTextNode(name.replace("_", " ")), el("b", "", "–"));
      key.append(item);
    }
    stack.append(head, bar, key);
    $("stages").append(stack);
  }
}
function drawStages(now, then) {
  for (const [id, names] of [["ttft", TTFT], ["second", SECOND]]) {
    const stack = $(`stack-${id}`), [head, bar, key] = stack.children;
    const means = names.map((stage) => {
      const count = grown(now.proxy, then, "pdserve_stage_duration_seconds_count", { stage });
      return count ? grown(now.proxy, then, "pdserve_stage_duration_seconds_sum", { stage }) / count : 0;
    });
    const sum = means.reduce((a, b) => a + b, 0);
    say(head.lastChild, sum ? ms(sum) : "–");
    head.lastChild.dataset.value = String(sum);
    means.forEach((mean, i) => {
      bar.children[i].style.width = sum ? `${(100 * mean) / sum}%` : "0";
      say(key.children[i].lastChild, sum ? ms(mean) : "–");
      key.children[i].lastChild.dataset.value = String(mean);
    });
    bar.setAttribute("aria-label", names.map((name, i) => `${name.replace("_", " ")} ${ms(means[i])}`).join(", "));
  }
}

const slowRows = new Map(); // seq -> element
function drawSlowest(now) {
  const longest = Math.max(1e-3, ...now.slowest.map((told) => told.ttft_ms ?? told.total_ms));
  const wanted = new Set(now.slowest.map((told) => told.seq));
  for (const [seq, row] of slowRows) if (!wanted.has(seq)) { row.remove(); slowRows.delete(seq); }
  now.slowest.forEach((told, i) => {
    let row = slowRows.get(told.seq);
    if (!row) slowRows.set(told.seq, (row = slowRow(told)));
    row.querySelectorAll(".bar i").forEach((part) => { part.style.width = `${(100 * part.ms) / longest}%`; });
    if ($("slow").children[i] !== row) $("slow").insertBefore(row, $("slow").children[i] ?? null);
  });
  $("slow-empty").hidden = $("curl").hidden = now.slowest.length > 0;
  $("slow-key").hidden = !now.slowest.length;
  if (!$("slow-key").firstChild)
    for (const [name, text] of [["admission", "admission"], ["proxy", "proxy"], ["queue", "queue"], ["reserve", "reserve"], ["prefill", "prefill"], ["relay", "relay"], ["retry", "retry"]]) {
      const item = el("span");
      item.append(el("i", `t-${name}`), document.createTextNode(text));
      $("slow-key").append(item);
    }
}
function slowRow(told) {
  const row = el("li"), details = el("details"), summary = el("summary"), bar = el("span", "bar");
  const terms = Object.entries(told.ttft_terms);
  for (const [name, value] of terms) {
    const part = el("i", `t-${name}`);
    part.ms = value;
    part.title = `${name.replace("_", " ")} ${value.toFixed(1)} ms`;
    bar.append(part);
  }
  bar.setAttribute("role", "img");
  bar.setAttribute("aria-label", terms.map(([name, value]) => `${name.replace("_", " ")} ${value.toFixed(1)} ms`).join(", ") || "no first token");
  const what = [told.outcome !== "ok" && told.outcome, `${told.prompt_tokens} → ${told.output_tokens} tok`, told.kv_path || told.mode, told.rungs.length && `${told.rungs.length} rungs`].filter(Boolean).join(" · ");
  const who = el("span", "who mono", told.request_id);
  who.title = told.request_id;
  summary.append(el("span", "ms", told.ttft_ms === null ? "no token" : ms(told.ttft_ms / 1e3)), who, bar, el("span", "what", what));
  const more = el("div", "more");
  more.append(el("pre", "", told.line), el("pre", "", told.story.map((event) => `${event.at_ms.toFixed(1).padStart(9)} ms  ${event.event}`).join("\n")));
  details.append(summary, more);
  row.append(details);
  return row;
}

function drawAbout(now) {
  const model = [...now.engines.values()].map((engine) => engine.data.model).find(Boolean);
  say($("about"), [model && model.split("/").pop(), `${now.engines.size} engine${now.engines.size === 1 ? "" : "s"}`, location.host, `version ${now.shown.version}`].filter(Boolean).join(" · "));
  document.title = `${plain(total(now.proxy, "pdserve_requests_running"))} running · pdserve`;
  $("no-engines").hidden = now.engines.size > 0 || ghosts.size > 0;
  say($("no-engines-commands"), `pdserve prefill MODEL --proxy ${BASE}\npdserve decode MODEL --proxy ${BASE}`);
  const key = now.shown.needs_key ? ` -H 'Authorization: Bearer '"$PDSERVE_API_KEY"` : "";
  say($("curl"), `curl ${BASE}/v1/completions${key} \\\n  -H 'Content-Type: application/json' \\\n  -d '{"prompt": "Once upon a time", "max_tokens": 64, "stream": true}'`);
}
function draw() {
  const now = last();
  if (!now) return;
  const then = spansMinute ? moments[0].proxy : null;
  drawAbout(now);
  drawBanner(now);
  drawEvents(now);
  drawTiles(now, then);
  drawFlow(now, then);
  drawStore(now, then);
  drawRoutes(now, then);
  drawPools(now);
  drawHistogram("ttft", "pdserve_time_to_first_token_seconds", now, then);
  drawHistogram("itl", "pdserve_inter_token_latency_seconds", now, then);
  drawStages(now, then);
  drawSlowest(now);
}

// --- asking

function seen(engine) {
  const at = index(engine.series), blocks = STATES.map((state) => total(at, "pdserve_kv_blocks", { state }));
  const all = blocks.reduce((a, b) => a + b, 0) || 1;
  return { data: engine, at, shares: blocks.map((number) => number / all) };
}
function take(data) {
  const former = last();
  const now = { at_s: data.at_s, wall_s: data.wall_s, began_s: data.began_s, banner: data.banner, events: data.events, events_since_s: data.events_since_s, shown: data.proxy, proxy: index(data.proxy.series), edges: data.edges, routes: data.routes, slowest: data.slowest, engines: new Map(data.engines.map((engine) => [engine.url, seen(engine)])) };
  // An engine that cannot be asked any more keeps the figures it gave last.
  if (former) for (const [url, engine] of now.engines) { const was = former.engines.get(url); if (!engine.at.size && was && was.data.incarnation === engine.data.incarnation) { engine.at = was.at; engine.shares = was.shares; } }
  // Nobody has looked for a while: what happened meanwhile is not drawn as if it were known.
  if (former && now.at_s - former.at_s > GAP_S) moments = [];
  moments.push(now);
  while (moments.length > 1 && now.at_s - moments[0].at_s > KEPT_S) moments.shift();
  if (!former) return;
  if (now.began_s !== former.began_s) { // another life of the proxy, which counts from 1 again
    moments = [now];
    for (const seen of [ghosts, slowRows, routeRows]) seen.clear();
    for (const id of ["slow", "routes-last", "events"]) $(id).replaceChildren();
    return;
  }
  for (const [url, engine] of former.engines) if (!now.engines.has(url)) ghosts.set(url, { ...engine, at_s: now.at_s });
}
function lost(why) {
  document.body.classList.add("stale");
  $("live").className = "live off";
  const ago = lastAnswer ? Math.round((Date.now() - lastAnswer) / 1000) : 0;
  say($("live-text"), lastAnswer ? `last seen ${ago} s ago` : "not connected");
  const figures = lastAnswer ? ` It was last seen at ${clock(lastAnswer / 1e3)}; all figures are from then.` : "";
  say($("alarm"), `${why}${figures} This page goes on asking.`);
  $("alarm").hidden = false;
}
async function ask() {
  let data;
  const stop = new AbortController(), timer = setTimeout(() => stop.abort(), TIMEOUT_MS);
  try {
    const response = await fetch("dashboard/data", { signal: stop.signal, cache: "no-store" });
    if (response.status === 401) return lost("The proxy does not take this key any more: reload the page to give another one.");
    if (!response.ok) return lost(`The proxy answers ${response.status}.`);
    data = await response.json();
  } catch (error) {
    if (error instanceof TypeError || error.name === "AbortError") return lost(`The proxy at ${location.host} does not answer: it has ended, or cannot be reached.`);
    throw error;
  } finally {
    clearTimeout(timer);
  }
  take(data);
  lastAnswer = Date.now();
  document.body.classList.remove("stale", "waiting");
  $("live").className = "live on";
  say($("live-text"), "live");
  $("alarm").hidden = true;
  draw();
}
async function run() {
  for (;;) {
    const begun = performance.now();
    // Nobody looks: the proxy need not ask its engines either.
    if (!document.hidden) try { await ask(); } catch (error) { console.error(error); lost("This page cannot read what the proxy says: reload it."); }
    await new Promise((resume) => setTimeout(resume, Math.max(50, INTERVAL_MS - (performance.now() - begun))));
  }
}
for (const [id, minute] of [["span-all", false], ["span-minute", true]])
  $(id).addEventListener("click", () => {
    spansMinute = minute;
    $("span-all").setAttribute("aria-pressed", String(!minute));
    $("span-minute").setAttribute("aria-pressed", String(minute));
    draw();
  });
buildFlow();
buildStore();
buildStages();
run();
