// Where the time went: lanes of actors, lags, losses, faults.
function showTime(main) {
  const run = currentRun();
  if (run.spans.length) showLanes(main, run);
  else main.append(make("p", {}, "This run wrote no timeline."));
  if (run.lanes.length) {
    const waits = shares => Object.entries(shares).filter(([what, part]) => what !== "work" && part > 0.005).sort((a, b) => b[1] - a[1]);
    main.append(make("h2", {}, "Shares of the recorded time"), table(["lane", "work", "waits for"], run.lanes.map(({lane, shares}) =>
      [lane, "work" in shares ? share(shares.work) : "", waits(shares).slice(0, 5).map(([what, part]) => `${what.replace(/^wait: /, "")} ${share(part)}`).join(", ")])));
  }
  showPrediction(main, run.prediction);
  const idle = Object.keys(DATA.metrics).filter(name => name.endsWith("idle_share"));
  const grid = make("div", {class: "charts"});
  main.append(grid);
  if (idle.length) chart("Idle shares", idle.map(hintOf).join("\n"), linesOf(idle), grid);
  showLags(grid, run);
  const lost = Object.entries(run.series).filter(([name]) => /^(dropped\/|wasted\/)/.test(name)).filter(([, series]) => series.last);
  if (lost.length) main.append(make("h2", {}, "Lost so far"), table(["what", "number", "unit"], lost.map(([name, series]) => [name, series.last, DATA.metrics[name][0]])));
  if (run.failures.length) {
    main.append(make("h2", {}, "Faults and recoveries"), table(["time", "process", "what happened"], run.failures.map(({time, who, ...rest}) =>
      [moment(time), shown(who), Object.entries(rest).map(([name, value]) => `${name}: ${shown(value)}`).join(", ")])));
  }
  if (run.resumes.length) main.append(make("h2", {}, "Resumes"), table(["resume"], run.resumes.map(resume => [shown(resume)])));
}
function showPrediction(main, {made, step_s, cases, problem}) {
  main.append(make("h2", {}, "Predicted with other settings"));
  if (problem) main.append(make("p", {}, `This run cannot be simulated: ${shown(problem)}.`));
  else if (!Array.isArray(cases) || !cases.length) main.append(make("p", {class: "dim"}, "monarch-rl report RUN --predict simulates the run with another split of the devices and another lag bound."));
  else {
    const percent = value => typeof value === "number" ? share(value) : "";
    main.append(table(["change", "trainer ranks", "replicas", "max-policy-lag", "s/step", "steps/h", "speed", "trainer idle", "generators idle", "mean lag"],
      cases.map(each => [shown(each.change), each.trainer_ranks, each.replicas, each.max_policy_lag ?? "none", each.step_s, 3600 / each.step_s,
        `× ${(cases[0].step_s / each.step_s).toFixed(2)}`, percent(each.trainer_idle_share), percent(each.generator_idle_share), each.lag_mean])),
      make("p", {class: "dim"}, `A prediction of ${moment(made)}: the run's own schedule, simulated with its measured times of steps, generation and transfers and its answers' lengths. ` +
        `As it was, a step took ${brief(step_s)} s, and ${brief(cases[0].step_s)} s are predicted. All other settings stay. It assumes a device of its own for each rank and replica, an update that takes ` +
        "less time in proportion to the ranks, and memory for the KV cache of all running requests; prefill and scores count as decoding."));
  }
}
function showLags(grid, run) {
  const lags = Object.entries(run.lags).map(([lag, tokens]) => [+lag, tokens]).sort((a, b) => a[0] - b[0]);
  if (!lags.length) return;
  const card = make("div", {class: "card"}, make("h3", {title: "Trained tokens of the rollouts here, by the number of updates since the version that sampled them"}, "Tokens by lag"));
  grid.append(card);
  const xs = lags.map(([lag]) => lag);
  draw(card, [{label: "lag"}, {label: "tokens", stroke: COLORS[0], fill: `${COLORS[0]}88`, paths: uPlot.paths.bars({size: [0.7, 60]}), points: {show: false}}],
    [], [xs, lags.map(([, tokens]) => tokens)], () => {}, {range: (_, low, high) => [0, high * 1.05]}, {range: () => [xs[0] - 0.7, xs.at(-1) + 0.7]}, "lag");
}
function showLanes(main, run) {
  const lanes = [...new Set(run.spans.map(span => span[0]))].sort();
  let begin = Infinity, end = -Infinity;
  for (const span of run.spans) { begin = Math.min(begin, span[4]); end = Math.max(end, span[5]); }
  const whole = [Math.max(begin, end - 200), end]; // the newest 200 s
  let view = [...whole];
  const canvas = make("canvas", {class: "lanes", height: 30 * lanes.length + 26, tabindex: 0, "aria-label": "timeline"});
  const row = new Map(lanes.map((lane, i) => [lane, i])), left = 150;
  main.append(make("h2", {}, "Timeline"), make("div", {class: "bar"},
    make("button", {onclick: () => zoom(0.5)}, "zoom in"), make("button", {onclick: () => zoom(2)}, "zoom out"),
    make("button", {onclick: () => { view = [begin, end]; paint(); }}, "all"),
    make("span", {class: "key"}, [["work", COLORS[0]], ["wait", "#d2992288"], ["fault", COLORS[6]]].map(([name, color]) => {
      const dot = make("i"); dot.style.background = color; return make("span", {}, dot, name); })),
    make("span", {class: "dim"}, "wheel: zoom, drag: move, hover: what, and who was waited for")), canvas);
  const x = time => left + (canvas.clientWidth - left - 4) * (time - view[0]) / (view[1] - view[0]);
  const timeAt = at => view[0] + (view[1] - view[0]) * (at - left) / (canvas.clientWidth - left - 4);
  function zoom(factor, at = (view[0] + view[1]) / 2) {
    view = view.map(edge => at + (edge - at) * factor);
    if (view[1] - view[0] < 0.01) view = [at - 0.005, at + 0.005];
    paint();
  }
  function paint() {
    const ratio = devicePixelRatio, height = 30 * lanes.length + 26;
    canvas.width = canvas.clientWidth * ratio;
    canvas.height = height * ratio;
    canvas.style.height = `${height}px`;
    const context = canvas.getContext("2d");
    context.scale(ratio, ratio);
    context.font = "12px system-ui, sans-serif";
    for (const [lane, kind, , , from, to] of run.spans) {
      if (to < view[0] || from > view[1]) continue;
      const a = Math.max(left, x(from)), b = Math.max(a + 0.5, x(to));
      context.fillStyle = kind === "work" ? COLORS[0] : "#d2992288";
      context.fillRect(a, 30 * row.get(lane) + (kind === "work" ? 3 : 16), b - a, 12);
    }
    context.fillStyle = css("--card");
    context.fillRect(0, 0, left - 2, height);
    context.fillStyle = css("--text");
    lanes.forEach((lane, i) => context.fillText(lane, 6, 30 * i + 18, left - 12));
    context.fillStyle = css("--dim");
    for (let i = 0; i <= 6; i++) {
      const time = view[0] + (view[1] - view[0]) * i / 6.5;
      context.fillText(`${(time - begin).toFixed(view[1] - view[0] < 5 ? 2 : 0)} s`, x(time), height - 8);
    }
    context.fillStyle = COLORS[6];
    for (const {time} of run.failures) if (time >= view[0] && time <= view[1]) context.fillRect(x(time) - 1, 0, 2, height - 22);
  }
  canvas.addEventListener("wheel", event => { event.preventDefault(); zoom(event.deltaY > 0 ? 1.25 : 0.8, timeAt(event.offsetX)); }, {passive: false});
  canvas.addEventListener("mousemove", event => {
    if (event.buttons & 1) {
      const moved = timeAt(event.offsetX) - timeAt(event.offsetX - event.movementX);
      view = view.map(edge => edge - moved);
      paint();
    }
    const lane = lanes[Math.floor(event.offsetY / 30)], at = timeAt(event.offsetX), upper = event.offsetY % 30 < 15.5;
    const fault = run.failures.find(({time}) => Math.abs(x(time) - event.offsetX) < 3);
    const hit = run.spans.filter(span => span[0] === lane && span[4] <= at && span[5] >= at);
    const span = hit.find(span => (span[1] === "work") === upper) ?? hit[0];
    showTip(event, fault ? `${shown(fault.who)}: ${shown(fault.cause ?? "back")}` : span && event.offsetX >= left ?
      `${span[0]}: ${span[1] === "work" ? "" : "waits: "}${shown(span[2])}${span[3] ? `\nwaited for: ${shown(span[3])}` : ""}\n${((span[5] - span[4]) * 1000).toFixed(0)} ms` : "");
  });
  canvas.addEventListener("mouseleave", () => tip.remove());
  repaints.push(paint);
  paint();
}
