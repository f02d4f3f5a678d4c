"""The judgement: pure functions over recorded positions.  The method: ``ci.validate``."""

import math
import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

CONFIDENCE = 0.999
FLOOR = 0.99
SIZE_LIMIT = 2.0  # of noise's disturbance; KL grows with the square of it
TIE_FACTOR = 2.0
OUTLIER = 8.0  # a noise run this many times another one is no noise
RESAMPLES = 1000
# What right runs may differ by at least, in steps of the largest logits: each rounds on its
# own.  Swaps that touch every layer were seen to move margins by 0.56 to 0.62 steps and to
# disturb by 0.10 to 0.11 (bfloat16, three random models, H200).
TIE_STEPS, SHIFT_STEPS, SIZE_STEPS = 2.0, 0.5, 0.1
# Relative spacing of the logits' dtype: two neighbours differ by up to this.
SPACING = {"bfloat16": 2.0**-7, "float16": 2.0**-10, "float32": 2.0**-23}

Sequence_ = Mapping[str, Any]


@dataclass(frozen=True)
class Miss:
    """A position where the best tokens differ.

    Attributes:
        sequence: Which prompt.
        position: Which token after it (prefill: which position of the scored part).
        base: The baseline's best token.
        other: The other run's.
        base_margin: Log probability of ``base`` minus that of the baseline's second token.
        other_margin: The same in the other run, of its own two best tokens.
        lost: How far below its best token the other run has ``base``; None if it is not
            among the recorded ones.
    """

    sequence: int
    position: int
    base: int
    other: int
    base_margin: float
    other_margin: float
    lost: float | None


@dataclass
class Comparison:
    """What two runs have in common, position by position.

    Attributes:
        counts: Positions of each sequence.
        misses: All positions with another best token.
        kl: Mean KL divergence of each sequence, in nats (a lower bound, see `kl_bound`).
        kl_max: The largest of any position.
        shift_max: Largest change of the margin between the baseline's two best tokens.
        shift_squares: Sum of the squares of these changes, over ``shifts`` positions.
        margins: The baseline's margin at each position.
        bad: Positions with a NaN or an infinity in either run.
        unforced: Positions where the other run went on from another token.
    """

    counts: list[int] = field(default_factory=list)
    misses: list[Miss] = field(default_factory=list)
    kl: list[float] = field(default_factory=list)
    kl_max: float = 0.0
    shift_max: float = 0.0
    shift_squares: float = 0.0
    shifts: int = 0
    margins: list[float] = field(default_factory=list)
    bad: int = 0
    unforced: int = 0

    @property
    def shift(self) -> float:
        """Root mean square of the changes of the margin, in nats."""
        return math.sqrt(self.shift_squares / self.shifts) if self.shifts else 0.0

    @property
    def positions(self) -> int:
        """Positions compared."""
        return sum(self.counts)

    @property
    def agreement(self) -> float:
        """Share of positions with the same best token, 0 to 1."""
        return 1.0 - len(self.misses) / self.positions if self.positions else 0.0

    @property
    def mean_kl(self) -> float:
        """Mean KL divergence over positions, in nats."""
        n = self.positions
        return sum(k * c for k, c in zip(self.kl, self.counts, strict=True)) / n if n else 0.0

    @property
    def size(self) -> float:
        """Size of the disturbance: the root of the mean KL."""
        return math.sqrt(max(self.mean_kl, 0.0))


def kl_bound(base: Mapping[int, float], other: Mapping[int, float]) -> float:
    """Return a lower bound of KL(base || other) in nats.

    Tokens that both recorded stand for themselves, all others are one bucket: merging
    outcomes never raises a divergence.

    Args:
        base: Log probability of each recorded token.
        other: The same of the other run.
    """
    total, base_rest, other_rest = 0.0, 1.0, 1.0
    for token, p in base.items():
        q = other.get(token)
        if q is not None:
            total += math.exp(p) * (p - q)
            base_rest -= math.exp(p)
            other_rest -= math.exp(q)
    # Rounded log probabilities may leave a rest of a few 1e-7 below zero.
    if base_rest > 1e-6 and other_rest > 1e-9:
        total += base_rest * math.log(base_rest / other_rest)
    return max(total, 0.0)


