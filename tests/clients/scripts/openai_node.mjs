// The features of OpenAI's SDK for Node. The harness is that of harness.py, in its protocol.
import OpenAI, { toFile } from "openai";

const target = JSON.parse(process.argv[2]);
const client = new OpenAI({ baseURL: `${target.url}/v1`, apiKey: target.key, maxRetries: 0, timeout: 60_000 });
const chat = {
  model: target.model,
  messages: [{ role: "user", content: "Write a function `add` that adds two numbers." }],
  max_tokens: 16,
  temperature: 0,
};
const text = { model: target.model, prompt: "def add(a, b):", max_tokens: 16, temperature: 0 };
const cities = ["Bern", "Oslo", "Rome"];
const weather = {
  type: "object",
  properties: {
    city: { type: "string", enum: cities },
    days: { type: "integer", minimum: 1, maximum: 7 },
  },
  required: ["city", "days"],
  additionalProperties: false,
};
const tool = {
  type: "function",
  function: { name: "get_weather", description: "The weather of a city.", parameters: weather },
};
// A small model that must call goes on calling.
const calling = {
  ...chat,
  model: target.agent,
  tools: [tool],
  tool_choice: "required",
  parallel_tool_calls: false,
  max_tokens: 160,
};
const response = { model: target.model, input: "def add(a, b):", max_output_tokens: 16, temperature: 0 };

class Wrong extends Error {}

function check(holds, found) {
  if (!holds) throw new Wrong(JSON.stringify(found));
}

function same(found, expected) {
  check(JSON.stringify(found) === JSON.stringify(expected), { found, expected });
}

function isWeather(json) {
  const found = typeof json === "string" ? JSON.parse(json) : json;
  same(Object.keys(found).sort(), ["city", "days"]);
  check(cities.includes(found.city) && found.days >= 1 && found.days <= 7, found);
}

async function raised(kind, call) {
  try {
    check(false, await call());
  } catch (error) {
    if (error instanceof kind) return error;
    throw error;
  }
}

async function all(stream) {
  const found = [];
  for await (const one of stream) found.push(one);
  return found;
}

const sleep = (ms) => new Promise((resolve) => setTimeout(resolve, ms));
const contentOf = (answer) => answer.choices[0].message.content;
const create = (options) => client.chat.completions.create(options);

