// Against a running installation: FAIRWAY_TEST_HTTP, FAIRWAY_TEST_GRPC, FAIRWAY_TEST_KEY, FAIRWAY_TEST_MODEL.
import assert from "node:assert/strict";
import { execFileSync } from "node:child_process";
import { randomUUID } from "node:crypto";
import { after, before, test } from "node:test";

import { Code, ConnectError } from "@connectrpc/connect";

import { httpClient, inferenceClient, serverEvents, SocketClosed, StreamSocket, type Schemas } from "../src/index.js";

function setting(name: string): string {
  const value = process.env[`FAIRWAY_TEST_${name}`];
  assert(value, `FAIRWAY_TEST_${name} is not set`);
  return value;
}

const http = setting("HTTP");
const grpc = setting("GRPC");
const key = setting("KEY");
const model = setting("MODEL");
const CHAT = "/v1/chat/completions";
const body = {
  model,
  messages: [{ role: "user", content: "Once upon a time" }],
  max_tokens: 24,
  temperature: 0,
} satisfies Schemas["ChatBody"];

type Chunk = { choices: { delta: { content?: string } }[] };
const textOf = (data: unknown): string =>
  typeof data === "string" ? "" : ((data as Chunk).choices[0]?.delta.content ?? "");

async function whole(): Promise<string> {
  const { data, error } = await httpClient(http, key).POST(CHAT, { body });
  assert(data, JSON.stringify(error));
  return data.choices[0]?.message.content ?? "";
}

let socket: StreamSocket;
before(async () => {
  socket = await StreamSocket.open(http, key);
});
after(() => socket.close());

test("an answer over HTTP is typed, and an error too", async () => {
  const { data } = await httpClient(http, key).POST(CHAT, { body });
  assert(data);
  assert.equal(data.model, model);
  assert.equal(data.usage.completion_tokens, 24);
  const wrong = await httpClient(http, key).POST(CHAT, { body: { ...body, model: "none" } });
  assert.equal(wrong.response.status, 404);
  assert.equal(wrong.error?.error.code, "model_not_found");
  const models = await httpClient(http, key).GET("/v1/models");
  assert(models.data?.data.some((each) => each.id === model));
});

test("events over HTTP and over a socket are one text", async () => {
  const expected = await whole();
  const { data } = await httpClient(http, key).POST(CHAT, { body: { ...body, stream: true }, parseAs: "stream" });
  let overHttp = "";
  for await (const event of serverEvents(data as unknown as ReadableStream<Uint8Array>)) {
    if (event.data !== "[DONE]") overHttp += textOf(JSON.parse(event.data));
  }
  assert.equal(overHttp, expected);
  const many = Array.from({ length: 8 }, async () => {
    let text = "";
    for await (const message of socket.request(CHAT, { ...body, stream: true })) {
      if (message.type === "event") text += textOf(message.data);
      if (message.type === "end") assert(message.complete);
    }
    return text;
  });
  assert.deepEqual(await Promise.all(many), Array(8).fill(expected));
});

test("a request of a lost socket continues on another without repetition", async () => {
  const expected = await whole();
  const headers: Record<string, string> = { "idempotency-key": randomUUID() };
  const first = await StreamSocket.open(http, key);
  let text = "";
  await assert.rejects(async () => {
    for await (const message of first.request(CHAT, { ...body, stream: true }, headers)) {
      if (message.type !== "event" || message.event_id === undefined) continue;
      if (text !== "") {
        first.terminate(); // this event and those behind it are lost
        await new Promise((resolve) => setTimeout(resolve, 100));
        throw new SocketClosed(1006, "");
      }
      text += textOf(message.data);
      headers["last-event-id"] = message.event_id;
    }
  }, SocketClosed);
  assert(text !== "" && text !== expected);
  for await (const message of socket.request(CHAT, { ...body, stream: true }, headers)) {
    assert(message.type !== "answer");
    if (message.type === "event") text += textOf(message.data);
  }
  assert.equal(text, expected);
});

test("leaving the loop cancels one request of a socket, and a wrong one has an answer", async () => {
  for await (const message of socket.request(CHAT, { ...body, stream: true, max_tokens: 100 })) {
    if (message.type === "event") break;
  }
  for await (const message of socket.request(CHAT, { ...body, model: "none" })) {
    assert(message.type === "answer");
    assert.equal(message.status, 404);
  }
  await assert.rejects(StreamSocket.open(http, key.slice(0, -1) + "x"), /401/);
});

test("gRPC streams tokens and has typed errors", async () => {
  const client = inferenceClient(grpc, key);
  const input = { case: "prompt", value: "Once upon a time" } as const;
  const generation = { model, input, maxOutputTokens: 8, sampling: { temperature: 0 } };
  let text = "";
  let tokens = 0;
  for await (const { event } of client.generate({ generation })) {
    if (event.case === "chunk") text += event.value.text;
    if (event.case === "finished") tokens = event.value.usage?.outputTokens ?? 0;
  }
  assert.equal(tokens, 8);
  const complete = await client.complete({ generation });
  assert(complete.choices[0]?.text.startsWith(text));
  await assert.rejects(client.complete({ generation: { ...generation, model: "none" } }), (error: unknown) => {
    assert(error instanceof ConnectError);
    return error.code === Code.NotFound;
  });
});

test("the example prints a text", () => {
  const script = new URL("../examples/chat.js", import.meta.url).pathname;
  const printed = execFileSync(process.execPath, [script, http, key, model, "Once upon a time"]);
  assert(printed.toString().trim().length > 0);
});