def compare(base: Sequence[Sequence_], other: Sequence[Sequence_]) -> Comparison:
    """Compare two runs over the same positions.

    Args:
        base: For each sequence ``tokens`` (what it went on with), and for each position
            ``ids`` and ``logprobs``, best first.
        other: The same of the other run.
    """
    seen = Comparison()
    for number, (one, two) in enumerate(zip(base, other, strict=False)):
        total, count = 0.0, 0
        rows = zip(
            one["tokens"], two["tokens"],
            one["ids"], one["logprobs"], two["ids"], two["logprobs"], strict=False,
        )  # fmt: skip
        for at, (went, goes, ids, values, other_ids, other_values) in enumerate(rows):
            if went != goes:
                # What follows has another past.
                seen.unforced += len(one["tokens"]) - at
                break
            count += 1
            # JSON has no NaN: it is null there.
            if not all(v is not None and math.isfinite(v) for v in (*values, *other_values)):
                seen.bad += 1
                continue
            p = dict(zip(ids, values, strict=True))
            q = dict(zip(other_ids, other_values, strict=True))
            kl = kl_bound(p, q)
            total += kl
            seen.kl_max = max(seen.kl_max, kl)
            margin = values[0] - values[1]
            seen.margins.append(margin)
            if ids[0] in q and ids[1] in q:
                moved = abs(margin - (q[ids[0]] - q[ids[1]]))
                seen.shift_max = max(seen.shift_max, moved)
                seen.shift_squares += moved**2
                seen.shifts += 1
            if ids[0] != other_ids[0]:
                lost = other_values[0] - q[ids[0]] if ids[0] in q else None
                ahead = other_values[0] - other_values[1]
                seen.misses.append(Miss(number, at, ids[0], other_ids[0], margin, ahead, lost))
        seen.counts.append(count)
        seen.kl.append(total / count if count else 0.0)
    return seen


def beta_binomial_quantile(n: int, x: float, seen: float, level: float = CONFIDENCE) -> int:
    """Return how many of n positions a further run of the same kind may miss.

    Args:
        n: Positions of the further run.
        x: Misses of the run at hand.
        seen: Its positions.
        level: The quantile.

    Returns:
        The smallest count whose cumulated probability reaches ``level`` when the rate has
        Jeffreys' prior and x of ``seen`` were seen.
    """
    if n <= 0:
        return 0
    a, b = x + 0.5, max(seen - x, 0.0) + 0.5

    def log_beta(p: float, q: float) -> float:
        return math.lgamma(p) + math.lgamma(q) - math.lgamma(p + q)

    log_p = log_beta(a, n + b) - log_beta(a, b)
    total = math.exp(log_p)
    for k in range(n):
        if total >= level:
            return k
        log_p += math.log((n - k) / (k + 1)) + math.log((k + a) / (n - k - 1 + b))
        total += math.exp(log_p)
    return n


def design_effect(comparison: Comparison) -> float:
    """Return by how much misses cluster within sequences: 1 if they are independent.

    It is the variance of the sequences' miss counts over what independent misses would
    give; with fewer than five misses it cannot be told and is 1.
    """
    n = comparison.positions
    if len(comparison.misses) < 5 or len(comparison.counts) < 2:
        return 1.0
    rate = len(comparison.misses) / n
    found = [0] * len(comparison.counts)
    for miss in comparison.misses:
        found[miss.sequence] += 1
    pairs = list(zip(found, comparison.counts, strict=True))
    spread = sum((f - rate * c) ** 2 for f, c in pairs) * len(pairs) / (len(pairs) - 1)
    return max(1.0, spread / (n * rate * (1.0 - rate)) if 0 < rate < 1 else 1.0)


def allowed_misses(noise: Comparison, n: int) -> int:
    """Return how many of n positions may be missed if it is like this noise run."""
    effect = design_effect(noise)
    scaled = beta_binomial_quantile(
        math.ceil(n / effect), len(noise.misses) / effect, noise.positions / effect
    )
    return min(n, math.ceil(scaled * effect))


def predicted_misses(margins: Sequence[float], shift: float) -> float:
    """Return how many best tokens change if margins move by a normal error.

    Args:
        margins: Of the two best tokens, at each position.
        shift: The error's standard deviation.
    """
    if shift <= 0.0:
        return 0.0
    return math.fsum(0.5 * math.erfc(m / (shift * math.sqrt(2.0))) for m in margins)


def poisson_quantile(mean: float, level: float = CONFIDENCE) -> int:
    """Return the smallest count whose cumulated Poisson probability reaches ``level``.

    It bounds a sum of unequal rare events from above.
    """
    if mean <= 0.0:
        return 0
    total, k = 0.0, 0
    while k < 10 * mean + 100:
        total += math.exp(k * math.log(mean) - mean - math.lgamma(k + 1))
        if total >= level:
            break
        k += 1
    return k


