"""Running normalisation of observations, rewards and values.

:class:`RunningMeanStd`, :class:`RewardNormalizer` and :class:`ValueNormalizer` have
the interface of esper-lite's classes of these names, so that an import can be
swapped. They are ``nn.Module``: they move, save, freeze, compile and synchronise
with the model they belong to. They know nothing of the allocator and work without
it, on the CPU and on CUDA.

Moments are kept in float64 and counts in int64; formulas and their sources stand in
`moments`. State lives in buffers at addresses that change only when the module is
moved, is written in place, and nothing here waits for a device, so updates can be
captured into CUDA graphs and compiled.

What contributes to the statistics: values that are finite and at most 1e140 in size
(so that their squares are finite), that the mask does not leave out, and whose weight
is a finite number above 0. So NaN and infinity never reach them, as long as the weights
times the values' squares have a finite sum. Normalised, NaN stays
NaN and an infinity becomes the clip bound. A row counts when at least one of its
values contributes.
"""
