// Reads one list of steps per line, and prints the effects of the JavaScript assembly.

import { createInterface } from "node:readline";

const { RequestAssembly } = await import(process.argv[2]);

for await (const line of createInterface({ input: process.stdin })) {
  const { requestId, streaming, steps } = JSON.parse(line);
  const assembly = new RequestAssembly(requestId, { streaming });
  const effects = steps.flatMap(([what, now, reply]) => {
    if (what === "observe") return assembly.observe(reply, now);
    return what === "tick" ? assembly.tick(now) : assembly.cancel(now);
  });
  console.log(JSON.stringify(effects));
}
