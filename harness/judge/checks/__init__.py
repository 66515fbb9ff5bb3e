"""The questions that a verdict is made of: a module for each subject, a tier for each question.

- ``integrity`` and ``comparability``: tier 0, whether the evidence is whole, and whether the two
  runs are the comparison that was meant (same data, and in force what is named)
- ``first_step``: tier 1, curves at the first step; ``precision``: the same for what computes in
  less than float32, against a reference in float32
- ``envelope``: tier 2, curves at every step; ``random_numbers``: whether they go on
- ``tensors``: tiers 1 and 2, tensor by tensor
- ``equivalence``: tier 3, the mean loss against a margin; ``seeds``: the same over several seeds
- ``resume``: runs that were made in several passes

``question`` turns a documented function into a check; ``selection`` says which checks are asked of
which runs, and in which order.
"""
