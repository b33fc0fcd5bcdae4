// The rollouts: a list of groups, a group's answers side by side, and one episode with its tokens.
let visible = []; // the groups that the filters leave

function showRollouts(main) {
  const groups = currentRun().groups;
  if (!groups.length) { main.append(make("p", {}, "This run wrote no rollouts.")); return; }
  const list = make("div", {class: "list"}), detail = make("div", {id: "detail"});
  const select = (name, title, values) => make("select", {"aria-label": title, onchange: event => { setState({[name]: event.target.value}); fill(); }},
    make("option", {value: ""}, title), values.map(value => make("option", {value, selected: STATE[name] === value}, value)));
  const input = (name, title, id) => {
    const element = make("input", {placeholder: title, "aria-label": title, id, size: name === "text" ? 24 : 9,
      oninput: event => { setState({[name]: event.target.value}); fill(); }});
    element.value = STATE[name];
    return element;
  };
  const all = key => [...new Set(groups.flatMap(group => group[key]))].sort();
  const fill = () => fillList(list, detail);
  main.append(make("div", {class: "bar"}, select("kind", "every kind", all("kinds")), select("task", "every task", all("task")),
    select("finish", "every end", all("finish")), input("step", "step: 5 or 5-9"), input("least", "reward ≥"), input("text", "text of the prompt (/)", "filter"),
    make("button", {title: "search also the answers, of all groups: their files are loaded", onclick: async () => {
      for (const group of groups) {
        await rowsOf(group);
        if (!list.isConnected) return; // another screen or run was chosen meanwhile
      }
      fill();
    }}, "search answers"), make("span", {class: "dim", id: "count"})), make("div", {class: "split"}, list, detail));
  fill();
}

function fillList(list, detail) {
  const [from, to] = STATE.step.split("-").map(Number), words = STATE.text.toLowerCase();
  const said = row => JSON.stringify([row.messages, row.turns.map(turn => turn.sampled)]).toLowerCase();
  visible = currentRun().groups.filter(group =>
    (!STATE.kind || group.kinds.includes(STATE.kind)) && (!STATE.task || group.task === STATE.task) &&
    (!STATE.finish || group.finish.includes(STATE.finish)) &&
    (!STATE.step || (group.step !== null && group.step >= from && group.step <= (STATE.step.includes("-") ? to || Infinity : from))) &&
    (!STATE.least || (group.best !== null && group.best >= +STATE.least)) &&
    (!words || group.prompt.toLowerCase().includes(words) || (loaded.get(group.name) ?? []).some(row => said(row).includes(JSON.stringify(words).slice(1, -1)))));
  document.getElementById("count").textContent = `${visible.length} of ${currentRun().groups.length} groups`;
  const at = Math.max(0, visible.findIndex(group => group.name === STATE.group));
  // Rows far from the chosen one are added when they are asked for.
  const first = Math.max(0, at - 200), last = first + 500;
  const body = visible.slice(first, last).map(group => make("tr", {class: "row", "data-group": group.name, onclick: () => choose(group)},
    make("td", {}, group.kinds.join(", "), group.set ? ` ${group.set}` : ""), make("td", {class: "number"}, group.step ?? (group.version === null ? "" : `v${group.version}`)),
    make("td", {}, group.task), make("td", {class: "number"}, group.reward === null ? "–" : brief(group.reward)),
    make("td", {}, make("div", {class: "text"}, group.prompt.slice(-80)))));
  list.replaceChildren(make("table", {}, make("tr", {}, ["kind", "step", "task", "reward", "prompt"].map(text => make("th", {}, text))), body));
  if (last < visible.length) list.append(make("p", {class: "dim"}, `${visible.length - last} more: narrow the filters`));
  if (visible.length) choose(visible[at], STATE.episode, STATE.sequence); else detail.replaceChildren(make("p", {}, "No group passes the filters."));
}
function moveBy(places) {
  const at = visible.findIndex(group => group.name === STATE.group);
  if (visible[at + places]) choose(visible[at + places]);
}
async function choose(group, episode = "0", sequence = "0") {
  setState({group: group.name, episode, sequence});
  for (const row of document.querySelectorAll("tr.row")) {
    row.classList.toggle("selected", row.dataset.group === group.name);
    if (row.dataset.group === group.name) row.scrollIntoView({block: "nearest"});
  }
  const rows = await rowsOf(group), detail = document.getElementById("detail");
  if (detail && STATE.group === group.name) showGroup(detail, group, rows); // else another was chosen meanwhile
}

