"""Code that runs inside vLLM's workers: sampling that can resume, and safepoints. Imports torch."""