def bootstrap_lower(
    values: Sequence[float], weights: Sequence[float], level: float = 1.0 - CONFIDENCE
) -> float:
    """Return the lower end of a weighted mean, resampled over its (few) clusters."""
    if not values:
        return 0.0
    generator = random.Random(0)
    pairs = list(zip(values, weights, strict=True))
    means = []
    for _ in range(RESAMPLES):
        drawn = generator.choices(pairs, k=len(pairs))
        weight = sum(w for _, w in drawn)
        means.append(sum(v * w for v, w in drawn) / weight if weight else 0.0)
    return sorted(means)[max(0, math.floor(level * RESAMPLES))]


@dataclass(frozen=True)
class Noise:
    """What a model's noise runs say: of the model and its dtype, so of all paths together.

    Attributes:
        runs: Names of the runs that count as noise.
        dropped: Why others do not, by name.
        tie: Largest margin of a near tie, in nats.
        shift: Root mean square change of a margin, in nats.
        size: Size of the disturbance (root of the mean KL).
        source: "measured", or "rounding" if no noise run disturbs more than that must.
    """

    runs: tuple[str, ...]
    dropped: Mapping[str, str]
    tie: float
    shift: float
    size: float
    source: str


def measure_noise(
    runs: Mapping[str, Sequence[Comparison]], largest_logit: float, dtype: str = "bfloat16"
) -> Noise:
    """Find the scale of noise.

    A run that is equal bit for bit on one path (kernels that add in the same order there)
    says nothing of rounding, so the scale is that of the path where noise moved most, and
    never less than what rounding the logits alone may do.

    Args:
        runs: The noise runs against the baseline, by name: one comparison for each path.
        largest_logit: Mean over positions of the largest absolute logit.
        dtype: Of the logits as the model makes them.
    """
    dropped: dict[str, str] = {}
    usable: dict[str, Sequence[Comparison]] = {}
    for name, paths in runs.items():
        bad, unforced = sum(p.bad for p in paths), sum(p.unforced for p in paths)
        if not all(p.positions for p in paths):
            dropped[name] = "no positions"
        elif bad or unforced:
            dropped[name] = f"{bad} NaN or infinite, {unforced} not forced"
        else:
            usable[name] = paths
    sizes = {name: max(p.size for p in paths) for name, paths in usable.items()}
    moved = min((size for size in sizes.values() if size > 0), default=0.0)
    for name, size in sizes.items():
        if moved and size > OUTLIER * moved:
            dropped[name] = f"disturbs {size / moved:.0f} times as much as another"
            del usable[name]
    every = [p for paths in usable.values() for p in paths]
    step = SPACING.get(dtype, SPACING["bfloat16"]) * max(largest_logit, 1.0)
    tie = TIE_FACTOR * max((p.shift_max for p in every), default=0.0)
    shift = max((p.shift for p in every), default=0.0)
    size = max((p.size for p in every), default=0.0)
    return Noise(
        tuple(usable),
        dropped,
        max(tie, TIE_STEPS * step),
        max(shift, SHIFT_STEPS * step),
        max(size, SIZE_STEPS * step),
        "measured" if size > SIZE_STEPS * step else "rounding",
    )


