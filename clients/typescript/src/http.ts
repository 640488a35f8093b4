// The HTTP API, with the types of its OpenAPI document.
import { EventSourceParserStream, type EventSourceMessage } from "eventsource-parser/stream";
import createClient, { type Client } from "openapi-fetch";

import type { components, paths } from "./gen/openapi.js";

export type Schemas = components["schemas"];
export type HttpClient = Client<paths, "application/json">;

/** Return a client of every route: `client.POST("/v1/chat/completions", { body })`. */
export function httpClient(baseUrl: string, apiKey: string): HttpClient {
  return createClient<paths, "application/json">({ baseUrl, headers: { authorization: `Bearer ${apiKey}` } });
}

/**
 * Yield the server-sent events of an answer that was asked for with `parseAs: "stream"`.
 *
 * An error in the middle is an event whose data has `error`. With an idempotency key, a request with
 * `last-event-id` continues behind the `id` of an event.
 */
export async function* serverEvents(answer: ReadableStream<Uint8Array>): AsyncGenerator<EventSourceMessage> {
  const text = new TextDecoderStream() as unknown as ReadableWritablePair<string, Uint8Array>;
  const reader = answer.pipeThrough(text).pipeThrough(new EventSourceParserStream()).getReader();
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      yield value;
    }
  } finally {
    await reader.cancel();
  }
}
