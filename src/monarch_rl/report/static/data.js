// The page's data, and how elements are made. Text is only ever set by textContent.
let DATA = null;
const loaded = new Map(); // rows of groups, by name
const pieces = new Map(); // by number, a promise of whether the piece could be loaded
const waitingFor = new Map(); // by number of a piece that is being loaded, what resolves its promise

function bytesOf(base64) {
  const text = atob(base64), bytes = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
  return bytes;
}
async function unpack(base64) {
  const stream = new Blob([bytesOf(base64)]).stream().pipeThrough(new DecompressionStream("deflate"));
  return JSON.parse(await new Response(stream).text());
}
function arrayOf(base64, Kind) {
  if (typeof base64 !== "string") return null;
  try {
    const bytes = bytesOf(base64);
    return new Kind(bytes.buffer, 0, Math.floor(bytes.length / Kind.BYTES_PER_ELEMENT));
  } catch (error) {
    return null; // no base64: damaged
  }
}
// Values for uPlot, in which null is a gap.
function valuesOf(base64) {
  return Array.from(arrayOf(base64, Float32Array), value => (Number.isNaN(value) ? null : value));
}

// A piece calls this when its script runs.
globalThis.__piece = (number, base64) => {
  const done = waitingFor.get(number);
  waitingFor.delete(number);
  unpack(base64).then(groups => { Object.assign(DATA.inside, groups); done?.(true); }, () => done?.(false));
};
// The rows of a group; null if the piece that holds it is missing or damaged.
async function rowsOf(group) {
  if (loaded.has(group.name)) return loaded.get(group.name);
  if (!(group.name in DATA.inside) && !(await addPiece(group.piece))) return null;
  const rows = group.name in DATA.inside ? await unpack(DATA.inside[group.name]) : null;
  loaded.set(group.name, rows);
  return rows;
}
function addPiece(number) {
  if (!pieces.has(number)) pieces.set(number, new Promise(resolve => {
    waitingFor.set(number, resolve);
    const script = document.createElement("script");
    script.src = `${DATA.pieces_at.split("/").map(encodeURIComponent).join("/")}/${String(number).padStart(3, "0")}.js`;
    script.onerror = () => resolve(false);
    script.onload = () => { if (waitingFor.delete(number)) resolve(false); }; // damaged: it has not called __piece
    document.head.append(script);
  }));
  return pieces.get(number);
}

// make("td", {class: "number", title: "..."}, "text", child, ...)
function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value);
  }
  for (const child of children.flat()) {
    if (child === null || child === undefined) continue;
    element.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
  return element;
}
function table(headings, rows) {
  return make("table", {}, headings.length ? make("tr", {}, headings.map(text => make("th", {}, text))) : null,
    rows.map(cells => make("tr", {}, cells.map(cell =>
      make("td", {class: typeof cell === "number" ? "number" : null}, typeof cell === "number" ? brief(cell) : cell)))));
}
function brief(value) {
  if (typeof value !== "number" || !Number.isFinite(value)) return "–";
  if (Number.isInteger(value) && Math.abs(value) < 1e15) return value.toLocaleString("en");
  return Math.abs(value) >= 1e5 || (value !== 0 && Math.abs(value) < 1e-3) ? value.toExponential(2) : String(+value.toPrecision(4));
}
function shown(value) { return typeof value === "string" ? value : value === undefined ? "" : JSON.stringify(value); }
function share(value) { return `${(100 * value).toFixed(1)} %`; }
function moment(seconds) { return typeof seconds === "number" ? new Date(seconds * 1000).toLocaleString() : ""; }

// What is looked at stands in the address, so that a reload or a link shows the same.
const STATE = {screen: "learn", run: "0", x: "step", group: "", episode: "0", sequence: "0", color: "version", kind: "", task: "", finish: "",
  step: "", text: "", least: "", theme: ""};
const STANDARD = {...STATE};
function readState() {
  for (const [name, value] of new URLSearchParams(location.hash.slice(1))) if (name in STATE) STATE[name] = value;
}
function setState(changes) {
  Object.assign(STATE, changes);
  const parts = new URLSearchParams();
  for (const name in STATE) if (STATE[name] !== STANDARD[name]) parts.set(name, STATE[name]);
  history.replaceState(null, "", `#${parts}`);
}
function currentRun() { return DATA.runs[+STATE.run] ?? DATA.runs[0]; }

const tip = make("div", {class: "tip"});
function showTip(event, text) {
  if (!text) { tip.remove(); return; }
  tip.textContent = text;
  document.body.append(tip);
  tip.style.left = `${Math.max(0, Math.min(event.clientX + 12, innerWidth - tip.offsetWidth - 4))}px`;
  tip.style.top = `${Math.max(0, Math.min(event.clientY + 14, innerHeight - tip.offsetHeight - 4))}px`;
}
