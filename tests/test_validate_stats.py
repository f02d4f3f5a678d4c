"""The judgement of ci.validate: pure functions."""

import math
import random
from dataclasses import replace

import pytest

from ci.validate import stats
from ci.validate.stats import Comparison, Miss


def sequence(rows, tokens=None):
    """A recorded sequence; each row is {token: log probability}, best first."""
    return {
        "tokens": tokens or [next(iter(row)) for row in rows],
        "ids": [list(row) for row in rows],
        "logprobs": [list(row.values()) for row in rows],
    }


def run(n=2000, misses=0, margin=0.2, size=0.01, sequences=20, clustered=False):
    """A comparison with so many misses, spread over the sequences or all in one."""
    each = n // sequences
    at = [0 if clustered else i % sequences for i in range(misses)]
    return Comparison(
        counts=[each] * sequences,
        misses=[Miss(s, i, 1, 2, margin, margin, margin) for i, s in enumerate(at)],
        kl=[size**2] * sequences,
        kl_max=size**2,
        shift_max=margin,
        shift_squares=n * margin**2 / 4,
        shifts=n,
        margins=[5.0] * n,
    )


def judged(candidate, **runs):
    noise = stats.measure_noise({name: [r] for name, r in runs.items()}, 10.0)
    return stats.judge(candidate, runs, noise)


# ---- comparing


def test_equal_runs_have_no_misses():
    one = [sequence([{1: -0.1, 2: -3.0}, {4: -0.5, 1: -1.0}])]
    seen = stats.compare(one, one)
    assert (seen.positions, seen.misses, seen.mean_kl, seen.shift_max) == (2, [], 0.0, 0.0)


def test_a_miss_names_tokens_and_margins():
    one = [sequence([{1: -0.5, 2: -1.0}])]
    two = [sequence([{2: -0.6, 1: -0.9}], tokens=[1])]
    (miss,) = stats.compare(one, two).misses
    assert (miss.base, miss.other) == (1, 2)
    assert miss.base_margin == pytest.approx(0.5)
    assert miss.other_margin == pytest.approx(0.3)
    assert miss.lost == pytest.approx(0.3)


def test_after_another_token_nothing_is_compared():
    rows = [{1: -0.5, 2: -1.0}] * 4
    seen = stats.compare([sequence(rows)], [sequence(rows, tokens=[1, 2, 1, 1])])
    assert (seen.positions, seen.unforced) == (1, 3)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, None])
def test_nan_and_infinity_are_counted(bad):
    one = [sequence([{1: -0.5, 2: -1.0}])]
    two = [sequence([{1: bad, 2: -1.0}])]
    assert stats.compare(one, two).bad == 1
    assert stats.compare(two, one).bad == 1


def test_kl_of_known_distributions_is_a_lower_bound():
    p = {i: math.log(x) for i, x in enumerate([0.5, 0.25, 0.125, 0.0625, 0.0625])}
    q = {i: math.log(x) for i, x in enumerate([0.4, 0.3, 0.1, 0.1, 0.1])}
    exact = sum(math.exp(p[i]) * (p[i] - q[i]) for i in p)
    assert stats.kl_bound(p, q) == pytest.approx(exact, abs=1e-9)
    for kept in range(1, 5):
        part = {i: p[i] for i in range(kept)}
        assert 0 <= stats.kl_bound(part, q) <= exact + 1e-12
    # A token that only one side recorded goes into the rest.
    assert stats.kl_bound(p, {0: q[0], 1: q[1]}) <= exact


# ---- the band


def test_no_misses_still_allow_a_few():
    assert 3 <= stats.beta_binomial_quantile(2000, 0, 2000) <= 12
    # About as many, however many positions: the rate is what shrinks.
    assert stats.beta_binomial_quantile(20000, 0, 20000) <= 12