function showGroup(detail, group, rows) {
  detail.replaceChildren(make("h2", {}, `Group ${group.group}${group.step === null ? "" : `, trained in step ${group.step}`}`));
  if (rows === null) {
    detail.append(make("p", {class: "note"}, `These rollouts are in the file ${DATA.pieces_at}/${String(group.piece).padStart(3, "0")}.js beside the page, which is missing or damaged. Copy the folder along with the page, or make the page with --single.`));
    return;
  }
  const best = episodesOf(rows).map(episode => [meanReward(episode), episode]).sort((a, b) => b[0] - a[0]).map(([, episode]) => episode);
  const item = rows.find(row => "item" in row && row.item !== null);
  detail.append(make("div", {class: "text dim"}, shown(rows[0].prompt ?? "").slice(0, 2000)));
  if (item) detail.append(make("details", {}, make("summary", {}, "Item"), make("pre", {}, typeof item.item === "string" ? item.item : JSON.stringify(item.item, null, 1))));
  const others = currentRun().groups.filter(other => other !== group && other.index === group.index && other.index !== null && other.task === group.task && other.set === group.set && (other.group < 0) === (group.group < 0));
  if (others.length) {
    detail.append(make("p", {class: "bar"}, "The same prompt at other steps:", others.slice(0, 30).map(other =>
      make("button", {onclick: () => choose(other)}, `${other.step === null ? `version ${other.version ?? "?"}` : `step ${other.step}`}: ${other.reward === null ? "–" : brief(other.reward)}`))));
  }
  const shownAt = Math.min(+STATE.episode || 0, best.length - 1);
  detail.append(make("div", {class: "side"}, best.map((episode, i) => make("div", {class: `answer${i === shownAt ? " selected" : ""}`, tabindex: 0, role: "button",
    onkeydown: event => { if (event.key === "Enter") event.target.click(); },
    onclick: () => { setState({episode: String(i), sequence: "0"}); showGroup(detail, group, rows); }}, summaryOf(episode),
    make("div", {class: "text"}, answerOf(episode[0]).slice(-600))))));
  showSequences(detail, best[shownAt]);
}
// The sequences of each episode, one per seat and branch, in their order.
function episodesOf(rows) {
  const episodes = [], latest = new Map();
  for (const row of rows) {
    const key = `${row.kind} ${row.rollout}`;
    let episode = latest.get(key);
    if (!episode || episode.some(other => other.episode === row.episode)) { // an episode's sequences have different positions
      episodes.push(episode = []);
      latest.set(key, episode);
    }
    episode.push(row);
  }
  return episodes;
}
function meanReward(episode) {
  const rewards = episode.map(row => row.reward).filter(reward => reward !== null);
  return rewards.length ? rewards.reduce((sum, reward) => sum + reward, 0) / rewards.length : -Infinity;
}
function summaryOf(episode) {
  const [row] = episode, seats = new Set(episode.map(each => each.seat)).size, branches = episode.filter(each => each.fork).length;
  const facts = episode.length === 1 ? [row.seat, row.fork ? "branch" : "", row.finish_reason, `${row.tokens ?? "?"} tokens`]
    : [seats > 1 ? `${seats} seats` : "", branches ? `${branches} branch${branches > 1 ? "es" : ""}` : "",
      `${episode.reduce((sum, each) => sum + (each.tokens ?? 0), 0)} tokens`];
  return make("div", {}, make("b", {}, episode.length === 1 ? rewardOf(row) : episode.map(each => each.reward === null ? "–" : brief(each.reward)).join(" | ")),
    " ", make("span", {class: "dim"}, facts.filter(Boolean).join(", ")));
}
// The number of the earlier sequence that a branch shares its first turns with; -1 without one, or if its line was not read.
function parentOf(episode, row) {
  const {sequence, turns} = row.fork ?? {}, parent = episode[sequence];
  const same = parent && parent !== row && row.turns.slice(0, turns).every((turn, t) => turn.sampled === parent.turns[t]?.sampled);
  return same ? sequence : -1;
}
function nameOf(episode, i) {
  const row = episode[i], parent = parentOf(episode, row);
  return [`${i + 1}`, row.seat ? ` ${shown(row.seat)}` : "", row.fork ? (parent < 0 ? ", branch" : `, branch of ${parent + 1}`) : ""].join("");
}
// An episode: of several sequences, one at a time, chosen by tabs.
function showSequences(detail, episode) {
  const panel = make("div"), at = Math.min(+STATE.sequence || 0, episode.length - 1);
  if (episode.length === 1) { detail.append(panel); showEpisode(panel, episode, 0); return; }
  const tabs = episode.map((row, i) => make("button", {role: "tab", id: `tab${i}`, "aria-controls": "sequence", onclick: () => select(i)},
    `${nameOf(episode, i)}: ${rewardOf(row)}`));
  const select = i => {
    setState({sequence: String(i)});
    tabs.forEach((tab, t) => { tab.setAttribute("aria-selected", t === i); tab.tabIndex = t === i ? 0 : -1; });
    panel.setAttribute("aria-labelledby", `tab${i}`);
    panel.replaceChildren();
    showEpisode(panel, episode, i);
  };
  panel.id = "sequence";
  panel.setAttribute("role", "tabpanel");
  detail.append(make("h2", {}, "Seats and branches of the episode"), make("div", {class: "bar", role: "tablist", "aria-label": "seats and branches",
    onkeydown: event => {
      const last = tabs.length - 1, now = +STATE.sequence;
      const next = {ArrowLeft: now ? now - 1 : last, ArrowRight: now < last ? now + 1 : 0, Home: 0, End: last}[event.key];
      if (next === undefined) return;
      event.preventDefault();
      select(next);
      tabs[next].focus();
    }}, tabs), panel);
  select(at);
}
function moveTab(places) { document.querySelectorAll("[role=tab]")[+STATE.sequence + places]?.click(); }
function rewardOf(row) {
  if (row.kind === "failed") return "failed";
  const advantage = typeof row.advantage === "number" ? `, advantage ${brief(row.advantage)}` : "";
  return `${row.kind === "dropped" ? "dropped: " : ""}${row.reward === null ? "no reward" : brief(row.reward)}${advantage}`;
}
function answerOf(row) { return row.turns.map(turn => shown(turn.sampled)).join("\n…\n") || shown(row.failure?.reason ?? ""); }

