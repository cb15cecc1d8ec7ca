"""
Attached servers in virtual time: stock `vllm serve` that share one device, and their requests.

Clients that choose the server themselves, or the instances of a mesh (`solver.instance`), serve the
same load. The times of iterations come from a latency model, so that two policies can be compared
without the noise of a machine.
"""
