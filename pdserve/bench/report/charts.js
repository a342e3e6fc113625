// Draws the charts of a report with uPlot: axes, grids, zoom, legends and the cursor are its own.
//
// Each `.chart` holds its values as JSON, as charts.py wrote them. Series with x values of their
// own, whiskers, bands and tracks of pieces are drawn here, onto uPlot's canvas: it has one column of
// x values for all series, and no tracks. Colours are the page's CSS variables, so that a chart
// follows the scheme.
"use strict";
(() => {
  const NARROW = 560;
  const NEAR = 16; // pixels between the pointer and what its tooltip tells of
  const FONT = "12px system-ui,-apple-system,'Segoe UI',Roboto,'Noto Sans',sans-serif";

  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`);
  const ofStage = (name) => `s-${name.toLowerCase().replace(/[^a-z0-9]/g, "-")}`;
  const stageColour = (name) => colour(ofStage(name)) || colour("s-other");
  const shown = (name) => name.replaceAll("_", " ");
  const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
  const digits = new Intl.NumberFormat("en", { maximumSignificantDigits: 3 });
  const figure = (value) => (Math.abs(value) < 1000 ? digits : whole).format(value);
  const isNamed = (chart) => Boolean(chart.tracks[0]?.name);
  const tick = new Intl.NumberFormat("en", { maximumSignificantDigits: 6 });

  // ---- the ends of axes

  function step125(value, isUp) {
    const power = 10 ** Math.floor(Math.log10(value));
    const steps = [1, 2, 5, 10].map((factor) => factor * power);
    return isUp
      ? steps.find((step) => step >= value * (1 - 1e-9))
      : steps.findLast((step) => step <= value * (1 + 1e-9));
  }

  const greatest = (values) => values.reduce((a, b) => Math.max(a, b), 0);

  function ends(axis, values) {
    if (!axis.is_log) {
      const [low, high] = axis.ends ?? uPlot.rangeNum(0, greatest(values) || 1, 0.02, true);
      return [low, high > low ? high : low + 1];
    }
    const positive = (axis.ends ?? values).filter((value) => value > 0);
    const low = step125(positive.reduce((a, b) => Math.min(a, b), greatest(positive) || 1), false);
    const high = step125(greatest(positive) || 1, true);
    return high > low ? [low, high] : [low / 10, high * 10];
  }

  // Values of an axis by powers of ten that are labelled: uPlot's own choice does so for y alone.
  function labelled(key, room) {
    return (u, splits) => {
      const decade = Math.abs(u.valToPos(10, key) - u.valToPos(1, key));
      const digits = decade < room ? [1] : decade < 6 * room ? [1, 2, 5] : [1, 2, 3, 4, 5, 6, 7, 8, 9];
      const first = (value) => Math.round(value / 10 ** Math.floor(Math.log10(value) + 1e-9));
      return splits.map((value) => (digits.includes(first(value)) ? value : null));
    };
  }

  // ---- drawing, in CSS pixels from the corner of the plot; `x` and `y` give places of values

  function paint(u, home, hasNotes, draw) {
    const { ctx, bbox } = u;
    const [width, height] = [bbox.width / devicePixelRatio, bbox.height / devicePixelRatio];
    const placed = (key, [low, high]) => (value) =>
      u.valToPos(Math.min(high, Math.max(low, value)), key);
    ctx.save();
    ctx.translate(bbox.left, bbox.top);
    ctx.scale(devicePixelRatio, devicePixelRatio);
    ctx.font = FONT;
    ctx.beginPath();
    ctx.rect(-5, -5, hasNotes ? u.width : width + 10, height + 10); // dots on the edge stay whole
    ctx.clip();
    draw(ctx, placed("x", home.x), placed("y", home.y), width, height);
    ctx.restore();
  }

  function line(ctx, points, dashes = []) {
    ctx.setLineDash(dashes);
    ctx.beginPath();
    points.forEach(([x, y]) => ctx.lineTo(x, y));
    ctx.stroke();
    ctx.setLineDash([]);
  }

  function drawSeries(ctx, one, x, y) {
    const places = one.points.map(([px, py]) => [x(px), y(py)]);
    const disc = ([px, py], radius) => (ctx.moveTo(px + radius, py), ctx.arc(px, py, radius, 0, 7));
    const own = colour(`c${one.colour}`);
    const card = colour("card");
    ctx.strokeStyle = ctx.fillStyle = own;
    ctx.lineJoin = ctx.lineCap = "round";
    if (one.marks === "cloud") {
      ctx.globalAlpha = 0.5;
      ctx.beginPath();
      places.forEach((place) => disc(place, 1.3));
      ctx.fill();
      ctx.globalAlpha = 1;
      return;
    }
    ctx.lineWidth = 2;
    if (one.marks !== "dots") line(ctx, places, one.is_dashed ? [6, 4] : []);
    if (one.marks === "line") return;
    ctx.lineWidth = 1.6;
    one.bars.forEach(([low, high], i) => {
      if (high > low) line(ctx, [[places[i][0], y(low)], [places[i][0], y(high)]]);
    });
    places.forEach((place, i) => {
      const isHollow = one.hollow.includes(i);
      ctx.fillStyle = isHollow ? card : own;
      ctx.strokeStyle = isHollow ? own : card;
      ctx.lineWidth = isHollow ? 2 : 1.2;
      ctx.beginPath();
      disc(place, 4);
      ctx.fill();
      ctx.stroke();
    });
  }

  function drawBehind(chart, ctx, x, height) {
    ctx.globalAlpha = 0.13;
    ctx.fillStyle = colour("span");
    for (const band of chart.bands) {
      ctx.fillRect(x(band.start), 0, Math.max(0.8, x(band.end) - x(band.start)), height);
    }
    ctx.globalAlpha = 0.28;
    ctx.lineWidth = 6;
    for (const marker of chart.markers) {
      ctx.strokeStyle = colour(`c${marker.colour}`);
      line(ctx, [[x(marker.value), 0], [x(marker.value), height]]);
    }
    ctx.globalAlpha = 1;
  }

  // uPlot's own line lies below the grid's line at the same place.
  function drawZero(ctx, points) {
    ctx.strokeStyle = colour("soft");
    ctx.lineWidth = 1;
    line(ctx, points);
  }

  function drawRules(chart, ctx, y, width) {
    ctx.strokeStyle = ctx.fillStyle = colour("rule");
    ctx.lineWidth = 1;
    ctx.textAlign = "right";
    ctx.textBaseline = "alphabetic";
    for (const rule of chart.rules) {
      const at = y(rule.value);
      line(ctx, [[0, at], [width, at]], [5, 4]);
      ctx.fillText(rule.text, width - 4, at > 16 ? at - 5 : at + 14);
    }
  }

  function drawTracks(u, chart, ctx, x, y, width) {
    const hidden = new Set(u.series.filter((s) => !s.show).map((s) => s.label));
    ctx.textAlign = "left";
    ctx.textBaseline = "middle";
    chart.tracks.forEach((track, i) => {
      const whole = y(i + 1) - y(i);
      const above = isNamed(chart) && u.width < NARROW ? 16 : 0;
      const gap = (whole - above) * (isNamed(chart) ? 0.17 : 0.1);
      const [top, height] = [y(i) + above + gap, whole - above - 2 * gap];
      let last = 0;
      for (const [stage, from, to] of track.pieces) {
        last = x(to);
        if (hidden.has(shown(stage))) continue;
        ctx.fillStyle = stageColour(stage);
        ctx.fillRect(x(from), top, Math.max(0.6, x(to) - x(from)), height);
      }
      ctx.fillStyle = colour("text");
      if (above) ctx.fillText(track.name, 0, y(i) + 10, width);
      if (track.note) ctx.fillText(track.note, last + 8, top + height / 2);
    });
  }

  // ---- what the pointer rests on

  function tipOfSeries(u, chart, home, left, top) {
    let [best, found] = [NEAR ** 2, ""];
    const inside = (value, [low, high]) => Math.min(high, Math.max(low, value));
    chart.series.forEach((one, i) => {
      if (!u.series[i + 1].show) return;
      one.points.forEach(([x, y], at) => {
        const dx = u.valToPos(inside(x, home.x), "x") - left;
        const far = dx * dx + (u.valToPos(inside(y, home.y), "y") - top) ** 2;
        // Of what lies as near, the later series is drawn on top.
        if (far <= best) {
          best = far;
          found = one.tips[at] ?? `${one.name}: ${figure(x)}, ${figure(y)}`;
        }
      });
    });
    if (found) return found;
    const marker = chart.markers.find((each) => Math.abs(u.valToPos(each.value, "x") - left) < 5);
    const at = u.posToVal(left, "x");
    return marker?.tip ?? chart.bands.find((band) => band.start <= at && at <= band.end)?.tip ?? "";
  }

  function tipOfTrack(u, chart, home, left, top) {
    const track = chart.tracks[Math.floor(u.posToVal(top, "y"))];
    const at = u.posToVal(left, "x");
    const piece = track?.pieces.find(([, from, to]) => from <= at && at <= to);
    if (!piece) return "";
    const [stage, from, to] = piece;
    return `${track.tip || track.name}\n${shown(stage)}: ${figure(to - from)} ${chart.x.label}`;
  }

  function showTip(u, tip, words) {
    const { left, top } = u.cursor;
    tip.hidden = !words || left < 0;
    tip.textContent = words;
    const room = u.over.clientWidth;
    tip.style.left = `${Math.max(0, Math.min(left + 12, room - tip.offsetWidth))}px`;
    tip.style.top = `${top + 14}px`;
  }

  // ---- a chart

  function entries(chart) {
    if (!chart.tracks.length) {
      return chart.series.map((one) => ({ label: one.name, key: `c${one.colour}` }));
    }
    const names = new Set(chart.tracks.flatMap((track) => track.pieces.map(([stage]) => stage)));
    return [...names].map((name) => ({ label: shown(name), key: ofStage(name) }));
  }

  function axisOf(spec, key, room, own) {
    const filter = spec.is_log ? { filter: labelled(key, room) } : {};
    return {
      ...filter,
      stroke: () => colour("soft"),
      font: FONT,
      labelFont: FONT,
      label: spec.label,
      labelSize: 20,
      gap: 6,
      values: (u, splits) => splits.map((value) => (value === null ? "" : tick.format(value))),
      ...own,
      grid: { stroke: () => colour("grid"), width: 1, ...filter, ...own.grid },
    };
  }

  function measured(u, texts) {
    u.ctx.save();
    u.ctx.font = FONT;
    const widest = Math.max(0, ...texts.map((text) => u.ctx.measureText(text).width));
    u.ctx.restore();
    return Math.ceil(widest);
  }

  function axesOf(chart, names) {
    const num = chart.tracks.length;
    const x = axisOf(chart.x, "x", 130, {
      size: 30,
      grid: { show: num > 0 },
      ticks: { stroke: () => colour("grid"), size: 4 },
    });
    const y = axisOf(chart.y, "y", 45, {
      grid: { show: !num },
      ticks: { show: false, size: 0 },
      size: (u, values) => measured(u, num ? names() : values ?? []) + 12,
    });
    if (num) {
      y.splits = () => (names().length ? chart.tracks.map((_, i) => i + 0.5) : []);
      y.values = names;
      y.label = undefined;
    }
    return [x, y];
  }

  function hooksOf(chart, home, tip) {
    const num = chart.tracks.length;
    const drawAll = (u, ctx, x, y, width, height) => {
      chart.series.forEach((one, i) => u.series[i + 1].show && drawSeries(ctx, one, x, y));
      if (!num) drawZero(ctx, [[0, height], [width, height]]);
      if (isNamed(chart)) drawZero(ctx, [[0, 0], [0, height]]);
      drawRules(chart, ctx, y, width);
      drawTracks(u, chart, ctx, x, y, width);
    };
    const hasNotes = chart.tracks.some((track) => track.note);
    const rest = (u) => {
      const { left, top } = u.cursor;
      const of = num ? tipOfTrack : tipOfSeries;
      showTip(u, tip, left < 0 ? "" : of(u, chart, home, left, top));
    };
    return {
      drawClear: [(u) => paint(u, home, false, (ctx, x, ...of) => drawBehind(chart, ctx, x, of[2]))],
      draw: [(u) => paint(u, home, hasNotes, (...of) => drawAll(u, ...of))],
      setCursor: [rest],
    };
  }

  function homeOf(chart) {
    const points = chart.series.flatMap((one) => one.points);
    const pieces = chart.tracks.flatMap((track) => track.pieces);
    const xs = [...points.map(([x]) => x), ...pieces.map(([, , to]) => to)];
    const bars = chart.series.flatMap((one) => one.bars.flat());
    const ys = [...points.map(([, y]) => y), ...bars, ...chart.rules.map((rule) => rule.value)];
    const num = chart.tracks.length;
    return { x: ends(chart.x, xs), y: num ? [0, num] : ends(chart.y, ys) };
  }

  function make(place) {
    const chart = JSON.parse(place.firstElementChild.textContent);
    const [home, keys, num] = [homeOf(chart), entries(chart), chart.tracks.length];
    const isNarrow = () => place.clientWidth < NARROW;
    const names = () => (isNamed(chart) && !isNarrow() ? chart.tracks.map((each) => each.name) : []);
    const height = () => {
      if (!num) return chart.height;
      const track = isNamed(chart) ? (isNarrow() ? 46 : 34) : Math.max(3, Math.min(14, 420 / num));
      return track * num + 52;
    };
    const tip = document.createElement("div");
    tip.className = "tip";
    tip.hidden = true;
    const notes = chart.tracks.map((track) => track.note);
    const fill = (u, i) => `var(--${keys[i - 1].key}, var(--s-other))`;
    const options = {
      width: place.clientWidth,
      height: height(),
      padding: [8, (u) => measured(u, notes) + 20, 0, num && !isNamed(chart) ? 8 : null],
      legend: { show: chart.has_legend, live: false, markers: { width: 0, fill } },
      cursor: { y: !num, points: { show: false }, drag: { x: true, y: false } },
      scales: {
        x: { time: false, distr: chart.x.is_log ? 3 : 1, range: (u, low, high) => [low, high] },
        y: { distr: chart.y.is_log ? 3 : 1, dir: num ? -1 : 1, range: () => home.y },
      },
      axes: axesOf(chart, names),
      series: [{}, ...keys.map(({ label }) => ({ label, points: { show: false } }))],
      hooks: hooksOf(chart, home, tip),
    };
    // The ends of x are what a double click goes back to; what is drawn, uPlot need not know.
    const u = new uPlot(options, [home.x, ...keys.map(() => [null, null])], place);
    u.over.append(tip);
    // A chart on a page that is not shown has no width, and keeps the one it had.
    const fit = () => place.clientWidth && u.setSize({ width: place.clientWidth, height: height() });
    new ResizeObserver(fit).observe(place);
    return { fit, redraw: () => u.redraw() };
  }

  const made = [...document.querySelectorAll(".chart")].map(make);
  const on = (media, what) => matchMedia(media).addEventListener("change", () => made.forEach(what));
  on("(prefers-color-scheme: dark)", (each) => each.redraw());
  on("print", (each) => each.fit());
})();
