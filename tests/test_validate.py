"""ci.validate as a whole over a made-up engine, its children included."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ci import paths
from ci.errors import StackError
from ci.validate import data, driver, guidellm, jobs, judge, report, store, variants
from ci.validate.variants import Variant

FAKE = Path(__file__).parent / "fake_vllm"
CONFIG = """
[models.one]
path = "MODEL"
tasks = TASKS
prompts = 16
longest = 120
new_tokens = 64
variants = ["segmented", "bad", "hipdnn"]
spec = { method = "ngram" }
[models.one.perf]
contexts = [64, 9999]
decode = 6
prefill = [32]
mixed = [32, 4]
concurrency = [2]
request = [16, 4]
turns = [3, 32, 16, 4]
sessions = 2
[variants.bad]
engine = { attention_config = { backend = "ROCM_SEGMENTED_ATTN" } }
env = { HIPSTACK_TEST_DAMAGE = "head" }
served_by = "segmented"
"""


def command(config: Path, out: Path, *more: str) -> list[str]:
    words = ["-m", "ci.validate", "run", "--config", str(config), "--out", str(out)]
    return [
        sys.executable,
        *words,
        "--workers",
        "2",
        "--repeats",
        "2",
        "--top",
        "4",
        "--no-page",
        *more,
    ]


def environment(**more: str) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("VLLM", "FAKE"))}
    return {**kept, "PYTHONPATH": str(FAKE), "PYTHONHASHSEED": "0", **more}


def run(config: Path, out: Path, *more: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(config, out, *more), cwd=paths.ROOT, env=environment(**env),
        capture_output=True, text=True, check=False,
    )  # fmt: skip


def write_config(folder: Path, tasks: str = '["generate"]', prompts: int = 16) -> Path:
    model = folder / "model"
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text("{}")
    path = folder / "validate.toml"
    path.write_text(
        CONFIG.replace("MODEL", str(model))
        .replace("TASKS", tasks)
        .replace("16\nlongest", f"{prompts}\nlongest")
    )
    return path


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """One run of all tasks; the tests below look at it."""
    folder = tmp_path_factory.mktemp("validate")
    out = folder / "out"
    return out, run(write_config(folder, '["generate", "embed", "spec", "perf"]'), out)


def verdicts(out: Path) -> dict[tuple[str, str], dict]:
    summary = store.read_json(out / "summary.json")
    return {(r["task"], r["variant"]): r["verdict"] for r in summary["rows"]}


# ---- a whole run


def test_who_passes_and_who_does_not(whole):
    out, done = whole
    assert done.returncode == 1, done.stdout + done.stderr
    found = {key: verdict["status"] for key, verdict in verdicts(out).items()}
    for name in ("baseline", "repeat", "neutral-norm", "neutral-batch", "segmented"):
        assert found["generate", name] == "pass", name
    assert found["generate", "bad"] == found["embed", "bad"] == "fail"
    assert found["generate", "hipdnn"] == "did not serve"
    assert found["embed", "segmented"] == found["spec", "segmented"] == "pass"
    assert found["perf", "segmented"] == "measured"


def test_a_failure_lists_tokens_and_margins(whole):
    out, done = whole
    path = verdicts(out)["generate", "bad"]["paths"]["decode"]
    assert path["misses"] > path["allowed"] > 0
    assert {"base", "other", "base_margin", "lost"} <= set(path["listed"][0])
    assert len(path["margins"]) == path["misses"]
    assert "one, generate, bad: **FAIL**" in (out / "report.md").read_text()
    assert "fail          gfx1201 one generate bad" in done.stdout


def test_a_result_says_what_made_it(whole):
    out, _ = whole
    result = store.read_json(out / "gfx1201" / "one" / "generate" / "segmented.json.gz")
    known = result["identity"]
    assert known["machine"]["arch"] == "gfx1201"
    assert len(known["commit"]) == 40 and len(known["set_hash"]) == 64 and len(known["code"]) == 64
    assert result["engine"]["attention_config"] == {"backend": "ROCM_SEGMENTED_ATTN"}
    assert "python" in known["versions"]


def test_speed_is_compared_with_the_baseline_of_the_same_job(whole):
    out, _ = whole
    result = store.read_json(out / "gfx1201" / "one" / "perf" / "segmented.json")
    assert result["complete"]
    for entry in result["workloads"].values():
        assert len(entry["base"]) == len(entry["candidate"]) == 2
    assert result["left"] == ["decode at 9999: longer than the model's 2048"]
    verdict = verdicts(out)["perf", "segmented"]
    assert {r["kind"] for r in verdict["rows"]} == set(driver.FIGURES)
    assert len(verdict["turns"]["multi-turn"]["candidate"]) == 3


def test_a_second_run_keeps_everything(whole):
    out, _ = whole
    done = run(out.parent / "validate.toml", out)
    assert done.stdout.count("] kept") == 22
    assert "] done" not in done.stdout


def test_another_setting_is_another_result(whole, tmp_path):
    out, _ = whole
    found = store.read_json(out / "gfx1201" / "one" / "generate" / "segmented.json.gz")
    plan = variants.load(out.parent / "validate.toml")
    job = next(j for j in jobs.plan_jobs(plan) if j.variant.name == "segmented")
    known = found["identity"]
    options = jobs.Options(out, top=4)
    assert jobs.fingerprint(job, options, known) == found["fingerprint"]
    assert jobs.fingerprint(job, jobs.Options(out, top=5), known) != found["fingerprint"]
    assert jobs.fingerprint(job, options, {**known, "code": "x"}) != found["fingerprint"]


def test_the_page_is_whole_and_fetches_nothing(whole):
    pytest.importorskip("matplotlib")
    pytest.importorskip("jinja2")
    from ci.validate import page

    out, _ = whole
    text = page.render(store.read_json(out / "summary.json"))
    assert text.count("<svg") >= 4
    assert "prefers-color-scheme: dark" in text
    for word in ("<script", "@import", 'src="http', "url(http", "<link"):
        assert word not in text
    assert "did not serve" in text and "agreement" in text
    # matplotlib's colours are all replaced.
    assert "#010203" not in text and "#020304" not in text


def test_compare_names_what_got_worse(whole):
    out, _ = whole
    before = store.read_json(out / "summary.json")
    after = json.loads(json.dumps(before))
    same, worse = report.compare(before, after)
    assert (same, worse) == ("no difference", False)
    row = next(r for r in after["rows"] if (r["task"], r["variant"]) == ("generate", "segmented"))
    row["verdict"] |= {"status": "fail", "reasons": ["made worse"]}
    text, worse = report.compare(before, after)
    assert worse and "WORSE" in text and "made worse" in text


def test_history_is_told_by_architecture(whole, tmp_path):
    out, _ = whole
    summary = store.read_json(out / "summary.json")
    for name, created in (("a", "2026-01-01T00:00:00Z"), ("b", "2026-02-01T00:00:00Z")):
        for row in summary["rows"]:
            row["created"] = created
        store.write_json(tmp_path / name / "summary.json", summary)
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "summary.json").write_text("{")
    runs = report.history(tmp_path)
    assert [run["path"] for run in runs["gfx1201"]] == ["a", "b"]
    assert "2026-02-01" in report.history_markdown(runs)
    with pytest.raises(StackError, match="no summary"):
        report.history(tmp_path / "a" / "none")


# ---- what goes wrong


def test_an_engine_that_fails_is_an_error_and_the_rest_is_judged(tmp_path):
    out = tmp_path / "out"
    done = run(write_config(tmp_path), out, FAKE_FAIL="HIPDNN")
    found = verdicts(out)
    assert found["generate", "hipdnn"]["status"] == "error"
    assert "made to fail" in found["generate", "hipdnn"]["reasons"][0]
    assert found["generate", "segmented"]["status"] == "pass"
    assert done.returncode == 1


def test_without_a_baseline_nobody_waits(tmp_path):
    out = tmp_path / "out"
    begin = time.monotonic()
    run(write_config(tmp_path, prompts=2), out, FAKE_FAIL="TRITON_ATTN")
    assert time.monotonic() - begin < 60
    found = verdicts(out)
    assert found["generate", "baseline"]["status"] == "error"
    assert found["generate", "segmented"]["status"] == "error"


def test_a_killed_run_leaves_what_it_had_and_goes_on(tmp_path):
    out, config = tmp_path / "out", write_config(tmp_path, prompts=2)
    child = subprocess.Popen(
        [*command(config, out), "--workers", "1"], cwd=paths.ROOT,
        env=environment(FAKE_SLOW="0.3"), stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert child.stdout is not None
    for line in child.stdout:
        if "[2/" in line:
            break
    child.send_signal(signal.SIGTERM)
    rest = child.communicate(timeout=60)[0]
    assert child.returncode == 1
    assert "summary.json" in rest
    found = verdicts(out)
    assert found["generate", "baseline"]["status"] == "pass"
    assert ("generate", "hipdnn") not in found
    assert not list(out.rglob("*.part"))
    again = run(config, out)
    assert again.stdout.count("] kept") >= 2
    assert ("generate", "hipdnn") in verdicts(out)


def test_a_damaged_result_is_left_out_and_made_again(tmp_path):
    out, config = tmp_path / "out", write_config(tmp_path, prompts=2)
    run(config, out)
    path = out / "gfx1201" / "one" / "generate" / "repeat.json.gz"
    path.write_bytes(path.read_bytes()[:100])
    assert "repeat" not in {v for _, v in ((k[0], k[1]) for k in _summary(out))}
    assert "] done     one / repeat" in run(config, out).stdout


def _summary(out: Path) -> list[tuple[str, str]]:
    return [(r["task"], r["variant"]) for r in judge.summarize(out)["rows"]]


def test_a_model_too_large_is_not_run_with_the_numbers():
    gib = 2**30
    assert variants.fits(10 * gib, gib, 32 * gib) is None
    why = variants.fits(60 * gib, gib, 32 * gib)
    assert why and "60.0 GiB of weights" in why and "32.0 GiB" in why


def test_a_too_large_model_reaches_the_report(tmp_path, monkeypatch):
    config = write_config(tmp_path)
    with (tmp_path / "model" / "model.safetensors").open("wb") as file:
        file.truncate(64 << 30)  # a hole
    plan = variants.load(config)
    machine = {"arch": "gfx1201", "device": "card", "memory": 16 << 30}
    runner = jobs.Runner(
        jobs.Options(tmp_path / "out"), {**_identity(), "machine": machine}, lambda line: None
    )
    assert {runner.run(job) for job in jobs.plan_jobs(plan)} == {"not run"}
    rows = judge.summarize(tmp_path / "out")["rows"]
    assert {r["verdict"]["status"] for r in rows} == {"not run"}
    assert "64.0 GiB of weights" in rows[0]["verdict"]["reasons"][0]


def test_without_lm_eval_gsm8k_is_not_run(tmp_path, monkeypatch):
    monkeypatch.setattr(jobs.importlib.util, "find_spec", lambda name: None)
    plan = variants.load(write_config(tmp_path, '["gsm8k"]'))
    machine = {"arch": "gfx1201", "device": "card", "memory": 0}
    runner = jobs.Runner(
        jobs.Options(tmp_path / "out"), {**_identity(), "machine": machine}, lambda line: None
    )
    assert {runner.run(job) for job in jobs.plan_jobs(plan)} == {"not run"}
    rows = judge.summarize(tmp_path / "out")["rows"]
    assert "lm-eval is not installed" in rows[0]["verdict"]["reasons"][0]


def test_gsm8k_is_judged_by_its_standard_error():
    base = {"exact_match,strict": 0.80, "exact_match_stderr,strict": 0.02}
    less = base | {"exact_match,strict": 0.76}
    bad = base | {"exact_match,strict": 0.60}
    assert judge._judge_gsm8k(base, less)["status"] == "pass"
    assert judge._judge_gsm8k(base, bad)["status"] == "fail"
    assert judge._judge_gsm8k({}, {})["status"] == "inconclusive"


def test_the_harness_travels_in_the_pack(tmp_path):
    sys.path.insert(0, str(Path(__file__).parent / "gpu"))
    try:
        import pack
    finally:
        sys.path.pop(0)
    pack.pack_harness(tmp_path)
    subprocess.run(["tar", "-xJf", "patches.tar.xz"], cwd=tmp_path, check=True)
    done = subprocess.run(
        [sys.executable, "-c", "from ci.validate import jobs, store; print(store.identity())"],
        cwd=tmp_path, env=environment(), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "'set_hash_from': \"this repository's series\"" in done.stdout


def _identity() -> dict:
    return {"code": "c", "versions": {}, "set_hash": "s", "pin": "0", "commit": "0" * 40,
            "set_hash_from": "a test", "repository": None, "environment": {}}  # fmt: skip


@pytest.mark.parametrize(
    "text, message",
    [
        ("[models.a]\ntaks = ['embed']", "unknown key 'taks'"),
        ("[models.a]\ntasks = ['embd']", "unknown task 'embd'"),
        ("[models.a]\nvariants = ['fast']", "unknown variant 'fast'"),
        ("[model.a]", "unknown table"),
        ("[models.a]\ntasks = ['spec']", "speculative configuration"),
        ("[engine]\nseed = 1", "no model"),
    ],
)
def test_a_bad_plan_is_one_clear_line(tmp_path, text, message):
    config = tmp_path / "c.toml"
    config.write_text(text)
    with pytest.raises(StackError, match=message):
        jobs.plan_jobs(variants.load(config))


def test_bad_engine_arguments():
    assert variants.parse_engine('{"seed": 1}') == {"seed": 1}
    for text in ("{", "[1]"):
        with pytest.raises(StackError, match="--engine"):
            variants.parse_engine(text)


# ---- routing


def test_segmented_serves_only_with_calls_on_its_kernels():
    variant = variants.BUILTIN["segmented"]
    layers = [{"backend": "ROCM_SEGMENTED_ATTN"}] * 3
    good = variants.served(variant, {"layers": layers, "paths": {"segmented": 9}}, None)
    assert good["ok"] and good["served"] == {"segmented": 9}
    paths_ = {"unified: fused output quantisation": 9}
    bad = variants.served(variant, {"layers": layers, "paths": paths_}, None)
    assert not bad["ok"]
    assert "unified: fused output quantisation" in bad["text"]
    other = [{"backend": "TRITON_ATTN"}]
    assert not variants.served(variant, {"layers": other, "paths": {"segmented": 1}}, None)["ok"]


def test_hipdnn_serves_only_where_an_engine_did():
    variant = variants.BUILTIN["hipdnn"]
    declined = {"served": {}, "declined": {"NO_ENGINE": {"calls": 5, "example": ""}}}
    served = {"served": {"good": {"calls": 2, "example": ""}}, "declined": {}}
    report_ = {"layers": [{"backend": "HIPDNN"}], "hipdnn": {"kinds": {"attention": declined}}}
    assert not variants.served(variant, report_, None)["ok"]
    assert variants.served(variant, report_, None)["declined"] == {"attention: NO_ENGINE": 5}
    report_["hipdnn"]["kinds"]["rms_norm"] = served
    assert variants.served(variant, report_, None)["served"] == {"rms_norm: good": 2}


def test_a_neutral_swap_must_swap_something():
    variant = variants.BUILTIN["neutral-norm"]
    one, two = {"norms": {"rms_norm": ["native"]}}, {"norms": {"rms_norm": ["vllm_c"]}}
    assert variants.served(variant, one, two)["ok"]
    assert not variants.served(variant, one, one)["ok"]
    assert variants.neutral_norms({"enforce_eager": True}) != variants.neutral_norms({})


def test_every_layer_must_be_on_the_backend():
    variant = Variant("x", served_by="backend:TRITON_ATTN")
    layers = [{"backend": "TRITON_ATTN"}, {"backend": "ROCM_ATTN"}]
    assert variants.served(variant, {"layers": layers[:1]}, None)["ok"]
    assert not variants.served(variant, {"layers": layers}, None)["ok"]
    # Layers of a hybrid model that are no attention have backends of their own.
    hybrid = [layers[0], {"backend": "GDN_ATTN", "kind": "GatedDeltaNet"}]
    found = variants.served(variant, {"layers": hybrid}, None)
    assert found["ok"] and "1 layers that are no attention" in found["text"]


# ---- data and the driver


def test_prompts_have_all_lengths_and_repeat():
    encode = data.bytes_encoder(256)
    one = data.prompts(encode, 24, 1000)
    assert [len(p) for p in one] == data.lengths(24, 1000)
    assert one == data.prompts(encode, 24, 1000)
    assert max(map(len, one)) == 1000 and min(map(len, one)) == 4
    assert len({tuple(p[:4]) for p in one}) > 10
    assert len(data.texts()) >= 12


class Echo:
    """Gives every queued request one token a step; a clock that only it moves."""

    def __init__(self):
        self.open, self.now, self.most = {}, 0.0, 0

    def add(self, request, prompt, max_tokens):
        self.open[request] = [len(prompt), max_tokens]
        self.most = max(self.most, len(self.open))

    def step(self):
        self.now += 1.0
        out = []
        for request in list(self.open):
            self.open[request][1] -= 1
            done = not self.open[request][1]
            length = self.open.pop(request)[0] if done else 0
            out.append(driver.Step(request, [7], done, length // 2 if done else None))
        return out


def test_the_driver_keeps_concurrency_and_turns():
    engine = Echo()
    session = driver.Session((([1, 2, 3], 2), ([4], 3)))
    records = driver.drive(engine, [session] * 5, 2, clock=lambda: engine.now)
    assert len(records) == 10 and engine.most == 2
    second = [r for r in records if r.turn == 1]
    # Three tokens, two answered, one more.
    assert {r.prompt for r in second} == {6}
    assert {r.ttft for r in records} == {1.0}
    summary = driver.summarize(records)
    assert summary["itl"] == 1000.0 and summary["turns"] == [1000.0, 1000.0]
    assert summary["requests"] == 10


def test_workloads_never_share_prompts_between_repeats():
    pool = list(range(100))
    one, _ = driver.workloads({}, 65536, pool, 1)
    two, _ = driver.workloads({}, 65536, pool, 2)
    assert [w.name for w in one] == [w.name for w in two]
    firsts = [
        tuple(s.turns[0][0][:32]) for w in (*one, *two) for s in w.sessions if w.kind != "turns"
    ]
    long = [f for f in firsts if len(f) == 32]
    assert len(set(long)) == len(long)


# ---- GuideLLM


def test_guidellm_reports_become_turns():
    def request(turn, ttft):
        return {"info": {"turn_index": turn}, "time_to_first_token_ms": ttft,
                "inter_token_latency_ms": 2.0, "output_tokens": 8}  # fmt: skip

    rows = [request(0, 50.0), request(0, 70.0), request(1, 20.0), request(1, 30.0)]
    benchmark = {"requests": {"successful": rows, "errored": []}, "duration": 4.0}
    found = guidellm.parse({"benchmarks": [benchmark]})
    assert found["turns"] == [60.0, 25.0]
    assert (found["output_rate"], found["itl"], found["requests"]) == (8.0, 2.0, 4)
    with pytest.raises(StackError, match="unknown form"):
        guidellm.parse({"benchmarks": [{}]})
    none = {"requests": {"successful": [], "errored": [1]}, "duration": 4.0}
    with pytest.raises(StackError, match="1 requests failed"):
        guidellm.parse({"benchmarks": [none]})


def test_guidellm_and_the_server_get_the_variants_arguments():
    arguments = {"enforce_eager": True, "attention_config": {"backend": "X"}, "max_model_len": 9}
    words = guidellm.serve_command("model", arguments, 80)
    assert words[words.index("serve") + 1] == "model"
    assert "--enforce-eager" in words
    assert words[words.index("--attention-config") + 1] == '{"backend": "X"}'
    words = guidellm.run_command(["g"], 80, "m", driver.DEFAULTS, 3, Path("o.json"))
    assert "kind=static,value=3" in words
    assert any("turns=6" in w and "prefix_tokens=768" in w for w in words)


# ---- clusters


class FakeSlurm:
    """submitit's executor as far as `submit` uses it."""

    def __init__(self):
        self.sent, self.parameters = [], {}

    def update_parameters(self, **parameters):
        self.parameters = parameters

    def submit(self, function, *arguments):
        self.sent.append((self.parameters, function, arguments))
        number = str(len(self.sent))
        return type("J", (), {"job_id": number, "done": lambda s: True,
                              "exception": lambda s: None})()  # fmt: skip


