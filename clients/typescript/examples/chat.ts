// node dist/examples/chat.js http://127.0.0.1:8080 KEY MODEL "Once upon a time"
import { httpClient, serverEvents } from "../src/index.js";

const [baseUrl = "", apiKey = "", model = "", text = ""] = process.argv.slice(2);
const { data, error } = await httpClient(baseUrl, apiKey).POST("/v1/chat/completions", {
  body: { model, messages: [{ role: "user", content: text }], stream: true, max_tokens: 32 },
  parseAs: "stream",
});
if (error) throw new Error(error.error.message);
for await (const event of serverEvents(data as unknown as ReadableStream<Uint8Array>)) {
  if (event.data === "[DONE]") break;
  const chunk = JSON.parse(event.data) as { choices: { delta: { content?: string } }[] };
  process.stdout.write(chunk.choices[0]?.delta.content ?? "");
}
process.stdout.write("\n");
