"""
vLLM as an engine backend, one package per process: `front`, `host`, `core` and `worker`.

`shared` and `kv` are used by several of them.
"""
