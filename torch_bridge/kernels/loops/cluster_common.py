"""Exchange of words between the programs of a cluster: each writes into the shared memory of the others.

Words, their numbers and their two buffers are those of `split_common`; only the memory and the instructions differ. A
program has a mailbox with a box for each sender, and a sender writes its words into the mailbox of every receiver. The
programs of a worker are a cluster, which the GPU starts as a whole, so a launch need not be cooperative, and workers
need not run at once. Each has one tile, so a column without a sequence never has an old word. Compute capability 9.0
and newer have clusters. Stores that signal an mbarrier (`st.async`) took longer than words that are polled (H200).

Stores and polls of a word are relaxed, of the scope of the cluster and of the same size, so they are no data race. A
store of a pair is a vector of two such words.

Gluon has no address of shared memory, but PTX may declare a variable in it anywhere. It adds to the shared memory that
Triton counts.
"""

import triton.experimental.gluon.language as gl
from triton.experimental import gluon


@gluon.constexpr_function
def _declaration(size):
    """Returns assembly that declares the mailbox, once in a kernel, and returns its address."""
    return "{ .shared .align 16 .b8 mailbox[" + str(size) + "]; mov.u32 $0, mailbox; }"


@gluon.constexpr_function
def _to_all(team, store, before="", first="0"):
    """Returns assembly that runs `store` with `a`, the address $1 in the shared memory of each program of a cluster.

    There are `team` programs, from `first` on.
    """
    stores = [f"add.u32 r, {first}, {k}; mapa.shared::cluster.u32 a, $1, r; {store}" for k in range(team)]
    declared = [".reg .b32 a, r;", ".reg .b64 w;", ".reg .pred p;"]
    return "\n".join(["{", *declared, before, *stores, "mov.b32 $0, 0;", "}"])


@gluon.constexpr_function
def _pair_to(team):
    """Returns assembly that stores $4 and $5 at the address $2 of program $6, of `team` that a cluster has."""
    return (
        "{ .reg .b32 a; .reg .pred p; setp.lt.u32 p, $6, " + str(team) + "; @p mapa.shared::cluster.u32 a, $2, $6;"
        "@p st.relaxed.cluster.shared::cluster.v2.b32 [a], {$4, $5}; mov.b32 $0, 0; mov.b32 $1, 0; }"
    )


@gluon.jit
def _wait_for_cluster(x):
    """Waits for all threads of the cluster; what they wrote before is then visible to all.

    `x` is any int32 scalar: inline assembly needs an operand.
    """
    gl.inline_asm_elementwise(
        "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned; mov.b32 $0, 0;",
        "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def open_mailbox(place, BYTES: gl.constexpr):
    """Returns the address of a program's mailbox, int32, which has zeros: they are no words of this launch.

    Every program of the cluster has one when this function returns.
    """
    WARPS: gl.constexpr = gl.num_warps()
    STRIDE: gl.constexpr = 256 * WARPS  # bytes that all threads clear at once
    COUNT: gl.constexpr = (BYTES + STRIDE - 1) // STRIDE
    gl.static_assert(COUNT * STRIDE <= 48 * 1024, "a variable in shared memory has at most 48 KB")
    mailbox = gl.inline_asm_elementwise(
        _declaration(COUNT * STRIDE), "=r,r", [place.split], dtype=gl.int32, is_pure=False, pack=1
    )
    thread = gl.arange(0, 32 * WARPS, gl.BlockedLayout([1], [32], [WARPS], [0]))
    for k in gl.static_range(COUNT):
        gl.inline_asm_elementwise(
            "st.shared.b64 [$1], 0; mov.b32 $0, 0;",
            "=r,r", [mailbox + k * STRIDE + thread * 8], dtype=gl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    _wait_for_cluster(place.split)
    return mailbox


@gluon.jit
def close_mailbox(place):
    """Waits until no program of the cluster writes: the shared memory of one that has ended is gone."""
    _wait_for_cluster(place.split)


@gluon.jit
def columns_of(mask_q):
    """Returns the columns of a tile that have a sequence, or a piece of one, each as a bit of an int32."""
    column = gl.arange(0, mask_q.shape[0], mask_q.type.layout)
    return gl.sum(gl.where(mask_q, 1 << column, 0), axis=0)


@gluon.jit
def in_pairs(columns):
    """Returns the columns of which either one of a pair, 2 k and 2 k + 1, is among `columns`."""
    return columns | (columns & 0x5555) << 1 | (columns & 0xAAAA) >> 1


@gluon.jit
def has_column(columns, column):
    """Returns 1 where `column` is among `columns`, otherwise 0. The words of the others need not travel."""
    return (columns >> column) & 1


@gluon.jit
def send_numbered_to(address, word, number, live, first, COUNT: gl.constexpr):
    """Sends 32-bit words with their number to COUNT programs from `first` on, where `live` is not 0.

    See `split_common.send_numbered`.
    """
    STORE: gl.constexpr = "@p st.relaxed.cluster.shared::cluster.b64 [a], w;"
    gl.inline_asm_elementwise(
        _to_all(COUNT, STORE, "setp.ne.b32 p, $4, 0; mov.b64 w, {$2, $3};", "$5"),
        "=r,r,r,r,r,r", [address, word, number, live, first], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def send_to_all(address, word, TEAM: gl.constexpr):
    """Sends 32-bit words to all programs as they are."""
    gl.inline_asm_elementwise(
        _to_all(TEAM, "st.relaxed.cluster.shared::cluster.b32 [a], $2;"),
        "=r,r,r", [address, word], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def send_pairs_to(address, word, receiver, TEAM: gl.constexpr):
    """Sends 32-bit words as they are, each to the program `receiver` of the cluster, if it has such a program.

    Two adjacent elements of a thread are sent together: they have one receiver and adjacent addresses.
    """
    gl.inline_asm_elementwise(
        _pair_to(TEAM), "=r,=r,r,r,r,r,r,r", [address, word, receiver], dtype=gl.int32, is_pure=False, pack=2
    )
