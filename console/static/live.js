"use strict";
// Replaces the block `live` of an open page. Without this script the page shows what it was loaded with.
(() => {
  const region = document.getElementById("live");
  const status = document.getElementById("live-status");
  const toggle = document.getElementById("live-toggle");
  if (!region || !toggle) return;
  const everyMs = Number(region.dataset.every) * 1000;
  let last = "", lastTime = Date.now(), paused = false, timer = 0;

  const report = (text) => { if (status.textContent !== text) status.textContent = text; };

  // An update would take the form from under the person who fills it in.
  const isInUse = () => region.querySelector("details.confirm[open]") !== null
    || (region.contains(document.activeElement) && document.activeElement.matches("input, select, textarea"))
    || !document.getSelection().isCollapsed;

  function replace(html) {
    if (html === last) return;
    const open = [...region.querySelectorAll("details[open][id]")].map((each) => each.id);
    const scrolled = [...region.querySelectorAll(".scroll[id]")].map((each) => [each.id, each.scrollLeft]);
    const active = document.activeElement;
    const label = region.contains(active) ? (active.id || active.getAttribute("aria-label") || active.textContent) : null;
    region.innerHTML = html;
    last = html;
    for (const id of open) document.getElementById(id)?.setAttribute("open", "");
    for (const [id, left] of scrolled) { const found = document.getElementById(id); if (found) found.scrollLeft = left; }
    if (label !== null) {
      const same = [...region.querySelectorAll("a, button, summary, [tabindex]")].find(
        (each) => (each.id || each.getAttribute("aria-label") || each.textContent) === label);
      same?.focus({ preventScroll: true });
    }
    document.dispatchEvent(new CustomEvent("live"));
  }

  async function update() {
    try {
      const response = await fetch(location.href, { headers: { "x-part": "live" }, signal: AbortSignal.timeout(15000) });
      if (response.status === 401) { location.reload(); return; }
      if (!response.ok) throw new Error(String(response.status));
      const html = await response.text();
      if (paused) return;
      if (isInUse()) { report("Updates wait for what you do here"); return; }
      replace(html);
      lastTime = Date.now();
      report("");
    } catch {
      report(`No answer from the console for ${Math.round((Date.now() - lastTime) / 1000)} s; shown is the state of before`);
    }
  }

  async function loop() {
    if (!paused && !document.hidden) await update();
    timer = setTimeout(loop, everyMs);
  }

  toggle.hidden = false;
  toggle.addEventListener("click", () => {
    paused = !paused;
    toggle.setAttribute("aria-pressed", String(paused));
    report(paused ? "Updates are paused" : "");
  });
  document.addEventListener("visibilitychange", () => {
    if (document.hidden) return;
    clearTimeout(timer);
    loop();
  });
  timer = setTimeout(loop, everyMs);
})();
