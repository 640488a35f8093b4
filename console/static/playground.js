"use strict";
// Keeps the conversation of this page and shows a generation as it streams. The key stays with the console.
(() => {
  const form = document.getElementById("playground");
  if (!form) return;
  const turns = document.getElementById("turns"), status = document.getElementById("run-status");
  const field = (id) => document.getElementById(id);
  let messages = [], running = null;

  function turn(role) {
    const item = document.createElement("li"), name = document.createElement("b");
    name.textContent = role;
    item.append(name);
    turns.append(item);
    return item;
  }

  function text(item, kind, value) {
    let block = item.lastElementChild;
    if (!block.classList.contains(kind)) {
      block = document.createElement("pre");
      block.className = kind;
      item.append(block);
    }
    block.textContent += value;
  }

  function call(item, answer, piece) {
    const one = answer.tool_calls[piece.index] ??= { id: "", name: "", arguments: "" };
    one.id ||= piece.id;
    one.name ||= piece.name;
    one.arguments += piece.arguments;
    let block = item.querySelector(`[data-call="${piece.index}"]`);
    if (!block) {
      block = document.createElement("pre");
      block.className = "call";
      block.dataset.call = piece.index;
      item.append(block);
    }
    block.textContent = `${one.name}(${one.arguments})`;
  }

  // The result of a call is the next message: the model goes on from there.
  function results(item, answer) {
    answer.tool_calls.forEach((one, index) => {
      const label = document.createElement("label"), input = document.createElement("textarea");
      label.textContent = `Result of ${one.name}`;
      input.rows = 2;
      input.dataset.id = one.id;
      input.className = "code result";
      label.append(input);
      item.append(label);
      if (index === 0) input.focus();
    });
  }

  function show(event, item, answer) {
    if (event.text !== undefined) { answer.content += event.text; text(item, "answer", event.text); }
    else if (event.reasoning !== undefined) text(item, "reasoning", event.reasoning);
    else if (event.call) call(item, answer, event.call);
    else if (event.accepted) status.textContent = `Request ${event.accepted.request}, seed ${event.accepted.seed}`;
    else if (event.error) status.textContent = `${event.error.message} (${event.error.reason})`;
    else if (event.finished) {
      const done = event.finished, ms = done.stages_ms;
      const first = ms.validate + ms.admit + ms.queue + ms.dispatch + ms.engine_wait + ms.prefill;
      status.textContent += `. ${done.prompt_tokens} tokens in (${done.cached_tokens} cached), ${done.output_tokens} out, first after ${Math.round(first)} ms, then ${Math.round(ms.decode)} ms; ${done.reason}`;
    }
  }

  // Returns whether the generation finished: a stream may also end by an error, or be cut.
  async function stream(response, item, answer) {
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "", finished = false;
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return finished;
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const event of lines.map((line) => JSON.parse(line))) {
        show(event, item, answer);
        finished ||= event.finished !== undefined;
      }
    }
  }

  // Adds the next turn to the conversation, and returns a function that takes it back.
  function added() {
    const conversation = messages, before = messages.length;
    const given = [...turns.querySelectorAll("textarea.result:enabled")];
    for (const input of given) {
      messages.push({ role: "tool", tool_call_id: input.dataset.id, content: input.value });
      input.disabled = true;
    }
    const message = field("message").value;
    if (message || !given.length) {
      messages.push({ role: "user", content: message });
      text(turn("user"), "answer", message);
    }
    return () => {
      conversation.length = before;
      for (const input of given) input.disabled = false;
    };
  }

  async function send(event) {
    event.preventDefault();
    if (running || !form.reportValidity()) return;
    const isChat = field("mode").value === "chat";
    const body = new URLSearchParams(new FormData(form));
    let takeBack = () => {}, finished = false;
    if (isChat) {
      takeBack = added();
      const system = field("system").value;
      body.set("messages", JSON.stringify([...(system ? [{ role: "system", content: system }] : []), ...messages]));
    } else {
      text(turn("text"), "answer", field("message").value);
    }
    const item = turn(isChat ? "assistant" : "continued"), answer = { role: "assistant", content: "", tool_calls: [] };
    running = new AbortController();
    field("send").disabled = true;
    field("stop").hidden = false;
    status.textContent = "Waiting";
    turns.setAttribute("aria-busy", "true");
    try {
      const response = await fetch("/playground/run", { method: "POST", body, signal: running.signal });
      if (response.redirected || response.status === 401) { location.reload(); return; }
      if (!(response.headers.get("content-type") || "").startsWith("application/x-ndjson")) {
        const page = new DOMParser().parseFromString(await response.text(), "text/html");
        show({ error: { message: page.querySelector(".notice p")?.textContent ?? "It failed", reason: String(response.status) } }, item, answer);
        return;
      }
      finished = await stream(response, item, answer);
      if (isChat && finished) {
        answer.tool_calls = answer.tool_calls.filter(Boolean);
        messages.push(answer);
        field("message").value = "";
        results(item, answer);
      }
    } catch (error) {
      status.textContent = error.name === "AbortError" ? "Stopped" : "The console does not answer";
    } finally {
      if (!finished) {
        // The message is still in its field, and the next Send would add it a second time.
        takeBack();
        text(item, "muted", isChat ? "Did not finish: the conversation goes on without this turn" : "Did not finish");
      }
      running = null;
      turns.setAttribute("aria-busy", "false");
      field("send").disabled = false;
      field("stop").hidden = true;
    }
  }

  form.addEventListener("submit", send);
  field("stop").addEventListener("click", () => running?.abort());
  field("clear").addEventListener("click", () => { running?.abort(); messages = []; turns.replaceChildren(); status.textContent = ""; });
  field("message").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) form.requestSubmit();
  });
})();
