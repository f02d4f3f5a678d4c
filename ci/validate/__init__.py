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

* Scale.  The noise of a model is measured over all paths together, since a run that adds in
  the same order on one path is equal bit for bit there and says nothing: how far margins
  between the baseline's two best tokens move (root mean square, and at most), and the size of
  the disturbance (the root of the mean KL divergence).  Never less than what rounding the
  logits alone may do, for noise runs that hardly touch a model.
* Band.  How many positions may have another best token, the larger of two estimates: x of n
  positions of a noise run have one, so with Jeffreys' prior the number in one more such run is
  beta-binomial (n and x shrunk by the design effect where misses cluster in sequences); and,
  from the baseline's own margins m and the scale s, misses are Poisson around the sum of
  Phi(-m / s).  Of each the 99.9% quantile is taken.  Two equal runs give no band of zero width:
  x = 0 still allows a handful, and near ties may fall either way.  0.99 is no threshold, only
  what the computed one is shown beside; where too few positions were compared to tell, nothing
  passes.  On an H200 the two estimates agreed within a fifth, and predicted misses were 42, 55,
  37, 46 where 42, 51, 36, 41 were seen.
* Ties.  A miss is a near tie if the baseline's margin is at most twice the largest change of a
  margin in any noise run.  A miss above that fails by itself.
* Size.  A candidate's disturbance may be twice that of noise (its bootstrap's lower end, over
  sequences).  KL is taken over the baseline's best tokens and one bucket with all others: a
  lower bound of the whole one.
* Routing.  A candidate that did not serve does not pass, however equal its tokens.
* NaN or infinity anywhere fails.

Embeddings are judged by cosine distance and speculative decoding by acceptance length, each
against the same noise runs; speed as ratios within one job with interleaved repeats.
"""