function showEpisode(detail, episode, i) {
  repaints = [];
  const row = episode[i], parent = parentOf(episode, row), sharedTurns = row.fork?.turns ?? 0;
  const facts = [["reward", rewardOf(row)], ["parts", Object.entries(row.parts ?? {}).map(([name, value]) => `${name} ${brief(value)}`).join(", ")],
    ["seat", row.seat], ["branch", row.fork ? `${parent < 0 ? "" : `of sequence ${parent + 1}, `}after ${turnsOf(sharedTurns)}` : ""],
    ["end", row.finish_reason], ["dropped", row.dropped], ["worker", row.worker],
    ["versions", (row.versions ?? []).map(span => `${span[0]} (${span[1]} tokens)`).join(", ")],
    ["began", moment(row.began)], ["seconds", typeof row.began === "number" && typeof row.ended === "number" ?
      `${brief(row.ended - row.began)}: generating ${brief(row.generate_s)}, tools ${brief(row.tool_s)}, scoring ${brief(row.score_s)}` : ""],
    ["info", row.info && Object.keys(row.info).length ? JSON.stringify(row.info) : ""]];
  detail.append(make("h2", {}, "Episode"), table([], facts.filter(([, value]) => value).map(([name, value]) => [name, shown(value)])));
  if (row.failure) {
    detail.append(make("p", {class: "note"}, `${shown(row.failure.reason)}${row.failure.infrastructure ? " (infrastructure)" : ""} at ${shown(row.failure.place)}`),
      make("pre", {}, shown(row.failure.report)));
  }
  const shared = sharedTurns ? make("details", {class: "shared", open: true}, make("summary", {},
    `${turnsOf(sharedTurns)} shared with ${parent < 0 ? "an earlier sequence" : `sequence ${parent + 1}`}`)) : null;
  const boxOf = t => (t < sharedTurns ? shared : detail); // of turn t
  const tokens = tokensOf(row);
  if (tokens) showTokens(detail, tokens, shared, boxOf);
  else {
    if (shared) detail.append(shared);
    row.turns.forEach((turn, t) => boxOf(t).append(make("h2", {}, turnTitle(turn, t)), make("div", {class: "text dim"}, shown(turn.read)), make("div", {class: "tokens"}, make("div", {class: "text"}, shown(turn.sampled)))));
  }
  if (row.messages.length) detail.append(make("details", {open: !tokens}, make("summary", {}, `${row.messages.length} messages`), row.messages.map(showMessage)));
}
function turnsOf(count) { return `${count} turn${count === 1 ? "" : "s"}`; }
function turnTitle(turn, i) {
  return `Turn ${i + 1}${[typeof turn.reward === "number" ? `, reward ${brief(turn.reward)}` : "", typeof turn.seconds === "number" ? `, ${brief(turn.seconds)} s` : "",
    typeof turn.replica === "number" ? `, replica ${turn.replica}` : ""].join("")}`;
}
function showMessage(message) {
  const {role, content, ...rest} = message;
  const others = Object.entries(rest).filter(([, value]) => value !== null && value !== undefined && value !== "");
  return make("div", {class: "message"}, make("b", {class: message.failed ? "bad" : null}, shown(role)),
    make("div", {class: "text"}, typeof content === "string" ? content : content == null ? "" : JSON.stringify(content, null, 1)),
    others.length ? make("pre", {}, others.map(([name, value]) => `${name}: ${typeof value === "string" ? value : JSON.stringify(value, null, 1)}`).join("\n")) : null);
}

