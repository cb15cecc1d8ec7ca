"""
Code that runs inside vLLM's workers: token draws that can resume, and safepoints. Imports torch.
"""