const features = {
  async models() {
    const names = (await all(client.models.list())).map((model) => model.id);
    check(names.includes(target.model) && names.includes(target.agent), names);
    same((await client.models.retrieve(target.model)).id, target.model);
  },
  async completion() {
    const answer = await client.completions.create(text);
    check(answer.choices[0].text, answer);
    same(answer.usage.total_tokens, answer.usage.prompt_tokens + answer.usage.completion_tokens);
  },
  async completion_stream() {
    const whole = (await client.completions.create(text)).choices[0].text;
    const chunks = await all(await client.completions.create({ ...text, stream: true }));
    same(chunks.map((chunk) => chunk.choices[0].text).join(""), whole);
  },
  async chat() {
    const answer = await create(chat);
    check(contentOf(answer), answer);
    check(answer._request_id, "no request id");
  },
  async chat_stream() {
    const whole = contentOf(await create(chat));
    const chunks = await all(await create({ ...chat, stream: true }));
    same(chunks.map((chunk) => chunk.choices[0].delta.content ?? "").join(""), whole);
    same(await client.chat.completions.stream(chat).finalContent(), whole);
  },
  async stream_usage() {
    const { usage } = await create(chat);
    const options = { ...chat, stream: true, stream_options: { include_usage: true } };
    same((await all(await create(options))).at(-1).usage.completion_tokens, usage.completion_tokens);
  },
  async developer_role() {
    const messages = [{ role: "developer", content: "Be brief." }, ...chat.messages];
    check(contentOf(await create({ ...chat, messages })), messages);
  },
  async choices() {
    const options = { ...chat, temperature: 1.2, seed: 5, n: 3 };
    const answers = [await create(options), await create(options)];
    const texts = answers.map((answer) => answer.choices.map((choice) => choice.message.content));
    same(texts[0].length, 3);
    same(texts[0], texts[1]);
  },
  async stop() {
    const long = { ...text, max_tokens: 40 };
    const whole = (await client.completions.create(long)).choices[0].text;
    const middle = Math.floor(whole.length / 2);
    const stop = [whole.slice(middle, middle + 3)];
    const found = (await client.completions.create({ ...long, stop })).choices[0];
    same([found.text, found.finish_reason], [whole.split(stop[0])[0], "stop"]);
  },
  async logprobs() {
    const { content } = (await create({ ...chat, logprobs: true, top_logprobs: 3 })).choices[0].logprobs;
    check(content.length > 0 && content[0].top_logprobs.length === 3, content);
  },
  async hints() {
    const hinted = {
      ...chat,
      metadata: { trace: "1" },
      store: false,
      user: "someone",
      service_tier: "default",
      reasoning_effort: "low",
      verbosity: "low",
    };
    same(contentOf(await create(hinted)), contentOf(await create(chat)));
  },
  async json_object() {
    const { choices } = await create({ ...chat, max_tokens: 200, response_format: { type: "json_object" } });
    check(choices[0].message.content.startsWith("{"), choices);
    if (choices[0].finish_reason === "stop") JSON.parse(choices[0].message.content);
  },
  async json_schema() {
    const json_schema = { name: "weather", schema: weather, strict: true };
    const options = { ...chat, max_tokens: 64, response_format: { type: "json_schema", json_schema } };
    isWeather((await client.chat.completions.parse(options)).choices[0].message.parsed);
    isWeather(await client.chat.completions.stream(options).finalContent());
  },
  async tool_call() {
    const { message, finish_reason } = (await create(calling)).choices[0];
    same([finish_reason, message.tool_calls.length], ["tool_calls", 1]);
    isWeather(message.tool_calls[0].function.arguments);
  },
  async tool_stream() {
    const [whole] = contentOfCalls((await create(calling)).choices[0].message);
    const final = await client.chat.completions.stream(calling).finalChatCompletion();
    same(contentOfCalls(final.choices[0].message), [whole]);
  },
  async tool_result() {
    const { message } = (await create(calling)).choices[0];
    const result = { role: "tool", tool_call_id: message.tool_calls[0].id, content: '{"degrees": 7}' };
    const messages = [...chat.messages, message, result];
    check(contentOf(await create({ ...chat, model: target.agent, messages, tools: [tool] })), messages);
  },
  async agent_loop() {
    let called = "";
    const runner = client.chat.completions.runTools({
      ...calling,
      tools: [{ ...tool, function: { ...tool.function, parse: JSON.parse, function: note } }],
    }, { maxChatCompletions: 2 });
    function note(found) {
      called = found;
      return "7 degrees";
    }
    await runner.done();
    isWeather(called);
    check(runner.messages.some((message) => message.role === "tool"), runner.messages);
  },
  async reasoning() {
    const options = { ...chat, model: target.agent, chat_template_kwargs: { enable_thinking: true } };
    const { message } = (await create(options)).choices[0];
    check(message.reasoning_content && !message.content, message);
  },
  async responses() {
    const made = await client.responses.create(response);
    check(made.output_text, made);
    same((await client.responses.retrieve(made.id)).output_text, made.output_text);
    await client.responses.delete(made.id);
    await raised(OpenAI.NotFoundError, () => client.responses.retrieve(made.id));
  },
  async responses_stream() {
    const whole = (await client.responses.create(response)).output_text;
    const events = await all(await client.responses.create({ ...response, stream: true }));
    const deltas = events.filter((event) => event.type === "response.output_text.delta");
    same(deltas.map((event) => event.delta).join(""), whole);
    const final = await client.responses.stream(response).finalResponse();
    same(final.output_text, whole);
  },
  async responses_chain() {
    const first = await client.responses.create(response);
    const next = { ...response, input: "and", previous_response_id: first.id };
    check((await client.responses.create(next)).usage.input_tokens > first.usage.input_tokens, first.usage);
  },
  async responses_background() {
    const made = await client.responses.create({ ...response, background: true });
    let found = made;
    for (let tries = 0; tries < 200 && ["queued", "in_progress"].includes(found.status); tries++) {
      await sleep(100);
      found = await client.responses.retrieve(made.id);
    }
    check(found.output_text, found);
  },
  async responses_tools() {
    const offered = { type: "function", strict: true, ...tool.function };
    const options = { ...response, model: target.agent, tools: [offered], tool_choice: "required" };
    const made = await client.responses.create({
      ...options,
      parallel_tool_calls: false,
      max_output_tokens: 160,
    });
    isWeather(made.output.find((item) => item.type === "function_call").arguments);
  },
  async responses_schema() {
    const format = { type: "json_schema", name: "weather", schema: weather, strict: true };
    const made = await client.responses.parse({ ...response, max_output_tokens: 64, text: { format } });
    isWeather(made.output_parsed);
  },
  async embeddings() {
    const input = ["the fox", "a dog"];
    const plain = await client.embeddings.create({ model: target.embedder, input }); // as base64
    const floats = await client.embeddings.create({
      model: target.embedder,
      input,
      encoding_format: "float",
    });
    same(plain.data[0].embedding.length, 24);
    const near = (value, index) => Math.abs(value - floats.data[0].embedding[index]) < 1e-6;
    check(plain.data[0].embedding.every(near), plain.data[0]);
  },
  async batches() {
    const body = { ...chat, max_tokens: 4 };
    const url = "/v1/chat/completions";
    const lines = ["0", "1"].map((id) => JSON.stringify({ custom_id: id, method: "POST", url, body }));
    const file = await client.files.create({
      file: await toFile(Buffer.from(lines.join("\n")), "in.jsonl"),
      purpose: "batch",
    });
    let batch = await client.batches.create({
      input_file_id: file.id,
      endpoint: url,
      completion_window: "24h",
    });
    for (let tries = 0; tries < 200 && ["validating", "in_progress"].includes(batch.status); tries++) {
      await sleep(200);
      batch = await client.batches.retrieve(batch.id);
    }
    same(batch.status, "completed");
    const output = await (await client.files.content(batch.output_file_id)).text();
    same(output.trim().split("\n").length, 2);
  },
  async error_401() {
    const error = await raised(OpenAI.AuthenticationError, () =>
      client.withOptions({ apiKey: "wrong" }).models.list(),
    );
    same(error.code, "invalid_api_key");
  },
  async error_404() {
    const error = await raised(OpenAI.NotFoundError, () => create({ ...chat, model: "nope" }));
    same(error.code, "model_not_found");
  },
  async error_400() {
    const error = await raised(OpenAI.BadRequestError, () => create({ ...chat, temperature: 9 }));
    same(error.param, "temperature");
  },
  async error_429() {
    const limited = client.withOptions({ apiKey: target.limited_key });
    const error = await raised(OpenAI.RateLimitError, async () => {
      for (let tries = 0; tries < 20; tries++) await limited.completions.create(text);
    });
    check(Number(error.headers.get("retry-after")) > 0, [...error.headers]);
  },
  async retry() {
    const paced = client.withOptions({ apiKey: target.paced_key, maxRetries: 4 });
    for (let number = 0; number < 3; number++) check((await paced.completions.create(text)).choices, number);
  },
  async timeout() {
    const long = { ...text, max_tokens: 900, ignore_eos: true };
    await raised(OpenAI.APIConnectionTimeoutError, () => client.completions.create(long, { timeout: 200 }));
  },
  async cancel() {
    const stream = await client.completions.create({ ...text, max_tokens: 900, ignore_eos: true, stream: true });
    for await (const chunk of stream) {
      check(chunk.choices, chunk);
      break; // ends the request
    }
  },
  async idempotency() {
    const headers = { "Idempotency-Key": `node-${Date.now()}` };
    const options = { ...chat, temperature: 1.5 };
    const answers = [];
    for (let number = 0; number < 2; number++) {
      answers.push(await client.chat.completions.create(options, { headers }));
    }
    same(answers[0].id, answers[1].id);
  },
};

function contentOfCalls(message) {
  return message.tool_calls.map((call) => call.function.arguments);
}

console.log(JSON.stringify({ features: Object.keys(features) }));
for (const [feature, show] of Object.entries(features)) {
  let [outcome, evidence] = ["served", ""];
  try {
    await show();
  } catch (error) {
    outcome = "wrong";
    evidence = `${error?.constructor?.name}: ${error?.message}`.slice(0, 600);
    console.error(error);
  }
  console.log(JSON.stringify({ feature, outcome, evidence }));
}
process.exit(0); // no open connection keeps it
