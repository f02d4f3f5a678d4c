"""Is a backend as right as vLLM's own noise, what served which layer, and how fast?

``python3 -m ci.validate run --model DIR --variants segmented,hipdnn --out OUT`` runs, for
each model, the baseline (TRITON_ATTN), the same once more (*repeat*), neutral swaps that
change rounding and nothing else (*neutral-norm*: another norm provider, *neutral-batch*:
other batch sizes), and the candidates.  Every run but the first is teacher-forced over the
baseline's own greedy continuations, so position n has the same past in all runs:

decode    each step is a decode step; a logits processor puts the baseline's token in after
          the logits were recorded
prefill   prompt and continuation are scored in one go (``prompt_logprobs``)

How a candidate is judged (``stats.py``; constants there):

* Band.  x of n positions of a noise run have another best token than the baseline.  With
  Jeffreys' prior the number in n positions of one more such run is beta-binomial; its 99.9%
  quantile is what a candidate may have, the widest noise run counts.  Two equal runs give no
  band of zero width: x = 0 still allows a handful.  Where misses cluster within sequences,
  n and x shrink by the design effect.  0.99 is no threshold, only what the computed one is
  shown beside; where too few positions were compared to tell, nothing passes.
* Ties.  A miss is a near tie if the baseline's margin between its two best tokens is at most
  twice the largest change of a margin seen in any noise run (if all of those are equal bit
  for bit: two roundings of the largest logits).  A miss above that fails by itself.
* Size.  The root of the mean KL divergence is the size of the disturbance.  A candidate's may
  be twice that of noise (its bootstrap's lower end, over sequences).  KL is taken over the
  baseline's best tokens and one bucket with all others: a lower bound of the whole one.
* Routing.  A candidate that did not serve does not pass, however equal its tokens.
* NaN or infinity anywhere fails.

Embeddings are judged by cosine distance and speculative decoding by acceptance length, each
against the same noise runs; speed as ratios within one job with interleaved repeats.
"""