// The tokens of an episode with their columns, or null if the run did not write them.
function tokensOf(row) {
  const turns = [], columns = {logprob: [], version: []};
  for (const turn of row.turns) {
    const ends = arrayOf(turn.text_ends, Uint32Array);
    if (!ends) return null;
    turns.push({turn, texts: textsOf(new TextEncoder().encode(shown(turn.sampled)), ends), ids: arrayOf(turn.ids, Int32Array)});
    for (const [name, key, Kind] of [["logprob", "logprobs", Float32Array], ["version", "token_versions", Int32Array]]) {
      const values = arrayOf(turn[key], Kind);
      for (let i = 0; i < ends.length; i++) columns[name].push(values?.[i] ?? null);
    }
  }
  const count = columns.logprob.length, trained = row.trained;
  if (!count) return null;
  // Turns that a branch shares are trained in the earlier sequence: here their tokens have version -1, and no values.
  const own = columns.version.map(version => version !== -1), sampled = own.filter(Boolean).length;
  columns.version = columns.version.map((version, i) => (own[i] ? version : null));
  const column = (key, Kind) => {
    const values = trained && arrayOf(trained[key], Kind);
    let next = 0;
    return values && values.length === sampled ? own.map(is => (is ? values[next++] : null)) : null;
  };
  if (typeof row.step === "number") columns.lag = columns.version.map(version => (version === null ? null : row.step - 1 - version));
  const now = column("trainer_logprobs", Float32Array);
  if (now) {
    columns["trainer log-prob"] = now;
    columns.ratio = columns.logprob.map((value, i) => (value === null || now[i] === null ? null : Math.exp(now[i] - value)));
  }
  for (const [name, key, Kind] of [["log-prob in the last pass", "new_logprobs", Float32Array], ["entropy", "entropies", Float32Array],
    ["advantage", "advantages", Float32Array], ["weight", "weights", Float32Array], ["mask", "flags", Uint8Array]]) {
    const values = column(key, Kind);
    if (values) columns[name] = values;
  }
  return {turns, columns, count};
}
// The text of each token. A token may end inside a character, which then belongs to the token that ends it.
function textsOf(bytes, ends) {
  const decoder = new TextDecoder(), texts = [];
  let from = 0;
  for (const end of ends) {
    let to = Math.min(end, bytes.length);
    while (to > from && to < bytes.length && (bytes[to] & 0xc0) === 0x80) to--;
    texts.push(decoder.decode(bytes.subarray(from, to)));
    from = Math.max(from, to);
  }
  return texts;
}
const FLAGS = ["clipped", "importance weight", "importance weight at its bound", "masked"];
function flagsOf(value) { return FLAGS.filter((_, bit) => value & (1 << bit)).join(", ") || "none"; }
const FLAG_COLORS = ["#d29922", "#3f83d6", "#a371f7", "#f85149"];

