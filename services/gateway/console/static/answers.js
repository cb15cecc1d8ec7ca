// Answers to questions that a view asks on request, and what went wrong with the last one.

import { useState } from "./vendor/htm-preact-3.1.1.js";
import { get } from "./server.js";

export function useAnswers() {
  const [problem, setProblem] = useState(null);
  const ask = async (path, show) => {
    setProblem(null);
    try {
      show(await get(path));
    } catch (error) {
      setProblem(error);
    }
  };
  return { ask, problem };
}
