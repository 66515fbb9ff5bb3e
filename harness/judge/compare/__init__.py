"""Two runs to numbers: how far they are apart, and how far right runs may be.

- ``curves``: signals as arrays, aligned by step; ``envelopes``: their differences with a limit for
  each step; ``tost`` and ``seeds``: the statistics of means and of several seeds
- ``sketches``: samples aligned by parameter; ``tensors``: gradients and updates with a limit for
  each; ``post_step_state``: clipping, optimizer state, buffers
- ``precision_errors``: errors of low precision, from a reference in float32; ``random_numbers``:
  how far what a run draws moves its gradients
- ``reported``: what a run reports against what its own probe recomputed
- ``floors``: what arithmetic alone may do; ``limits``: what was learnt from repeats may do
"""
