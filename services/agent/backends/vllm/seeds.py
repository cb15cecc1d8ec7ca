"""Seeds of draws that are made in several runs; without vLLM itself."""

from hashlib import blake2b


def seed_at(seed: int, place: int) -> int:
    """
    A seed of its own for each *place*, below 2**63; *seed* itself at the first.

    Args:
        seed: The request's.
        place: In a sequence of draws, from 0.
    """
    if place == 0:
        return seed
    digest = blake2b(f"{seed}/{place}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
