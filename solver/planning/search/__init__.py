"""
Compiled search for plans: one evaluation kernel, and the generators of proposals for it.

Kernels are numba functions without Python objects: they release the GIL and are compiled once
per machine, into numba's cache beside the sources. Where that directory is read-only, set
`NUMBA_CACHE_DIR` to a writable one before the first import, or fill the cache when an image is
built; without any place for its cache numba cannot be imported.
"""