// A column's colours: a function from value to CSS colour, and its scale.
function scaleOf(name, values) {
  if (name === "mask") return {of: value => (value ? `${FLAG_COLORS[31 - Math.clz32(value)]}88` : ""), flags: true};
  let low = Infinity, high = -Infinity;
  const value = name === "ratio" ? x => Math.log(x) : x => x;
  for (const each of values) { const x = each === null ? NaN : value(each); if (Number.isFinite(x)) { low = Math.min(low, x); high = Math.max(high, x); } }
  if (low > high) low = high = 0;
  if (name === "ratio" || name === "advantage") {
    const most = Math.max(Math.abs(low), Math.abs(high)) || 1;
    const of = x => (x >= 0 ? `rgba(47,154,82,${(0.85 * x / most).toFixed(3)})` : `rgba(217,69,77,${(-0.85 * x / most).toFixed(3)})`);
    return {low: -most, high: most, text: x => brief(name === "ratio" ? Math.exp(x) : x), plain: of, of: x => (x === null || !Number.isFinite(value(x)) ? "" : of(value(x)))};
  }
  const plain = x => `hsla(${(220 - 180 * (high > low ? (x - low) / (high - low) : 0)).toFixed(0)},75%,50%,0.4)`;
  return {low, high, text: brief, plain, of: x => (x === null || !Number.isFinite(x) ? "" : plain(x))};
}
function showTokens(detail, {turns, columns, count}, shared, boxOf) {
  if (!(STATE.color in columns)) STATE.color = "version";
  const scale = scaleOf(STATE.color, columns[STATE.color]);
  detail.append(make("div", {class: "bar"}, make("h2", {}, `${count.toLocaleString("en")} sampled tokens, coloured by`), make("span", {class: "printed"}, STATE.color),
    make("select", {"aria-label": "colour of tokens", onchange: event => { setState({color: event.target.value}); show(); }},
      Object.keys(columns).map(name => make("option", {value: name, selected: name === STATE.color}, name))), legend(scale)), shared ?? []);
  let first = 0;
  for (const [t, {turn, texts, ids}] of turns.entries()) {
    const start = first, box = make("div", {class: "tokens", tabindex: 0, dir: "auto"});
    first += texts.length;
    boxOf(t).append(make("h2", {}, turnTitle(turn, t)), make("div", {class: "text dim"}, shown(turn.read).slice(-5000)), box);
    let done = 0;
    const more = () => { // in parts, so that 100,000 tokens do not block the page
      const part = document.createDocumentFragment();
      for (const end = Math.min(done + 2000, texts.length); done < end; done++) {
        const span = document.createElement("span");
        span.textContent = texts[done] || "▫";
        span.style.backgroundColor = scale.of(columns[STATE.color][start + done]);
        span.dataset.i = done;
        part.append(span);
      }
      box.append(part);
    };
    more();
    repaints.push(() => { while (printing && done < texts.length) more(); });
    box.addEventListener("scroll", () => { if (done < texts.length && box.scrollTop + box.clientHeight > box.scrollHeight - 400) more(); });
    box.addEventListener("mousemove", event => {
      const i = event.target.dataset.i;
      if (i === undefined) { tip.remove(); return; }
      const at = start + +i;
      showTip(event, [`${JSON.stringify(texts[i])}${texts[i] ? "" : " (part of a character)"}${ids ? `, id ${ids[i]}` : ""}`,
        ...Object.entries(columns).map(([name, values]) => `${name}: ${name === "mask" ? flagsOf(values[at]) : brief(values[at])}`)].join("\n"));
    });
    box.addEventListener("mouseleave", () => tip.remove());
  }
}
function legend(scale) {
  if (scale.flags) {
    return make("span", {class: "key"}, FLAGS.map((name, bit) => { const dot = make("i"); dot.style.background = FLAG_COLORS[bit]; return make("span", {}, dot, name); }));
  }
  if (scale.low === scale.high) return make("span", {class: "dim"}, `all ${scale.text(scale.low)}`);
  const canvas = make("canvas", {width: 120, height: 10}), context = canvas.getContext("2d");
  for (let i = 0; i < 120; i++) {
    context.fillStyle = scale.plain(scale.low + (scale.high - scale.low) * i / 119);
    context.fillRect(i, 0, 1, 10);
  }
  return make("span", {class: "legend"}, scale.text(scale.low), canvas, scale.text(scale.high));
}