def judge(
    candidate: Comparison,
    runs: Mapping[str, Comparison],
    noise: Noise,
    lines: int = 12,
) -> dict[str, Any]:
    """Judge one path of one candidate.

    Args:
        candidate: The candidate against the baseline.
        runs: The noise runs against the baseline.
        noise: Their scale, from `measure_noise`.
        lines: How many misses to list in full, the clearest first.

    Returns:
        ``status`` ("pass", "fail" or "inconclusive"), ``reasons``, and every number that
        they rest on.
    """
    n = candidate.positions
    bands = {name: allowed_misses(runs[name], n) for name in noise.runs}
    if noise.runs:
        bands["margins"] = poisson_quantile(predicted_misses(candidate.margins, noise.shift))
    allowed = max(bands.values(), default=0)
    clear = [m for m in candidate.misses if m.base_margin > noise.tie]
    low = math.sqrt(bootstrap_lower(candidate.kl, [float(c) for c in candidate.counts]))
    threshold = 1.0 - allowed / n if n else 1.0
    reasons, doubts = [], []
    if candidate.bad:
        reasons.append(f"{candidate.bad} positions with NaN or infinity")
    if candidate.unforced:
        reasons.append(f"{candidate.unforced} positions did not go on with the forced token")
    if len(candidate.misses) > allowed:
        reasons.append(
            f"agreement {candidate.agreement:.4%} is below the band's {threshold:.4%}: "
            f"{len(candidate.misses)} misses, {allowed} allowed"
        )
    if clear:
        worst = max(m.base_margin for m in clear)
        reasons.append(
            f"{len(clear)} misses are no ties: margins up to {worst:.3f}, a tie is {noise.tie:.3f}"
        )
    if low > SIZE_LIMIT * noise.size:
        reasons.append(
            f"disturbs {candidate.size / noise.size:.1f} times as much as noise "
            f"(at least {low / noise.size:.1f}, {SIZE_LIMIT:.0f} allowed)"
        )
    if not n:
        doubts.append("nothing was compared")
    elif not noise.runs:
        doubts.append("no noise run to compare with")
    elif (least := beta_binomial_quantile(n, 0, n)) > (1.0 - FLOOR) * n:
        doubts.append(f"{n} positions are too few: {least} misses would prove nothing")
    notes = [f"{name} is not counted as noise: {why}" for name, why in noise.dropped.items()]
    if threshold < FLOOR and not doubts:
        notes.append(f"this model's own noise makes the band reach below {FLOOR:.0%}")
    ordered = sorted(candidate.misses, key=lambda m: -m.base_margin)
    return {
        "status": "fail" if reasons else "inconclusive" if doubts else "pass",
        "reasons": reasons + doubts,
        "notes": notes,
        "positions": n,
        "agreement": candidate.agreement,
        "threshold": threshold,
        "floor": FLOOR,
        "misses": len(candidate.misses),
        "allowed": allowed,
        "bands": bands,
        "clear": len(clear),
        "tie": noise.tie,
        "mean_kl": candidate.mean_kl,
        "kl_max": candidate.kl_max,
        "size": candidate.size,
        "noise_size": noise.size,
        "noise_source": noise.source,
        "ratio": candidate.size / noise.size if noise.size else 0.0,
        "shift": candidate.shift,
        "noise_shift": noise.shift,
        "shift_max": candidate.shift_max,
        "listed": [asdict(m) for m in ordered[:lines]],
        "margins": [round(m.base_margin, 4) for m in ordered],
    }


def cosine(one: Sequence[float], two: Sequence[float]) -> float:
    """Return the cosine of two vectors; NaN if one is zero or not finite (null in JSON)."""
    if None in one or None in two:
        return math.nan
    dot = math.fsum(a * b for a, b in zip(one, two, strict=True))
    norms = math.sqrt(math.fsum(a * a for a in one) * math.fsum(b * b for b in two))
    return dot / norms if norms > 0 and math.isfinite(norms) else math.nan


def judge_embeddings(
    base: Sequence[Sequence[float]],
    other: Sequence[Sequence[float]],
    noise: Mapping[str, Sequence[Sequence[float]]],
    dtype: str = "bfloat16",
) -> dict[str, Any]:
    """Judge embeddings by cosine distance (1 - cosine), which is quadratic like KL.

    Args:
        base: The baseline's vectors.
        other: The candidate's, in the same order.
        noise: The noise runs', by name.
        dtype: Of the activations.
    """

    def distances(vectors: Sequence[Sequence[float]]) -> list[float]:
        # Not max(0.0, d), which hides NaN.
        found = (1.0 - cosine(a, b) for a, b in zip(base, vectors, strict=True))
        return [0.0 if d < 0 else d for d in found]

    mine = distances(other)
    scale = {name: statistics.fmean(distances(v)) for name, v in noise.items() if v}
    scale = {name: d for name, d in scale.items() if math.isfinite(d)}
    # One rounding of every element, were they independent.
    rounding = SPACING.get(dtype, SPACING["bfloat16"]) ** 2 / 24.0
    size = math.sqrt(max([*scale.values(), rounding]))
    reasons, doubts = [], []
    if not all(map(math.isfinite, mine)):
        reasons.append(f"{sum(not math.isfinite(d) for d in mine)} vectors are zero or not finite")
        mine = [d for d in mine if math.isfinite(d)]
    low = math.sqrt(bootstrap_lower(mine, [1.0] * len(mine)))
    if low > SIZE_LIMIT * size:
        reasons.append(
            f"disturbs at least {low / size:.1f} times as much as noise, {SIZE_LIMIT:.0f} allowed"
        )
    if not mine or not scale:
        doubts.append("no noise run to compare with" if mine else "nothing was compared")
    return {
        "status": "fail" if reasons else "inconclusive" if doubts else "pass",
        "reasons": reasons + doubts,
        "notes": [],
        "vectors": len(base),
        "cosine_min": 1.0 - max(mine, default=0.0),
        "cosine_mean": 1.0 - (statistics.fmean(mine) if mine else 0.0),
        "noise_cosine": {name: 1.0 - d for name, d in scale.items()},
        "ratio": math.sqrt(statistics.fmean(mine)) / size if mine else 0.0,
    }


