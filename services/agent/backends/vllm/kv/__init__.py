"""
KV checkpoints in host memory, through a vLLM KV connector. Runs in the engine core.

ConServe §4.4: a request's KV is copied to host memory block by block while it grows. Evicting the
request then costs nothing, and restoring it costs a copy instead of a prefill. In the scheduler,
`checkpoints` decides which blocks are copied to which slots. `transfers` is the message to the
worker, and `store` copies the blocks there. `connector` is the only module that vLLM calls.
"""
