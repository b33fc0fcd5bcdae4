// What was run: settings, versions, machine, command, log.
function showRun(main) {
  const run = currentRun(), state = run.state;
  const part = (title, ...children) => main.append(make("h2", {}, title), ...children);
  const lines = [["state", [state.state, state.cause].filter(Boolean).join(": ") || "unknown"], ["folder", run.folder],
    ["started", moment(state.started)], ["ended", moment(state.ended ?? (["running", "killed"].includes(state.state) ? null : state.time))],
    ["steps", state.steps], ["recipe", state.recipe?.path],
    ["command", Array.isArray(state.command) ? state.command.map(shown).join(" ") : null],
    ["commit", state.git ? `${shown(state.git.commit)}${state.git.dirty ? " (with changes)" : ""}` : null],
    ["monarch_rl", state.version], ["Python", state.python]];
  main.append(table([], lines.filter(([, value]) => value !== null && value !== undefined && value !== "").map(([name, value]) => [name, shown(value)])));
  if (run.differs.length) {
    part("Settings that differ from the recipe's defaults", table(["flag", "value", "default"],
      run.differs.map(([name, value, standard]) => [`--${name}`, shown(value), shown(standard)])));
  }
  if (run.settings.length) {
    main.append(make("details", {open: !run.differs.length}, make("summary", {}, run.differs.length ? `${run.settings.length} other settings` : "Settings"),
      table(["flag", "value"], run.settings.map(([name, value]) => [`--${name}`, shown(value)]))));
  }
  if (Array.isArray(state.attempts) && state.attempts.length > 1) {
    part("Attempts", table(["started", "resumed from", "command"], state.attempts.filter(Boolean).map(attempt => [moment(attempt.started), shown(attempt.resumed_from ?? ""), shown(attempt.command ?? "")])));
  }
  if (Array.isArray(state.hosts)) {
    part("Machines", table(["name", "cores", "GiB", "system", "GPUs", "driver"], state.hosts.filter(Boolean).map(host =>
      [host.name, host.cores, host.memory_gib, host.os, host.gpus, host.driver].map(value => shown(value ?? "")))));
  }
  if (state.packages && typeof state.packages === "object") {
    main.append(make("details", {}, make("summary", {}, "Packages"), table(["package", "version"], Object.entries(state.packages).map(([name, version]) => [name, shown(version)]))));
  }
  if (run.recipe) main.append(make("details", {}, make("summary", {}, "Recipe"), make("pre", {}, run.recipe)));
  if (run.log) {
    part("End of the log", make("pre", {tabindex: 0}, run.log));
  }
}
