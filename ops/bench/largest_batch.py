"""A batch with as many lines as one may have, with the kills of `batches`."""

from ops.bench.batch_kills import batch_with_kills
from ops.bench.result import Result


async def run(*, seed: int, quick: bool, broker: str | None) -> Result:
    """Run the benchmark on a private RabbitMQ node and PostgreSQL, which it restarts."""
    del broker  # another broker could not be restarted
    result = Result(name="largest_batch", seed=seed, quick=quick)
    await batch_with_kills(result, seed=seed, num_lines=1000 if quick else 50_000)
    return result
