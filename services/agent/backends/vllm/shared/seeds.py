"""Seeds for sampling the tokens of one request in several runs. Does not import vLLM."""

from hashlib import blake2b


def seed_at(seed: int, place: int) -> int:
    """
    A separate seed below 2**63 for each *place*; *seed* itself at place 0.

    Args:
        seed: Seed of the request.
        place: Position in a sequence of draws, from 0.
    """
    if place == 0:
        return seed
    digest = blake2b(f"{seed}/{place}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
