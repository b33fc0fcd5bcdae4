// Charts of uPlot.
const COLORS = ["#3f83d6", "#d0559c", "#2f9a52", "#c08416", "#8a63d2", "#1b9aaa", "#d9544d", "#7f8c3a"];
const X_AXES = {step: "step", episodes: "episodes", tokens: "tokens", hours: "hours"};
let plots = [];
let repaints = []; // draw other canvases again, after the colours have changed
let printing = false;

function css(name) { return getComputedStyle(document.documentElement).getPropertyValue(name).trim(); }
function removePlots() { plots.forEach(plot => plot.destroy()); plots = []; repaints = []; }
function pointsOf(run, name) {
  const series = run.series[name];
  if (!series) return null;
  const axis = run.axes[series.axis], x = axis[STATE.x] ?? axis.step;
  // A run that was resumed, or an evaluation, can repeat a position: uPlot wants rising ones, and the last value counts.
  const xs = valuesOf(x), columns = ["mean", "low", "high"].map(key => series[key] && valuesOf(series[key]));
  const order = xs.map((_, i) => i).sort((a, b) => xs[a] - xs[b] || a - b).filter((at, i, all) => xs[at] !== xs[all[i + 1]]);
  const pick = values => values && order.map(i => values[i]);
  return {x: pick(xs), mean: pick(columns[0]), low: pick(columns[1]), high: pick(columns[2])};
}
// lines: [{label, color, points, bars}], where bars draws low and high as an interval at each point instead of a band.
function chart(title, hint, lines, parent) {
  const card = make("div", {class: "card"}, make("h3", {title: hint}, title));
  parent.append(card);
  const series = [{label: X_AXES[STATE.x]}], bands = [], tables = [];
  const intervals = [];
  for (const {label, color, points, bars} of lines) {
    const columns = [points.x, points.mean];
    series.push({label, stroke: color, width: 1.4, spanGaps: true, points: {show: bars || points.x.length < 60, size: bars ? 7 : 4},
      value: (_, value) => brief(value)});
    if (points.low) {
      columns.push(points.high, points.low);
      const at = series.length, hidden = {stroke: "transparent", points: {show: false}, spanGaps: true, label: "", value: () => ""};
      series.push({...hidden, label: `${label} high`}, {...hidden, label: `${label} low`});
      if (bars) intervals.push([at, at + 1, color]);
      else bands.push({series: [at, at + 1], fill: `${color}33`});
    }
    tables.push(columns);
  }
  draw(card, series, bands, tables.length > 1 ? uPlot.join(tables) : tables[0], plot => {
    for (const [high, low, color] of intervals) {
      plot.ctx.strokeStyle = color;
      plot.ctx.lineWidth = devicePixelRatio;
      plot.ctx.beginPath();
      plot.data[0].forEach((x, i) => {
        if (plot.data[high][i] == null || plot.data[low][i] == null) return;
        const at = plot.valToPos(x, "x", true);
        plot.ctx.moveTo(at, plot.valToPos(plot.data[high][i], "y", true));
        plot.ctx.lineTo(at, plot.valToPos(plot.data[low][i], "y", true));
      });
      plot.ctx.stroke();
    }
  });
  card.append(make("div", {class: "key"}, lines.map(({label, color}) => {
    const dot = make("i");
    dot.style.background = color;
    return make("span", {}, dot, label);
  })));
}
// layers: [{label, color, points}], drawn on top of each other.
function stacked(title, hint, layers, parent) {
  const card = make("div", {class: "card"}, make("h3", {title: hint}, title));
  parent.append(card);
  const joined = uPlot.join(layers.map(layer => [layer.points.x, layer.points.mean]));
  const sums = [], series = [{label: X_AXES[STATE.x]}], bands = [];
  let below = joined[0].map(() => 0);
  for (const values of joined.slice(1)) sums.push(below = below.map((sum, i) => sum + (values[i] ?? 0)));
  const top = sums.toReversed ? sums.toReversed() : [...sums].reverse();
  [...layers].reverse().forEach(({label, color}, i) => {
    series.push({label, stroke: color, fill: `${color}99`, width: 1, points: {show: false},
      value: (_, value, at, row) => brief(row == null ? null : joined[joined.length - at]?.[row])});
    if (i + 1 < layers.length) bands.push({series: [i + 1, i + 2]});
  });
  draw(card, series, bands, [joined[0], ...top], () => {}, {range: [0, 1]});
  card.append(make("div", {class: "key"}, layers.map(({label, color}) => {
    const dot = make("i");
    dot.style.background = color;
    return make("span", {}, dot, label);
  })));
}
function draw(card, series, bands, data, after, y = {}, x = {}, cursor = "x") {
  const dim = () => css("--dim"), line = () => css("--line"); // as they are when it is drawn
  const axis = {stroke: dim, grid: {stroke: line, width: 1}, ticks: {stroke: line, width: 1}};
  plots.push(new uPlot({
    width: Math.max(card.clientWidth - 14, 200), height: 180, series, bands,
    scales: {x: {time: false, ...x}, y}, legend: {show: false},
    cursor: {sync: {key: cursor}, drag: {x: true, y: false}},
    axes: [{...axis, values: (_, values) => values.map(brief)}, {...axis, size: 58, values: (_, values) => values.map(brief)}],
    hooks: {draw: [after], setCursor: [plot => tipOf(plot, card)]},
  }, data, card));
}
function tipOf(plot, card) {
  const row = plot.cursor.idx, box = plot.over.getBoundingClientRect();
  if (row == null || !card.matches(":hover")) { if (!document.querySelector(".card:hover")) tip.remove(); return; }
  const lines = [`${plot.series[0].label} ${brief(plot.data[0][row])}`];
  plot.series.forEach((series, i) => {
    if (i && plot.data[i][row] != null) lines.push(`${series.label}: ${series.fill ? series.value(plot, 0, i, row) : brief(plot.data[i][row])}`);
  });
  showTip({clientX: box.left + plot.cursor.left, clientY: box.top + plot.cursor.top}, lines.join("\n"));
}
