"""
Compiled search for plans: a kernel that evaluates proposals, and kernels that generate them.

Kernels are numba functions without Python objects: they release the GIL and are compiled once per
machine, into numba's cache beside the sources. If the source directory is read-only, set
`NUMBA_CACHE_DIR` to a writable directory before the first import, or fill the cache when an image
is built. Without a directory for the cache, the import of numba fails.
"""
