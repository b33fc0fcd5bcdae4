// The frame: header, screens, keys.
const SCREENS = {learn: ["Learn", showLearn], rollouts: ["Rollouts", showRollouts], time: ["Time", showTime], run: ["Run", showRun]};
const main = make("main");

function show() {
  removePlots();
  tip.remove();
  main.replaceChildren();
  for (const button of document.querySelectorAll("nav button")) {
    if (button.dataset.screen === STATE.screen) button.setAttribute("aria-current", "page");
    else button.removeAttribute("aria-current");
  }
  for (const run of DATA.runs) for (const note of run.notes) main.append(make("div", {class: "note"}, note));
  SCREENS[STATE.screen][1](main);
}
function goTo(screen) { setState({screen}); show(); scrollTo(0, 0); }
function setTheme(theme) {
  const dark = theme ? theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  document.documentElement.classList.toggle("dark", dark);
}
// Paper is white: canvases are drawn for it, where they are, so that opened parts of the page stay open.
function setPrinting(on) {
  printing = on;
  setTheme(on ? "light" : STATE.theme);
  for (const plot of plots) plot.redraw(false, true);
  for (const repaint of repaints) repaint();
}
function onKey(event) {
  if (event.ctrlKey || event.altKey || event.metaKey) return;
  if (/^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName)) {
    if (event.key === "Escape") event.target.blur();
    return;
  }
  const screen = Object.keys(SCREENS)["1234".indexOf(event.key)];
  if (screen && event.key !== "") goTo(screen);
  else if (STATE.screen === "rollouts" && "jk".includes(event.key)) moveBy(event.key === "j" ? 1 : -1);
  else if (STATE.screen === "rollouts" && "hl".includes(event.key)) moveTab(event.key === "l" ? 1 : -1);
  else if (event.key === "/") { if (STATE.screen !== "rollouts") goTo("rollouts"); document.getElementById("filter")?.focus(); }
  else return;
  event.preventDefault();
}
async function start() {
  const began = performance.now();
  DATA = await unpack(document.getElementById("data").textContent);
  readState();
  if (!(STATE.screen in SCREENS)) STATE.screen = "learn";
  setTheme(STATE.theme);
  const picker = make("select", {"aria-label": "run", onchange: event => { setState({run: event.target.value, group: "", episode: "0", sequence: "0"}); show(); }},
    DATA.runs.map((run, i) => make("option", {value: i, selected: String(i) === STATE.run}, run.name)));
  document.body.append(make("header", {}, make("h1", {}, DATA.runs.length > 1 ? `${DATA.runs.length} runs` : DATA.runs[0].name),
    DATA.runs.length > 1 ? picker : null,
    make("span", {class: "dim"}, currentRun().state.state ?? ""),
    make("nav", {}, Object.entries(SCREENS).map(([screen, [title]], i) =>
      make("button", {"data-screen": screen, title: `key ${i + 1}`, onclick: () => goTo(screen)}, title))),
    make("button", {title: "dark or light", onclick: () => {
      const theme = document.documentElement.classList.contains("dark") ? "light" : "dark";
      setState({theme}); setTheme(theme); show();
    }}, "◐"),
    make("span", {class: "dim"}, `${DATA.reload_s ? "live, " : ""}as of ${moment(DATA.made)}`)), main);
  show();
  document.addEventListener("keydown", onKey);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { setTheme(STATE.theme); show(); });
  addEventListener("beforeprint", () => setPrinting(true));
  addEventListener("afterprint", () => setPrinting(false));
  let resized = 0;
  addEventListener("resize", () => { clearTimeout(resized); resized = setTimeout(() => { if (STATE.screen !== "rollouts") show(); }, 200); });
  // Not while something is searched or selected, which a reload would undo.
  const inUse = () => /^(INPUT|SELECT)$/.test(document.activeElement.tagName) || (STATE.screen === "rollouts" && STATE.text) || String(getSelection());
  if (DATA.reload_s) setInterval(() => { if (!document.hidden && !inUse()) location.reload(); }, 1000 * DATA.reload_s);
  globalThis.ready = performance.now() - began;
}
start().catch(error => {
  document.body.append(make("p", {class: "note"}, `This page cannot be shown: ${error}. It needs a browser of 2023 or newer.`));
  throw error;
});
