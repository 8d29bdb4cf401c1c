"""The pointwise part of each cell: what a time loop computes between its products.

A cell is a module with functions for Triton, which run in the time loops of `torch_bridge.kernels.loops`:

- `step(gates, x_last, states, ACCURACY)` returns the new states, and activations for `residuals`. `gates` are the gates
  before their activations: the sums of input projection and hidden product. For a cell whose last gate is separate
  (`torch_bridge.cells.CellSpec.last_gate_separate`), the last one is the hidden product alone, and `x_last` is its
  input projection.
- `residuals(activations, states)` returns what the backward pass needs of a step, which started from `states`: local
  gradients and factors.
- `grad_step(dstates, local_grads, factors)` returns the gradients of the gates before their activations, and the
  gradient that goes straight to the last of the previous states, as a tuple of one or no element. If the last gate is
  separate, the gradient of its hidden product follows those of the gates.
- `tangent_step(products, x, states, local_grads, factors)` is the transpose of `grad_step`, of cells for which
  `torch_bridge.cells.CellSpec.has_tangent_loop` is true. It returns the tangents of the new states, given the hidden
  products of the tangents `states` by gate, and `x`, which is added to the new ones.

All of these are tuples, in the order of the cell's entry in `torch_bridge.cells`. The factors are the residuals after
`local_grads`, except for "norm_state": with two states "dc_dh", by which the loop adds the gradient of the hidden state
to that of the other one, then "carry_gate", by which `grad_step` multiplies the gradient that it passes on. Of the
local gradients, which may be stored as float16, only the first two may exceed one, except for a cell with a norm. The
functions are elementwise, so a loop may call them on tiles of any layout.
"""