def acceptance_length(counts: Mapping[str, float]) -> float:
    """Return the tokens that a verification step yields: 1 + accepted / drafts."""
    return 1.0 + counts["accepted"] / counts["drafts"] if counts.get("drafts") else 1.0


def judge_acceptance(
    base: Sequence[Mapping[str, float]],
    other: Sequence[Mapping[str, float]],
    noise: Mapping[str, Sequence[Mapping[str, float]]],
) -> dict[str, Any]:
    """Judge speculative decoding by its acceptance length; only a loss fails.

    Args:
        base: ``drafts`` and ``accepted`` of each group of prompts, the baseline's.
        other: The candidate's, of the same groups.
        noise: The noise runs', by name.

    Returns:
        As `judge`.  The loss that noise allows is the larger of the widest noise run's
        difference and the spread of the paired differences (its bootstrap's upper end).
    """

    def whole(groups: Sequence[Mapping[str, float]]) -> float:
        return acceptance_length(
            {key: sum(g.get(key, 0) for g in groups) for key in ("drafts", "accepted")}
        )

    reasons, doubts = [], []
    differences = [
        acceptance_length(b) - acceptance_length(a) for a, b in zip(base, other, strict=True)
    ]
    mine, reference = whole(other), whole(base)
    widest = max((abs(whole(g) - reference) for g in noise.values() if g), default=0.0)
    # The best that the difference may be, over resampled groups.
    best = -bootstrap_lower([-d for d in differences], [1.0] * len(differences))
    if not any(g.get("drafts") for g in base):
        doubts.append("the baseline drafted nothing")
    elif not any(g.get("drafts") for g in other):
        reasons.append("nothing was drafted")
    elif best < 0 and reference - mine > widest:
        reasons.append(
            f"acceptance length {mine:.3f} is below the baseline's {reference:.3f} by more "
            f"than noise ({widest:.3f})"
        )
    return {
        "status": "fail" if reasons else "inconclusive" if doubts else "pass",
        "reasons": reasons + doubts,
        "notes": [],
        "acceptance": mine,
        "baseline": reference,
        "noise": widest,
        "groups": len(base),
    }


def ratio_of(
    base: Sequence[float], other: Sequence[float], lower_is_better: bool
) -> dict[str, Any] | None:
    """Compare interleaved repeats of one measurement.

    Args:
        base: The baseline's repeats.
        other: The candidate's, each measured next to the baseline's of the same index.
        lower_is_better: Whether it is a time and not a rate.

    Returns:
        ``ratio`` (speed-up: above 1 is better), its range ``low`` to ``high`` over the
        paired repeats, medians, spreads, and ``verdict``: "noise" where 1 lies within the
        range or a side's own spread covers the difference, or where a single repeat shows
        no spread; else "faster" or "slower".  None if either has no value.
    """
    pairs = [
        (a, b)
        for a, b in zip(base, other, strict=False)
        if a and b and math.isfinite(a) and math.isfinite(b)
    ]
    if not pairs:
        return None
    ratios = sorted(a / b if lower_is_better else b / a for a, b in pairs)
    one = statistics.median(a for a, _ in pairs)
    two = statistics.median(b for _, b in pairs)
    ratio = one / two if lower_is_better else two / one
    spread = max(_spread([a for a, _ in pairs]), _spread([b for _, b in pairs]))
    noisy = len(pairs) < 2 or ratios[0] <= 1.0 <= ratios[-1] or spread >= abs(ratio - 1.0)
    return {
        "ratio": ratio,
        "low": ratios[0],
        "high": ratios[-1],
        "base": one,
        "candidate": two,
        "spread": spread,
        "repeats": len(pairs),
        "verdict": "noise" if noisy else "faster" if ratio > 1 else "slower",
    }


def _spread(values: Sequence[float]) -> float:
    """Return half the range over the median."""
    return (max(values) - min(values)) / 2.0 / statistics.median(values)


def quantile(values: Sequence[float], level: float) -> float:
    """Return a quantile by linear interpolation; NaN if there is nothing."""
    if not values:
        return math.nan
    ordered = sorted(values)
    at = level * (len(ordered) - 1)
    low = math.floor(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def median(values: Sequence[float]) -> float:
    """Return the median; NaN if there is nothing."""
    return quantile(values, 0.5)
