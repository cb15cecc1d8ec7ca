"""
KV checkpoints in host memory, through a KV connector of vLLM's. Runs in the engine core.

ConServe §4.4: a request's KV is copied to host memory block by block while it grows, so that
taking its memory away costs nothing and giving it back costs a copy instead of computing.
`checkpoints` decides in the scheduler what is copied where, `transfers` is what it tells the
worker, `store` copies, and `connector` is all that vLLM sees.
"""