def test_slurm_gets_one_job_a_variant_and_architecture(tmp_path):
    plan = variants.load(write_config(tmp_path))
    executor = FakeSlurm()
    settings = {"gfx1201": {"slurm_partition": "a"}, "gfx1100": {"slurm_partition": "b"}}
    sent = jobs.submit(plan, jobs.Options(tmp_path), settings, executor)
    assert len(sent) == 2 * 7
    labels = [label for label, _ in sent]
    assert labels[0] == "gfx1201 / one / baseline" and len(set(labels)) == 14
    first, second = executor.sent[0][0], executor.sent[1][0]
    assert "dependency" not in first["slurm_additional_parameters"]
    assert second["slurm_additional_parameters"]["dependency"] == "afterany:1"
    assert executor.sent[7][0]["slurm_partition"] == "b"
    assert executor.sent[0][2][-1] == "gfx1201"
    assert [state for _, state in jobs.states(sent)] == ["done"] * 14


def test_slurm_settings_are_read():
    from ci.validate import __main__ as cli

    found = cli._slurm(["gfx1201:partition=gpu,mem_gb=64", "partition=any"])
    assert found == {
        "gfx1201": {"slurm_partition": "gpu", "slurm_mem_gb": 64},
        "": {"slurm_partition": "any"},
    }
    with pytest.raises(StackError, match="key=value"):
        cli._slurm(["gpu"])