def test_the_quantile_is_one_of_the_predictive_distribution():
    generator = random.Random(1)
    n, x = 400, 4
    limit = stats.beta_binomial_quantile(n, x, n, level=0.95)
    above = 0
    for _ in range(400):
        rate = generator.betavariate(x + 0.5, n - x + 0.5)
        above += sum(generator.random() < rate for _ in range(n)) > limit
    assert above / 400 < 0.09
    assert stats.beta_binomial_quantile(n, x, n, level=0.95) < limit + 1


def test_more_noise_allows_more():
    allowed = [stats.allowed_misses(run(misses=m), 2000) for m in (0, 5, 20, 80)]
    assert allowed == sorted(allowed)
    assert all(a > m for a, m in zip(allowed, (0, 5, 20, 80), strict=True))


def test_clustered_noise_widens_the_band():
    spread, clustered = run(misses=20), run(misses=20, clustered=True)
    assert stats.design_effect(spread) == 1.0
    assert stats.design_effect(clustered) > 5
    assert stats.allowed_misses(clustered, 2000) > stats.allowed_misses(spread, 2000)


# Margins of a Gemma-3-shaped random model's baseline on an H200, in 32nds of a nat: how many
# positions have 0, 1, ... 15 of them, and how many have more; bfloat16 logits.
GEMMA = {
    "decode": [45, 80, 81, 71, 74, 65, 61, 66, 62, 45, 52, 52, 37, 30, 47, 28, 640],
    "prefill": [66, 115, 120, 100, 97, 103, 91, 70, 86, 71, 65, 70, 53, 53, 63, 35, 889],
}


def gemma(path, misses=0, margin=0.0, size=0.0, shift=0.0, shift_max=0.0):
    """A run of that model against its baseline; misses all have the largest margin seen."""
    margins = [i / 32 for i, count in enumerate(GEMMA[path]) for _ in range(count)]
    n = len(margins)
    made = run(n=n, misses=misses, margin=margin, size=size, sequences=1)
    made.margins, made.shift_squares, made.shifts = margins, n * shift**2, n
    made.shift_max = shift_max
    return made


def test_predicted_misses_are_those_that_were_seen():
    # The segmented kernels moved margins by 0.0382 and 0.0360 and changed 39 and 45 tokens.
    for path, shift, seen in (("decode", 0.0382, 39), ("prefill", 0.036, 45)):
        mean = stats.predicted_misses(gemma(path).margins, shift)
        assert abs(mean - seen) < 3 * math.sqrt(mean)


def test_a_path_on_which_noise_is_equal_bit_for_bit_takes_the_models_scale():
    # Prefill of all noise runs was equal; only other batches moved decode.
    still = [gemma("decode"), gemma("prefill")]
    batch = [gemma("decode", 20, 0.0625, 0.004849, 0.0255, 0.125), gemma("prefill")]
    noise = stats.measure_noise({"repeat": still, "norm": still, "batch": batch}, 7.97)
    # Decode was moved a little less than rounding the logits alone may do.
    assert (noise.source, noise.tie) == ("rounding", 0.25)
    assert 0.004849 < noise.size < 0.0067 and 0.0255 < noise.shift < 0.0358
    on_prefill = {"repeat": still[1], "norm": still[1], "batch": batch[1]}
    segmented = gemma("prefill", 45, 0.0625, 0.006825, 0.036, 0.125)
    good = stats.judge(segmented, on_prefill, noise)
    assert good["status"] == "pass"
    assert good["bands"]["batch"] < 45 < good["bands"]["margins"] < 90
    # A window of one key less, on the same paths.
    damaged = gemma("prefill", 156, 0.8438, 0.027358, 0.1474, 1.71875)
    bad = stats.judge(damaged, on_prefill, noise)
    assert bad["status"] == "fail" and len(bad["reasons"]) == 3
    on_decode = {"repeat": still[0], "norm": still[0], "batch": batch[0]}
    assert stats.judge(gemma("decode", 39, 0.0938, 0.007194), on_decode, noise)["status"] == "pass"
    assert stats.judge(gemma("decode", 121, 0.8437, 0.0287), on_decode, noise)["status"] == "fail"


