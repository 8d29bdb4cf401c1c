"""An emulator of PTX in NumPy: it runs kernels that Triton compiled for compute capability 8.0, without a GPU.

Kernels with clusters are for 9.0. `Kernel(ptx, name, shared, num_warps).launch(grid, arguments)` runs the programs of a
launch. It raises `PTXError` for

- an access out of bounds of its array or of shared memory, and a misaligned one,
- a race: two warps access the same shared memory between two barriers, and one of them changes it,
- a barrier that not all threads reach, and a poll that never ends,
- a store to the shared memory of a program of a cluster that has ended, and different values at one address there,
- an instruction that the emulator does not know.

Shared memory and registers start as NaN. A `cp.async` reads at once and writes as late as its wait allows.

The emulator does not see the order in which a GPU makes stores visible, so it does not notice a missing fence or
`acquire`. It does not check races within a warp. It does not check races between programs in global memory: these give
wrong results in some order of the programs, and `seed` draws that order. It does not see time, the number of registers,
or what ptxas does. Approximate instructions are as accurate as float32, and denormal numbers are kept.

The emulator knows the instructions of the time loops, as Triton 3.6 to 3.9 compile them. `parse` reads PTX, `registers`
has its types, `arithmetic` and `warp_operations` compute, `memory` is global and shared memory, `translate` translates
basic blocks to Python, and `machine` runs them.
"""

from ptx.machine import Kernel
from ptx.parse import PTXError

__all__ = ["Kernel", "PTXError"]
