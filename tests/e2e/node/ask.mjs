// Asks one server everything test_openai_node.py wants to know, and prints the answers as
// one JSON object: {name: answer}. Judges nothing.
//
//   BASE_URL=http://127.0.0.1:8000/v1 API_KEY=... MODEL=... node ask.mjs

import OpenAI from "openai";

const { BASE_URL: baseURL, API_KEY: apiKey, MODEL: model } = process.env;
const client = new OpenAI({ baseURL, apiKey, maxRetries: 0, timeout: 60_000 });
const prompt = "What is one part, and what are two?";
const messages = [{ role: "user", content: prompt }];
const max_tokens = 24;

const complete = (fields) => client.completions.create({ model, prompt, max_tokens, ...fields });
const chat = (fields) => client.chat.completions.create({ model, messages, max_tokens, ...fields });

// What an answer says, without its id and time.
const said = (answer) => ({
  choices: answer.choices.map((choice) => ({
    index: choice.index,
    text: choice.text ?? choice.message.content,
    logprobs: choice.logprobs,
    finish_reason: choice.finish_reason,
  })),
  usage: answer.usage,
});

// The same from a stream; keeps how often a choice ended and whether the usage came last.
async function saidByStream(stream) {
  const choices = [];
  let usage = null;
  for await (const chunk of stream) {
    if (usage) throw new Error("a chunk after the usage");
    usage = chunk.usage ?? null;
    for (const { index, text, delta, logprobs, finish_reason } of chunk.choices) {
      const known = choices[index];
      const piece = text ?? delta.content;
      if (!known) {
        choices[index] = { index, text: piece, logprobs, finish_reason };
        continue;
      }
      if (known.finish_reason) throw new Error("a chunk after the end of its choice");
      known.text += piece;
      known.finish_reason = finish_reason;
      for (const [name, column] of Object.entries(logprobs ?? {})) {
        known.logprobs[name] = known.logprobs[name].concat(column);
      }
    }
  }
  return { choices, usage };
}

async function bothWays(ask, fields) {
  const stream_options = { include_usage: true };
  return {
    whole: said(await ask(fields)),
    stream: await saidByStream(await ask({ ...fields, stream: true, stream_options })),
  };
}

// The class an error is an instance of, as its users would ask for it.
async function refusal(promise) {
  const classes = [
    "BadRequestError",
    "AuthenticationError",
    "NotFoundError",
    "APIConnectionTimeoutError",
  ];
  try {
    await promise;
  } catch (error) {
    const { status, code, param, type, message } = error;
    const name = classes.find((known) => error instanceof OpenAI[known]) ?? error.name;
    return { class: name, status, code, param, type, message };
  }
  return { class: null };
}

// Leave a stream after some chunks, in one of the two ways there are.
async function leave(ask, how) {
  const stream = await ask({ max_tokens: 900, n: 2, ignore_eos: true, stream: true });
  let num_chunks = 0;
  for await (const _ of stream) {
    num_chunks += 1;
    if (num_chunks < 5) continue;
    if (how === "abort") stream.controller.abort();
    else break;
  }
  return { num_chunks };
}

async function helper() {
  const runner = client.chat.completions.stream({ model, messages, max_tokens, seed: 5 });
  let deltas = "";
  runner.on("content", (delta) => (deltas += delta));
  const content = await runner.finalContent();
  return { deltas, content, whole: said(await chat({ seed: 5 })) };
}

const KIND = {
  type: "object",
  properties: { kind: { enum: ["small", "large"] } },
  required: ["kind"],
  additionalProperties: false,
};

// An object of the client's own class, as its parser makes it of the answer's text.
async function parsed() {
  const response_format = {
    ...{ type: "json_schema", json_schema: { name: "kind", strict: true, schema: KIND } },
    ...{ $brand: "auto-parseable-response-format", $parseRaw: JSON.parse },
  };
  const answer = await client.chat.completions.parse({ model, messages, seed: 5, response_format });
  return answer.choices[0].message.parsed;
}

// A call that has to be made, run by the client's own runner.
async function called() {
  const given = [];
  const tool = {
    type: "function",
    function: { name: "choose", parameters: KIND, parse: JSON.parse, function: (args) => given.push(args) },
  };
  const tool_choice = { type: "function", function: { name: "choose" } };
  const runner = client.chat.completions.runTools({
    ...{ model, messages, seed: 5, stream: true, tools: [tool], tool_choice },
  });
  const call = await runner.finalFunctionToolCall();
  return { given, call };
}

async function response() {
  const asked = { model, input: prompt, max_output_tokens: max_tokens, temperature: 0 };
  const stream = client.responses.stream(asked);
  let deltas = "";
  stream.on("response.output_text.delta", (event) => (deltas += event.delta));
  const { output_text } = await stream.finalResponse();
  const chatted = said(await chat({ temperature: 0 })).choices[0].text;
  return { deltas, streamed: output_text, whole: (await client.responses.create(asked)).output_text, chatted };
}

async function models() {
  const names = [];
  for await (const found of client.models.list()) names.push(found.id);
  return names;
}

const wrongKey = new OpenAI({ baseURL, apiKey: "sk-of-another", maxRetries: 0 });
const questions = {
  "completions, sampled": () => bothWays(complete, { seed: 7, temperature: 0.9, top_p: 0.9 }),
  "completions, choices": () => bothWays(complete, { seed: 7, n: 3 }),
  "completions, logprobs": () => bothWays(complete, { seed: 9, logprobs: 3 }),
  "completions, echo": () => bothWays(complete, { seed: 7, echo: true }),
  "completions, one token": () => bothWays(complete, { seed: 7, max_tokens: 1 }),
  "completions, end at once": () => bothWays(complete, { logit_bias: { 2: 100 } }),
  "completions, stop": async () => {
    const { text } = (await complete({ temperature: 0 })).choices[0];
    const stop = [text.slice(5, 8)];
    return { text, at: text.indexOf(stop[0]), ...(await bothWays(complete, { temperature: 0, stop })) };
  },
  "chat, sampled": () => bothWays(chat, { seed: 7, temperature: 0.9 }),
  "chat, choices": () => bothWays(chat, { seed: 7, n: 3 }),
  "chat, logprobs": () => bothWays(chat, { seed: 7, logprobs: true, top_logprobs: 2 }),
  "chat, helper": helper,
  "chat, parsed": parsed,
  "chat, called": called,
  "response": response,
  "models": models,
  "bad temperature": () => refusal(complete({ temperature: -1 })),
  "bad prompt": () => refusal(complete({ prompt: "x".repeat(2000), stream: true })),
  "unknown model": () => refusal(chat({ model: "gpt-6" })),
  "wrong key": () => refusal(wrongKey.models.list()),
  "impatience": () => refusal(
    client.completions.create(
      { model, prompt, max_tokens: 900, n: 8, ignore_eos: true }, { timeout: 100 },
    ),
  ),
  "completions, left by break": () => leave(complete, "break"),
  "chat, left by abort": () => leave(chat, "abort"),
};

const answers = {};
for (const [name, ask] of Object.entries(questions)) answers[name] = await ask();
process.stdout.write(JSON.stringify(answers));
