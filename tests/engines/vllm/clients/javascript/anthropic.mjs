// Does one thing with Anthropic's client and prints what it saw: node anthropic.mjs '{"url", "key", "method", "request"}'
import Anthropic from "@anthropic-ai/sdk";
import { report } from "./report.mjs";

await report(({ url, key }) => {
  const client = new Anthropic({ baseURL: url, apiKey: key, maxRetries: 0 });
  return {
    create: (request) => client.messages.create(request),
    async stream(request) {
      const stream = client.messages.stream(request);
      let pieces = "";
      stream.on("text", (piece) => (pieces += piece));
      const whole = await stream.finalMessage();
      return { ...whole, pieces };
    },
    count: (request) => client.messages.countTokens(request),
    async models() {
      const ids = [];
      for await (const model of client.models.list()) ids.push(model.id);
      return ids;
    },
  };
});