def test_poisson_quantile():
    assert stats.poisson_quantile(0.0) == 0
    assert stats.poisson_quantile(30.0, 0.5) == 30
    assert 46 <= stats.poisson_quantile(30.0) <= 50


# ---- the verdict


def test_like_noise_passes():
    verdict = judged(run(misses=7), repeat=run(size=0.0, margin=0.0), neutral=run(misses=6))
    assert verdict["status"] == "pass"
    assert verdict["threshold"] < verdict["agreement"]


def test_two_equal_runs_pass_and_their_band_has_a_width():
    verdict = judged(run(size=0.0, margin=0.0), repeat=run(size=0.0, margin=0.0))
    assert verdict["status"] == "pass"
    assert 0.99 < verdict["threshold"] < 1.0
    assert verdict["noise_source"] == "rounding"


def test_too_many_near_ties_fail():
    verdict = judged(run(misses=60), neutral=run(misses=6))
    assert verdict["status"] == "fail"
    assert "below the band" in verdict["reasons"][0]


def test_one_clear_miss_fails_within_the_band():
    verdict = judged(run(misses=1, margin=0.5), neutral=run(misses=6, margin=0.01))
    assert verdict["status"] == "fail"
    assert (verdict["misses"], verdict["clear"]) == (1, 1)
    assert verdict["listed"][0]["base_margin"] == 0.5


def test_a_large_disturbance_fails_without_a_miss():
    assert judged(run(size=0.018), neutral=run(size=0.01))["status"] == "pass"
    verdict = judged(run(size=0.1), neutral=run(size=0.01))
    assert verdict["status"] == "fail"
    assert "10.0 times" in verdict["reasons"][0]


def test_a_disturbance_in_one_sequence_only_is_seen_or_listed():
    # One prompt of twenty reaches past a window: its misses are clear.
    candidate = run(size=0.001)
    candidate.kl[3] = 0.5
    candidate.misses.append(Miss(3, 0, 1, 2, 2.0, 1.0, 1.0))
    assert judged(candidate, neutral=run(misses=3))["status"] == "fail"


def test_nan_fails_whatever_else():
    candidate = run()
    candidate.bad = 1
    assert judged(candidate, neutral=run(misses=3))["status"] == "fail"


def test_too_few_positions_prove_nothing():
    verdict = judged(run(n=200), neutral=run(n=200))
    assert verdict["status"] == "inconclusive"
    assert "too few" in verdict["reasons"][0]


def test_a_failure_is_a_failure_with_few_positions_too():
    assert judged(run(n=200, misses=100), neutral=run(n=200))["status"] == "fail"


def test_without_noise_runs_nothing_passes():
    assert judged(run())["status"] == "inconclusive"


def test_a_broken_noise_run_does_not_widen_the_band():
    runs = {"neutral": run(misses=3), "broken": run(misses=400, margin=3.0, size=0.5)}
    noise = stats.measure_noise({name: [r] for name, r in runs.items()}, 10.0)
    assert noise.runs == ("neutral",)
    assert "times as much" in noise.dropped["broken"]
    verdict = stats.judge(run(misses=100, margin=1.0), runs, noise)
    assert verdict["status"] == "fail"
    assert any("broken" in note for note in verdict["notes"])


def test_a_noise_run_with_nan_is_none():
    bad = run()
    bad.bad = 3
    assert stats.measure_noise({"a": [bad]}, 10.0).runs == ()


