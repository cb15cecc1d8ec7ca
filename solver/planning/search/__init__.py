"""
The search for plans, compiled: one evaluation kernel, and who proposes plans to it.

Kernels are numba functions without Python objects: they release the GIL and are compiled once per
machine, into numba's cache beside the sources. Where that directory is read-only, set
`NUMBA_CACHE_DIR` to one that is writable before the first import, or fill it when an image is
built; without any place for its cache numba refuses to import.
"""
