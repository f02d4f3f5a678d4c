"""Prompts: texts that the package carries, records that are generated."""

import random
from collections.abc import Callable, Sequence
from pathlib import Path

_TEXTS = Path(__file__).with_name("prompts.txt")
_THINGS = ("lamp", "kettle", "ladder", "drill", "blanket", "compass", "bucket", "mirror")
_PLACES = ("cellar", "attic", "kitchen", "garage", "garden", "hall", "pantry", "workshop")


def texts() -> list[str]:
    """Return the package's own texts: prose, code, tables, lists, dialogue, sums."""
    parts = _TEXTS.read_text(encoding="utf-8").split("\n%%\n")
    return [part.strip("\n") for part in parts if part.strip()]


def records(seed: int, count: int) -> str:
    """Return an inventory that ends in a question about one of its lines.

    What the question asks for may lie anywhere, so a long one needs all of the context.
    """
    generator = random.Random(seed)
    lines = []
    for number in range(1, count + 1):
        thing, place = generator.choice(_THINGS), generator.choice(_PLACES)
        lines.append(f"{number:04d} {thing} {generator.randrange(100, 1000)} in the {place}")
    asked = generator.choice(lines)
    return "\n".join([*lines, "", f"Line {asked[:4]} again:", f"{asked[:4]} "])


def lengths(count: int, longest: int) -> list[int]:
    """Return prompt lengths, spread evenly on a logarithmic scale from 4 to ``longest``."""
    if count < 2:
        return [longest][:count]
    step = (longest / 4.0) ** (1.0 / (count - 1))
    return [max(1, round(4.0 * step**i)) for i in range(count)]


def bytes_encoder(vocabulary: int) -> Callable[[str], list[int]]:
    """Return what stands in for a tokenizer: a text's bytes, within the vocabulary."""
    return lambda text: [byte % vocabulary for byte in text.encode()]


def prompts(encode: Callable[[str], list[int]], count: int, longest: int) -> list[list[int]]:
    """Return prompts of many lengths as token ids.

    Every third one is an inventory, cut at its beginning so that its question stays; the
    others begin with one of the texts and go on with others, cut at their end.

    Args:
        encode: From text to ids, without special tokens.
        count: How many.
        longest: Tokens of the longest.
    """
    pieces = texts()
    encoded: dict[int, list[int]] = {}

    def text(index: int) -> list[int]:
        index %= len(pieces)
        if index not in encoded:
            encoded[index] = encode(pieces[index] + "\n\n")
        return encoded[index]

    out = []
    for number, length in enumerate(lengths(count, longest)):
        if number % 3 == 2:
            ids = encode(records(number, length // 4 + 4))
            out.append(ids[-length:])
            continue
        ids, index = [], number
        while len(ids) < length:
            ids = ids + text(index)
            index += 1
        out.append(ids[:length])
    return out


def salted(pool: Sequence[int], length: int, salt: int) -> list[int]:
    """Return ``length`` ids drawn from a pool, others for each salt.

    Speed is measured with these: no two share a prefix, so no cache serves them.
    """
    return random.Random(salt).choices(pool, k=length)
