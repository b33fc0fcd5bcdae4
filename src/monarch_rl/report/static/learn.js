// Whether the run learns: charts of metrics.
function showLearn(main) {
  showFindings(main);
  const choices = Object.keys(X_AXES).filter(x => DATA.runs.some(run => run.axes.some(axis => x in axis)));
  main.append(make("div", {class: "bar"}, "against", make("span", {class: "printed"}, X_AXES[STATE.x]), choices.map(x =>
    make("button", {"aria-pressed": STATE.x === x, onclick: () => { setState({x}); show(); }}, X_AXES[x]))));
  if (!DATA.runs.some(run => Object.keys(run.series).length)) main.append(make("p", {}, "No metrics yet: they are written with the first step."));
  const used = new Set(DATA.stacked);
  const grid = make("div", {class: "charts"});
  main.append(grid);
  for (const [title, patterns] of DATA.charts) {
    let names = Object.keys(DATA.metrics).filter(name => patterns.includes(name) || (patterns.includes(DATA.metrics[name][2]) && DATA.metrics[name][2].includes("*")));
    if (!names.length) continue;
    if (names.includes("held_out/accuracy")) names = ["held_out/accuracy"]; // without a success_reward, the reward stands for it
    names.forEach(name => used.add(name));
    used.add(`${names[0]}_low`).add(`${names[0]}_high`);
    chart(title, names.map(hintOf).join("\n"), linesOf(names), grid);
  }
  showGroups(grid);
  const groups = new Map();
  for (const name of Object.keys(DATA.metrics)) {
    if (used.has(name)) continue;
    const prefix = name.includes("/") ? name.split("/")[0] : "other";
    groups.set(prefix, [...(groups.get(prefix) ?? []), name]);
  }
  if (DATA.runs.length > 1) showDifferences(main);
  main.append(make("h2", {}, "Every other metric"));
  for (const [prefix, names] of groups) {
    const inside = make("div", {class: "charts"});
    const details = make("details", {}, make("summary", {}, `${prefix} (${names.length})`), inside);
    details.addEventListener("toggle", () => {
      if (details.open && !inside.firstChild) for (const name of names) chart(name, hintOf(name), linesOf([name]), inside);
    });
    main.append(details);
  }
}
function showFindings(main) {
  const run = currentRun(), found = run.findings;
  const panel = make("div", {class: "card findings"}, make("h3", {}, `Diagnosis${DATA.runs.length > 1 ? ` of ${run.name}` : ""}`));
  if (!found.length) panel.append(make("div", {class: "dim"}, "Nothing found: none of the rules applies."));
  for (const {sentence, since, change, confidence, level, metric} of found) {
    panel.append(make("div", {class: level, title: metric}, sentence,
      make("span", {class: "dim"}, ` Since step ${since}, ${confidence}. Change: ${change}`)));
  }
  main.append(panel);
}
function hintOf(name) {
  const [unit, meaning] = DATA.metrics[name];
  return `${name}${unit ? ` [${unit}]` : ""}: ${meaning}`;
}
function linesOf(names) {
  const lines = [];
  DATA.runs.forEach((run, r) => names.forEach((name, n) => {
    const points = pointsOf(run, name);
    if (!points) return;
    const label = DATA.runs.length > 1 ? (names.length > 1 ? `${run.name}: ${name}` : run.name) : name;
    const bars = name.startsWith("held_out/");
    if (bars && !points.low) {
      const low = pointsOf(run, `${name}_low`), high = pointsOf(run, `${name}_high`);
      if (low && high && low.x.length === points.x.length) Object.assign(points, {low: low.mean, high: high.mean});
    }
    lines.push({label, color: COLORS[(DATA.runs.length > 1 ? r + n * DATA.runs.length : n) % COLORS.length], points, bars});
  }));
  return lines;
}
function showGroups(grid) {
  const run = currentRun(), [wrong, equal, right] = DATA.stacked.map(name => pointsOf(run, name));
  if (!equal) return;
  const zeros = equal.x.map(() => 0);
  // Groups that are all right or all wrong are equal, too, if their rewards are.
  const of = points => (points && points.x.length === equal.x.length ? points.mean : zeros);
  const rest = equal.mean.map((value, i) => value == null ? null : Math.max(0, value - (of(wrong)[i] ?? 0) - (of(right)[i] ?? 0)));
  const mixed = rest.map((value, i) => Math.max(0, 1 - (value ?? 0) - (of(wrong)[i] ?? 0) - (of(right)[i] ?? 0)));
  const layer = (label, color, mean) => ({label, color, points: {x: equal.x, mean}});
  stacked("Groups by their rewards", DATA.stacked.filter(name => name in DATA.metrics).map(hintOf).join("\n"), [
    layer("all wrong", COLORS[6], of(wrong)), layer("equal otherwise", "#8b949e", rest), layer("all right", COLORS[2], of(right)),
    layer("differ", COLORS[0], mixed)], grid);
}
function showDifferences(main) {
  const all = DATA.runs.map(run => new Map([...run.differs, ...run.settings].map(([name, value]) => [name, shown(value)])));
  const names = [...new Set(all.flatMap(settings => [...settings.keys()]))];
  const differ = names.filter(name => new Set(all.map(settings => settings.get(name))).size > 1);
  main.append(make("h2", {}, "Settings that differ"));
  main.append(differ.length ? table(["setting", ...DATA.runs.map(run => run.name)], differ.map(name => [`--${name}`, ...all.map(settings => settings.get(name) ?? "")]))
    : make("p", {}, "All settings are the same."));
}
