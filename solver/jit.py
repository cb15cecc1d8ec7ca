"""Compilation of kernels, and the check whether a cached kernel may be used again."""

import hashlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import ParamSpec, TypeVar, cast

import numba

P = ParamSpec("P")
R = TypeVar("R")


def kernel(function: Callable[P, R]) -> Callable[P, R]:
    """
    Compile a function at its first call, or load it from the cache; it runs without the GIL.

    The function is compiled again when any file of its directory has changed.
    """
    compiled = numba.njit(cache=True, nogil=True, error_model="numpy")(function)
    # Numba detects changes only in the file of a kernel; the functions and constants that the
    # kernel uses are in other files.
    entry = compiled._cache._cache_file  # noqa: SLF001 - there is no public way to say so
    text = _text(Path(function.__code__.co_filename).parent)
    entry._source_stamp = (*entry._source_stamp, text)  # noqa: SLF001 - as above
    return cast("Callable[P, R]", compiled)


inlined = kernel
"""Decorator of a function that other kernels call; the compiler decides whether to inline it."""


@cache
def _text(directory: Path) -> str:
    """Digest of the sources in *directory* and of the compiler options."""
    sources = [Path(__file__), *sorted(directory.glob("*.py"))]
    return hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()
