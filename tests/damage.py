"""What becomes of a file that is damaged."""

import random
from collections.abc import Iterator


def flips(data: bytes, count: int, seed: int = 0) -> Iterator[bytes]:
    """Yields the data with one bit changed, `count` times."""
    chosen = random.Random(seed)
    for bit in chosen.sample(range(8 * len(data)), count):
        at, place = divmod(bit, 8)
        yield data[:at] + bytes([data[at] ^ 1 << place]) + data[at + 1 :]


def damages(data: bytes, count: int) -> Iterator[bytes]:
    """Yields the data after about `count` faults of each kind: cut, overwritten by zeros, with a bit changed."""
    for size in range(0, len(data), len(data) // count + 1):
        yield data[:size]
        if any(data[size:]):
            yield data[:size] + bytes(len(data) - size)
    yield data + b"\0"
    yield from flips(data, count)
