// Does one thing with OpenAI's client and prints what it saw: node openai.mjs '{"url", "key", "method", "request"}'
import OpenAI, { toFile } from "openai";
import { report } from "./report.mjs";

await report(({ url, key }) => {
  const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: key, maxRetries: 0 });
  return {
    create: (request) => client.chat.completions.create(request),
    async stream(request) {
      const stream = client.chat.completions.stream(request);
      let pieces = "";
      stream.on("content", (piece) => (pieces += piece));
      const whole = await stream.finalChatCompletion();
      return { ...whole, pieces };
    },
    async batch(contents) {
      const file = await client.files.create({ file: await toFile(Buffer.from(contents), "in.jsonl"), purpose: "batch" });
      let batch = await client.batches.create({
        input_file_id: file.id,
        endpoint: "/v1/chat/completions",
        completion_window: "24h",
      });
      while (!["completed", "failed"].includes(batch.status)) {
        await new Promise((resolve) => setTimeout(resolve, 200));
        batch = await client.batches.retrieve(batch.id);
      }
      const written = await (await client.files.content(batch.output_file_id)).text();
      return { lines: written.trim().split("\n") };
    },
    async models() {
      const ids = [];
      for await (const model of client.models.list()) ids.push(model.id);
      return ids;
    },
  };
});
