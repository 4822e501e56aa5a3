// Does one thing with OpenAI's client and prints what it saw: node openai.mjs '{"url", "key", "method", "request"}'
import OpenAI from "openai";
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
    async models() {
      const ids = [];
      for await (const model of client.models.list()) ids.push(model.id);
      return ids;
    },
  };
});
