"""Compares two runs in numbers: how much they differ, and how much correct runs may differ.

- ``curves``: signals as arrays, aligned by step; ``envelopes``: their differences with a limit for
  each step; ``tost`` and ``seeds``: the statistics of means and of several seeds
- ``loss_only``: what a gate on the loss alone would say, to show beside a verdict
- ``sketches``: samples aligned by parameter; ``tensors``: gradients and updates with a limit for
  each; ``experts``: those of a layer as one
- ``post_step_state``: clipping, optimizer state, buffers
- ``activations``: what modules got and returned, in the order of their calls
- ``precision_errors``: errors of low precision, from a reference in float32; ``random_numbers``:
  how much a run's random numbers move its gradients; ``random_states``: which ones it draws,
  ``dropout_masks``: and which units it drops by them
- ``objective_terms``: what the objective is made of
- ``reported``: what a run reports against what its own probe recomputed
- ``floors``: limits from arithmetic alone; ``limits``: limits learnt from repeats
"""
