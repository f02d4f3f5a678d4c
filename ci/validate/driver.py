"""Workloads and the loop that times them, over any engine that can step."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from ci.validate.data import salted
from ci.validate.stats import quantile


class Step(NamedTuple):
    """What one engine step gave one request."""

    request: str
    tokens: list[int]
    finished: bool
    cached: int | None = None


class Stepper(Protocol):
    """The part of an engine that is timed."""

    def add(self, request: str, prompt: list[int], max_tokens: int) -> None:
        """Queue a request that ends after exactly ``max_tokens``."""

    def step(self) -> list[Step]:
        """Run one step; return what it gave."""


@dataclass(frozen=True)
class Session:
    """Turns of one user: each adds tokens to all that was said and waits for an answer.

    Attributes:
        turns: For each turn the new tokens and the length of the answer.
    """

    turns: tuple[tuple[list[int], int], ...]


@dataclass
class Record:
    """One request as its caller saw it; times in seconds."""

    turn: int
    prompt: int
    start: float
    times: list[float] = field(default_factory=list)
    cached: int = 0

    @property
    def ttft(self) -> float:
        """Seconds to the first token."""
        return self.times[0] - self.start

    @property
    def itl(self) -> list[float]:
        """Seconds from each token to the next."""
        return [b - a for a, b in zip(self.times, self.times[1:], strict=False)]


@dataclass(frozen=True)
class Workload:
    """Sessions to run, ``concurrency`` at a time."""

    name: str
    kind: str
    sessions: tuple[Session, ...]
    concurrency: int


def drive(
    engine: Stepper,
    sessions: Sequence[Session],
    concurrency: int,
    clock: Callable[[], float] = time.perf_counter,
    mark: str = "",
) -> list[Record]:
    """Run sessions in a closed loop.

    Args:
        engine: What to drive.
        sessions: The sessions; a new one starts when another has ended.
        concurrency: Sessions at a time.
        clock: Seconds.
        mark: Makes the names of requests unique.

    Returns:
        A record for each turn of each session.
    """  # fmt: skip
    waiting = list(enumerate(sessions))[::-1]
    history: dict[int, list[int]] = {}
    running: dict[str, tuple[int, int, Record]] = {}
    records = []

    def begin(number: int, turn: int) -> None:
        new, answer = sessions[number].turns[turn]
        prompt = history.setdefault(number, [])
        prompt.extend(new)
        name = f"{mark}{number}.{turn}"
        record = Record(turn, len(prompt), clock())
        running[name] = (number, turn, record)
        engine.add(name, list(prompt), answer)

    while waiting and len(running) < concurrency:
        begin(waiting.pop()[0], 0)
    while running:
        for step in engine.step():
            number, turn, record = running[step.request]
            at = clock()
            record.times += [at] * len(step.tokens)
            history[number].extend(step.tokens)
            if step.cached:
                record.cached = step.cached
            if not step.finished:
                continue
            del running[step.request]
            records.append(record)
            if turn + 1 < len(sessions[number].turns):
                begin(number, turn + 1)
            elif waiting:
                begin(waiting.pop()[0], 0)
    return records


def summarize(records: Sequence[Record]) -> dict[str, Any]:
    """Return the figures of one run of one workload.

    Returns:
        ``output_rate`` (tokens/s over the whole run), ``prompt_rate``, ``ttft`` and ``itl``
        (medians, ms) with ``ttft_p90`` and ``itl_p90``, ``turns`` (median TTFT of each turn,
        ms), ``cached`` (share of prompt tokens from the prefix cache), ``requests``.
    """
    mine = [r for r in records if r.times]
    if not mine:
        return {"requests": 0}
    span = max(r.times[-1] for r in mine) - min(r.start for r in mine)
    itl = [gap for r in mine for gap in r.itl]
    ttft = [r.ttft for r in mine]
    turns = [
        1e3 * quantile([r.ttft for r in mine if r.turn == turn], 0.5)
        for turn in range(1 + max(r.turn for r in mine))
    ]
    return {
        "requests": len(mine),
        "seconds": span,
        "output_rate": sum(len(r.times) for r in mine) / span if span > 0 else None,
        "prompt_rate": sum(r.prompt - r.cached for r in mine) / sum(ttft) if sum(ttft) else None,
        "ttft": 1e3 * quantile(ttft, 0.5),
        "ttft_p90": 1e3 * quantile(ttft, 0.9),
        "itl": 1e3 * quantile(itl, 0.5) if itl else None,
        "itl_p90": 1e3 * quantile(itl, 0.9) if itl else None,
        "turns": turns,
        "cached": sum(r.cached for r in mine) / sum(r.prompt for r in mine),
    }


# What counts in each kind of workload: key, whether lower is better, how it is called.
FIGURES: dict[str, tuple[tuple[str, bool, str], ...]] = {
    "decode": (("itl", True, "inter-token latency"),),
    "prefill": (("ttft", True, "time to first token"),),
    "mixed": (
        ("output_rate", False, "output tokens/s"),
        ("itl_p90", True, "inter-token latency, 90%"),
        ("ttft_p90", True, "time to first token, 90%"),
    ),
    "concurrency": (
        ("output_rate", False, "output tokens/s"),
        ("ttft", True, "time to first token"),
        ("itl", True, "inter-token latency"),
    ),
    "turns": (("ttft", True, "time to first token"), ("itl", True, "inter-token latency")),
}

DEFAULTS: dict[str, Any] = {
    "contexts": [512, 4096, 16384, 32768],
    "decode": 64,
    "prefill": [512, 4096, 16384],
    "mixed": [4096, 64],
    "concurrency": [1, 2, 4, 8],
    "request": [512, 64],
    "sessions": 4,
    "turns": [6, 1024, 256, 32],
}


def workloads(
    settings: Mapping[str, Any], limit: int, pool: Sequence[int], salt: int
) -> tuple[list[Workload], list[str]]:
    """Return the workloads of one repeat.

    Args:
        settings: Of `DEFAULTS`, what is to be different: ``contexts`` and ``prefill`` are
            lengths, ``decode`` tokens at each context, ``mixed`` a long prompt and the
            tokens of those who decode meanwhile, ``concurrency`` levels with ``request``
            (prompt, answer), ``sessions`` and ``turns`` (count, first prompt, each further
            one, answer).
        limit: The engine's longest sequence.
        pool: Token ids to draw from.
        salt: Other prompts for each one, so that no cache serves them.

    Returns:
        The workloads, and lines on those left out because they exceed the limit.
    """
    s = {**DEFAULTS, **settings}
    serial = salt * 1_000_003

    def draw(length: int) -> list[int]:
        nonlocal serial
        serial += 1
        return salted(pool, length, serial)

    def one(length: int, answer: int) -> Session:
        return Session(((draw(length), answer),))

    out: list[Workload] = []
    left = []
    for length in s["contexts"]:
        if length + s["decode"] > limit:
            left.append(f"decode at {length}: longer than the model's {limit}")
        else:
            out.append(Workload(f"decode at {length}", "decode", (one(length, s["decode"]),), 1))
    for length in s["prefill"]:
        if length + 1 > limit:
            left.append(f"prefill of {length}: longer than the model's {limit}")
        else:
            pair = (one(length, 1), one(length, 1))
            out.append(Workload(f"prefill of {length}", "prefill", pair, 1))
    long, answer = s["mixed"]
    if long + answer > limit:
        left.append(f"mixed: longer than the model's {limit}")
    else:
        sessions = tuple(one(long, 1) if i % 4 == 3 else one(64, answer) for i in range(12))
        out.append(Workload("mixed", "mixed", sessions, 4))
    prompt, answer = s["request"]
    for level in s["concurrency"]:
        if prompt + answer <= limit:
            sessions = tuple(one(prompt, answer) for _ in range(2 * level))
            out.append(Workload(f"concurrency {level}", "concurrency", sessions, level))
    count, first, further, answer = s["turns"]
    if first + count * (further + answer) > limit:
        left.append(f"multi-turn: longer than the model's {limit}")
    else:
        shared = draw(first // 2)
        sessions = tuple(
            Session(
                tuple(
                    (shared + draw(first - len(shared)) if turn == 0 else draw(further), answer)
                    for turn in range(count)
                )
            )
            for _ in range(s["sessions"])
        )
        out.append(Workload("multi-turn", "turns", sessions, 2))
    return out, left
