"""A made-up engine behind vLLM's names, for tests of ci.validate: no model, no torch.

Logits are drawn from the last few tokens; a variant's arguments and HIPSTACK_TEST_DAMAGE
decide how far they are off. ``FAKE_FAIL`` makes an engine of that backend fail, ``FAKE_SLOW``
makes engines wait before they load.
"""

import math
import os
import random
import time
from types import SimpleNamespace as _Some

VOCABULARY = 24


class SamplingParams:
    def __init__(self, **arguments):
        self.__dict__.update({"logprobs": None, "prompt_logprobs": None, "extra_args": None})
        self.__dict__.update(arguments)


def _logits(past, shift, salt):
    draw = random.Random(hash(tuple(past[-4:]))).random
    values = [9 * (draw() + draw() - 1) for _ in range(VOCABULARY)]
    if shift:
        draw = random.Random(hash((tuple(past[-6:]), salt))).random
        values = [value + 4 * shift * (draw() - 0.5) for value in values]
    return values


class LLM:
    def __init__(self, **arguments):
        time.sleep(float(os.environ.get("FAKE_SLOW", 0)))
        self.backend = (arguments.get("attention_config") or {}).get("backend", "TRITON_ATTN")
        if os.environ.get("FAKE_FAIL") == self.backend:
            raise ValueError(f"{self.backend} cannot run this layer: made to fail")
        kernels = arguments.get("kernel_config") or {}
        self.norms = kernels.get("ir_op_priority") or {"rms_norm": ["vllm_c", "native"]}
        self.seqs = arguments.get("max_num_seqs", 16)
        self.salt = hash((self.backend, str(self.norms), self.seqs))
        plain = self.backend == "TRITON_ATTN" and self.norms["rms_norm"][0] == "vllm_c"
        self.shift = 0.0 if plain and self.seqs == 16 else 0.004
        if os.environ.get("HIPSTACK_TEST_DAMAGE") and self.backend != "TRITON_ATTN":
            self.shift = 0.3
        self.calls = 0
        self.speculates = arguments.get("speculative_config")
        self.drafts = 0
        self.queue = {}
        config = _Some(
            max_model_len=2048, get_vocab_size=lambda: VOCABULARY, dtype="torch.bfloat16"
        )
        self.llm_engine = self
        self.vllm_config = _Some(model_config=config)

    def _row(self, past, top, taken):
        values = _logits(past, self.shift, self.salt)
        total = math.log(sum(map(math.exp, values)))
        order = sorted(range(VOCABULARY), key=values.__getitem__, reverse=True)
        taken = order[0] if taken is None else taken
        return taken, {i: _Some(logprob=values[i] - total) for i in {*order[:top], taken}}

    def generate(self, inputs, params, use_tqdm=True):
        params = params if isinstance(params, list) else [params] * len(inputs)
        out = []
        for entry, param in zip(inputs, params, strict=False):
            self.calls += 1
            past = list(entry["prompt_token_ids"])
            scored = None
            if param.prompt_logprobs:
                rows = [
                    self._row(past[:i], param.prompt_logprobs, past[i])[1]
                    for i in range(1, len(past))
                ]
                scored = [None, *rows]
            forced = (param.extra_args or {}).get("hipstack_forced_tokens") or []
            tokens, rows = [], []
            for step in range(param.max_tokens):
                wanted = forced[step] if step < len(forced) else None
                token, row = self._row(past, param.logprobs or 1, wanted)
                past.append(token)
                tokens.append(token)
                rows.append(row)
            self.drafts += param.max_tokens
            out.append(
                _Some(
                    prompt_token_ids=entry["prompt_token_ids"],
                    prompt_logprobs=scored,
                    outputs=[_Some(token_ids=tokens, logprobs=rows)],
                )
            )
        return out

    def embed(self, inputs, use_tqdm=True):
        out = []
        for entry in inputs:
            past = entry["prompt_token_ids"]
            out.append(_Some(outputs=_Some(embedding=_logits(past, self.shift, self.salt))))
        return out

    def get_tokenizer(self):
        return _Some(encode=lambda text, **_: [byte % VOCABULARY for byte in text.encode()])

    def get_metrics(self):
        names = {"drafts": 1.0, "draft_tokens": 4.0, "accepted_tokens": 1.5}
        return [
            _Some(name=f"vllm:spec_decode_num_{name}", value=factor * self.drafts)
            for name, factor in names.items()
        ]

    def collective_rpc(self, method):
        segmented = self.backend == "ROCM_SEGMENTED_ATTN"
        return [
            {
                "layers": [{"name": "0", "backend": self.backend, "impl": "Impl"}] * 2,
                "norms": self.norms,
                "bad_rows": 0,
                "largest_logit": 10.0 * self.calls,
                "logit_rows": self.calls,
                "paths": {"segmented": self.calls or 1} if segmented else {},
                "hipdnn": None,
            }
        ]

    def add_request(self, request, prompt, params):
        self.queue[request] = params.max_tokens

    def step(self):
        time.sleep(1e-4)
        out = []
        for request in list(self.queue):
            self.queue[request] -= 1
            done = not self.queue[request]
            if done:
                del self.queue[request]
            tokens = _Some(token_ids=[1])
            out.append(
                _Some(request_id=request, outputs=[tokens], finished=done, num_cached_tokens=0)
            )
        return out