def test_noise_runs_that_hardly_touch_a_model_are_not_the_scale():
    # Seen on a CPU in float16: other batches moved next to nothing, right kernels a bit more.
    faint = run(n=840, margin=0.00195, size=3.3e-5)
    noise = stats.measure_noise({"batch": [faint]}, 2.99, "float16")
    assert noise.source == "rounding"
    good = stats.judge(run(n=840, margin=0.00195, size=9.3e-5), {"batch": faint}, noise)
    assert good["status"] == "pass"
    damaged = run(n=840, margin=0.00195, size=1.6e-3)
    assert stats.judge(damaged, {"batch": faint}, noise)["status"] == "fail"


def test_rounding_is_the_scale_when_nothing_moves():
    still = run(size=0.0, margin=0.0)
    wide = stats.measure_noise({"repeat": [still]}, 16.0)
    assert wide.tie == pytest.approx(2 * 16.0 / 128)
    assert stats.measure_noise({"repeat": [still]}, 16.0, "float16").tie < wide.tie / 7


def test_noise_that_reaches_below_the_floor_is_told():
    verdict = judged(run(misses=60), neutral=run(misses=60))
    assert verdict["status"] == "pass"
    assert verdict["threshold"] < stats.FLOOR
    assert any("99%" in note for note in verdict["notes"])


# ---- embeddings, speculation, speed


def vectors(noise, seed=0):
    generator, other = random.Random(0), random.Random(seed)
    return [
        [generator.gauss(0, 1) + noise * other.gauss(0, 1) for _ in range(64)] for _ in range(12)
    ]


def test_embeddings():
    base = vectors(0)
    noise = {"repeat": base, "neutral": vectors(0.004, 1)}
    assert stats.judge_embeddings(base, vectors(0.004, 2), noise)["status"] == "pass"
    assert stats.judge_embeddings(base, base, {"repeat": base})["status"] == "pass"
    bad = stats.judge_embeddings(base, vectors(0.1, 3), noise)
    assert bad["status"] == "fail"
    for bad_value in (math.nan, None, 0.0):
        broken = [[bad_value] * 64, *base[1:]]
        assert stats.judge_embeddings(base, broken, noise)["status"] == "fail"
    assert stats.judge_embeddings(base, base, {})["status"] == "inconclusive"


def test_acceptance_length():
    base = [{"drafts": 40, "accepted": 60 + i} for i in range(8)]
    like = [{"drafts": 40, "accepted": 60 + (i + 3) % 8} for i in range(8)]
    less = [{"drafts": 40, "accepted": 20 + i} for i in range(8)]
    none = [{"drafts": 0, "accepted": 0}] * 8
    noise = {"repeat": base}
    assert stats.acceptance_length(base[0]) == pytest.approx(2.5)
    assert stats.judge_acceptance(base, like, noise)["status"] == "pass"
    assert stats.judge_acceptance(base, less, noise)["status"] == "fail"
    assert stats.judge_acceptance(base, none, noise)["status"] == "fail"
    assert stats.judge_acceptance(less, base, noise)["status"] == "pass"
    assert stats.judge_acceptance(none, base, noise)["status"] == "inconclusive"


def test_ratios_and_noise():
    faster = stats.ratio_of([10.0, 10.2, 9.9], [5.0, 5.1, 5.0], lower_is_better=True)
    assert faster["verdict"] == "faster"
    assert faster["ratio"] == pytest.approx(2.0)
    assert stats.ratio_of([10, 10.1], [5, 5.1], lower_is_better=False)["verdict"] == "slower"
    assert stats.ratio_of([10, 11, 9], [10.1, 10.2, 9.9], True)["verdict"] == "noise"
    # Steady pairs on a drifting clock: the spread covers the difference.
    assert stats.ratio_of([10, 12, 14], [9.9, 11.9, 13.8], True)["verdict"] == "noise"
    assert stats.ratio_of([10], [5], True)["verdict"] == "noise"
    assert stats.ratio_of([None], [5], True) is None


def test_a_miss_is_plain_data():
    assert replace(Miss(0, 1, 2, 3, 0.1, 0.2, None), lost=0.5).lost == 0.5
